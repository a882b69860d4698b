"What a step costs beyond the arithmetic: host syncs and operations, counted; and skips that the device decides."
from collections import Counter
from functools import partial

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelStepException, CancelValidException
from fastai.callback.training import GradientClip
from fastai.optimizer import Lookahead
from torch.profiler import ProfilerActivity, profile

from fastxtend_amp import HalfWeights, MixedPrecision
from fastxtend_amp.scaling import LossScaling, skips_on_device
from helpers import *

FUSED = {'fused adam': partial(OptimWrapper, opt=partial(torch.optim.Adam, fused=True)), 'fused adamw': OPTIMIZERS['fused adamw'],
         'fused sgd': OPTIMIZERS['fused sgd'], 'fused plain sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, fused=True))}
OTHERS = {k: OPTIMIZERS[k] for k in ('adam', 'sgd', 'adamw', 'torch sgd')}
STEPS = 12


def counted(f):
    with profile(activities=[ProfilerActivity.CPU]) as p: f()
    return Counter(e.name for e in p.events() if e.name.startswith('aten::'))


def build(mode, opt, cls=MixedPrecision, **scaling):
    "Without the watch: in main memory it reads loss and flag, which waits for nothing; see devices/accelerator/test_waits.py."
    def no_validation(l): raise CancelValidException
    cbs = [At('before_validate', no_validation)] + ([] if mode == 'fp32' else [cls(mode, on_overflow='ignore', **scaling)])
    return learner(dls=loaders(n=4 * STEPS), opt_func=opt, cbs=cbs)


def fit_counts(mode, opt, **scaling):
    learn = build(mode, opt, **({'init_scale': 256.} if mode == 'fp16' else {}), **scaling)
    learn.fit(1, .01)
    return counted(lambda: learn.fit(1, .01))


@pytest.mark.parametrize('mode,opt,syncs', [*(('bf16', o, 0) for o in ('adam', 'fused adamw')),
                                            *(('fp16', o, 1) for o in OTHERS), *(('fp16', o, 0) for o in FUSED)])
def test_host_syncs_per_step_beyond_fp32(mode, opt, syncs):
    opt = {**OTHERS, **FUSED}[opt]
    key = 'aten::_local_scalar_dense'
    assert fit_counts(mode, opt)[key] - fit_counts('fp32', opt)[key] == syncs * STEPS


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('mode,opt,syncs', [('bf16', 'adam', 0), ('fp16', 'adam', 1), ('fp16', 'fused adamw', 0)])
def test_host_syncs_of_half_precision_weights(mode, opt, syncs, flat):
    counts = {}
    for m in ('fp32', mode):
        learn = build(m, {**OTHERS, **FUSED}[opt], HalfWeights, flat_master=flat, **({'loss_scale': 256.} if m == 'fp16' else {}))
        learn.fit(1, .01)
        counts[m] = counted(lambda: learn.fit(1, .01))
    beyond = counts[mode]['aten::_local_scalar_dense'] - counts['fp32']['aten::_local_scalar_dense']
    # flat: once a fit, trial steps whether the optimizer is elementwise, in which PyTorch's fused kernels read for each tensor
    # on a CPU, and the step counts that the parameters start from
    assert beyond <= syncs * STEPS + 10 if flat else beyond == syncs * STEPS


def handwritten_counts(mode, opt):
    learn = build('fp32', opt); learn.create_opt(); learn.opt.set_hypers(lr=.01)
    model, opt, loss_func = learn.model, learn.opt, nn.MSELoss()
    dtype = {'fp16': torch.float16, 'bf16': torch.bfloat16}.get(mode)
    scaler = torch.amp.GradScaler('cpu', enabled=mode == 'fp16', init_scale=256.)
    batches = list(learn.dls.train)
    def epoch():
        model.train()
        for xb, yb in batches:
            with torch.autocast('cpu', dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                pred = model(xb)
                loss = loss_func(pred.float() if dtype else pred, yb)
            scaler.scale(loss).backward()
            scaler.unscale_(opt); scaler.step(opt); scaler.update()
            opt.zero_grad()
    epoch()
    return counted(epoch)


@pytest.mark.parametrize('mode,opt', [('bf16', 'adam'), ('bf16', 'fused adamw'), ('fp16', 'adam'), ('fp16', 'adamw'), ('fp16', 'sgd')])
def test_operations_per_step_equal_the_handwritten_loop(mode, opt):
    opt = OPTIMIZERS[opt]
    ours, theirs = fit_counts(mode, opt), handwritten_counts(mode, opt)
    ours.subtract(fit_counts('fp32', opt)); theirs.subtract(handwritten_counts('fp32', opt))
    extra = {k: ours[k] - theirs[k] for k in ours.keys() | theirs.keys() if ours[k] != theirs[k]}
    assert sum(v for v in extra.values() if v > 0) <= 3, extra     # once a fit, not once a step


def unscale_counts(n):
    ps = [nn.Parameter(torch.zeros(1)) for _ in range(n)]
    for p in ps: p.grad = torch.ones(1)
    opt, scaling = SGD(ps, lr=.1), LossScaling(256., 2., .5, 2000, True)
    scaling.start('cpu', True); scaling.scale(torch.ones(1))
    counts = counted(lambda: scaling.unscale(opt))
    assert all(p.grad.item() == 1 / 256 for p in ps)
    return counts


@pytest.mark.parametrize('n', [10, 100, 1000, 10000])
def test_unscaling_takes_the_same_number_of_calls_for_any_number_of_parameters(n):
    counts = unscale_counts(n)
    assert counts == unscale_counts(1) and counts['aten::_amp_foreach_non_finite_check_and_unscale_'] == 1


# -- skips that the device decides

def overflow_at(steps):
    "A callback that makes a gradient infinite in these training batches."
    def spoil(l):
        if l.train_iter in steps: next(l.model.parameters()).grad.view(-1)[0] = float('inf')
    return At('after_backward', spoil, 5)


def run(opt, skips, clip=None, host=False, monkeypatch=None, **kwargs):
    cbs = [MixedPrecision('fp16', init_scale=256., growth_interval=4), overflow_at(skips)] + ([GradientClip(clip)] if clip else [])
    learn = learner(dls=loaders(n=4 * STEPS), opt_func=opt, cbs=cbs)
    seen = []
    learn.add_cb(At('after_batch', lambda l: l.training and seen.append((params(l), opt_state(l.opt), l.mixed_precision.skipped)), 70))
    if host: monkeypatch.setattr('fastxtend_amp.scaling.skips_on_device', lambda *_: False)
    learn.fit(1, .01)
    return learn, seen


@pytest.mark.parametrize('clip', [None, .1])
@pytest.mark.parametrize('opt', FUSED)
@pytest.mark.parametrize('skips', [{0}, {0, 1, 2}, {3}, {1, 5, 6, 11}, set()], ids=str)
def test_the_device_decides_as_the_host_would(opt, skips, clip, monkeypatch):
    device, seen = run(FUSED[opt], skips, clip)
    host, expected = run(FUSED[opt], skips, clip, True, monkeypatch)
    assert [s for *_, s in seen] == [s for *_, s in expected] == [i in skips for i in range(STEPS)]
    for (p, s, _), (q, t, _) in zip(seen, expected): assert same(p, q) and same_state(s, t)
    for i in skips - {0}: assert same(seen[i][0], seen[i - 1][0]) and same_state(seen[i][1], seen[i - 1][1])
    assert device.mixed_precision.scales == host.mixed_precision.scales and device.mixed_precision.n_skipped == len(skips)
    assert device.mixed_precision.state_dict() == host.mixed_precision.state_dict()


def test_which_optimizers_decide_on_the_device():
    learn = learner(opt_func=FUSED['fused sgd']); learn.create_opt()
    ps = list(learn.model.parameters())
    for p in ps: p.grad = torch.ones_like(p)
    assert not skips_on_device(learn.opt, ps)                     # its momentum is not there yet
    learn.opt.step(); assert skips_on_device(learn.opt, ps)
    learn.opt.opt.state[ps[0]]['momentum_buffer'] = None; assert not skips_on_device(learn.opt, ps)
    class Counting(torch.optim.AdamW): pass
    for opt in (Adam(ps, lr=.1), OptimWrapper(ps, torch.optim.AdamW), OptimWrapper(ps, partial(Counting, fused=True)), Lookahead(SGD(ps, lr=.1))):
        opt.step() if not isinstance(opt, Lookahead) else None
        assert not skips_on_device(opt, ps)


def test_lookahead_does_not_count_a_skipped_step():
    learn, counts = learner(opt_func=lambda p, lr: Lookahead(SGD(p, lr=lr)), cbs=[MixedPrecision('fp16', init_scale=256.), overflow_at({0, 3})]), []
    learn.add_cb(At('after_batch', lambda l: l.training and counts.append(l.opt.count), 70)); learn.fit(1, .01)
    assert counts == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize('flags', [(0., 0.), (1., 0.), (0., 1.), (1., 1.)])
def test_flags_of_several_devices_are_combined_by_their_maximum(flags, monkeypatch):
    learn = learner(opt_func=FUSED['fused adamw'], cbs=MixedPrecision('fp16', init_scale=256.)); learn.fit(1, .01)
    scaling, opt, before = learn.mixed_precision.scaling, learn.opt, params(learn)
    scaling.start('cpu', True)
    xb, yb = learn.dls.one_batch()
    scaling.scale(learn.loss_func(learn.model(xb), yb)).backward()
    state = opt_state(opt)
    monkeypatch.setattr(scaling.scaler, '_found_inf_per_device', lambda o: dict(enumerate(map(torch.tensor, flags))))
    assert not scaling.unscale(opt) and opt.opt.found_inf.item() == max(flags)   # a sum of 2 would be taken for no skip
    opt.step()
    skipped = max(flags) == 1.
    assert scaling.skipped == skipped == same(params(learn), before) == same_state(opt_state(opt), state)


@pytest.mark.parametrize('opt,fires', [('adam', [0, 3]), ('fused adamw', [0])])
def test_after_cancel_step_does_not_fire_where_the_device_decides(opt, fires):
    "The first step has no state yet, and so takes the way that waits; `skipped` tells in both."
    learn, fired, skipped = learner(opt_func={**OTHERS, **FUSED}[opt], cbs=[MixedPrecision('fp16', init_scale=256.), overflow_at({0, 3})]), [], []
    learn.add_cbs([At('after_cancel_step', lambda l: fired.append(l.train_iter), 20),
                   At('after_step', lambda l: skipped.append(l.mixed_precision.skipped), 20)])
    learn.fit(1, .01)
    assert fired == fires and skipped == [i in (0, 3) for i in range(6)]


def test_no_callback_of_fastai_depends_on_after_cancel_step():
    import fastai.callback.all, fastai.vision.all, fastai.text.all, fastai.tabular.all  # noqa: F401
    def below(c): return {c, *(d for s in c.__subclasses__() for d in below(s))}
    from fastai.callback.core import Callback
    theirs = {c for c in below(Callback) if c.__module__.startswith('fastai.')}
    assert len(theirs) > 30 and not [c for c in theirs if hasattr(c, 'after_cancel_step')]


@pytest.mark.parametrize('exc', [RuntimeError, KeyboardInterrupt, CancelStepException, CancelBatchException])
def test_found_inf_never_stays_on_the_optimizer(exc):
    learn = learner(opt_func=FUSED['fused adamw'], cbs=[MixedPrecision('fp16', init_scale=256.), overflow_at({2, 4})])
    def stop(l):
        if l.train_iter == 2: raise exc('stop')
    stopper = At('before_step', stop, 20); learn.add_cb(stopper)
    left = []
    learn.add_cb(At('after_batch', lambda l: left.append({'found_inf', 'grad_scale'} & l.opt.opt.__dict__.keys()), 70))
    try: learn.fit(1, .01)
    except (RuntimeError, KeyboardInterrupt): pass
    assert not {'found_inf', 'grad_scale'} & learn.opt.opt.__dict__.keys() and not any(left[:2] + left[3:])
    before = params(learn); learn.to_fp32().remove_cbs([stopper, *(cb for cb in learn.cbs if getattr(cb, 'f', None) and 'spoil' in cb.f.__name__)])
    learn.fit(1, .01); assert not same(params(learn), before)


def test_history_is_read_when_asked_for_and_joined_every_4096_steps():
    from fastxtend_amp.scale_history import ScaleHistory as History, ScaleRule as _Rule
    history, flags = History(), [torch.tensor(float(i % 700 == 0)) for i in range(9000)]
    history.mark(8., 0, _Rule(2., .5, 2000))
    history.record(True)
    counts = counted(lambda: [history.record(f) for f in flags])
    assert counts['aten::stack'] == 2 and counts['aten::_local_scalar_dense'] == 0
    assert history.n == 9001 and history.skips.tolist() == [True] + [i % 700 == 0 for i in range(9000)]
    history.record(False); history.record(torch.tensor(1.)); history.record(True)
    assert history.skips[-3:].tolist() == [False, True, True] and len(history.scales) == 9004
