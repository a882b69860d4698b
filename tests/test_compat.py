"Each use of an undocumented name does what `compat.py` says; the test fails with the function's name when it is gone."
import inspect

import pytest, torch
from fastai.learner import Learner
from torch import nn
from torch.utils import checkpoint as checkpointing

from fastxtend_amp import compat
from fastxtend_amp.guard import cache_loses_gradients
from helpers import *


def one_parameter(cls=torch.optim.AdamW, **kwargs):
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    return p, cls([p], lr=.5, **kwargs)


# -- autocast

def test_autocast_nesting():
    assert compat.autocast_nesting() == 0
    with torch.autocast('cpu'), torch.autocast('cpu'): assert compat.autocast_nesting() == 2


def test_AutocastState():
    with torch.autocast('cpu', dtype=torch.float16, cache_enabled=False):
        state, before = compat.AutocastState('cpu'), autocast_state()
        torch.autocast('cpu', enabled=False).__enter__()
        assert autocast_state() != before
        state.restore(); state.restore()
        assert autocast_state() == before


@pytest.mark.skipif(cache_loses_gradients(), reason='such a cache is not used here')
@pytest.mark.parametrize('keep', [False, True])
def test_exit_autocast(keep):
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    def use():
        with compat.AutocastState('cpu'):
            context = torch.autocast('cpu', dtype=torch.bfloat16)
            context.__enter__()
            out = layer(x)
            compat.exit_autocast(context, keep)
            return out
    before = autocast_state()
    use()
    with torch.no_grad(): layer.weight.zero_(); layer.bias.zero_()
    again = use()
    assert bool(again.any()) == keep and autocast_state() == before
    again.sum().backward()
    assert layer.weight.grad.tolist() == [[1, 1]]                # also through a cast that was kept
    torch.clear_autocast_cache()
    assert not use().any()
    torch.clear_autocast_cache()


def test_tensor_version():
    t = torch.ones(1); before = compat.tensor_version(t)
    assert compat.tensor_version(t) == before
    t.add_(1); assert compat.tensor_version(t) != before
    assert compat.tensor_version(object()) != compat.tensor_version(object())


def test_tensors_in_and_map_tensors_traced():
    t = torch.ones(1)
    assert compat.tensors_in(({'a': [t]}, 1)) == [t] and compat.map_tensors_traced(lambda t: t + 1, [t, 2]) == [torch.tensor([2.]), 2]


def test_has_hooks():
    for register in ('register_hook', 'register_post_accumulate_grad_hook'):
        p = nn.Parameter(torch.ones(1))
        assert not compat.has_hooks(p)
        getattr(p, register)(lambda t: None)
        assert compat.has_hooks(p)


def test_has_step_hooks():
    for register in ('register_step_pre_hook', 'register_step_post_hook'):
        opt = torch.optim.SGD(nn.Linear(1, 1).parameters(), .1)
        assert not compat.has_step_hooks(opt)
        getattr(opt, register)(lambda *args: None)
        assert compat.has_step_hooks(opt)


def test_is_uninitialized():
    assert compat.is_uninitialized(nn.LazyLinear(1).weight) and not compat.is_uninitialized(nn.Linear(1, 1).weight)


def test_dtype_of(monkeypatch):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs): raise AssertionError('asked')
    t = torch.ones(1).half().as_subclass(Loud)
    assert compat.dtype_of(t) is torch.float16
    monkeypatch.delattr(torch._C, 'DisableTorchFunctionSubclass')
    assert compat.dtype_of(torch.ones(1)) is torch.float32


# -- fastai's loop

def test_events_method():
    method = getattr(Learner, compat.events_method())
    assert list(inspect.signature(method).parameters) == ['self', 'f', 'event_type', 'ex', 'final']
    seen, learn = [], learner()
    learn.remove_cbs(list(learn.cbs))
    learn.add_cb(At('before_epoch', lambda l: seen.append('before')))
    getattr(learn, compat.events_method())(lambda: seen.append('f'), 'epoch', KeyError, lambda: seen.append('final'))
    assert seen == ['before', 'f', 'final']


def test_in_fit():
    learn, other, seen = learner(), learner(), []
    learn.add_cb(At('after_pred', lambda l: seen.append((compat.in_fit(l), compat.in_fit(other)))))
    learn.fit(1)
    assert set(seen) == {(True, False)} and not compat.in_fit(learn)
    seen.clear(); learn.validate()
    assert set(seen) == {(False, False)}


# -- loss scaling and optimizers

def test_move_scaler():
    scaler = torch.amp.GradScaler('cpu', init_scale=8.)
    scaler.scale(torch.ones(1)); scaler.update(4.)
    compat.move_scaler(scaler, 'meta')
    assert scaler._scale is None and scaler._device == 'meta' and scaler.state_dict()['scale'] == 4.
    compat.move_scaler(scaler, 'cpu')
    assert scaler.scale(torch.ones(1)).item() == 4.


