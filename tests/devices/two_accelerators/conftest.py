"Tests of two simulated devices of one type, `pytest --sim=cuda --sim-devices=2`; without them they are left out."
from devices.simulated import is_installed, options


def pytest_ignore_collect(collection_path): return None if is_installed() and options.n_devices > 1 else True
