"Half-precision weights with fp32 masters, against loops written by hand."
import copy, math, warnings
from functools import partial

import pytest, torch
from fastai.callback.core import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
                                  CancelTrainException, CancelValidException, Callback)
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from fastxtend_amp import HalfPrecision, MixedPrecision
from fastxtend_amp.half import NORMS
from helpers import OPTIMIZERS, At, dataset, learner, loaders, mlp, opt_state, params, same, same_state

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')
HALF = {'fp16': torch.float16, 'bf16': torch.bfloat16}


def by_hand(dtype, opt_func, n_epoch=2, lr=.01, n_acc=None, clip=None, model=None, dls=None, kept=NORMS, **scaling):
    "The original recipe: a second model in half precision, its gradients copied to the masters, masters copied back."
    learn = learner(model, dls, opt_func=opt_func)
    learn.create_opt()
    learn.opt.set_hypers(lr=lr)
    masters, opt, half = learn.model, learn.opt, copy.deepcopy(learn.model)
    for m in half.modules():
        if isinstance(m, kept): continue
        for p in m._parameters.values():
            if p is not None: p.data = p.data.to(HALF[dtype])
    scaler, losses, count = torch.amp.GradScaler('cpu', enabled=dtype == 'fp16', **scaling), [], 0
    for _ in range(n_epoch):
        masters.train(), half.train()
        for xb, yb in learn.dls.train:
            loss = nn.functional.mse_loss(half(xb.to(HALF[dtype])).float(), yb)
            losses.append(loss.item())
            if n_acc: loss = loss / (n_acc / len(yb))
            scaler.scale(loss).backward()
            for p, h in zip(masters.parameters(), half.parameters()):
                if h.grad is None: continue
                p.grad = h.grad.float() if p.grad is None else p.grad + h.grad.float()
                h.grad = None
            count += len(yb)
            if n_acc and count < n_acc: continue
            count = 0
            scaler.unscale_(opt)
            if clip: nn.utils.clip_grad_norm_(masters.parameters(), clip)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            for p, h in zip(masters.parameters(), half.parameters()): h.data.copy_(p.data)
    for p, h in zip(masters.buffers(), half.buffers()): p.copy_(h)
    return masters, opt, scaler, losses


def fitted(dtype='bf16', opt_func=SGD, n_epoch=2, lr=.01, cbs=None, model=None, dls=None, **kwargs):
    learn = learner(model, dls, opt_func=opt_func, cbs=cbs).to_half(dtype, **kwargs)
    learn.fit(n_epoch, lr)
    return learn


@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('dtype', HALF)
def test_equals_the_loop_by_hand(dtype, opt):
    learn = fitted(dtype, OPTIMIZERS[opt])
    model, o, scaler, losses = by_hand(dtype, OPTIMIZERS[opt])
    assert same(params(learn), [p.detach() for p in model.parameters()])
    assert same([*learn.model.buffers()], [*model.buffers()])
    assert same_state(opt_state(learn.opt), opt_state(o))
    assert all(p.dtype is torch.float32 for p in learn.model.parameters())


@pytest.mark.parametrize('dtype', HALF)
def test_accumulates_and_clips_the_masters_gradients(dtype):
    norms = []
    look = At('before_step', lambda l: norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in l.parameters()))), order=12)
    learn = fitted(dtype, Adam, cbs=[GradientAccumulation(8), GradientClip(.05), look])
    model, *_ = by_hand(dtype, Adam, n_acc=8, clip=.05)
    assert same(params(learn), [p.detach() for p in model.parameters()])
    assert len(norms) == 6 - learn.half_precision.n_skipped and max(norms) < .0501   # clipping clips


def test_fp16_skips_as_by_hand():
    learn = learner(opt_func=Adam).to_half('fp16', loss_scale=None)
    cb = learn.half_precision
    cb.scaling._fp16_scaler = torch.amp.GradScaler('cpu', init_scale=2.**40)
    learn.fit(4, .01)
    model, _, scaler, _ = by_hand('fp16', Adam, n_epoch=4, init_scale=2.**40)
    assert 0 < cb.n_skipped < len(cb.scales) == 24 and learn.half_precision.state_dict() == scaler.state_dict()
    assert same(params(learn), [p.detach() for p in model.parameters()])
