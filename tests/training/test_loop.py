"The loop of the learner: wrappers, switches of precision, also by callbacks, and what a fit leaves behind."

import copy

import pytest, torch
from fastai.callback.core import CancelBatchException
from fastai.callback.training import GradientAccumulation

from helpers import *


def wrapped(learn, calls):
    "Put a user's wrapper around the learner's `_with_events`."
    own = learn._with_events

    def with_events(f, event_type, *args):
        calls.append(event_type)
        return own(f, event_type, *args)

    learn._with_events = with_events
    return with_events


def test_a_wrapper_on_with_events_is_called_and_given_back():
    learn, calls = learner(), []
    own = wrapped(learn, calls)
    learn.to_fp16(init_scale=256.0).fit(1)
    assert calls.count('batch') == 8 and calls.count('step') == 6
    assert learn.to_bf16().to_fp32()._with_events is own


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_a_wrapper_that_a_callback_puts_around_ours(mode):
    learn, plain, calls = learner(cbs=mixed(mode)), learner(cbs=mixed(mode)), []
    learn.fit(2, 0.01, cbs=At('before_train', lambda l: calls or wrapped(l, calls)))
    plain.fit(2, 0.01)
    assert 'batch' in calls and same(params(learn), params(plain)) and is_outside_a_fit(learn)


def test_a_switch_in_a_fit_of_a_callback_for_one_fit():
    "A precision set during the fit stays; one passed to `fit` is removed."
    learn = learner()
    dtypes = output_dtypes(learn)
    to_bf16 = At('before_batch', lambda l: l.training and l.iter == 2 and l.to_bf16())
    learn.fit(1, cbs=[mixed('fp16'), to_bf16])
    assert dtypes == [torch.float16] * 3 + [torch.bfloat16] * 3
    assert learn.mixed_precision is learn.precision and repr(learn.precision) == "MixedPrecision('bf16')"


@pytest.mark.parametrize('switch, half', [('run_valid', [True, False]), ('run_train', [False, True])])
def test_what_every_callback_of_fastai_has(switch, half):
    "`run_valid`, `run_train`, `run`, and events set on an instance."
    learn, seen, calls = learner().to_bf16(), {}, []
    learn.add_cb(At('after_pred', lambda l: seen.setdefault(l.training, torch.is_autocast_enabled('cpu')), 20))
    setattr(learn.precision, switch, False)
    learn.precision.after_epoch = lambda: calls.append(1)
    learn.fit(1)
    assert [seen[True], seen[False]] == half and calls == [1]
    learn.precision.run = False
    seen.clear()
    learn.fit(1)
    assert not any(seen.values()) and learn.precision.run


def test_a_fit_is_gone_when_it_ends_and_a_copy_has_none():
    learn, copies = learner().to_fp16(init_scale=256.0, fp32_modules='0'), []

    def make(l):
        if l.training and l.iter == 2:
            l.loss = l.loss_grad = l.pred = None  # their graphs cannot be copied
            copies.append(copy.deepcopy(l))

    learn.fit(1, cbs=At('after_batch', make, 80))
    assert learn.precision.fit is None and copies[0].precision.fit is None and not replaced(copies[0].model)
    assert copies[0].precision.scales == [256.0] * 3
    copies[0].fit(1)
    assert finite(copies[0]) and len(copies[0].precision.scales) == 9


class Checkpointed(Callback):
    "Wraps a module's forward for a fit, as activation checkpointing and loggers do."

    def __init__(self, order):
        self.order, self.calls = order, 0

    def before_fit(self):
        self.module = self.learn.model[0]
        self.own = own = self.module.forward

        def forward(x):
            self.calls += 1
            return own(x)

        self.module.forward = forward

    def after_fit(self):
        self.module.forward = self.own


@pytest.mark.parametrize('order', [9, 20])
def test_a_callback_that_wraps_a_kept_modules_forward(order):
    learn, plain = (learner(cbs=cb).to_bf16(fp32_modules='0') for cb in (Checkpointed(order), None))
    for l in (learn, plain):
        l.fit(2, 0.01)
        l.validate()
        l.get_preds()
        l.fit(1, 0.01)
    assert learn.checkpointed.calls == 16 + 2 + 2 + 8 and same(params(learn), params(plain))


