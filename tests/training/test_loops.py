"Loops other than fastai's: validation inside a fit, two forward passes, custom loops, switches in a batch, threads."

import threading

import pytest, torch
from fastai.callback.core import CancelBackwardException, CancelEpochException, CancelStepException
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Lamb
from fastai.text.learner import LMLearner
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder, SequentialRNN
from fastai.vision.gan import FixedGANSwitcher, GANLearner

from fastxtend_amp import AMPMode
from helpers import *

MODES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])
BATCH = [
    'before_batch',
    'after_pred',
    'after_loss',
    'before_backward',
    'after_backward',
    'before_step',
    'after_step',
    'after_batch',
]


# -- validation inside a fit


class Once:
    "Call `f(learn)`, but not again while it runs."

    def __init__(self, f):
        self.f, self.busy = f, False

    def __call__(self, learn):
        if self.busy:
            return
        self.busy = True
        self.f(learn)
        self.busy = False


@pytest.mark.parametrize(
    'event, call, mode',
    [
        ('before_fit', 'validate', 'fp16'),
        ('before_epoch', 'get_preds', 'fp16'),
        ('after_validate', 'validate', 'bf16'),
        ('after_epoch', 'validate', 'fp16'),
        ('after_fit', 'get_preds', 'fp16'),
        ('after_fit', 'validate', 'bf16'),
    ],
)
def test_predictions_inside_a_fit_change_nothing(event, call, mode):
    def run(extra):
        learn = learner(cbs=MixedPrecision(mode, init_scale=2.0**18))

        def predict(l):
            scaler = l.scaler
            getattr(l, call)()
            if event not in ('before_fit', 'after_fit'):
                assert l.scaler is scaler

        if extra:
            learn.add_cb(At(event, Once(predict), order=40 if event != 'after_fit' else 5))
        dtypes = output_dtypes(learn)
        learn.fit(2, 0.01)
        assert set(dtypes) == {AMPMode(mode).dtype} and is_outside_a_fit(learn)
        return params(learn), learn.precision.scales

    (weights, scales), (nested, nested_scales) = run(False), run(True)
    assert same(weights, nested) and scales == nested_scales


def test_a_validation_in_after_fit_keeps_an_unfinished_accumulation():
    def run(cb):
        learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
        learn.add_cb(At('after_fit', Once(lambda l: l.validate()), 0)).fit(1, 0.01)
        return plain_grads(learn)

    for a, b in zip(run(None), run(mixed('fp16'))):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


# -- a batch with two forward passes


class Twice(Learner):
    "A second forward and backward pass, as in sharpness-aware minimization; the first gradients are dropped."

    def _backward(self):
        super()._backward()
        self.opt.zero_grad()
        with self.amp_context():
            pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(pred.float(), *self.yb)
        self('before_backward')
        super()._backward()


@MODES
def test_a_second_forward_of_a_batch_with_amp_context(mode):
    twice, once = learner(cls=Twice, cbs=mixed(mode)), learner(cbs=mixed(mode))
    dtypes, before = output_dtypes(twice), autocast_state()
    for learn in (twice, once):
        learn.fit(1, 0.01)
    assert dtypes == [AMPMode(mode).dtype] * 12 and autocast_state() == before and same(params(twice), params(once))


class OwnBackward(Callback):
    "A backward pass in a callback, with `learn.scaler`, before that of the learner."

    def before_backward(self):
        self.learn.scaler.scale(self.learn.loss_grad).backward(retain_graph=True)


class Doubled(Callback):
    "The same gradients, times a factor."

    order = 12

    def before_step(self):
        for p in self.model.parameters():
            p.grad.mul_(2)


@pytest.mark.parametrize('acc', [(), (8,)])
def test_a_backward_pass_with_the_learners_scaler(acc):
    "From the first batch of a fit."
    own, doubled = (
        learner(cbs=[mixed('fp16'), cb(), *map(GradientAccumulation, acc)]) for cb in (OwnBackward, Doubled)
    )
    for l in (own, doubled):
        l.fit(2, 0.01)
    assert own.precision.scales == doubled.precision.scales and same(params(own), params(doubled))


def test_a_learner_that_scales_its_loss_itself():
    class Scales(Learner):
        def _do_grad_opt(self):
            self.scaler.scale(self.loss_grad).backward()
            self._with_events(self._step, 'step', CancelStepException)
            self.opt.zero_grad()

    own, plain = (learner(cls=cls, cbs=mixed('fp16')) for cls in (Scales, Learner))
    for l in (own, plain):
        l.fit(2, 0.01)
    assert own.precision.scales == plain.precision.scales and same(params(own), params(plain))


