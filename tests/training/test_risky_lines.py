"Lines that mutation testing could change without a failing test: one behaviour each."

import pytest, torch
from fastai.callback.core import CancelBackwardException, CancelStepException

from helpers import *


def largest_gradients(learn):
    "Record the largest gradient in each step from now on, as a callback that clips sees it."
    found = []

    def look(l):
        found.append(max(g.abs().max().item() for g in plain_grads(l) if g is not None))

    learn.add_cb(At('before_step', look, 41))
    return found


# -- parameters without a gradient


def with_unused():
    "The model of `mlp`, with parameters that no batch uses."
    model = mlp()
    model[0].unused = nn.Linear(3, 3)
    return model


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd'])
def test_gradients_are_unscaled_in_a_model_with_an_unused_parameter(opt):
    plain, learn = (learner(m(), opt_func=OPTIMIZERS[opt]) for m in (mlp, with_unused))
    found = largest_gradients(learn.to_fp16(init_scale=4096.0))
    plain.to_fp16(init_scale=4096.0)
    for l in (plain, learn):
        l.fit(2, 0.01)
    assert max(found) < 64
    assert learn.precision.scales == [4096.0] * 12
    unused = {id(p) for p in learn.model[0].unused.parameters()}
    assert same(params(plain), [p for p in learn.model.parameters() if id(p) not in unused])


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_step_is_skipped_in_a_model_with_an_unused_parameter(opt):
    learn = learner(with_unused(), opt_func=OPTIMIZERS[opt], cbs=spoil_at(2)).to_fp16(init_scale=256.0)
    learn.fit(1, 0.01)
    assert learn.precision.skips == [False, False, True, False, False, False]
    assert finite(learn)


def test_a_step_without_any_gradient_is_no_attempt():
    learn = learner().to_fp16(init_scale=256.0)
    learn.add_cb(At('before_step', lambda l: l.train_iter == 2 and l.model.zero_grad(set_to_none=True), 5))
    learn.fit(1, 0.01)
    assert len(learn.precision.scales) == 5
    assert finite(learn)


# -- custom loops, and a batch inside a batch


def own_loop(learn, n=6):
    "Train `n` batches with `one_batch`, as a user's loop does, without fastai's callbacks for `fit`."
    of_fit = [cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')]
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01)
    with learn.removed_cbs(of_fit):
        learn.model.train()
        learn.training, learn.dl = True, learn.dls.train
        for i, b in zip(range(n), learn.dls.train):
            learn.one_batch(i, b)
    return learn


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_batch_inside_a_batch(mode, event):
    "It enters and leaves autocast inside the autocast of the outer batch, which continues until the loss."
    learn, before, inside, outside = learner(cbs=mixed(mode)), autocast_state(), [], []
    dtype = learn.precision.mode.dtype

    def another(l):
        if not l.training or l.iter not in (1, 2):
            return
        kept = {k: vars(l)[k] for k in ('xb', 'yb', 'pred', 'iter') if k in vars(l)}
        l.training = False
        with torch.no_grad():
            l.one_batch(l.iter, (*kept['xb'], *kept['yb']))
        l.training = True
        vars(l).update(kept)
        inside.append(autocast_state()[:2])

    learn.add_cb(At(event, another, 20))
    learn.add_cb(At('after_loss', lambda l: l.training and outside.append(autocast_state()), 20))
    own_loop(learn)
    assert inside == [(True, dtype)] * 2
    assert outside == [before] * 6
    assert autocast_state() == before


# -- a learner with its own `_do_grad_opt`


class KeepsGradients(Learner):
    "Zeroes no gradient after a step: each step sees the sum of all so far."

    def _do_grad_opt(self):
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self._step, 'step', CancelStepException)


@pytest.mark.parametrize('opt', ['sgd', 'fused sgd'])
def test_gradients_that_a_learner_keeps_after_a_step(opt):
    def grads(to):
        learn, seen = learner(linear(), cls=KeepsGradients, opt_func=OPTIMIZERS[opt]), []
        getattr(learn, to)(**(dict(init_scale=1024.0) if to == 'to_fp16' else {}))
        learn.add_cb(At('before_step', lambda l: seen.append([g.clone() for g in plain_grads(l)]), 41))
        learn.fit(1, 1e-4)
        return seen

    for a, b in zip(grads('to_fp32'), grads('to_fp16'), strict=True):
        for x, y in zip(a, b):
            torch.testing.assert_close(y, x, rtol=0.02, atol=0.02)


def test_a_learner_of_ones_own_that_zeroes_as_fastai_does():
    class Own(Learner):
        def _do_grad_opt(self):
            self._with_events(self._backward, 'backward', CancelBackwardException)
            self._with_events(self._step, 'step', CancelStepException)
            self.opt.zero_grad()

    a, b = (learner(cls=cls, cbs=mixed('fp16')) for cls in (Own, Learner))
    for l in (a, b):
        l.fit(2, 0.01)
    assert same(params(a), params(b))


# -- a fit after a custom loop


def test_lr_find_after_a_loop_of_ones_own_forgets_nothing_of_it():
    import fastai.callback.schedule  # noqa: F401  patches Learner

    learn = own_loop(learner(cbs=mixed('fp16')))
    scales, scale = list(learn.precision.scales), learn.precision.scale
    assert len(scales) == 6
    learn.lr_find(num_it=3, show_plot=False, suggest_funcs=None)
    assert learn.precision.scales == scales
    assert learn.precision.scale == scale


def test_a_fit_after_a_loop_of_ones_own_checks_the_model_again():
    learn = own_loop(learner(cbs=mixed('fp16')))
    learn.model[0].register_parameter('stray', nn.Parameter(torch.ones(2)))  # which the optimizer does not have
    assert len(told(lambda: learn.fit(1), "'0.stray'")) == 1


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_a_fit_after_a_loop_of_ones_own_keeps_modules_of_another_model(mode):
    learn = own_loop(learner(cbs=mixed(mode, fp32_modules='0')))
    learn.model = mlp(1)
    dtypes = output_dtypes(learn)
    learn.fit(1)
    assert set(dtypes) == {torch.float32}


def test_gradients_that_such_a_loop_left_have_their_true_size():
    class Holds(Learner):
        def _do_grad_opt(self):
            self._with_events(self._backward, 'backward', CancelBackwardException)

    learn, largest = own_loop(learner(cls=Holds, cbs=mixed('fp16'))), []
    learn.add_cb(At('before_train', lambda l: largest.extend(g.abs().max().item() for g in plain_grads(l)), 40))
    learn.fit(1, 0.0)
    assert 0 < max(largest) < 64
