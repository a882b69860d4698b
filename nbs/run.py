"Runs the notebooks and stores their outputs: `python nbs/run.py` all of them, `python nbs/run.py 02 05` these."
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent


def execute(
    file: Path, # The notebook; it is not changed
    timeout: float = 240., # Seconds that one cell may take
): # The notebook with its new outputs
    "Run a notebook from top to bottom in a fresh kernel, in its own folder, with the package beside it."
    search = [str(FOLDER.parent), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, search))}
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, timeout=timeout, kernel_name='python3', resources={'metadata': {'path': str(file.parent)}})
    return client.execute(env=env)


def main(names):
    "Run each notebook; one that fails keeps its old outputs. Returns how many failed."
    failed = 0
    for file in sorted(FOLDER.glob('*.ipynb')):
        if names and not file.name.startswith(tuple(names)): continue
        start = time.perf_counter()
        try: notebook = execute(file)
        except CellExecutionError as error:
            failed += 1
            print(f'{file.name}: {error.ename}: {error.evalue}', flush=True)
            continue
        for cell in notebook.cells: cell.metadata.pop('execution', None)   # times of each cell: noise in a diff
        nbformat.write(notebook, file)
        print(f'{file.name}: {time.perf_counter() - start:.0f} s', flush=True)
    return failed


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
