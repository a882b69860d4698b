"Each undocumented name that the core uses does what `compat.py` says; a test fails when the name is gone."

import pytest, torch
from fastai.torch_core import TensorBase
from torch import nn
from torch._functorch import config

from fastxtend_amp import compat
from helpers import autocast_state


def test_autocast_is_restored():
    with torch.autocast('cpu', dtype=torch.float16, cache_enabled=False):
        before = autocast_state()
        with pytest.raises(KeyError), compat.autocast_restored('cpu'):
            for _ in range(3):
                torch.autocast('cpu', enabled=False).__enter__()
            torch.set_grad_enabled(False)
            assert autocast_state() != before
            raise KeyError
        assert autocast_state() == before and torch.is_grad_enabled()
        with compat.autocast_restored('cpu'):
            torch.autocast_decrement_nesting()
        assert autocast_state() == before


def test_compiled_modules():
    m = nn.Linear(1, 1)
    compiled = torch.compile(m)
    assert getattr(compiled, compat.COMPILED_NAME) is m
    assert any(n.endswith(compat.COMPILED_NAME) for n, _ in nn.Sequential(compiled).named_modules())
    assert compat.is_compiled(nn.Sequential(compiled)) and not compat.is_compiled(m)
    m.compile()
    assert compat.is_compiled(m)
    function = lambda x: x
    assert compat.uncompiled(torch.compile(function)) is compat.uncompiled(function) is function


def test_subclasses_are_plain_tensors():
    with compat.without_subclasses():
        assert type(TensorBase(1.0) + 1) is torch.Tensor


def test_the_backward_pass_is_compiled_without_autocast():
    before = config.backward_pass_autocast
    with compat.backward_without_autocast():
        assert config.backward_pass_autocast == 'off'
    assert config.backward_pass_autocast == before


def test_function_transforms_are_known():
    seen = []
    torch.func.vmap(lambda x: (seen.append(compat.in_function_transform()), x)[1])(torch.ones(2))
    assert seen == [True] and not compat.in_function_transform()


def test_traits_of_operators():
    aten = torch.ops.aten
    assert compat.traits_of(aten.mm.default)[:4] == ('mm', False, False, False)
    assert compat.traits_of(aten.view.default).makes_nothing and compat.traits_of(aten.add_.Tensor).writes
    assert compat.traits_of(aten.bernoulli_.float)[1:] == (True, False, True, None)


def test_operators_without_modes():
    seen = []

    class Notes(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        with compat.without_modes():
            torch.ones(2) + 1
        assert not seen
        torch.ones(2) + 1
    assert seen


def test_a_backward_pass_is_surrounded():
    w, seen = torch.ones(2, requires_grad=True), []
    loss = (w * 3).sum()
    compat.around_backward(loss, lambda: seen.append(w.grad), lambda: seen.append(w.grad.tolist()))
    loss.backward()
    assert seen == [None, [3.0, 3.0]]
