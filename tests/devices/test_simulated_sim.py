"The tests of accelerators on simulated devices of type 'sim', which stand for any other than CUDA's."
import pytest, torch

from devices.simulated import install, missing_reason
from on_simulated import FILES, assert_passed


@pytest.mark.parametrize('file', FILES)
def test_accelerator(file, outcomes): assert_passed(outcomes('sim', file.partition('/')[0]), file)


def test_a_pytorch_that_cannot_says_why(monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.13.0+cu130')
    monkeypatch.setattr(torch.backends.cuda, 'is_built', lambda: True)
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    if hasattr(torch._C, '_acc'): assert 'known for PyTorch 2.14, not for 2.13.0' in missing_reason('cuda')
    monkeypatch.setattr(torch.backends.cuda, 'is_built', lambda: False)
    if hasattr(torch._C, '_acc'): assert 'not a CUDA build' in missing_reason('cuda')
    monkeypatch.delattr(torch._C, '_acc', raising=False)
    for kind in ('cuda', 'sim'):
        assert 'registers no device from Python' in missing_reason(kind)
        with pytest.raises(RuntimeError, match='cannot be simulated: PyTorch 2.13.0'): install(kind)
