"The notebooks run from top to bottom; their hidden cells assert."

import importlib.util, tempfile
from pathlib import Path

import nbformat, pytest

NBS = Path(__file__).parent.parent / 'nbs'
FOLDERS = (str(Path.home()), tempfile.gettempdir(), 'site-packages', '/home/')  # of the machine that ran them
NOTEBOOKS = sorted(NBS.glob('*.ipynb'))
HIDDEN = {'remove-cell', 'hide-input', 'remove-input'}
spec = importlib.util.spec_from_file_location('run_notebooks', NBS / 'run.py')
run_notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_notebooks)


def tags(cell):
    return set(cell.metadata.get('tags', []))


@pytest.fixture(scope='module')
def execute():
    "One kernel for all, because fastai's imports take longer than most notebooks."
    with run_notebooks.kernel() as execute:
        yield execute


@pytest.mark.slow  # in CI alone
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_in_an_empty_folder(path, execute):
    done = execute(path)
    assert all(c.execution_count for c in done.cells if c.cell_type == 'code')


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
    "It opens with a title and a sentence; nothing long stands before the first thing that happens; checks are hidden."
    cells = nbformat.read(path, as_version=4).cells
    title, _, text = cells[0].source.partition('\n')
    assert cells[0].cell_type == 'markdown' and title.startswith('# ') and len(text.strip()) > 40
    shown = [c for c in cells if c.cell_type == 'code' and not tags(c) & HIDDEN]
    for cell in shown:
        assert 'assert ' not in cell.source and 'test_eq' not in cell.source, cell.source
    if shown and 'import' in shown[0].source.split('\n')[0]:
        assert len(shown[0].source.split('\n')) <= 4
