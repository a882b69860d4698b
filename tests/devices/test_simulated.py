"The tests of test_accelerator.py on a simulated device, which must exist before torch looks for one."

import pytest, torch

from helpers import assert_passes


@pytest.mark.skipif(not hasattr(torch._C, '_acc'), reason='PyTorch registers no device from Python before 2.13')
def test_accelerator():
    assert_passes('--sim=sim', 'tests/devices/test_accelerator.py')
