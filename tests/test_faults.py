"Faults of 0.2.0 in the room insight: a loss of nan in wrapped weights, and a callback of anybody's named precision."
import pytest, torch
from fastai.callback.core import Callback
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from helpers import *


def wrapped(model):
    "`model` with its parameters in wrappers; all of them, because an operator that gets one runs twice."
    for m in model.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone())))
    return model


@pytest.mark.parametrize('prepare', [lambda m: m, wrapped], ids=['plain', 'wrappers'])
def test_a_loss_of_nan_is_noticed_in_its_batch(prepare):
    seen, nan = [], lambda pred, y: (pred - y).mean() * torch.nan
    learn = learner(prepare(mlp()), loss_func=nan).to_bf16(on_overflow='raise')
    learn.add_cb(At('before_batch', lambda l: seen.append(l.iter), 50))
    with pytest.raises(FloatingPointError, match='the loss is nan'): learn.fit(1)
    assert seen == [0]


class PrecisionCallback(Callback):
    "Anybody's; fastai names it `learn.precision`."


@pytest.mark.parametrize('call', [
    lambda learn: learn.precision_report('bf16').verdicts['bf16'].verdict,
    lambda learn: list(learn.compare_precision(('fp32', 'bf16'), n_steps=2).table.index),
    lambda learn: learn.to_amp(measure=True, max_seconds=5) is learn,
], ids=['report', 'comparison', 'choice'])
def test_what_looks_at_the_precision_finds_its_own_callback(call):
    "Beside a callback of anybody's named precision."
    learn, alone = learner().to_bf16(), learner().to_bf16()
    learn.add_cb(PrecisionCallback())
    assert call(learn) == call(alone)
