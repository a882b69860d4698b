"Each undocumented name that the core uses does what `compat.py` says; a test fails when the name is gone."

import pytest, torch
from torch import nn

from fastxtend_amp import compat
from fastxtend_amp.insight import compat as traced
from helpers import *


def test_AutocastState():
    with torch.autocast('cpu', dtype=torch.float16, cache_enabled=False):
        before = autocast_state()
        with compat.AutocastState('cpu'):
            for _ in range(3):
                torch.autocast('cpu', enabled=False).__enter__()
            torch.set_grad_enabled(False)
            assert autocast_state() != before
        assert autocast_state() == before and torch.is_grad_enabled()
        with compat.AutocastState('cpu'):
            torch.autocast_decrement_nesting()
        assert autocast_state() == before


def test_tree_leaves_and_tree_map():
    t = torch.ones(1)
    assert compat.tree_leaves(({'a': [t]}, 1)) == [t, 1] and compat.tree_map(lambda o: o + 1, [t, 2]) == [
        torch.tensor([2.0]),
        3,
    ]


def test_compiled_module():
    m = nn.Linear(1, 1)
    compiled = torch.compile(m)
    assert compat.compiled_module(compiled) is m and compat.compiled_module(m) is None
    assert any(n.endswith(compat.COMPILED_NAME) for n, _ in nn.Sequential(compiled).named_modules())


@pytest.mark.parametrize('grad, flag', [(1.0, 0.0), (float('inf'), 1.0)])
def test_found_infs_of(grad, flag):
    p, scaler = nn.Parameter(torch.ones(1)), torch.amp.GradScaler('cpu')
    p.grad, opt = scaler.scale(torch.full((1,), grad)), torch.optim.SGD([p])
    scaler.unscale_(opt)
    assert [t.item() for t in compat.found_infs_of(scaler, opt)] == [flag]


def test_skips_by_flag():
    class Optimizer:
        "Does not step; records the flag that `GradScaler.step` passes to it."

        param_groups, found_inf = [{'params': [p := nn.Parameter(torch.ones(1))]}], None

        def step(self):
            self.flag = self.found_inf.item()

    opt, scaler = Optimizer(), torch.amp.GradScaler('cpu')
    Optimizer.p.grad = scaler.scale(torch.full((1,), float('inf')))
    assert not compat.skips_by_flag(opt)
    opt._step_supports_amp_scaling = True
    scaler.step(opt)
    assert opt.flag == 1
    assert [compat.skips_by_flag(torch.optim.AdamW([Optimizer.p], fused=f)) for f in (True, False)] == [True, False]


def test_fp32_settings():
    assert compat.get_fp32_setting('mkldnn', 'matmul') == torch.backends.mkldnn.matmul.fp32_precision == 'none'
    compat.set_fp32_setting('mkldnn', 'all', 'bf16')
    try:
        assert torch.backends.mkldnn.fp32_precision == torch.backends.mkldnn.conv.fp32_precision == 'bf16'
        assert torch.backends.fp32_precision == 'none'
    finally:
        compat.set_fp32_setting('mkldnn', 'all', 'none')


# -- insight


def test_in_function_transform():
    seen = []
    torch.func.vmap(lambda x: (seen.append(traced.in_function_transform()), x)[1])(torch.ones(2))
    assert seen == [True] and not traced.in_function_transform()


def test_operator():
    aten = torch.ops.aten
    assert traced.operator(aten.mm.default) == ('mm', False, False, False)
    assert traced.operator(aten.view.default).makes_nothing and traced.operator(aten.add_.Tensor).writes
    assert traced.operator(aten.bernoulli_.float)[1:] == (True, False, True)


def test_unwatched():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        with traced.unwatched():
            torch.ones(2) + 1
        assert not seen
        torch.ones(2) + 1
    assert seen
