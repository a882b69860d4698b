"The accelerator that tests of devices run on."

import importlib.util, os

import pytest, torch

import helpers


@pytest.fixture
def device(monkeypatch):
    "The accelerator; learners of helpers.py train on it."
    if importlib.util.find_spec('torch_xla') and os.environ.get('PJRT_DEVICE'):
        monkeypatch.setattr(helpers, 'DEVICE', torch.device('xla', 0))
    elif torch.cuda.is_available():
        monkeypatch.setattr(helpers, 'DEVICE', torch.device('cuda', 0))
    elif helpers.DEVICE.type == 'cpu':  # conftest.py above has not put a simulated device there
        pytest.skip('needs an accelerator, or --sim=sim')
    return helpers.DEVICE
