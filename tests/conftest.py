import os
os.environ.setdefault('MPLBACKEND', 'Agg')
import pytest, torch

torch.set_num_threads(1)  # tests run side by side; results must not depend on the machine


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason='needs an NVIDIA GPU, and PyTorch finds none')
    for item in items:
        if 'cuda' in item.keywords and not torch.cuda.is_available(): item.add_marker(skip)
