"Exceptions in a fit: the state of autocast, the gradients and the learner afterwards."

import pytest, torch
from fastai.callback import core
from fastai.callback.training import GradientAccumulation

from helpers import *
from interrupts import interrupted_before, lines_of

EXCEPTIONS = [
    RuntimeError,
    KeyboardInterrupt,
    core.CancelBatchException,
    core.CancelFitException,
    core.CancelEpochException,
    core.CancelStepException,
    core.CancelBackwardException,
]
EVENTS = [
    'before_batch',
    'after_pred',
    'after_loss',
    'before_backward',
    'after_backward',
    'before_step',
    'after_step',
    'after_batch',
]


class Bomb:
    "Raise `exc` in the second call while armed."

    def __init__(self, exc):
        self.exc, self.calls, self.armed = exc.__name__, 0, True  # fastai's cannot be pickled by class

    def __call__(self, learn=None):
        self.calls += self.armed
        if self.armed and self.calls == 2:
            self.armed = False
            raise next(e for e in EXCEPTIONS if e.__name__ == self.exc)('boom')


class OnlyTraining(At):
    run_valid = False


class SeesAutocast(Callback):
    "Record autocast's state in the events that end a batch, after the precision callback."

    order = 11

    def __init__(self):
        self.seen = []

    def after_cancel_batch(self):
        self.seen.append(torch.is_autocast_enabled('cpu'))

    def after_batch(self):
        self.after_cancel_batch()


def build(cb, event=None, exc=RuntimeError, order=0, **kwargs):
    bomb = Bomb(exc)
    learn = learner(opt_func=OPTIMIZERS['sgd'], cbs=cb, lr=0.01, **kwargs)
    return learn.add_cbs([SeesAutocast(), *([OnlyTraining(event, bomb, order)] if event else [])]), bomb


def caught(f):
    try:
        f()
    except BaseException as e:
        return type(e), str(e)


