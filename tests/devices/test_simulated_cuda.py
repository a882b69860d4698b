"The tests of accelerators, and those of an NVIDIA GPU in test_cuda.py, on simulated devices of type 'cuda'."
import pytest

from on_simulated import FILES, assert_passed


@pytest.mark.parametrize('file', ['test_cuda.py', *FILES])
def test_accelerator(file, outcomes):
    room, slash, _ = file.partition('/')
    if not slash: room = 'accelerator'
    assert_passed(outcomes('cuda', room, *(['test_cuda.py'] if room == 'accelerator' else [])), file)
