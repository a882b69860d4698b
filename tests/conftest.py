"The options of the tests, which pose as another CPU, device or set of rules, and fixtures that several files use."

import importlib.util, os, sys
from pathlib import Path

os.environ.setdefault('MPLBACKEND', 'Agg')
import pytest, torch

if os.environ.get('PJRT_DEVICE') and importlib.util.find_spec('torch_xla'):
    import torch_xla

    # Before the first backward pass of the process: autograd only knows the devices that exist at that time.
    torch_xla.device()

# The instruction sets of the CPUs that `--cpu` poses as.
CPUS = {'emulated': '', 'bf16': 'bf16', 'fp16': 'bf16 fphp'}
torch.set_num_threads(1)  # tests run side by side; results must not depend on the machine


def pytest_addoption(parser):
    parser.addoption('--sim', choices=('sim',), help='run on a simulated device: see tests/devices/simulated.py')
    parser.addoption('--rules', choices=('cuda',), help="CUDA's autocast rules on a CPU: see devices/cuda_rules.py")
    parser.addoption('--rewrite', action='store_true', help='rewrite tests/expected/*.txt with the texts of today')
    parser.addoption('--cpu', choices=CPUS, help="what the CPU computes natively, as if; the machine's own by default")


def pytest_configure(config):
    if cpu := config.getoption('--cpu'):
        from fastxtend_amp.devices import facts

        facts.cpu_features = lambda: frozenset(CPUS[cpu].split())
    if config.getoption('--rules'):
        from fastxtend_amp.devices.cuda_rules import cuda_rules

        rules = cuda_rules()
        rules.__enter__()
        config.add_cleanup(lambda: rules.__exit__(None, None, None))
    if not config.getoption('--sim'):
        return
    sys.path.insert(0, os.path.dirname(__file__))
    from devices.simulated import install

    device = install()  # before anything can use it
    import helpers

    helpers.DEVICE = device


@pytest.fixture(params=CPUS)
def cpu(request, monkeypatch):
    "Run a test as if on each kind of CPU; return its instruction sets."
    from fastxtend_amp.devices import facts

    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset(CPUS[request.param].split()))
    return facts.cpu_features()


def pytest_pycollect_makeitem(obj):
    if str(getattr(obj, '__module__', '')).startswith(('fastai.', 'fastcore.')):
        return []  # star imports bring functions called test_...


def pytest_collection_modifyitems(config, items):
    has_torchao = importlib.util.find_spec('torchao') and torch.__version__ >= '2.11'
    for item in items:
        if 'torchao' in item.keywords and not has_torchao:
            item.add_marker(pytest.mark.skip(reason='needs torchao, and torch 2.11 to import it'))
        if 'cuda' in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason='needs an NVIDIA GPU, and PyTorch finds none'))


@pytest.fixture
def expected(request):
    "A function that reads a file in tests/expected; with `--rewrite`, what equals its result is written there."

    class Rewritten(str):
        def __eq__(self, text):
            return bool(Path(self).write_text(text, encoding='utf-8'))

    def read(name):
        file = Path(__file__).parent / 'expected' / f'{name}.txt'
        if request.config.getoption('--rewrite'):
            return Rewritten(file)
        text = file.read_text(encoding='utf-8')
        return text if torch.__version__ >= '2.10' else text.replace('c10::Half', 'at::Half')  # in PyTorch's error

    return read


@pytest.fixture
def with_tf32(monkeypatch):
    "Pose as a device with TF32: PyTorch accepts its settings on any device."
    from fastxtend_amp.precisions import PRECISIONS, Support

    native = classmethod(lambda cls, device: Support('native', 'as if'))
    monkeypatch.setattr(PRECISIONS['tf32'], 'support', native)