def test_a_loop_that_sets_a_loss_alone():
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb)
            self('after_pred')
            self.loss = self.loss_func(self.pred, *self.yb).bfloat16()
            self('after_loss')

    learn = learner(cls=Own).to_bf16()
    learn.fit(1)
    assert len(learn.recorder.losses) == 6 and {l.dtype for l in learn.recorder.losses} == {torch.float32}


# -- loops without `fit`


class OwnStep(Learner):
    "Steps with its own method, which a fused optimizer's step on the device must not replace."

    taken = 0

    def take(self):
        self.taken += 1
        self._step()

    def _do_grad_opt(self):
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self.take, 'step', CancelStepException)
        self.opt.zero_grad()


def test_a_step_of_a_learners_own():
    plain, own = (learner(cls=cls, opt_func=OPTIMIZERS['fused adamw'], cbs=mixed('fp16')) for cls in (Learner, OwnStep))
    for l in (plain, own):
        l.fit(2, 0.01)
    assert own.taken == 12 and same(params(plain), params(own))


def test_a_wrapper_on_the_optimizers_step_is_called():
    "As an average of the weights does; a fused optimizer's step on the device must not bypass it."
    learn, calls = learner(opt_func=OPTIMIZERS['fused adamw'], cbs=mixed('fp16')), []
    learn.create_opt()
    step = learn.opt.step
    learn.opt.step = lambda: (calls.append(1), step())
    learn.fit(1, 0.01)
    assert len(calls) == 6


@pytest.mark.parametrize('event, order', [('before_step', 11), ('after_step', 9)])
def test_an_epoch_left_between_unscaling_and_update(event, order):
    "The step is cancelled: the scale does not change, and the next epoch trains."

    def leave(l):
        if l.epoch == 1 and l.train_iter == 9:
            raise CancelEpochException

    learn = learner(
        opt_func=OPTIMIZERS['fused adamw'], cbs=[mixed('fp16', growth_interval=100), At(event, leave, order)]
    )
    learn.fit(3, 0.01)
    assert len(learn.precision.scales) == 15 and finite(learn) and learn.precision.scale == learn.precision.scales[0]


def prepared(mode, model=None, **kwargs):
    "A learner as a user's own loop prepares it."
    learn = learner(model, cbs=mixed(mode, **kwargs))
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01, **({} if learn.wd is None else {'wd': learn.wd}))
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')])
    learn.model.train()
    learn.training, learn.dl = True, learn.dls.train
    return learn


@MODES
def test_a_loop_over_one_batch_trains_as_fit_does(mode):
    scaling = dict(init_scale=2.0**18) if mode == 'fp16' else {}
    fitted, learn = learner(cbs=mixed(mode, **scaling)), prepared(mode, **scaling)
    fitted.fit(1, 0.01)
    for i, b in enumerate(learn.dls.train):
        learn.one_batch(i, b)
    assert same(params(learn), params(fitted)) and learn.precision.scales == fitted.precision.scales
    assert not left_on(learn.to_fp32()) and max(g.abs().max() for g in plain_grads(learn) if g is not None) < 64


def test_an_exception_in_such_a_loop():
    class Fails(nn.Linear):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError('boom')

    learn, before = prepared('fp16', Fails(6, 1)), autocast_state()
    for b in list(learn.dls.train)[:2]:
        with pytest.raises(RuntimeError, match='boom'):
            learn.one_batch(0, b)
        assert autocast_state() == before
    assert not left_on(learn.to_fp32())


# -- fastai's own loops with two models, and with a state


def gan():
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    return GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), show_img=False), [
        generator[0],
        critic[0],
    ]


def text(n=8):
    rnn = AWD_LSTM(20, 6, 8, 1)
    model = SequentialRNN(rnn, LinearDecoder(20, 6, 0.1, tie_encoder=rnn.encoder))
    words = torch.arange(n * 5).view(n, 5) % 20
    data = Data(words, words.flip(1))
    loss = lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten())
    return learner(model, loaders(train=data, valid=data), loss, cls=LMLearner), [model[1].decoder]


@pytest.mark.parametrize('make', [gan, text])
def test_learners_of_fastai_with_loops_of_their_own(make):
    "They train in bf16, also after an exception, after which autocast is restored."
    learn, modules = make()
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    dtypes, before, fits = output_dtypes(learn, *modules), autocast_state(), [params(learn)]
    learn.to_bf16(fp32_modules=[t for t in [nn.LSTM] if any(isinstance(m, t) for m in learn.model.modules())])

    def fail(l):
        if l.train_iter == 1:
            raise KeyboardInterrupt

    for event in ('after_pred', 'before_step', None):
        if event is None:
            learn.fit(1, 0.01)
        else:
            with pytest.raises(KeyboardInterrupt):
                learn.fit(1, 0.01, cbs=At(event, fail, 20))
        fits.append(params(learn))
        assert autocast_state() == before and is_outside_a_fit(learn) and finite(learn) and not same(fits[-2], fits[-1])
    assert set(dtypes) == {torch.bfloat16} and not left_on(learn.to_fp32())