@pytest.mark.parametrize('grad,flag', [(1., 0.), (float('inf'), 1.)])
def test_found_inf_flags_and_has_unscaled_and_forget_unscale(grad, flag):
    scaler, (p, opt) = torch.amp.GradScaler('cpu'), one_parameter()
    scaler.scale(torch.ones(1)); p.grad.fill_(grad)
    assert not compat.has_unscaled(scaler)
    scaler.unscale_(opt)
    assert [f.item() for f in compat.found_inf_flags(scaler, opt)] == [flag] and compat.has_unscaled(scaler)
    with pytest.raises(RuntimeError, match='already been called'): scaler.unscale_(opt)
    compat.forget_unscale(scaler)
    assert not compat.has_unscaled(scaler)
    scaler.unscale_(opt)


def test_scale_version():
    scaler = torch.amp.GradScaler('cpu', init_scale=8.)
    scaler.scale(torch.ones(1))
    before = compat.scale_version(scaler)
    assert compat.scale_version(scaler) == before
    scaler.update(2.); assert compat.scale_version(scaler) != before
    before = compat.scale_version(scaler); scaler.set_growth_factor(3.); assert compat.scale_version(scaler) != before
    del scaler._scale
    assert compat.scale_version(scaler) != compat.scale_version(scaler)    # unknown: counts as changed


def test_grads_version():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert compat.grads_version([p, q]) == []
    p.grad = torch.zeros(1)
    before = compat.grads_version([p, q])
    assert before == compat.grads_version([p, q])
    (p * 2).backward(); assert compat.grads_version([p, q]) != before
    q.grad = torch.zeros(1); assert len(compat.grads_version([p, q])) == 2


@pytest.mark.parametrize('cls', [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_arm_found_inf_and_disarm_found_inf(cls):
    p, opt = one_parameter(cls, fused=True)
    assert compat.supports_found_inf(opt) and not compat.supports_found_inf(one_parameter(cls)[1])
    opt.step(); before = p.item()
    for flag, moves in ((1., False), (0., True)):
        compat.arm_found_inf(opt, torch.tensor(flag)); opt.step(); compat.disarm_found_inf(opt)
        assert (p.item() != before) is moves and not {'found_inf', 'grad_scale'} & vars(opt).keys()


def test_supports_found_inf(): assert not compat.supports_found_inf(object())


def test_honours_found_inf(monkeypatch):
    cpu, fused = torch.device('cpu'), (('fused', True),)
    assert compat.honours_found_inf(torch.optim.AdamW, cpu, fused)
    class Ignores(torch.optim.AdamW):
        def step(self, closure=None): compat.disarm_found_inf(self); return super().step()
    class Never(torch.optim.AdamW):
        def step(self, closure=None): pass
    assert not compat.honours_found_inf(Ignores, cpu, fused) and not compat.honours_found_inf(Never, cpu, fused)


def test_the_step_is_decided_on_the_host_where_the_kernel_ignores_the_flag(monkeypatch):
    from fastxtend_amp import device_skip
    monkeypatch.setattr(device_skip, 'honours_found_inf', lambda *args: False)
    learn = learner(opt_func=OPTIMIZERS['fused adamw']).to_fp16(init_scale=2.**20, growth_interval=3); learn.fit(2, .01)
    assert isinstance(learn.precision.scaling.found_inf, bool)
    monkeypatch.undo()
    other = learner(opt_func=OPTIMIZERS['fused adamw']).to_fp16(init_scale=2.**20, growth_interval=3); other.fit(2, .01)
    assert same(params(learn), params(other)) and learn.precision.scales == other.precision.scales


class Syncfree(torch.optim.SGD):
    seen = None
    def step(self, closure=None, found_inf=None): self.seen = found_inf


def test_is_syncfree_and_syncfree_state(monkeypatch):
    _, opt = one_parameter(Syncfree)
    assert not compat.is_syncfree(opt) and not compat.syncfree_state(opt, {'step': 1})
    monkeypatch.setattr(Syncfree, '__module__', 'torch_xla.amp.syncfree.sgd')
    assert compat.is_syncfree(opt) and compat.syncfree_state(opt, {'step': 1}) and not compat.syncfree_state(opt, {})
    compat.arm_found_inf(opt, 'flag'); opt.step(); assert opt.seen == 'flag'
    compat.disarm_found_inf(opt); opt.step(); assert opt.seen is None


# -- modules

def test_compiled_module():
    m = nn.Linear(1, 1)
    compiled = torch.compile(m)
    assert compat.compiled_module(compiled) is m and compat.compiled_module(m) is None
    assert any(n.endswith(compat.COMPILED_NAME) for n, _ in nn.Sequential(compiled).named_modules())


def test_NotScriptable():
    from fastxtend_amp.forward import ModuleForward
    m = nn.Sequential(nn.Linear(1, 1)); ModuleForward(m[0]).install()
    with pytest.raises(AttributeError, match='torch.jit.script cannot compile'): torch.jit.script(m)
    assert not hasattr(m[0].forward, 'other')


# -- devices

def test_replace_replicate(monkeypatch):
    parallel, asked, x = nn.DataParallel(nn.Linear(2, 1)), [], torch.ones(3, 2)
    # Two replicas on the CPU, in one thread; `forward` is PyTorch's own.
    parallel.device_ids, parallel.output_device, parallel.src_device_obj = [0, 1], 0, torch.device('cpu')
    parallel.scatter = lambda inputs, kwargs, device_ids: ([inputs, inputs], [kwargs, kwargs])
    parallel.parallel_apply = lambda replicas, inputs, kwargs: [r(*i) for r, i in zip(replicas, inputs)]
    parallel.gather = lambda outputs, output_device: outputs
    def replicate(module, device_ids):
        asked.append((module, list(device_ids)))
        return [module, module]
    compat.replace_replicate(parallel, replicate)
    assert len(parallel(x)) == 2 and asked == [(parallel.module, [0, 1])]
    compat.replace_replicate(parallel, None)
    assert 'replicate' not in vars(parallel)
    monkeypatch.delattr(nn.DataParallel, 'replicate')
    with pytest.raises(RuntimeError, match='(?s)no method `replicate`.*DistributedDataParallel'): compat.replace_replicate(parallel, replicate)


def test_has_static_graph():
    import socket
    import torch.distributed as dist
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=0, world_size=1)
    try:
        for static in (False, True):
            model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), static_graph=static)
            assert compat.has_static_graph(model) is static
    finally: dist.destroy_process_group()


