"The notebooks run from top to bottom in a fresh kernel; their cells assert."
import tempfile
from pathlib import Path

import nbformat, pytest
from nbclient import NotebookClient

FOLDERS = (str(Path.home()), tempfile.gettempdir(), 'site-packages', '/home/')   # of the machine that ran them
NOTEBOOKS = sorted((Path(__file__).parent.parent / 'nbs').glob('*.ipynb'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    kept = sum(len(c.outputs) for c in notebook.cells if c.cell_type == 'code')
    done = NotebookClient(notebook, timeout=240, kernel_name='python3', resources={'metadata': {'path': str(path.parent)}}).execute()
    code = [c for c in done.cells if c.cell_type == 'code']
    assert kept and all(c.execution_count for c in code)         # outputs are kept in the file, and every cell ran


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_hold_no_paths_and_no_unexplained_warnings(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get('outputs', []):
            text = str(output.get('text', '')) + str(output.get('data', {}).get('text/plain', ''))
            assert output.output_type != 'error' and output.get('name') != 'stderr', text
            assert not any(p in text for p in FOLDERS), text
