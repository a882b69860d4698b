"The tests of accelerators on simulated devices of type 'sim', which stand for any other than CUDA's."
import pytest

from on_simulated import FILES, assert_passed


@pytest.mark.parametrize('file', FILES)
def test_accelerator(file, outcomes): assert_passed(outcomes('sim', file.partition('/')[0]), file)
