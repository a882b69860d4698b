"Whatever ends a fit, a batch or a step: nothing stays open, no gradient stays scaled, and the next fit trains."

import copy

import pytest, torch
from fastai.callback import core
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.vision.gan import FixedGANSwitcher, GANLearner
from fastcore.basics import noop
from torch import nn

from fastxtend_amp.training.current import precision_callback
from helpers import DEVICE, OPTIMIZERS, At, finite, is_outside_a_fit, learner, left_on, loaders, output_dtypes, params
from helpers import same, spoil_at, told
from rows import BATCH, BETWEEN, BF16, EXTRA, FP32, LOOPS, TO, Once, To, differences, find, largest, make, process
from rows import over_batches, seen_in_steps, third_batch, trained

# -- exceptions

EXCEPTIONS = [RuntimeError, KeyboardInterrupt, core.CancelBatchException, core.CancelFitException]
EXCEPTIONS += [core.CancelEpochException, core.CancelTrainException, core.CancelValidException]
EXCEPTIONS += [core.CancelStepException, core.CancelBackwardException]
INSIDE = ['the model', 'the loss', 'the backward pass', "the optimizer's step"]
PRECISIONS = ['fp16', 'bf16', 'skipping', 'flat fp16', 'tf32', 'fp16 and fused', 'bf16 and fp32_modules', 'no masters']
FUSED = To('fp16', dict(init_scale=4096.0), opt='fused adamw')
EXTRA.update({'fp16 and fused': FUSED, 'bf16 and fp32_modules': To('bf16', dict(fp32_modules='0'))})


def test_a_fit_ends_what_a_loop_over_one_batch_has_left_open():
    def cancel(l):
        raise core.CancelStepException  # before gradients are unscaled

    learn = make('fp16', loop='kept gradients', cbs=[At('before_step', cancel, 5)])
    over_batches(learn, 1)
    learn.fit(1, 0.01)
    assert is_outside_a_fit(learn) and 0 < largest(learn) < 64


class Bomb(Callback):
    "Raises an exception once: in an event, or in what runs in the third training batch."

    def __init__(self, place, order, exc):
        self.place, self.order, self.exc, self.armed = place, order, exc, True
        if place not in INSIDE:
            setattr(self, place, self.explode)

    def after_create(self):
        learn, model = self.learn, self.learn.model
        learn.create_opt()
        if self.place == 'the model':
            model.register_forward_pre_hook(self.explode)
        if self.place == 'the backward pass':
            hook = lambda m, i, o: o.register_hook(self.explode) and None if o.requires_grad else None
            model.register_forward_hook(hook)
        owner, name = {INSIDE[1]: (learn, 'loss_func'), INSIDE[3]: (learn.opt, 'step')}.get(self.place, (None, ''))
        if owner:
            f = getattr(owner, name)
            setattr(owner, name, lambda *args: (self.explode(), f(*args))[1])

    def explode(self, *args):
        if self.armed and (self.place in BETWEEN or third_batch(self.learn)):
            self.armed = False
            raise self.exc('boom')


class SeesAutocast(Callback):
    order = 11

    def after_batch(self):
        assert not torch.is_autocast_enabled(DEVICE.type)

    after_cancel_batch = after_batch


def ending(f):
    try:
        f()
    except BaseException as e:
        return type(e), str(e)


def assert_closed(learn, before):
    assert process() == before and is_outside_a_fit(learn) and largest(learn) < 64
    assert {p.dtype for p in learn.model.parameters()} == {FP32}


def assert_trains_on(learn, before):
    "Nothing is open, and the next fit trains with true gradients and leaves nothing either."
    assert_closed(learn, before)
    weights, found = params(learn), seen_in_steps(learn)
    learn.fit(1, 0.01)
    assert_closed(learn, before)
    assert max(found) < 64 and finite(learn) and not same(params(learn), weights)
    assert left_on(learn.to_fp32()) == []


@pytest.mark.parametrize('place', [*BATCH, *BETWEEN, *INSIDE])
def test_an_exception(place, with_tf32):
    "As fastai without a precision ends; each exception in several precisions, before and after the callback."
    for i, exc in enumerate(EXCEPTIONS * 2, len(place)):
        to, order = PRECISIONS[i % len(PRECISIONS)], (9, 11)[i % 2]
        if to == 'flat fp16' and place == "the optimizer's step":
            to = 'fp16'  # it needs the optimizer's own step
        cbs, plain_cbs = [[Bomb(place, order, exc), SeesAutocast()] for _ in range(2)]
        plain, learn, before = make('fp32', opt=find(TO, to).opt, cbs=plain_cbs), make(to, cbs=cbs), process()
        expected, found = ending(lambda: plain.fit(1)), ending(lambda: learn.fit(1))
        assert found == expected and not learn.bomb.armed
        assert vars(learn).get('train_iter') == vars(plain).get('train_iter')
        assert_trains_on(learn, before)


