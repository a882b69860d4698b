"DataParallel: each replica in a thread, in the precision of the fit and with its own weights."
import copy, threading

import pytest, torch
from fastai import distributed  # noqa: F401  to_parallel
from fastai.callback.training import GradientAccumulation

from fastxtend_amp import MixedPrecision
from fastxtend_amp.forward import ModuleForward
from helpers import *

DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16}


def net(): torch.manual_seed(0); return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


class Threads(nn.DataParallel):
    "`DataParallel.forward` with two replicas on the CPU; the steps that it calls are PyTorch's, written for the CPU."
    def __init__(self, module):
        super().__init__(module)
        self.device_ids, self.output_device, self.src_device_obj = [0, 1], 0, torch.device('cpu')
        self.left = []                                           # autocast's state at the end of each thread

    def scatter(self, inputs, kwargs, device_ids): return [(part,) for part in inputs[0].chunk(2)], [kwargs, kwargs]

    def replicate(self, module, device_ids): return [self._replica(module) for _ in device_ids]

    def _replica(self, module):
        replica = module._replicate_for_data_parallel()
        for name, child in module.named_children(): setattr(replica, name, self._replica(child))
        for name, p in module.named_parameters(recurse=False): setattr(replica, name, p.clone())
        return replica

    def parallel_apply(self, replicas, inputs, kwargs):
        out, grad, enabled, device_type = {}, torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'), 'cpu'
        def work(i):
            torch.set_grad_enabled(grad)
            with torch.amp.autocast(device_type, enabled=enabled): out[i] = replicas[i](*inputs[i])
            self.left.append((torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
        for t in threads: t.start()
        for t in threads: t.join()
        return [out[i] for i in range(len(replicas))]

    def gather(self, outputs, output_device): return torch.cat([o.float() for o in outputs])


def seen_in(layer, f):
    "What `f(layer)` gives in each forward of `layer`'s replicas, with whether it ran outside the main thread."
    seen = []
    def look(m, i, o): seen.append((f(m, o), threading.current_thread() is not threading.main_thread()))
    layer.register_forward_hook(look)
    return seen


@pytest.mark.parametrize('mode', DTYPES)
def test_replicas_in_threads_run_in_the_dtype_that_was_asked_for(mode):
    model = net()
    seen, default = seen_in(model[0], lambda m, o: o.dtype), torch.get_autocast_dtype('cpu')
    learn = learner(Threads(model), cbs=MixedPrecision(mode))
    learn.fit(1, .01)
    assert set(seen) == {(DTYPES[mode], True)}                   # the CPU's default is bf16, CUDA's fp16
    assert set(learn.model.left) == {(False, default)} and torch.get_autocast_dtype('cpu') is default
    assert 'replicate' not in vars(learn.model) and 'forward' not in vars(model)


def test_without_our_replicas_a_thread_takes_the_default_of_the_device():
    model = net()
    seen = seen_in(model[0], lambda m, o: o.dtype)
    with torch.autocast('cpu', dtype=torch.float16): Threads(model)(torch.randn(4, 6))
    assert set(seen) == {(torch.bfloat16, True)}                 # otherwise this package need do nothing any more


def test_a_part_of_the_model_that_is_data_parallel():
    body = net()[:2]
    seen = seen_in(body[0], lambda m, o: o.dtype)
    learn = learner(nn.Sequential(Threads(body), nn.Linear(8, 1)), cbs=MixedPrecision('fp16'))
    learn.fit(1, .01)
    assert set(seen) == {(torch.float16, True)} and 'replicate' not in vars(learn.model[0])


def test_outside_autocast_replicas_run_in_fp32():
    model, outside = net(), []
    seen = seen_in(model[0], lambda m, o: o.dtype)
    def call(l):
        n = len(seen)
        l.model(torch.randn(4, 6))
        outside.extend(seen[n:])
    learn = learner(Threads(model), cbs=[MixedPrecision('bf16'), At('after_epoch', call, 20)])
    learn.fit(1, .01)
    assert set(outside) == {(torch.float32, True)} and (torch.bfloat16, True) in seen


def test_parameters_equal_those_without_replicas():
    learns = [learner(wrap(net()), cbs=MixedPrecision('bf16'), opt_func=SGD) for wrap in (Threads, lambda m: m)]
    for learn in learns: learn.fit(1, .01)
    for p, q in zip(*map(params, learns)): torch.testing.assert_close(p, q, rtol=.02, atol=1e-3)


@pytest.mark.parametrize('kwargs', [dict(), dict(flat_master=True), dict(master_weights=False)], ids=str)
@pytest.mark.filterwarnings('ignore:master_weights')
def test_half_weights(kwargs):
    "The replicas' weights are new tensors in each batch, which autocast casts anew."
    learns = [learner(Threads(net()), opt_func=SGD, cbs=GradientAccumulation(8)) for _ in range(2)]
    learns[0].to_bf16().fit(2, .01)
    learns[1].to_half_weights(**kwargs).fit(2, .01)
    if 'master_weights' in kwargs:
        for p, q in zip(*map(params, learns)): torch.testing.assert_close(p, q, rtol=.05, atol=.01)
    else: assert same(*map(params, learns))
    assert {p.dtype for p in learns[1].model.parameters()} == {torch.float32}


class Own(nn.Linear):
    "Says of each forward whether it used the weights of a replica, which are no parameters, and in which dtype."
    seen: set
    def forward(self, x):
        out = super().forward(x)
        self.seen.add((not isinstance(self.weight, nn.Parameter), out.dtype))
        return out


@pytest.mark.parametrize('where', ['inside', 'the whole model', 'deep'])
def test_fp32_modules_run_with_the_weights_of_their_replica(where):
    torch.manual_seed(0)
    own = Own(6, 1)
    own.seen = set()
    model, names = {'inside': (nn.Sequential(own), '0'), 'the whole model': (own, '(model)'),
                    'deep': (nn.Sequential(nn.Sequential(nn.Identity(), own)), ['0.0', '0.1'])}[where]
    learn = learner(Threads(model), cbs=MixedPrecision('bf16', fp32_modules=names))
    before = {m: vars(m)['forward'] for m in model.modules() if 'forward' in vars(m)}
    learn.fit(1, .01)
    assert own.seen == {(True, torch.float32)} and before
    assert all(vars(m)['forward'] is f and f.module is m for m, f in before.items())
    plain = learner(own); plain.fit(1, .01)
    assert (False, torch.float32) in own.seen                    # the learner's own weights, without replicas


class Watched(ModuleForward):
    "Says of each forward whether the module that this object holds has the weights of a replica."
    def __call__(self, *args, **kwargs):
        self.module.seen.add((not isinstance(self.module.weight, nn.Parameter), 'underneath'))
        return super().__call__(*args, **kwargs)


def test_objects_on_one_another_each_hold_their_replica():
    own = Own(6, 1)
    own.seen = set()
    lower = Watched(own)
    lower.install()
    learn = learner(Threads(nn.Sequential(own)), cbs=MixedPrecision('bf16', fp32_modules='0'))
    learn.fit(1, .01)
    assert own.seen == {(True, 'underneath'), (True, torch.float32)}
    assert lower.module is own and own.forward.module is own and own.forward.inner is lower


@pytest.mark.parametrize('end', [None, RuntimeError, KeyboardInterrupt])
def test_to_parallel(end):
    learn, seen, dtypes = learner(net(), cbs=MixedPrecision('fp16', init_scale=256.)), [], set()
    module = learn.model
    module[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
    def look(l):
        seen.append((type(l.model).__name__, 'replicate' in vars(l.model)))
        if end: raise end('stop')
    looking = At('after_pred', look, 20)
    learn.to_parallel().add_cb(looking)
    if end:
        with pytest.raises(end): learn.fit(1, .01)               # fastai leaves the model wrapped, and wraps it again
    else: learn.fit(1, .01)
    assert set(seen) == {('DataParallel', True)} and not any('replicate' in vars(m) for m in learn.model.modules())
    learn.remove_cb(looking); learn.fit(1, .01)
    assert not any('replicate' in vars(m) for m in learn.model.modules()) and dtypes == {torch.float16}


def test_copy_made_inside_a_parallel_fit():
    learn, copies = learner(net(), cbs=MixedPrecision('fp16', init_scale=256.)), []
    learn.to_parallel()
    learn.add_cb(At('after_epoch', lambda l: copies.append(copy.deepcopy(l)), 80)); learn.fit(1, .01)
    twin = copies[0]
    assert 'replicate' in vars(twin.model)
    twin.to_fp32()
    assert 'replicate' not in vars(twin.model)
    twin.model = twin.model.module
    twin.detach_parallel(); twin.fit(1, .01)


@pytest.mark.cuda
@pytest.mark.parametrize('mode', DTYPES)
def test_parallel_apply_on_cuda(mode):
    "PyTorch's own threads; both replicas on one card, which `replicate` itself refuses."
    class OneCard(nn.DataParallel):
        replicate, _replica = Threads.replicate, Threads._replica
    model = net().cuda()
    seen = seen_in(model[0], lambda m, o: o.dtype)
    parallel = OneCard(model, device_ids=[0])
    parallel.device_ids = [0, 0]
    learn = learner(parallel, loaders().to(torch.device('cuda')), cbs=MixedPrecision(mode))
    learn.fit(1, .01)
    assert set(seen) == {(DTYPES[mode], True)} and torch.get_autocast_dtype('cuda') is torch.float16
