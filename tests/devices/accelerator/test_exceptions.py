"After an exception or an interrupt at any event: autocast's state, the gradients and the learner, on an accelerator."
import copy, pickle

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelFitException, CancelStepException

from helpers import *

EVENTS = [
    'before_fit',
    'before_epoch',
    'before_train',
    'before_batch',
    'after_pred',
    'after_loss',
    'before_backward',
    'after_backward',
    'before_step',
    'after_step',
    'after_batch',
    'after_train',
    'before_validate',
    'after_validate',
    'after_epoch',
    'after_fit',
]
MODES = {
    'bf16': lambda learn: learn.to_bf16(),
    'fp16': lambda learn: learn.to_fp16(init_scale=256.0),
    'half weights': lambda learn: learn.to_half_weights(),
    'half fp16': lambda learn: learn.to_half_weights('fp16', loss_scale=512.0, flat_master=True),
}

RUNS = [('fp16', 'fused adamw'), ('bf16', 'adam'), ('half weights', 'adam'), ('half fp16', 'sgd')]


class Once(Callback):
    "Raises `exc` at one event of the second batch, or of the fit; once."
    def __init__(self, event, exc, order):
        self.order, self.exc, self.armed = order, exc, True
        setattr(self, event, self._go)
    def _go(self):
        if not self.armed or (self.learn.training and getattr(self.learn, 'iter', 0) < 1 and hasattr(self.learn, 'xb')):
            return
        self.armed = False
        raise self.exc('boom')


def build(mode, opt, cb=None): return MODES[mode](learner(mlp(), loaders(n=12), opt_func=OPTIMIZERS[opt], cbs=cb))


@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('mode,opt', RUNS)
def test_at_every_event(mode, opt, event, device):
    "The fit ends as the plain learner's; then the state is as before, and training goes on with finite numbers."
    for order, exc in (
        (9, RuntimeError),
        (11, KeyboardInterrupt),
        (9, CancelBatchException),
        (11, CancelStepException),
        (11, CancelFitException),
    ):
        plain = learner(mlp(), loaders(n=12), cbs=Once(event, exc, order))
        expected = caught(lambda: plain.fit(1, .01))
        bomb, before = Once(event, exc, order), autocast_state()
        learn = build(mode, opt, bomb)
        assert caught(lambda: learn.fit(1, .01)) == expected and not bomb.armed
        assert autocast_state() == before and torch.is_grad_enabled()
        assert {p.dtype for p in learn.model.parameters()} == {torch.float32}
        assert not {
            type(v).__name__ for m in learn.model.modules() for v in vars(m).get('_parameters', {}).values()
        } - {'Parameter', 'NoneType'}
        weights = params(learn)
        learn.fit(1, .01)
        assert (
            autocast_state() == before
            and not same(params(learn), weights)
            and all(p.isfinite().all() for p in learn.model.parameters())
        )


def caught(f):
    try: f()
    except BaseException as e: return type(e), str(e).splitlines()[-1:]


@pytest.mark.parametrize('mode,opt', RUNS)
@pytest.mark.parametrize('event', ['after_pred', 'before_backward', 'after_backward', 'before_step', 'after_step'])
def test_copies_after_an_interrupt_train_on_alike(event, mode, opt):
    learn = build(mode, opt, Once(event, KeyboardInterrupt, 11))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .01)
    learn.remove_cb(learn.once)
    learn.zero_grad()
    deep, pickled = copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))
    for l in (learn, deep, pickled): l.fit(1, .01)
    assert same(params(learn), params(deep)) and same(params(learn), params(pickled))


class Explosive(torch.autograd.Function):
    "Raises in the backward pass, in a thread of the engine."
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad): raise RuntimeError('in the engine')


@pytest.mark.parametrize('mode', MODES)
def test_in_the_backward_pass(mode, device):
    learn, armed = build(mode, 'adam'), [True]
    handle = learn.model[2].register_forward_hook(lambda m, i, o: Explosive.apply(o) if armed and m.training else None)
    before = autocast_state()
    with pytest.raises(RuntimeError, match='in the engine'): learn.fit(1, .01)
    assert (
        autocast_state() == before
        and all(p.grad is None or not p.grad.any() for p in learn.model.parameters())
        or mode in ('bf16', 'half weights')
    )
    armed.clear()
    handle.remove()
    learn.fit(1, .01)
    assert all(p.isfinite().all() for p in learn.model.parameters())
