"Every function of compat.py does what it says, and where the undocumented name is gone, what it says of that."
import sys

import pytest, torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from fastxtend_amp import compat


# -- insight

def run_watched(f):
    names = []
    def handle(op, args, kwargs):
        names.append(op.name)
        return op.call(*args, **kwargs)
    with compat.watch_operators(handle): result = f()
    return names, result


def test_watch_operators_sees_them_below_autocast_and_autograd():
    x, w = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    def f():
        with torch.autocast('cpu', dtype=torch.bfloat16): return nn.functional.linear(x, w).relu()
    names, result = run_watched(f)
    assert '_to_copy' in names and 'relu' in names and result.requires_grad and result.dtype is torch.bfloat16


def test_watch_operators_knows_what_operators_do():
    known = {}
    def handle(op, args, kwargs):
        known[op.name] = op
        return op.call(*args, **kwargs)
    with compat.watch_operators(handle): torch.ones(2, 2).add_(torch.rand(2, 2)).t()
    assert known['rand'].draws and not known['add_'].draws and known['t'].is_view and not known['add_'].is_view
    assert known['add_'].changes_input and not known['rand'].changes_input


def test_watch_operators_without_dispatch_modes_sees_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils._python_dispatch', None)
    names, result = run_watched(lambda: torch.ones(2) + 1)
    assert names == [] and result.tolist() == [2., 2.]


def test_operators_unwatched(monkeypatch):
    def f():
        with compat.operators_unwatched(): torch.ones(2).exp()
        return torch.ones(2).log()
    assert run_watched(f)[0][-1] == 'log' and 'exp' not in run_watched(f)[0]
    monkeypatch.delattr('torch.utils._python_dispatch._disable_current_modes')
    assert 'exp' in run_watched(f)[0]                            # seen, and no harm done


def test_no_reentrant_checkpoints():
    lin = nn.Linear(2, 2)
    def grads():
        x = torch.ones(1, 2, requires_grad=True)
        return torch.autograd.grad(checkpointing.checkpoint(lin, x, use_reentrant=True).sum(), list(lin.parameters()))
    with pytest.raises(RuntimeError): grads()
    with compat.no_reentrant_checkpoints(): assert all(g.abs().sum() > 0 for g in grads())
    with pytest.raises(RuntimeError): grads()


def test_no_reentrant_checkpoints_without_the_function_behind_them(monkeypatch):
    monkeypatch.delattr(checkpointing, 'CheckpointFunction')
    with compat.no_reentrant_checkpoints(): pass


# -- insight: comparison and diagnosis

def test_is_compiled_in_place():
    class Old(nn.Module):
        _compiled_call_impl = property(lambda self: (_ for _ in ()).throw(AttributeError))
    model = nn.Sequential(nn.Linear(2, 2))
    assert not compat.is_compiled_in_place(model)
    model.compile(backend='eager')
    assert compat.is_compiled_in_place(model) and not compat.is_compiled_in_place(model[0])
    assert not compat.is_compiled_in_place(Old())


@pytest.mark.parametrize('name_is_there', [True, False])
def test_host_value_and_host_norm(monkeypatch, name_is_there):
    if not name_is_there: monkeypatch.delattr(torch._C, 'DisableTorchFunctionSubclass')
    weights = nn.Parameter(torch.full((2, 2), 3.))
    assert compat.host_value(torch.tensor(3.)) == 3.
    assert compat.host_norm(weights) == 6. and compat.host_norm(torch.zeros(0)) == 0.
    for other in (torch.ones(2), torch.tensor(1.).double(), torch.tensor(1), torch.tensor(1., device='meta')):
        assert compat.host_value(other) is None
    for other in (torch.ones(2, 3).t(), torch.ones(2).half(), torch.ones(2, device='meta'), torch.ones(2).to_sparse()):
        assert compat.host_norm(other) is None
