"Faults of 0.2.0 that cost a user work, by what a user does: tensors that are wrappers, names, memory formats."
import pytest, torch
import torch.distributed as dist
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fastxtend_amp import MixedPrecision
from helpers import *


# -- tensors that are wrappers around others, and have no memory themselves

class Quantized(TwoTensor):
    "A weight with the operators that training needs and no norm, as quantized weights are."
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if 'vector_norm' in str(func): raise NotImplementedError(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def wrapped(model, kind=TwoTensor):
    "`model` with its parameters in wrappers; all of them, because an operator that gets one runs twice."
    for m in model.modules():
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(kind(p.detach().clone(), p.detach().clone())))
    return model


@pytest.mark.parametrize('kind', [TwoTensor, Quantized])
def test_weights_that_are_wrappers_train_as_plain_ones(kind):
    plain, learn = learner(mlp()).to_bf16(), learner(wrapped(mlp(), kind)).to_bf16()
    for l in (plain, learn): l.fit(2, .01)
    assert {type(p.data) for p in learn.model.parameters()} == {kind}
    assert same(params(plain), [p.a for p in learn.model.parameters()])


@pytest.fixture
def mesh():
    "One process alone."
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try: yield dist.init_device_mesh('cpu', (1,))
    finally: dist.destroy_process_group()


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_a_loss_that_is_a_dtensor(mode, mesh):
    from torch.distributed.tensor import DTensor
    def distributed(pred, target):
        whole = [DTensor.from_local(t.as_subclass(torch.Tensor), mesh) for t in (pred, target)]
        return nn.functional.mse_loss(*whole)
    plain, learn = (getattr(learner(loss_func=f), f'to_{mode}')() for f in (None, distributed))
    kinds = set()
    learn.add_cb(At('after_loss', lambda l: kinds.add(type(l.loss)), 50))
    for l in (plain, learn): l.fit(2, .01)
    assert kinds == {DTensor} and same(params(plain), params(learn))


@pytest.mark.parametrize('prepare', [lambda m: m, wrapped], ids=['plain', 'wrappers'])
def test_a_loss_of_nan_is_noticed_in_its_batch(prepare):
    seen, nan = [], lambda pred, y: (pred - y).mean() * torch.nan
    learn = learner(prepare(mlp()), loss_func=nan).to_bf16(on_overflow='raise')
    learn.add_cb(At('before_batch', lambda l: seen.append(l.iter), 50))
    with pytest.raises(FloatingPointError, match='the loss is nan'): learn.fit(1)
    assert seen == [0]


# -- names

class PrecisionCallback(Callback):
    "Anybody's; fastai names it `learn.precision`."
    def __init__(self): self.n_batches = 0
    def after_batch(self): self.n_batches += 1


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'half_weights'])
def test_a_callback_of_anybodys_named_precision(mode):
    theirs, learn = PrecisionCallback(), learner()
    learn.add_cb(theirs)
    getattr(learn, f'to_{mode}')()
    assert learn.precision is theirs
    learn.fit(1, .01)
    assert theirs.n_batches == len(learn.dls.train) + len(learn.dls.valid)
    with learn.amp_context(): assert torch.is_autocast_enabled('cpu') is (mode != 'fp32')
    learn.remove_cb(theirs)
    own = learn.precision
    assert own is None if mode == 'fp32' else own in learn.cbs and own.mode == 'bf16'
    learn.remove_cb(theirs).add_cb(PrecisionCallback)            # removed twice, and added by its class
    assert isinstance(learn.precision, PrecisionCallback)
    learn.remove_cb(PrecisionCallback).to_fp32()
    assert learn.precision is None


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


# -- channels last

def modes(learn): return [cb.amp_mode for cb in learn.cbs if isinstance(cb, MixedPrecision)]


@pytest.mark.parametrize('arguments', [dict(amp_mode='bf16'), dict(amp_mode='bf16', fp32_modules='0')])
@pytest.mark.parametrize('before', ['fp32', 'fp16', 'half_weights'])
def test_to_channelslast_with_a_precision_replaces_the_one_before(before, arguments):
    learn = getattr(learner(), f'to_{before}')()
    assert learn.to_channelslast(**arguments) is learn
    assert modes(learn) == ['bf16'] and type(learn.precision) is MixedPrecision
    learn.fit(1)
    assert learn.precision.fp32_module_names == ([] if 'fp32_modules' not in arguments else ['0'])
    assert sum(isinstance(cb, ChannelsLast) for cb in learn.cbs) == 1


def test_to_channelslast_without_a_precision_keeps_the_one_there_is():
    for call in (lambda l: l.to_channelslast(), lambda l: l.to_channelslast(True), lambda l: l.to_channelslast(False)):
        learn = learner().to_bf16()
        before = learn.precision
        assert call(learn).precision is before and modes(learn) == ['bf16']
    assert modes(learner().to_channelslast()) == ['fp16'] and modes(learner().to_channelslast(False)) == []


@pytest.mark.parametrize('call, given', [
    (lambda l: l.to_channelslast(False, 'bf16'), "'bf16'"),
    (lambda l: l.to_channelslast(use_amp=False, init_scale=512.), 'init_scale'),
])
def test_to_channelslast_refuses_a_precision_that_it_is_not_to_set(call, given):
    learn = learner().to_fp16()
    before = list(learn.cbs)
    with pytest.raises(ValueError, match='(?s)use_amp=False.*' + given + r".*to_channelslast\(amp_mode='bf16'\)"): call(learn)
    assert list(learn.cbs) == before


def test_to_channelslast_with_a_bad_argument_changes_nothing():
    learn = learner().to_bf16()
    before = list(learn.cbs)
    with pytest.raises(ValueError, match='fp8'): learn.to_channelslast(amp_mode='fp8')
    with pytest.raises(ValueError, match='nowhere'): learn.to_channelslast(amp_mode='bf16', fp32_modules='nowhere')
    assert list(learn.cbs) == before
