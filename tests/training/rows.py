"""What training is tested with: models, precisions, loops, events; and the same training written by hand in PyTorch.

A new precision, loop or model is a row. `by_hand` is the reference: PyTorch's autocast and GradScaler.
"""

from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from fastai.callback import core
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import Learner
from fastai.optimizer import Adam, Lookahead, OptimWrapper
from fastai.torch_core import ismin_torch
from fastcore.basics import noop
from torch import backends, nn
from torch.utils.checkpoint import checkpoint

from fastxtend_amp import kahan
from fastxtend_amp.training.current import precision_callback
from helpers import DEVICE, OPTIMIZERS, At, Attentive, autocast_state, learner, loaders, mlp, opt_state, plain_grads
from helpers import same

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CACHE = None if ismin_torch('2.13') else False  # autocast's, which older versions of PyTorch may fill under `no_grad`
SCALING = dict(init_scale=2.0**18, growth_interval=3)  # overflows at the start, and whenever it has grown


# -- precisions


class To(NamedTuple):
    "How a learner gets a precision, and what a hand-written loop uses."

    method: str
    arguments: dict = {}
    dtype: Any = None  # autocast's
    scaler: Any = None  # arguments of a GradScaler
    opt: str = 'sgd'
    prepare: Any = staticmethod(lambda model: model)  # in the hand-written loop

    def __call__(self, learn):
        made = {k: v() if k == 'scaler' else v for k, v in self.arguments.items()}
        return getattr(learn, f'to_{self.method}')(**made)


def in_torchao(model):
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model, module_filter_fn=lambda m, name: name in ('1', '2'))


def fp16(**scaling):
    return To('fp16', scaling, FP16, scaling)


ODD = dict(init_scale=3e6, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
TO = {
    'fp32': To('fp32'),
    'bf16': To('bf16', {}, BF16),
    'skipping': To('bf16', dict(skip_nonfinite=True), BF16),
    'fp16': fp16(init_scale=4096.0),
    'overflowing': fp16(**SCALING),
    'odd factors': fp16(**ODD),
    'static': To('fp16', dict(loss_scale=512.0), FP16, dict(init_scale=512.0)),
    'own scaler': To('fp16', dict(scaler=lambda: torch.amp.GradScaler(DEVICE.type, **SCALING)), FP16, SCALING),
    'unscaled': To('fp16', dict(enabled=False), FP16),
    'all in fp32': To('bf16', dict(fp32_modules='*')),
    'flat': To('bf16', dict(flat_master=True), BF16, opt='adam'),
    'flat fp16': To('fp16', dict(flat_master=True, loss_scale=512.0), FP16, dict(init_scale=512.0)),
    'tf32': To('tf32'),
    'fp8': To('fp8', {}, BF16, prepare=in_torchao),
    'no masters': To('bf16', dict(master_weights=False), BF16, opt='kahan'),
}


def lookahead(params, lr):
    return Lookahead(Adam(params, lr=lr), k=3)


OPTS = {**OPTIMIZERS, 'kahan': kahan('AdamW')}
OPTS['fused adam'] = partial(OptimWrapper, opt=partial(torch.optim.Adam, fused=True))
OPTS['lookahead'] = lookahead
OPTS['fused plain sgd'] = partial(OptimWrapper, opt=partial(torch.optim.SGD, fused=True))


# -- models, from (n, 6) to (n, 1)


class Unused(nn.Sequential):
    "With parameters that no batch uses."

    def __init__(self):
        super().__init__(*mlp())
        self[0].unused = nn.Linear(3, 3)


class Shared(nn.Module):
    "One layer in two places of the tree, used twice in a forward pass."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 1)
        self.b = self.a

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Checkpointed(nn.Module):
    "Computes its first part again in the backward pass."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class NoGradFirst(nn.Sequential):
    "A pass without gradients before the one that is trained: autocast's cache must not hand on its casts."

    def forward(self, x):
        with torch.no_grad():
            target = super().forward(x).mean()
        with torch.no_grad(), torch.enable_grad():
            return super().forward(x) + 0 * target


class GradInside(nn.Module):
    "Differentiates in its forward pass, also in a validation."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)[0]
        return self.energy(x) + grad.float().sum(1, keepdim=True)


def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


def frozen():
    model = mlp()
    model[0].requires_grad_(False).half()
    return nn.Sequential(nn.Linear(6, 6), *model)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1))