def test_an_interrupt_while_autocast_is_entered(monkeypatch):
    learn, before, enter = make('bf16'), process(), torch.autocast.__enter__

    def interrupted(self):
        enter(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(torch.autocast, '__enter__', interrupted)
        learn.fit(1)
    assert_closed(learn, before)


@pytest.mark.parametrize(
    'event', ['before_fit', 'before_epoch', 'before_validate', 'after_pred', 'after_epoch', 'after_fit']
)
@pytest.mark.parametrize('call', ['validate', 'get_preds'])
def test_an_exception_in_predictions(call, event):
    for to, order in (('fp16', 11), ('bf16 and fp32_modules', 9), ('flat', 11)):
        learn, before = make(to), process()
        with pytest.raises(ZeroDivisionError):
            getattr(learn, call)(cbs=At(event, lambda l: 1 / 0, order))
        assert_trains_on(learn, before)


@pytest.mark.parametrize('loop', ['one_batch', 'own one_batch', 'accumulation', 'own _do_grad_opt'])
@pytest.mark.parametrize('place', ['after_pred', 'after_backward', 'before_step', 'the model'])
def test_an_exception_in_other_loops(loop, place):
    for to in ('fp16', 'bf16'):
        learn, before = make(to, loop=loop, cbs=[Bomb(place, 20, RuntimeError)]), process()
        ending(lambda: LOOPS[loop].train(learn))
        assert not learn.bomb.armed or loop == 'accumulation'
        assert_trains_on(learn, before)


@pytest.mark.parametrize('then', [noop, Learner.to_fp32, Learner.to_bf16, lambda l: l.remove_cb(l.mixed_precision)])
def test_no_gradient_stays_scaled_after_an_exception(then):
    learn = make('fp16', cbs=[GradientAccumulation(1000), Bomb('after_train', 20, RuntimeError)])
    assert ending(lambda: learn.fit(1, 0.01))
    then(learn.remove_cb(learn.gradient_accumulation))
    assert largest(learn) == 0
    found = seen_in_steps(learn)
    learn.fit(1, 0.01)
    assert max(found) < 64


def test_an_error_before_the_first_batch_keeps_the_gradients_of_an_earlier_fit():
    learn = make('fp16', cbs=[GradientAccumulation(1000)])
    learn.fit(1, 0.01)
    before = [p.grad.clone() for p in learn.model.parameters()]
    assert ending(lambda: learn.fit(1, 0.01, cbs=Bomb('before_fit', 20, RuntimeError)))
    assert same([p.grad for p in learn.model.parameters()], before) and largest(learn) > 0


def test_an_error_after_a_step_leaves_no_gradient():
    learn = make('fp16', cbs=[Bomb('after_step', 99, RuntimeError)])
    assert ending(lambda: learn.fit(1, 0.01)) and largest(learn) == 0


def test_an_error_after_a_skip_leaves_no_gradient():
    learn = learner().to_fp16(init_scale=1e38, on_overflow='raise', max_skips=1)
    with pytest.raises(FloatingPointError):
        learn.fit(1)
    learn.to_fp32().fit(1)
    assert finite(learn)


@pytest.mark.parametrize('event', ['after_cancel_step', 'after_step'])
def test_a_skip_that_ends_a_fit_leaves_no_gradient(event):
    def stop(l):
        if l.mixed_precision.skipped:
            raise core.CancelFitException

    learn = learner(opt_func=OPTIMIZERS['fused adamw' if event == 'after_step' else 'sgd'])
    learn.to_fp16(init_scale=256.0, on_overflow='ignore').fit(1)
    learn.mixed_precision.load_state_dict(dict(scale=1e38, _growth_tracker=0))
    learn.fit(1, cbs=At(event, stop, 20))
    learn.to_fp32().fit(1)
    assert finite(learn)


@pytest.mark.parametrize('exc', [RuntimeError, core.CancelStepException, core.CancelBatchException])
def test_a_skip_on_the_device_never_outlives_its_step(exc):
    learn, spoiling = make('fp16 and fused', cbs=[Bomb('before_step', 20, exc)]), spoil_at(2, 4)
    ending(lambda: learn.fit(1, 0.01, cbs=spoiling))
    before = params(learn)
    learn.to_fp32().fit(1, 0.01)
    assert not same(params(learn), before) and finite(learn)


@pytest.mark.parametrize('event, order', [('before_step', 11), ('after_step', 9)])
@pytest.mark.parametrize('bad', [1.0, float('inf')])
def test_an_epoch_left_between_unscaling_and_update(event, order, bad):
    "The step is cancelled: the scale does not change, also if a gradient was not finite, and the next epoch trains."
    spoil = At('after_backward', lambda l: third_batch(l) and l.epoch == 0 and l.model[0].weight.grad.mul_(bad), 5)
    learn = make('fp16 and fused', cbs=[Bomb(event, order, core.CancelEpochException), spoil])
    learn.add_cb(At('after_cancel_epoch', lambda l: l.opt.zero_grad()))  # fastai leaves the gradients of that batch
    learn.fit(3, 0.01)
    assert learn.mixed_precision.scales == [4096.0] * 14 and learn.mixed_precision.scale == 4096.0 and finite(learn)


# -- a loop of fastai with two models


def test_fastais_learner_for_two_models():
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    learn = GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), show_img=False)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    dtypes, before = output_dtypes(learn.to_bf16(), generator[0], critic[0]), process()
    assert ending(lambda: learn.fit(1, 0.01, cbs=At('before_step', lambda l: 1 / (l.train_iter != 1), 20)))
    assert_trains_on(learn, before)
    assert set(dtypes) == {BF16}