def test_amp_context_after_a_switch_in_a_fit_leaves_kept_modules_on():
    learn, seen = learner().to_bf16(), []
    learn.model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype) if m.training else None)

    def switch(l):
        if l.iter == 1 and l.training:
            l.to_fp16(init_scale=256.0, fp32_modules='0')

    def use(l):
        if l.training:
            with torch.no_grad(), l.amp_context():
                l.model(*l.xb)

    learn.fit(1, 1e-3, cbs=[At('after_batch', switch), At('before_batch', use, 5)])
    assert set(seen[4:]) == {torch.float32} and replaced(learn.model) == []


def test_a_copy_made_in_a_fit_is_a_plain_model():
    "It can be scripted, as an average of the weights is."
    learn, copies = learner().to_bf16(fp32_modules='0'), []
    learn.fit(1, cbs=At('after_backward', lambda l: copies or copies.append(copy.deepcopy(l.model)), 20))
    x = torch.randn(2, 6)
    assert replaced(copies[0]) == [] and '__reduce_ex__' not in vars(copies[0][0])
    torch.testing.assert_close(torch.jit.script(copies[0].eval())(x), copies[0](x))


def test_a_users_setting_of_autocasts_cache_counts():
    learn, seen = learner().to_bf16(), set()
    learn.add_cb(At('after_pred', lambda l: seen.add(torch.is_autocast_cache_enabled()), 20))
    torch.set_autocast_cache_enabled(False)
    try:
        learn.fit(1)
        assert seen == {False} and not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)


def test_a_parameter_in_two_groups_is_unscaled_once():
    def norms(cb):
        learn, found = learner(linear(), cbs=cb, splitter=lambda m: [[*m.parameters()], [m.bias]]), []
        learn.add_cb(At('before_step', lambda l: found.append(l.model.bias.grad.item()), 20))
        learn.fit(1, 0.01)
        return found

    assert norms(mixed('fp16')) == pytest.approx(norms(None), rel=0.05, abs=0.01)