MODELS = {
    'mlp': mlp,
    'conv': conv,
    'attention': lambda: Attentive(1.0),
    'unused': Unused,
    'shared': Shared,
    'checkpointed': Checkpointed,
    'no grad first': lambda: NoGradFirst(*mlp()),
    'grad inside': GradInside,
    'lazy': lazy,
    'frozen': frozen,
    'wide': wide,
}


# -- loops


class Once:
    "Call `f(learn)` where `when(learn)`, but not again while it runs."

    def __init__(self, f, when=lambda l: True):
        self.f, self.when, self.busy = f, when, False

    def __call__(self, learn):
        if self.busy or not self.when(learn):
            return
        self.busy = True
        self.f(learn)
        self.busy = False


def third_batch(learn):
    "Whether this is the third training batch of an epoch."
    return learn.training and learn.iter == 2


def backward_and_step(self):
    "`_do_grad_opt` that zeroes no gradient: each step sees the sum of all so far."
    self._with_events(self._backward, 'backward', core.CancelBackwardException)
    self._with_events(self._step, 'step', core.CancelStepException)


class Keeps(Learner):
    _do_grad_opt = backward_and_step


class Zeroes(Learner):
    "As fastai's own."

    def _do_grad_opt(self):
        backward_and_step(self)
        self.opt.zero_grad()


class OwnStep(Learner):
    "Steps with its own method, which a fused optimizer's step on the device must not replace."

    def _step(self):
        super()._step()


class ScalesItself(Learner):
    def _do_grad_opt(self):
        self.scaler.scale(self.loss_grad).backward()
        self._with_events(self._step, 'step', core.CancelStepException)
        self.opt.zero_grad()


class OwnBatch(Learner):
    "Its batches do not go through `_with_events`."

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


def extra_backward(scale):
    "A callback that back-propagates the loss once more, scaled by `scale(learn)`."
    return lambda: [At('before_backward', lambda l: scale(l)(l.loss_grad).backward(retain_graph=True), 5)]


def over_batches(learn, n_epoch=3):
    "Train in a loop of one's own over `one_batch`, without fastai's callbacks for `fit`."
    of_fit = [cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')]
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01)
    with learn.removed_cbs(of_fit):
        learn.model.train()
        learn.training, learn.dl = True, learn.dls.train
        for _ in range(n_epoch):
            for i, b in enumerate(learn.dls.train):
                learn.one_batch(i, b)


def fit(learn):
    learn.fit(3, 0.01)


def fits(learn):
    for _ in range(3):
        learn.fit(1, 0.01)


def without_zeroing(learn):
    learn.create_opt()
    learn.opt.zero_grad = noop
    fit(learn)


def patched_step(learn):
    original, calls = Learner._step, []
    with patch.object(Learner, '_step', lambda self: (calls.append(1), original(self))):
        fit(learn)
    assert calls


def wrapped_step(learn):
    "As an average of the weights does."
    learn.create_opt()
    step, calls = learn.opt.step, []
    learn.opt.step = lambda: (calls.append(1), step())
    fit(learn)
    assert calls


def another_fit(l):
    TO['bf16' if precision_callback(l) and l.mixed_precision.scales else 'fp16'](learner(dls=loaders(8))).fit(1)


def validations():
    validate = Once(lambda l: l.validate())
    return [At(event, validate, 40) for event in ('before_epoch', 'after_train', 'after_epoch')]


class Loop(NamedTuple):
    cbs: Any = list
    train: Any = fit
    cls: type = Learner
    by_hand: dict = {}  # arguments of the function of this name
    calm: bool = False  # without skipped steps


KEPT = dict(keep=True)
LOOPS = {
    'fit': Loop(),
    'three fits': Loop(train=fits),
    'one_batch': Loop(train=over_batches),
    'accumulation': Loop(lambda: [GradientAccumulation(8)], by_hand=dict(n_acc=8)),
    'clipping': Loop(lambda: [GradientClip(0.05)], by_hand=dict(clip=0.05)),
    'both': Loop(lambda: [GradientClip(0.05), GradientAccumulation(12)], by_hand=dict(clip=0.05, n_acc=12)),
    'own _do_grad_opt': Loop(cls=Zeroes),
    'own _step': Loop(cls=OwnStep),
    'own one_batch': Loop(cls=OwnBatch),
    'own scaling': Loop(cls=ScalesItself),
    'two passes': Loop(cls=Twice, by_hand=dict(n_forward=2)),
    'more backward': Loop(extra_backward(lambda l: l.scaler.scale), by_hand=dict(n_backward=2)),
    'scale_loss': Loop(extra_backward(lambda l: l.mixed_precision.scale_loss), by_hand=dict(n_backward=2)),
    'patched _step': Loop(train=patched_step),
    'wrapped step': Loop(train=wrapped_step),
    'validations inside': Loop(validations),
    'another fit inside': Loop(lambda: [At('after_batch', Once(another_fit, third_batch), 80)]),
    'kept gradients': Loop(cls=Keeps, by_hand=KEPT, calm=True),
    'kept by zero_grad': Loop(train=without_zeroing, by_hand=KEPT, calm=True),
}


