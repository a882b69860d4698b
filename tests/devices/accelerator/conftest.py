"""Tests of one accelerator: a simulated one with `pytest --sim=cuda` or `--sim=sim`, else an NVIDIA GPU.

Without both they are left out.

tests/devices/on_simulated.py runs them on simulated devices, in processes of their own.
"""
import sys

import pytest, torch

from devices.simulated import is_installed, options

def pytest_ignore_collect(collection_path): return None if is_installed() or torch.cuda.is_available() else True


@pytest.fixture(autouse=True)
def device(monkeypatch):
    "The accelerator; learners of helpers.py train on it."
    import helpers
    found = helpers.DEVICE if is_installed() else torch.device('cuda', 0)
    monkeypatch.setattr(helpers, 'DEVICE', found)
    return found


def forget_the_device():
    "A real device does not change; what the package found out about this one and keeps is asked for again."
    for name, module in list(sys.modules.items()):
        if not name.startswith('fastxtend_amp'): continue
        for function in list(vars(module).values()):
            if hasattr(function, 'cache_parameters'): function.cache_clear()


@pytest.fixture
def sim():
    "The simulated device's options, put back after the test."
    if not is_installed(): pytest.skip('needs a simulated device')
    before = dict(vars(options))
    forget_the_device()
    yield options
    vars(options).update(before)
    forget_the_device()
