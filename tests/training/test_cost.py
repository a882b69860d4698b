"What a step costs beyond the arithmetic: counted reads on the CPU; and skips that the device decides."

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelStepException, CancelValidException
from fastai.callback.training import GradientClip
from fastai.optimizer import Lookahead
from torch.profiler import ProfilerActivity, profile

from helpers import *

FUSED = {
    'fused adam': partial(OptimWrapper, opt=partial(torch.optim.Adam, fused=True)),
    'fused adamw': OPTIMIZERS['fused adamw'],
    'fused sgd': OPTIMIZERS['fused sgd'],
    'fused plain sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, fused=True)),
}
OPTS = {**OPTIMIZERS, **FUSED}
STEPS = 12


def reads(f):
    "Count how often `f()` reads a tensor's value on the CPU, which synchronizes with a device."
    with profile(activities=[ProfilerActivity.CPU]) as p:
        f()
    return sum(e.name == 'aten::_local_scalar_dense' for e in p.events())


def fit_reads(mode, opt):
    "Reads of a second fit, without validation and without `on_overflow`."

    def no_validation(l):
        raise CancelValidException

    cbs = [At('before_validate', no_validation)] + ([] if mode == 'fp32' else [mixed(mode, on_overflow='ignore')])
    learn = learner(dls=loaders(n=4 * STEPS), opt_func=OPTS[opt], cbs=cbs)
    learn.fit(1, 0.01)
    return reads(lambda: learn.fit(1, 0.01))


def handwritten_reads(mode, opt):
    "Reads of an epoch after the first."
    scaling = dict(init_scale=256.0) if mode == 'fp16' else {}
    first, both = (reads(lambda: handwritten(mode, OPTS[opt], n, dls=loaders(n=4 * STEPS), **scaling)) for n in (1, 2))
    return both - first


@pytest.mark.parametrize('mode, opt, per_step', [('bf16', 'adamw', 0), ('fp16', 'adam', 1)])
def test_reads_per_step_are_those_of_the_handwritten_loop(mode, opt, per_step):
    "Reads beyond those of fp32. test_cuda.py counts synchronizations."
    theirs = handwritten_reads(mode, opt) - handwritten_reads('fp32', opt)
    ours = fit_reads(mode, opt) - fit_reads('fp32', opt)
    assert theirs == per_step * STEPS and 0 <= ours - theirs <= 5  # once a fit


# -- skips that the device decides


class OnTheHost(Learner):
    "An optimizer with its own step, for which the CPU decides whether it is skipped."

    def _step(self):
        self.opt.step()


@pytest.mark.parametrize(
    'opt, skips, clip',
    [
        ('fused adam', {0}, None),
        ('fused adamw', {0, 1, 2}, 0.1),
        ('fused sgd', {1, 5, 6, 11}, None),
        ('fused plain sgd', {3}, 0.1),
    ],
    ids=str,
)
def test_the_device_decides_as_the_host_would(opt, skips, clip):
    def run(cls):
        cbs = [mixed('fp16', growth_interval=4), spoil_at(*skips)] + ([GradientClip(clip)] if clip else [])
        learn, seen = learner(dls=loaders(n=4 * STEPS), opt_func=FUSED[opt], cbs=cbs, cls=cls), []
        learn.add_cb(
            At(
                'after_batch',
                lambda l: l.training and seen.append((params(l), opt_state(l.opt), l.precision.skipped)),
                70,
            )
        )
        learn.fit(1, 0.01)
        return learn.precision, seen

    (device, seen), (host, expected) = run(Learner), run(OnTheHost)
    for i, ((p, s, skipped), (q, t, wanted)) in enumerate(zip(seen, expected, strict=True)):
        assert same(p, q) and same_state(s, t) and skipped is wanted is (i in skips)
        if i in skips - {0}:
            assert same(p, seen[i - 1][0]) and same_state(s, seen[i - 1][1])
    assert device.scales == host.scales and device.n_skipped == len(skips) and device.state_dict() == host.state_dict()


class Counting(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    'opt, fires',
    [
        (OPTS['adam'], [0, 3]),
        (OPTS['fused adamw'], [0]),
        (OPTS['fused sgd'], [0]),
        (OPTS['fused plain sgd'], []),
        (partial(OptimWrapper, opt=partial(Counting, fused=True)), [0, 3]),
        (lambda p, lr: Lookahead(SGD(p, lr=lr)), [0, 3]),
    ],
)
def test_who_decides(opt, fires):
    """`after_cancel_step` fires where the CPU decides: for all but torch's fused optimizers, and where the first step
    would create a state; `skipped` holds in both."""
    learn, fired, skipped, counts = learner(opt_func=opt, cbs=[mixed('fp16'), spoil_at(0, 3)]), [], [], []
    learn.add_cbs(
        [
            At('after_cancel_step', lambda l: fired.append(l.train_iter), 20),
            At('after_step', lambda l: skipped.append(l.precision.skipped), 20),
            At('after_batch', lambda l: l.training and counts.append(getattr(l.opt, 'count', None)), 70),
        ]
    )
    learn.fit(1, 0.01)
    assert fired == fires and skipped == [i in (0, 3) for i in range(6)] and learn.precision.n_skipped == 2
    assert counts in ([None] * 6, [0, 1, 2, 2, 3, 4])  # Lookahead does not count a skipped step


@pytest.mark.parametrize('exc', [RuntimeError, CancelStepException, CancelBatchException])
def test_a_skip_on_the_device_never_outlives_its_step(exc):
    "Also where the step is cancelled: a later fit in fp32 trains."

    def stop(l):
        if l.train_iter == 2:
            raise exc('stop')

    spoiling = [spoil_at(2, 4), At('before_step', stop, 20)]
    learn = learner(opt_func=FUSED['fused adamw']).to_fp16(init_scale=256.0)
    try:
        learn.fit(1, 0.01, cbs=spoiling)
    except RuntimeError:
        pass
    before = params(learn)
    learn.to_fp32().fit(1, 0.01)
    assert not same(params(learn), before) and finite(learn)