# -- training in a loop, and by hand

EXTRA: dict = {}  # rows that only one file of tests has, by name: precisions, models, optimizers


def find(table, name):
    return table[name] if name in table else EXTRA[name]


def make(to='fp32', model='mlp', loop='fit', opt=None, cbs=(), **kwargs):
    to, loop = find(TO, to), find(LOOPS, loop)
    made = find(MODELS, 'wide' if to.method == 'fp8' else model)()
    opt = find(OPTS, opt or to.opt)
    return to(learner(made, opt_func=opt, cls=loop.cls, cbs=[*loop.cbs(), *cbs], **kwargs))


def outcome(model, opt, losses, scales, state):
    "What two trainings are compared by."
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    scale = state.get('scale')
    return dict(weights=tensors, optimizer=opt_state(opt), losses=losses, scales=scales, scale=scale)


def end_state(learn, losses=()):
    cb = precision_callback(learn)
    scales, state = (cb.scales, cb.state_dict()) if cb and cb.state_dict() else ([], {})
    return outcome(learn.model, learn.opt, [*losses], scales, state)


def trained(to='fp32', model='mlp', loop='fit', opt=None, **kwargs):
    losses, learn = [], make(to, model, loop, opt, **kwargs)
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), 39))
    LOOPS[loop].train(learn)
    return learn, end_state(learn, losses)


def by_hand(to='fp32', model='mlp', opt=None, n_acc=None, clip=None, n_forward=1, n_backward=1, keep=False):
    row = find(TO, to)
    learn = make('fp32', 'wide' if row.method == 'fp8' else model, opt=opt or row.opt)
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01)
    model, opt, losses, scales, count = row.prepare(learn.model), learn.opt, [], [], 0
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=row.scaler is not None, **(row.scaler or {}))
    for _ in range(3):
        model.train()
        for xb, yb in learn.dls.train:
            with torch.autocast(DEVICE.type, row.dtype, enabled=row.dtype is not None, cache_enabled=CACHE):
                for _ in range(n_forward):
                    loss = learn.loss_func(model(xb).float(), yb)
            losses.append(loss.item())
            if n_acc:
                loss = loss / (n_acc / len(yb))
            for p in model.parameters():
                if keep and p.grad is not None:
                    p.grad *= scaler.get_scale()
            for i in range(n_backward):
                scaler.scale(loss).backward(retain_graph=i + 1 < n_backward)
            count += len(yb)
            if count < (n_acc or 0):
                continue
            count = 0
            scaler.unscale_(opt)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scales += [scaler.get_scale()] if row.scaler else []
            scaler.step(opt)
            scaler.update()
            if not keep:
                opt.zero_grad()
    return outcome(model, opt, losses, scales, scaler.state_dict())


def differences(a, b):
    return [name for name in a if not same(a[name], b[name])]


# -- events, and what is open


BATCH = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step']
BATCH += ['after_batch']
BETWEEN = ['before_fit', 'before_epoch', 'before_train', 'after_train', 'before_validate', 'after_validate']
BETWEEN += ['after_epoch', 'after_fit']


def process():
    "What a fit may set in the whole process."
    from torch._functorch import config

    tf32 = [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision]
    return autocast_state(), torch.is_grad_enabled(), *tf32, config.backward_pass_autocast


def largest(learn):
    "The largest gradient: in these models above 64 only if it is scaled."
    return max((g.abs().max().item() for g in plain_grads(learn) if g is not None), default=0.0)


def seen_in_steps(learn, f=largest, order=41):
    "Record `f(learn)` in each step from now on, as a callback that clips sees it."
    found = []
    learn.add_cb(At('before_step', lambda l: found.append(f(l)), order))
    return found