@pytest.mark.parametrize('event', EVENTS)
def test_any_exception_anywhere_in_a_batch(event, tmp_path):
    "Each pair of event, exception, order relative to the precision callback, and mode at least once."
    for i, exc in enumerate(EXCEPTIONS, EVENTS.index(event)):
        mode, order = ('fp16', 'bf16')[i % 2], (9, 11)[i // 2 % 2]
        plain, _ = build(None, event, exc, order)
        learn, bomb = build(mixed(mode), event, exc, order, path=tmp_path)
        before = autocast_state()
        assert (error := caught(lambda: learn.fit(1))) == caught(lambda: plain.fit(1))
        assert (
            not bomb.armed
            and autocast_state() == before
            and not any(learn.sees_autocast.seen)
            and is_outside_a_fit(learn)
        )
        left = any(g is not None and g.any() for g in plain_grads(learn))
        assert not (left and mode == 'fp16' and error is not None)
        learn.save('a')
        learn.load('a')
        weights = params(learn)
        learn.fit(1)
        assert autocast_state() == before and finite(learn) and not same(params(learn), weights)
        assert not left_on(learn.to_fp32())


ENDS = [
    (call, event)
    for call, events in (
        ('fit', 'before_fit before_epoch after_epoch after_fit'),
        ('validate', 'before_fit before_epoch before_validate after_epoch after_fit'),
        ('get_preds', 'before_fit before_epoch before_validate after_epoch after_fit'),
    )
    for event in events.split()
]


@pytest.mark.parametrize('call, event', ENDS)
def test_exceptions_around_the_batches_of_fit_validate_and_get_preds(call, event):
    def fail(l):
        raise KeyboardInterrupt

    for mode, order in (('fp16', 11), ('bf16', 9), ('fp16', 9)):
        learn, failing = learner(Attentive(1.0), cbs=mixed(mode, fp32_modules='attn')), At(event, fail, order)
        learn.create_opt()
        before = autocast_state()
        with pytest.raises(KeyboardInterrupt):
            learn.add_cb(failing)
            getattr(learn, call)(*[1] * (call == 'fit'))
        assert autocast_state() == before and torch.is_grad_enabled() and is_outside_a_fit(learn), mode
        learn.remove_cb(failing).fit(1)
        assert finite(learn)


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_an_interrupt_before_any_line_of_a_fit(mode):
    "Inside the user's own autocast context."
    learn, _ = build(mixed(mode, fp32_modules='0'), dls=loaders(n=8, valid=dataset(4, seed=1)))
    learn.fit(1)  # what is looked up once per process
    with torch.autocast('cpu', dtype=torch.float16, enabled=False, cache_enabled=False):
        lines, before = lines_of(lambda: learn.fit(1)), autocast_state()
        assert len(lines) > 80
        for line in lines:
            assert interrupted_before(line, lambda: learn.fit(1)), line
            assert autocast_state() == before and torch.is_grad_enabled() and is_outside_a_fit(learn), line
        learn.fit(1)
    assert is_outside_a_fit(learn) and finite(learn) and not left_on(learn.to_fp32())


def test_an_interrupt_while_a_fit_ends_leaves_no_scaled_gradient():
    def make():
        return learner(linear(), cbs=[mixed('fp16'), GradientAccumulation(1000)])

    for line in lines_of(lambda: make().fit(1, 0.01))[-50:]:
        learn = make()
        interrupted_before(line, lambda: learn.fit(1, 0.01))
        assert all(g is None or g.abs().max() < 64 for g in plain_grads(learn)) and is_outside_a_fit(learn), line


SWITCHES = {
    'to_fp16': lambda l: l.to_fp16(init_scale=256.0),
    'to_bf16': lambda l: l.to_bf16(fp32_modules='attn'),
    'to_fp32': lambda l: l.to_fp32(),
}


@pytest.mark.parametrize('start, to', [('to_fp32', 'to_fp16'), ('to_fp16', 'to_bf16'), ('to_bf16', 'to_fp32')])
def test_an_interrupted_switch_leaves_nothing_that_the_next_one_keeps(start, to):
    def make():
        return SWITCHES[start](learner(Attentive(1.0)))

    before, dtypes, learn = autocast_state(), set(), make()
    for line in lines_of(lambda: SWITCHES[to](learn)):
        learn = make()
        learn.model.emb.register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
        assert interrupted_before(line, lambda: SWITCHES[to](learn)), line
        learn.to_bf16().get_preds(dl=[next(iter(learn.dls.valid))])
        assert [cb.amp_mode for cb in learn.cbs if isinstance(cb, MixedPrecision)] == ['bf16'], line
        assert dtypes == {torch.bfloat16} and autocast_state() == before, line
        assert not left_on(learn.to_fp32()), line


@pytest.mark.parametrize('how', ['next fit', 'to_fp32', 'to_bf16', 'remove_cb'])
def test_no_scaled_gradient_reaches_the_step_after_an_exception(how):
    learn, seen = learner(linear(), cbs=[mixed('fp16'), GradientAccumulation(1000)]), []

    def stop(l):
        raise RuntimeError('here')

    with pytest.raises(RuntimeError):
        learn.fit(1, 0.01, cbs=At('before_validate', stop))
    learn.remove_cb(learn.gradient_accumulation)
    learn.add_cb(At('before_step', lambda l: seen.extend(g.abs().max().item() for g in plain_grads(l)), 41))
    {
        'next fit': noop,
        'to_fp32': learn.to_fp32,
        'to_bf16': learn.to_bf16,
        'remove_cb': lambda: learn.remove_cb(learn.precision),
    }[how]()
    assert not any(g.any() for g in plain_grads(learn) if g is not None)
    learn.fit(1, 0.01)
    assert max(seen) < 64


class Overrides(Learner):
    "A subclass whose batches do not go through `_with_events`."

    def one_batch(self, i, b):
        self.iter = i
        self._split(self._set_device(b))
        self('before_batch')
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training:
            self._do_grad_opt()
        self('after_batch')


def test_a_subclass_that_overrides_one_batch():
    def train(cls):
        learn = learner(cls=cls).to_fp16(init_scale=2.0**18)
        learn.fit(2, 0.01)
        return params(learn), learn.precision.scales

    (expected, scales), (found, found_scales) = train(Learner), train(Overrides)
    assert same(expected, found) and scales == found_scales
    learn, _ = build(mixed('bf16'), 'after_pred', cls=Overrides)
    with pytest.raises(RuntimeError):
        learn.fit(1)
    assert not autocast_state()[0] and is_outside_a_fit(learn)
