"The tests of accelerators on simulated devices of type 'sim'."
import pytest

from on_simulated import FILES, assert_passed, outcomes  # noqa: F401  a fixture


@pytest.mark.parametrize('file', FILES)
def test_accelerator(file, outcomes): assert_passed(outcomes('sim', file.partition('/')[0]), file)