# -- half_weights

def test_copy_all():
    into, values = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    compat.copy_all(into, values)
    assert [t.sum().item() for t in into] == [2, 3]


def test_in_function_transform():
    seen = []
    torch.vmap(lambda x: seen.append(compat.in_function_transform()) or x)(torch.ones(2))
    assert seen == [True] and not compat.in_function_transform()


def test_CastWatch():
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with compat.CastWatch([a]) as casts:
        kept, _, _ = a.bfloat16(), b.bfloat16(), a.half().sum()
        assert casts.alive() == kept.nbytes == 8


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


def test_operators_unwatched(monkeypatch):
    def f():
        with compat.operators_unwatched(): torch.ones(2).exp()
        return torch.ones(2).log()
    assert run_watched(f)[0][-1] == 'log' and 'exp' not in run_watched(f)[0]
    monkeypatch.delattr('torch.utils._python_dispatch._len_torch_dispatch_stack')
    assert 'exp' in run_watched(f)[0]                            # seen, and no harm done


def test_EnteredModes(monkeypatch):
    from torch.overrides import BaseTorchFunctionMode
    def handle(op, args, kwargs): return op.call(*args, **kwargs)
    def entered(): return [len(stack()) for stack in compat.EnteredModes._stacks()]
    with BaseTorchFunctionMode():
        modes, before = compat.EnteredModes(), entered()
        compat.watch_operators(handle).__enter__()
        BaseTorchFunctionMode().__enter__()
        assert [n - m for n, m in zip(entered(), before)] == [1, 1]
        modes.restore()
        modes.restore()
        assert entered() == before
        with compat.watch_operators(handle):
            modes, before = compat.EnteredModes(), entered()
            compat.operators_unwatched().__enter__()
            modes.restore()
            assert entered() == before
    for stance in ('default', 'eager_on_recompile'):
        with torch.compiler.set_stance(stance):
            modes = compat.EnteredModes()
            compat.no_reentrant_checkpoints().__enter__()
            torch.compiler.set_stance('force_eager')
            modes.restore()
            modes.restore()
            assert torch._dynamo.eval_frame._stance.stance == stance and 'apply' not in vars(checkpointing.CheckpointFunction)
    monkeypatch.delattr('torch.overrides._get_current_function_mode_stack')
    monkeypatch.delattr('torch.utils._python_dispatch._get_current_dispatch_mode_stack')
    monkeypatch.delattr('torch._dynamo.eval_frame._stance')
    compat.EnteredModes().restore()                         # nothing is known, and nothing left


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


def test_split_batch():
    learn, x, y = learner(), torch.ones(4, 6), torch.ones(4, 1)
    assert compat.split_batch(learn, (x, y)) == ((x,), (y,)) and not hasattr(learn, 'xb')
    assert compat.split_batch(learn, [x]) == ((x,), ()) and compat.split_batch(learn, x) == ((x,), ())
    learn.dls.n_inp = 2
    assert compat.split_batch(learn, (x, y)) == ((x, y), ())
    class Mine(Learner):
        def _split(self, b): self.xb, self.yb = [b['x']], [b['y']]
    assert compat.split_batch(learner(cls=Mine), {'x': x, 'y': y}) == ((x,), (y,))


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
def test_host_value(monkeypatch, name_is_there):
    if not name_is_there: monkeypatch.delattr(torch._C, 'DisableTorchFunctionSubclass')
    assert compat.host_value(torch.tensor(3.)) == 3.
    for other in (torch.ones(2), torch.tensor(1.).double(), torch.tensor(1), torch.tensor(1., device='meta')):
        assert compat.host_value(other) is None
