"Runs the notebooks and stores their outputs: `python nbs/run.py` all of them, `python nbs/run.py 01 03` these."
import base64
import io
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER))
from figures import save_dark  # noqa: E402


@contextmanager
def kernel(
    timeout: float = 240., # Seconds that one cell may take
): # A function that runs a notebook's file and returns the notebook with its new outputs; the file is not changed
    "Start a kernel that finds this package. Each notebook runs in an empty folder, without names of another."
    search = [str(FOLDER.parent), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, search))}
    env['PYTHONWARNINGS'] = 'ignore:IProgress not found'         # tqdm's, where ipywidgets is not installed
    client = NotebookClient(new_notebook(), timeout=timeout, kernel_name='python3')

    def run(notebook):
        client.nb = notebook
        client.reset_execution_trackers()
        for i, cell in enumerate(notebook.cells):
            client.execute_cell(cell, i, execution_count=client.code_cells_executed + 1)
        return notebook

    def execute(file):
        with tempfile.TemporaryDirectory() as folder:
            begin = f'__import__("os").chdir({folder!r})\n%reset -f\n%config InlineBackend.figure_formats = ["retina"]'
            empty = new_code_cell(begin)
            client.nb = new_notebook(cells=[empty])
            client.execute_cell(empty, 0, store_history=False)   # the notebook's cells count from 1
            return run(nbformat.read(file, as_version=4))

    with client.setup_kernel(env=env): yield execute


def is_left_over(output): # What a progress bar leaves when it is done, and its style sheet
    if output.output_type != 'display_data': return False
    html = output.data.get('text/html', '') if set(output.data) <= {'text/html', 'text/plain'} else 'other'
    return not html.strip() or html.strip().startswith('<style>')


def small(picture): # PNG as text, as notebooks hold it
    "Return the picture with 64 colours, in a third of the bytes: each version of it stays in the history."
    image, file = Image.open(io.BytesIO(base64.b64decode(picture))), io.BytesIO()
    image.convert('RGB').quantize(64, dither=Image.Dither.NONE).save(file, 'PNG', optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def stored(notebook):
    "Return the notebook without what progress bars leave behind or the times of each cell, and with small pictures."
    for cell in notebook.cells:
        cell.metadata.pop('execution', None)
        if cell.cell_type != 'code': continue
        cell.outputs = [o for o in cell.outputs if not is_left_over(o)]
        for o in cell.outputs:
            if 'image/png' in o.get('data', {}): o.data['image/png'] = small(o.data['image/png'])
    return notebook


def save_pictures(notebook):
    "Write the picture of each cell with a tag such as `save-report_2x.png` to that file, and a dark one beside it."
    for cell in notebook.cells:
        for tag in cell.metadata.get('tags', []):
            if not tag.startswith('save-'): continue
            picture = next(o.data['image/png'] for o in cell.outputs if 'image/png' in o.get('data', {}))
            file = FOLDER / tag.removeprefix('save-')
            file.write_bytes(base64.b64decode(picture))
            save_dark(file)


def main(names):
    "Run each notebook; one that fails keeps its old outputs. Returns how many failed."
    failed = 0
    unknown = [name for name in names if not any(FOLDER.glob(f'{name}*.ipynb'))]
    if unknown: sys.exit(f'No notebook has a name that begins with {", ".join(unknown)}.')
    for file in sorted(FOLDER.glob('*.ipynb')):
        if names and not file.name.startswith(tuple(names)): continue
        start = time.perf_counter()
        try:
            with kernel() as execute: notebook = execute(file)
        except CellExecutionError as error:
            failed += 1
            print(f'{file.name}: {error.ename}: {error.evalue}', flush=True)
            continue
        nbformat.write(stored(notebook), file)
        save_pictures(notebook)
        print(f'{file.name}: {time.perf_counter() - start:.0f} s', flush=True)
    return failed


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
