"Arguments: where they go, and what the calls say of those that cannot be used; the API page has the signatures."

import re

import torch
from torch import nn

from fastxtend_amp import MixedPrecision, fused, kahan
from fastxtend_amp.precisions import BF16 as BF16Precision
from helpers import Attentive, errors_of, learner, told


def test_positions_are_those_of_grad_scaler():
    given = (1024.0, 3.0, 0.25, 7, True)
    expected = torch.amp.GradScaler('cpu', *given).state_dict()
    for cb in (MixedPrecision('fp16', *given), learner().to_fp16(*given).mixed_precision):
        assert cb.state_dict() == expected
    assert MixedPrecision(BF16Precision(skip_nonfinite=True)).amp_mode == 'bf16'
    assert repr(MixedPrecision(BF16Precision(), skip_nonfinite=True).precision) == 'learn.to_bf16(skip_nonfinite=True)'


STATES = [{'scale': 1.0}, {'scale': 1.0, '_growth_tracker': None}]
STATES += [{'scale': scale, '_growth_tracker': 0} for scale in (1e300, -2.0, float('nan'), float('inf'))]
ERRORS = {  # what to call with a learner: its error is in tests/expected/arguments.txt
    'scale 0': lambda l: l.to_fp16(init_scale=0.0),
    'scale 1e-40': lambda l: l.to_fp16(init_scale=1e-40),
    'scale inf': lambda l: l.to_fp16(init_scale=float('inf')),
    'scale nan': lambda l: MixedPrecision('fp16', init_scale=float('nan')),
    'scale True': lambda l: l.to_fp16(True),
    'scale, for bf16': lambda l: MixedPrecision('bf16', init_scale=2.0),
    'growth interval True': lambda l: l.to_fp16(growth_interval=True),
    'growth interval 1e3': lambda l: l.to_fp16(growth_interval=1e3),
    'scale, a precision': lambda l: l.to_fp16('bf16'),
    'loss scaling, on or off': lambda l: l.to_fp16(enabled='no'),
    'growth interval 0': lambda l: l.to_fp16(growth_interval=0),
    'growth factor': lambda l: l.to_fp16(growth_factor=0.5),
    'backoff factor': lambda l: l.to_fp16(backoff_factor=-1),
    'scaler': lambda l: l.to_fp16(scaler=3),
    'a scaler of scale 0': lambda l: l.to_fp16(scaler=torch.amp.GradScaler('cpu', 0.0)),
    'a scaler for CUDA on a CPU': lambda l: l.to_fp16(scaler=torch.amp.GradScaler('cuda', enabled=False)),
    'static scale 0': lambda l: l.to_fp16(loss_scale=0.0),
    'static scale and a scaler': lambda l: l.to_fp16(loss_scale=2.0, scaler=torch.amp.GradScaler('cpu')),
    'first scale and a scaler': lambda l: l.to_fp16(4.0, scaler=torch.amp.GradScaler('cpu')),
    'first scale and a fixed one': lambda l: l.to_fp16(loss_scale=512.0, init_scale=1024.0),
    'a fixed scale and none': lambda l: l.to_fp16(loss_scale=2.0, enabled=False),
    'an argument that bf16 does not have': lambda l: l.to_bf16(init_scale=2.0),
    'a misspelt argument': lambda l: l.to_amp(mesure=True),
    'another library, bf16': lambda l: MixedPrecision(bf16=True),
    'another library, fp16': lambda l: l.to_amp(fp16=True),
    **{f'another library, {x!r}': lambda l, x=x: MixedPrecision(x) for x in ('bf16-true', 16)},
    'max_seconds without measure': lambda l: l.to_amp(max_seconds=5),
    'measure': lambda l: l.to_amp(measure='yes'),
    'too many arguments': lambda l: l.to_bf16('head'),
    'skip_nonfinite': lambda l: l.to_bf16(skip_nonfinite='yes'),
    'min_size': lambda l: l.to_fp8(min_size=-1),
    'min_size True': lambda l: l.to_fp8(min_size=True),
    'max_skips True': lambda l: l.to_bf16(max_skips=True),
    'max_skips': lambda l: l.to_bf16(max_skips=1.5),
    'on_overflow where fp32 is selected': lambda l: l.to_amp(on_overflow='stop'),
    'on_overflow': lambda l: l.to_bf16(on_overflow='stop'),
    'an unknown precision': lambda l: MixedPrecision('fp4'),
    'None as a precision': lambda l: MixedPrecision(None),
    'on_overflow, later': lambda l: setattr(l.mixed_precision, 'on_overflow', 'stop'),
    'a default beside a precision': lambda l: MixedPrecision(BF16Precision(), 65536.0),
    'fp32_modules, a name': lambda l: l.to_bf16(fp32_modules='atn'),
    'fp32_modules, a type': lambda l: l.to_fp16(fp32_modules=nn.Conv2d),
    'fp32_modules, a type as a name': lambda l: l.to_bf16(fp32_modules='LayerNorm'),
    'fp32_modules, one of several': lambda l: l.to_bf16(fp32_modules=['attn', 'nope']),
    'fp32_modules, a number': lambda l: l.to_bf16(fp32_modules=3),
    'fp32_modules, no type of modules': lambda l: l.to_bf16(fp32_modules=int),
    'half weights in TF32': lambda l: l.to_half_weights('tf32'),
    'half weights, no': lambda l: l.to_bf16(master_weights='no'),
    'half weights, flat without masters': lambda l: l.to_bf16(flat_master=True, master_weights=False),
    'half weights, fp16 without masters': lambda l: l.to_half_weights('fp16', master_weights=False),
    'fused, an optimizer': lambda l: fused(torch.optim.RMSprop),
    'fused, a list': lambda l: fused(['AdamW']),
    'fused, a name': lambda l: fused('Adamw'),
    'kahan, a name': lambda l: kahan('adamw'),
    'kahan, lr': lambda l: kahan('AdamW', lr=1e-3),
    "kahan, torch's AdamW": lambda l: kahan(torch.optim.AdamW),
    'learning rate': lambda l: l.compare_precision(lr=-1),
    'seeds': lambda l: l.compare_precision(n_seeds=True),
    **{f'state {s}': lambda l, s=s: MixedPrecision().load_state_dict(s) for s in STATES},
    'precision_as': lambda l: l.precision_as('fp64').__enter__(),
}


def test_arguments_that_cannot_be_used(expected):
    "They raise at the call, and change nothing."
    learn = learner(Attentive()).to_bf16()
    before = list(learn.cbs)
    assert re.sub(' object at 0x[0-9a-f]+', '', errors_of(ERRORS, learn)) == expected('arguments')
    assert list(learn.cbs) == before and before[-1].learn is learn


def test_fastais_own_callback_warns_once():
    from fastai.callback.fp16 import MixedPrecision as Fastais
    from fastxtend_amp import messages

    messages._said.pop(Fastais, None)  # another test may have seen the warning
    learn = learner(cbs=Fastais())
    said = told(lambda: (learn.fit(1), learn.fit(1), learner(cbs=Fastais()).fit(1)), 'MixedPrecision')
    assert len(said) == 1
