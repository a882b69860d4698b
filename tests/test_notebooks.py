"The notebooks run from top to bottom, and show what their text says."

import importlib.util, tempfile
from pathlib import Path

import nbformat, pytest

NBS = Path(__file__).parent.parent / 'nbs'
FOLDERS = (str(Path.home()), tempfile.gettempdir(), 'site-packages', '/home/')  # of the machine that ran them
NOTEBOOKS = sorted(NBS.glob('*.ipynb'))
HIDDEN = {'remove-cell', 'hide-input', 'remove-input'}
CHECKS = {  # code that runs after the first cell with this text, by notebook
    '01_first_run': {
        'learn.precision': """
dtype = learn.precision.mode.dtype if learn.precision.mode else torch.float32
assert learn.final_record[-1] > .9 and fp32.final_record[-1] > .9
seen = set()
hook = learn.model.conv1.register_forward_hook(lambda m, i, o: seen.add(o.dtype))
learn.validate(); hook.remove()
assert seen == {dtype}"""
    },
    '02_which_precision': {
        'report = ': """
assert report.fp32_modules == ['attn']
assert report.verdicts['fp16'].call == "learn.to_fp16(fp32_modules=['attn'])\"""",
        'learn.fit(1, 1e-2)': 'assert learn.precision.n_skipped == len(learn.precision.scales)',
        'fp32 = reader()': """
assert abs(learn.final_record[-1] - fp32.final_record[-1]) < .03 and learn.final_record[-1] > .85""",
    },
    '03_resume_and_export': {
        'resumed.fit(': """
straight = learner().to_fp16(init_scale=2**22)
with straight.no_bar(), straight.no_logging():
    straight.fit(2, 1e-2)
    straight.fit(1, 1e-2)
assert all(map(torch.equal, straight.model.state_dict().values(), resumed.model.state_dict().values()))
assert straight.precision.state_dict() == resumed.precision.state_dict()""",
        'resumed.export': "assert b'fastxtend_amp' not in (path/'model.pkl').read_bytes()",
    },
    '07_fixing_overflows': {
        'learn.fit(4': '''
fp32, warn, fix = runs.values()
assert warn.precision.n_skipped > 30 and fix.precision.n_skipped < 10 and len(fix.precision.fixes) == 1
assert abs(fix.final_record[1] - fp32.final_record[1]) < .05'''
    },
    '04_processes_compile_xla': {
        'done = subprocess': """
assert not done.returncode, done.stderr[-2000:]
assert len(rows) == 2 and rows[0] == rows[1] and float(rows[0][3]) > .9, done.stdout[-2000:]
assert os.path.exists('model.pkl')"""
    },
    '05_half_weights': {
        'results = ': """
weights = [torch.cat([p.detach().flatten() for p in l.model.parameters()]) for l in results.values()]
assert torch.equal(weights[1], weights[2]) and torch.equal(weights[1], weights[3])""",
        'kahan(': """
assert abs(learn.final_record[-1] - results['fp32'].final_record[-1]) < .05
assert {p.dtype for p in learn.model.parameters()} == {torch.float32}""",
    },
}
spec = importlib.util.spec_from_file_location('run_notebooks', NBS / 'run.py')
run_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_notebooks)


def tags(cell):
    return set(cell.metadata.get('tags', []))


@pytest.fixture(scope='module')
def execute():
    "One kernel for all, because fastai's imports take longer than most notebooks."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('OMP_NUM_THREADS', '1')  # more threads than free cores wait for each other, for minutes
        with run_notebooks.kernel() as execute:
            yield execute


@pytest.mark.slow  # in CI alone
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_in_an_empty_folder_and_shows_what_its_text_says(path, execute, tmp_path):
    notebook, checks = nbformat.read(path, as_version=4), CHECKS[path.stem]
    for text, code in checks.items():
        at = next(i for i, c in enumerate(notebook.cells) if c.cell_type == 'code' and text in c.source)
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(code))
    nbformat.write(notebook, tmp_path / path.name)
    done = execute(tmp_path / path.name)
    assert all(c.execution_count for c in done.cells if c.cell_type == 'code')


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_one_cell_is_hidden_which_installs_on_colab(path):
    "Hidden cells are shown where the repository is hosted, and on Colab."
    hidden = [c.source for c in nbformat.read(path, as_version=4).cells if 'remove-cell' in tags(c)]
    assert len(hidden) == 1 and '%pip install -q ./fastxtend_amp' in hidden[0]


def test_a_name_that_no_notebook_has_is_refused():
    with pytest.raises(SystemExit, match='begins with 99'):
        run_notebooks.main(['01', '99'])


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stored_without_paths_and_unexplained_warnings(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == 'code']
    assert any(c.outputs for c in cells)
    for cell in cells:
        for output in cell.outputs:
            text = str(output.get('text', '')) + str(output.get('data', {}).get('text/plain', ''))
            assert output.output_type != 'error' and output.get('name') != 'stderr', text
            assert not any(p in text for p in FOLDERS), text


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_reads_as_a_tutorial(path):
    "It opens with a title and a sentence; nothing long stands before the first thing that happens; no checks."
    cells = nbformat.read(path, as_version=4).cells
    title, _, text = cells[0].source.partition('\n')
    assert cells[0].cell_type == 'markdown' and title.startswith('# ') and len(text.strip()) > 40
    shown = [c for c in cells if c.cell_type == 'code' and not tags(c) & HIDDEN]
    for cell in shown:
        assert 'assert ' not in cell.source and 'test_eq' not in cell.source, cell.source
    if shown and 'import' in shown[0].source.split('\n')[0]:
        assert len(shown[0].source.split('\n')) <= 4
