import importlib.util, os
os.environ.setdefault('MPLBACKEND', 'Agg')
import pytest, torch

if os.environ.get('PJRT_DEVICE') and importlib.util.find_spec('torch_xla'):
    import torch_xla
    torch_xla.device()  # before any backward pass of the process, or none works on XLA: autograd knows the devices there are then

torch.set_num_threads(1)  # tests run side by side; results must not depend on the machine


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason='needs an NVIDIA GPU, and PyTorch finds none')
    for item in items:
        if 'cuda' in item.keywords and not torch.cuda.is_available(): item.add_marker(skip)