# -- what a callback does beside training


def several(learn):
    "Exports fp32, saves, copies, predicts."
    learn.save('beside')
    copy.deepcopy(learn.model)
    with torch.no_grad(), learn.amp_context():
        learn.model.eval()(torch.ones(2, 6))
        learn.model.train()
    precision_callback(learn) and learn.mixed_precision.load_state_dict(learn.mixed_precision.state_dict())


def as_fp32(learn):
    with learn.precision_as('fp32'):
        learn.validate()


BESIDE = {
    'several': (several, ['before_train', 'after_batch', 'after_train', 'after_epoch']),
    'precision_as': (as_fp32, ['before_epoch', 'after_train', 'after_epoch']),
    'load': (lambda l: l.load(l.save('beside').stem), ['before_train', 'after_batch', 'after_epoch']),
    'predictions': (lambda l: l.get_preds(), ['before_epoch', 'after_validate', 'after_epoch']),
    'export': (lambda l: told(lambda: l.export('beside.pkl')), ['after_epoch']),
}


@pytest.mark.parametrize('to', ['overflowing', 'bf16 and fp32_modules', 'flat', 'no masters'])
@pytest.mark.parametrize('what', BESIDE)
def test_what_is_done_beside_training_changes_no_bit(what, to, tmp_path):
    f, events = BESIDE[what]
    if to == 'no masters':  # a file that is loaded has no rounding errors; a validation without a fit's bf16 weights
        events = [] if what == 'load' else events
    _, expected = trained(to)
    for event in events:
        once = Once(f, third_batch) if event == 'after_batch' else Once(f)
        learn, found = trained(to, cbs=[At(event, once, 60)], path=tmp_path)
        assert differences(found, expected) == [] and is_outside_a_fit(learn), event


@pytest.mark.parametrize(
    'to, event',
    [('fp16', 'after_backward'), ('fp16 and fused', 'after_step'), ('bf16 and fp32_modules', 'after_batch')],
)
def test_a_learner_copied_in_a_fit_trains(to, event):
    copies = []

    def keep(l):
        l.pred = l.loss = l.loss_grad = None  # their graphs cannot be copied
        copies.append((copy.deepcopy(l), params(l), l.mixed_precision.state_dict()))
        raise core.CancelFitException

    make(to).fit(1, 0.01, cbs=At(event, keep, 70))
    twin, weights, state = copies[0]
    assert (
        same(params(twin), weights) and twin.mixed_precision.state_dict() == state and twin.mixed_precision.fit is None
    )
    before = process()
    twin.remove_cb(At).fit(1, 0.01)
    assert process() == before and finite(twin) and not same(params(twin), weights)
