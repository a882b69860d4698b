"""Run the cells of fastai's notebooks of tests with and without this package, and print what differs.

    python tests/fastai_notebooks.py path/to/fastai/nbs/13a_learner.ipynb ...

Cells that export code are left out: the library has it. Without `datasets` many cells fail, in both runs alike.
"""

import importlib, io, json, re, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout


def cells(file):
    "Yield the number of each cell that tests something, with how it ended and what it printed."
    import torch

    sources = [''.join(c['source']) for c in json.load(open(file))['cells'] if c['cell_type'] == 'code']
    names = {'__name__': '__main__', 'show_doc': lambda *args, **kwargs: None}
    exec('from fastai.basics import *\nfrom fastcore.test import *\nfrom fastai.test_utils import *', names)
    if found := re.search(r'default_exp (\S+)', '\n'.join(sources)):
        module = vars(importlib.import_module(f'fastai.{found[1]}'))
        names |= {k: v for k, v in module.items() if not k.startswith('__')}
    if sys.argv[1] == 'with':
        importlib.import_module('fastxtend_amp')
    for i, source in enumerate(sources):
        if re.search(r'^#\s*\|\s*(export|default_exp|cuda|slow)|nbdev|^[%!]', source, re.M):
            continue
        torch.manual_seed(0)
        names['random'].seed(0)
        out, end = io.StringIO(), 'ok'
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            try:
                exec(source, names)
            except Exception as e:
                end = f'{type(e).__name__}: {e}'
        yield i, end, re.sub(r'\d\d:\d\d|0x[0-9a-f]+', '', out.getvalue())


if __name__ == '__main__':
    if sys.argv[1] in ('with', 'without'):
        sys.exit(print(json.dumps([*cells(sys.argv[2])])))
    for file in sys.argv[1:]:
        run = [sys.executable, '-W', 'ignore', __file__]
        out = [subprocess.run([*run, word, file], capture_output=True, text=True) for word in ('without', 'with')]
        plain, ours = (json.loads(done.stdout) for done in out)
        differ = [(a, b) for a, b in zip(plain, ours) if a != b]
        print(
            file,
            f'{len(plain)} cells, {sum(end == "ok" for _, end, _ in plain)} pass; these differ:',
            *differ,
            sep='\n',
        )