# -- switching precision

TO = {'to_fp16': torch.float16, 'to_bf16': torch.bfloat16, 'to_fp32': torch.float32}


def set_to(learn, call):
    return getattr(learn, call)(**(dict(init_scale=256.0) if call == 'to_fp16' else {}))


def switches():
    "Each event before and after the callback's order, and each switch of precision two or three times."
    changes = [(start, to) for start in TO for to in TO if start != to]
    for i, (event, order) in enumerate((e, o) for e in BATCH for o in (9, 40)):
        yield *changes[i % len(changes)], event, order


@pytest.mark.parametrize('start, to, event, order', switches())
def test_a_switch_in_mid_batch_takes_effect_from_the_next(start, to, event, order):
    learn, largest = set_to(learner(), start), []
    dtypes = output_dtypes(learn)
    learn.add_cb(At(event, lambda l: l.training and l.iter == 2 and set_to(l, to), order))
    learn.add_cb(At('before_step', lambda l: largest.append(max(g.abs().max().item() for g in plain_grads(l))), 41))
    learn.fit(1, 1e-3)
    assert dtypes == [TO[start]] * 3 + [TO[to]] * 3
    assert max(largest) < 64.0 and len(largest) == 6  # true gradients at every step
    assert autocast_state()[0] is False and finite(learn)


def test_several_switches_in_a_fit_and_the_last_of_a_batch_counts():
    learn = learner()
    dtypes, steps = (
        output_dtypes(learn),
        {1: ['to_bf16'], 3: ['to_fp32', 'to_bf16', 'to_fp16'], 4: ['to_fp16', 'to_fp32']},
    )
    learn.fit(1, 0.01, cbs=At('after_pred', lambda l: l.training and [set_to(l, s) for s in steps.get(l.iter, ())], 40))
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    assert dtypes == [f32, f32, bf16, bf16, f16, f32] and autocast_state()[0] is False and not left_on(learn)


@pytest.mark.parametrize('event', BATCH[:6])
def test_a_callback_added_in_a_batch_whose_step_is_cancelled_begins_with_the_next(event):
    def cancel(l):
        if l.train_iter == 0:
            raise CancelStepException

    learn = learner()
    add = At(event, lambda l: l.precision or l.add_cb(mixed('fp16')))
    learn.fit(1, 0.01, cbs=[add, At('before_step', cancel, 5)])
    assert learn.precision.scales == [256.0] * 5


def test_remove_cb_in_mid_batch_is_refused_with_what_to_do():
    learn = learner().to_fp16()
    learn.add_cb(At('before_backward', lambda l: l.remove_cb(l.precision), 40))
    with pytest.raises(RuntimeError, match='(?s)middle of a batch.*to_fp32.*take effect at its end'):
        learn.fit(1)
    assert learn.precision is not None and autocast_state()[0] is False


def test_a_precision_set_during_a_fit_belongs_to_that_fit():
    "Its checks run, and it counts as one fit, also where an exception ends it outside a batch."
    learn = learner(cbs=GradientAccumulation(100)).to_fp16(init_scale=256.0)

    def fail(l):
        raise KeyboardInterrupt

    learn.add_cbs([At('before_batch', lambda l: l.iter == 0 and l.to_fp16(init_scale=1024.0)), At('after_train', fail)])
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1)
    assert learn.scaler is None and not any(p.grad.any() for p in learn.model.parameters())
    learn = learner(opt_func=Lamb).to_bf16()
    learn.add_cb(At('before_batch', lambda l: l.training and l.iter == 0 and l.to_half_weights(flat_master=True)))
    with pytest.raises(ValueError, match='flat_master=True cannot be used with'):
        learn.fit(1)


# -- threads


def test_two_learners_that_train_in_two_threads():
    def train(mode):
        learn = learner(cbs=mixed(mode))
        learn.fit(6, 0.01)
        results.append(finite(learn) and (learn.precision.mode, learn.precision.scales))

    results, threads = [], [threading.Thread(target=train, args=(mode,)) for mode in ('fp16', 'bf16')]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == [('bf16', []), ('fp16', [256.0] * 36)]
