"The notebooks run from top to bottom, and show what their text says."

import base64, importlib.util, tempfile
from pathlib import Path

import nbformat, pytest

NBS = Path(__file__).parent.parent / 'nbs'
FOLDERS = (str(Path.home()), tempfile.gettempdir(), 'site-packages', '/home/')  # of the machine that ran them
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted(NBS.glob('*.ipynb'))}
CHECKS = {  # code that runs after the first cell with this text, by notebook
    '01_tutorial': {
        'learn.get_preds': 'assert accuracy(probabilities, targets) > .9',
        'report = ': """
assert report.fp32_modules == ['attn']
assert report.verdicts['fp16'].call == "learn.to_fp16(fp32_modules=['attn'])\"""",
        "rows[name] = ": """
assert abs(rows['fp16']['loss'] - rows['fp32']['loss']) < .03 and rows['fp16']['accuracy'] > .85""",
        'train(fixed.': '''
fp32, warn, fix = runs.values()
warned, fixed = warn.mixed_precision, fix.mixed_precision
assert sum(warned.skips) > 30 and sum(fixed.skips) < 10 and len(fixed.fixes) == 1
assert abs(fix.final_record[1] - fp32.final_record[1]) < .05''',
    },
    '02_save_and_export': {
        'resumed.fit(': """
straight = learner().to_fp16(init_scale=2**22)
with straight.no_bar(), straight.no_logging():
    straight.fit(2, 1e-2)
    straight.fit(1, 1e-2)
assert all(map(torch.equal, straight.model.state_dict().values(), resumed.model.state_dict().values()))
assert straight.mixed_precision.state_dict() == resumed.mixed_precision.state_dict()""",
        'resumed.export': "assert b'fastxtend_amp' not in (path/'model.pkl').read_bytes()",
    },
    '03_gpus_compile_xla': {
        'done = subprocess': """
assert not done.returncode, done.stderr[-2000:]
assert len(rows) == 2 and rows[0] == rows[1] and float(rows[0][3]) > .9, done.stdout[-2000:]
assert os.path.exists('model.pkl')"""
    },
}
spec = importlib.util.spec_from_file_location('run_notebooks', NBS / 'run.py')
run_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_notebooks)


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == 'code']


@pytest.fixture(scope='module')
def execute():
    "One kernel for all, because fastai's imports take longer than most notebooks."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('OMP_NUM_THREADS', '1')  # more threads than free cores wait for each other, for minutes
        with run_notebooks.kernel() as execute:
            yield execute


@pytest.mark.slow  # in CI alone
@pytest.mark.parametrize('name', NOTEBOOKS)
def test_a_notebook_shows_what_its_text_says(name, execute, tmp_path):
    notebook, file = nbformat.read(NBS / f'{name}.ipynb', as_version=4), tmp_path / f'{name}.ipynb'
    for text, code in CHECKS[name].items():
        at = next(i for i, c in enumerate(notebook.cells) if c.cell_type == 'code' and text in c.source)
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(code))
    nbformat.write(notebook, file)
    assert all(c.execution_count for c in execute(file).cells if c.cell_type == 'code')


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_one_cell_is_hidden_which_installs_on_colab(name):
    "Hidden cells are shown where the repository is hosted, and on Colab."
    hidden = [cell.source for cell in code_cells(name) if 'remove-cell' in cell.metadata.get('tags', [])]
    assert len(hidden) == 1 and '%pip install -q ./fastxtend_amp' in hidden[0]


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_outputs_have_no_paths_warnings_or_large_pictures(name):
    assert any(cell.outputs for cell in code_cells(name))
    for output in (o for cell in code_cells(name) for o in cell.outputs):
        data = output.get('data', {})
        text = str(output.get('text', '')) + str(data.get('text/plain', ''))
        assert output.output_type != 'error' and output.get('name') != 'stderr', text
        assert not any(folder in text for folder in FOLDERS), text
        assert len(base64.b64decode(data.get('image/png', ''))) < 100_000  # each version stays in the history