def test_an_error_about_dtypes_says_where_to_look():
    class Fills(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(x[:, :1] > 0, -1e9).float()

    with pytest.raises(RuntimeError) as e:
        learner(Fills(6, 1)).to_fp16().fit(1)
    assert 'precision_report' in ''.join(getattr(e.value, '__notes__', ['precision_report']))
    with pytest.raises(RuntimeError) as e:
        learner(nn.Linear(7, 1)).to_fp16().fit(1)
    assert not hasattr(e.value, '__notes__')


def test_a_backward_pass_of_ones_own_with_an_unfinished_accumulation():
    "`scale_loss` first scales the true gradients that an earlier fit left."

    def grads(cb, own):
        learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
        learn.fit(1, 0.01)
        if own:
            add = (lambda l: l.precision.scale_loss(l.loss_grad)) if cb else (lambda l: l.loss_grad)
            learn.add_cb(At('before_backward', lambda l: add(l).backward(retain_graph=True), 5))
        learn.fit(1, 0.01)
        return plain_grads(learn)

    for a, b in zip(grads(None, True), grads(mixed('fp16'), True)):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_events_outside_of_one_batch_are_refused():
    learn = learner().to_bf16()
    learn.create_opt()
    learn._split(learn.dls.one_batch())
    with pytest.raises(RuntimeError, match=r'(?s)outside of `Learner.one_batch`.*amp_context'):
        learn('before_batch')


def test_without_masters_an_exception_before_the_first_step_changes_no_weight():
    from fastxtend_amp import kahan

    learn = learner(opt_func=kahan('AdamW')).to_half_weights(master_weights=False)
    before = params(learn)

    def stop(l):
        raise RuntimeError('stop')

    with pytest.raises(RuntimeError):
        learn.fit(1, cbs=At('before_step', stop))
    assert same(before, params(learn))


@pytest.mark.parametrize('how', ['warn', 'ignore'])
def test_a_validation_alone_whose_loss_is_not_finite(how):
    learn = learner(loss_func=lambda p, y: (p - y).square().mean() / (1 if p.requires_grad else 0))
    learn.to_bf16(on_overflow=how)
    words = told(lambda: learn.fit(2, 1e-3), 'validation')
    assert len(words) == (how == 'warn')
    if words:
        assert 'precision_report(dl=learn.dls.valid)' in words[0]


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_step', 'after_batch'])
@pytest.mark.parametrize('to', ['to_fp32', 'to_bf16'])
def test_a_switch_in_mid_batch_under_a_wrapper_of_the_users(to, event):
    learn, calls = learner(cbs=mixed('fp16')), []
    wrapped(learn, calls)
    dtypes = output_dtypes(learn)
    learn.fit(1, 0.01, cbs=At(event, lambda l: l.training and l.iter == 2 and getattr(l, to)(), 20))
    assert set(dtypes[:3]) == {torch.float16} and set(dtypes[3:]) == {
        torch.bfloat16 if to == 'to_bf16' else torch.float32
    }
    learn.fit(1, 0.01)
    assert finite(learn) and autocast_state()[0] is False


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('event, order', [('after_backward', 5), ('before_step', 5), ('before_step', 20)])
def test_a_scale_that_is_loaded_in_a_step_that_overflows_lets_no_inf_through(opt, event, order):
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=[mixed('fp16'), spoil_at(3)])
    learn.fit(1, 0.01, cbs=[])

    def load(l):
        if l.train_iter == 3:
            l.precision.load_state_dict({**l.precision.state_dict(), 'scale': 64.0})

    learn.fit(1, 0.01, cbs=At(event, load, order))
    assert finite(learn) and learn.precision.skips.count(True) == 2


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_validation_in_before_step_whose_batch_is_cancelled(opt):
    def cancel(l):
        if not l.training:
            raise CancelBatchException

    def validate(l):
        if l.training and l.train_iter == 3 and not busy:
            busy.append(1)
            mode = l.model.training
            l.validate()
            l.model.train(mode)
            l.training = True

    busy = []
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=[mixed('fp16'), spoil_at(3)])
    learn.fit(1, 0.01, cbs=[At('before_step', validate, 20), At('after_pred', cancel, 20)])
    assert finite(learn)


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss'])
def test_a_validation_in_a_batch_of_a_loop_of_ones_own_leaves_the_loss_scaled(event):
    "The batch is the outermost scope; `after_fit` of the validation does not end its fit."
    learn, scaled = learner(cbs=mixed('fp16', init_scale=256.0)), []
    learn.create_opt()

    def validate(l):
        if not l.training:
            return
        kept = {k: vars(l)[k] for k in ('xb', 'yb', 'pred', 'loss', 'loss_grad', 'training') if k in vars(l)}
        l.validate()
        vars(l).update(kept)

    learn.add_cb(At(event, validate, 12))
    learn.add_cb(At('before_backward', lambda l: scaled.append((l.loss_grad / l.loss).item()), 20))
    for i, b in enumerate(learn.dls.train):
        learn.model.train()
        learn.training = True
        learn.one_batch(i, b)
    assert scaled == [256.0] * 6 and learn.precision.scales == [256.0] * 6


def test_an_export_inside_a_fit_does_without_the_package(tmp_path):
    learn, plain = learner(path=tmp_path), learner()
    learn.add_cb(At('after_epoch', lambda l: l.export('in.pkl'), 70))
    learn.to_bf16().fit(2, 0.01)
    plain.to_bf16().fit(2, 0.01)
    assert b'fastxtend_amp' not in (tmp_path / 'in.pkl').read_bytes()
    assert same(params(learn), params(plain)) and is_outside_a_fit(learn)


def test_an_interrupt_while_a_callback_is_added_leaves_plain_fp32(monkeypatch):
    class Interrupted(type(learner().to_bf16().precision)):
        @property
        def name(self):  # fastai asks for it when `learn` is set, before it adds the callback
            raise KeyboardInterrupt

    learn, plain = learner(), learner()
    with pytest.raises(KeyboardInterrupt):
        learn.add_cb(Interrupted('bf16'))
    learn.fit(1, 0.01)
    plain.fit(1, 0.01)
    assert same(params(learn), params(plain))
    learn.to_bf16().fit(1, 0.01)
    assert is_outside_a_fit(learn)


def test_an_exception_in_a_batch_that_switches_zeroes_the_gradients():
    def fail(l):
        l.to_bf16()
        raise ValueError('boom')

    learn = learner(cbs=At('after_backward', fail, 12)).to_fp16(init_scale=256.0)
    with pytest.raises(ValueError, match='boom'):
        learn.fit(1, 0.01)
    assert not any(g.any() for g in plain_grads(learn) if g is not None)
    assert learn.precision.amp_mode == 'bf16' and is_outside_a_fit(learn)
