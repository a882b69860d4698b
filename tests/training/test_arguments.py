"Arguments: what the calls have, and what they say of those that cannot be used."

import inspect, re

import pytest

from fastxtend_amp import HalfWeights, fused
from fastxtend_amp.precisions import BF16 as BF16Precision
from rows import *

SHARED = ['on_overflow', 'max_skips']
FIRST = ['init_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'enabled']
ARGUMENTS = {
    'to_fp16': [*FIRST, 'loss_scale', 'scaler', 'fp32_modules', *SHARED],
    'to_bf16': ['fp32_modules', 'skip_nonfinite', *SHARED],
    'to_tf32': SHARED,
    'to_fp8': ['fp32_modules', 'modules', 'min_size', 'skip_nonfinite', *SHARED],
    'to_half_weights': ['amp_mode', 'loss_scale', 'flat_master', 'master_weights', 'fp32_modules', *SHARED],
}


@pytest.mark.parametrize('call', ARGUMENTS)
def test_each_call_has_the_arguments_of_its_precision(call):
    method = getattr(Learner, call)
    assert [*inspect.signature(method).parameters][1:] == ARGUMENTS[call]
    assert method.__name__ == call and len(method.__doc__) > 60


def test_defaults_and_positions_are_those_of_grad_scaler():
    parameters = [*inspect.signature(Learner.to_fp16).parameters.values()][1:]
    assert [p.default for p in parameters] == [65536.0, 2.0, 0.5, 2000, True, None, None, None, 'warn', 16]
    assert [*inspect.signature(MixedPrecision).parameters][:6] == ['amp_mode', *FIRST]
    given = (1024.0, 3.0, 0.25, 7, True)
    expected = torch.amp.GradScaler('cpu', *given).state_dict()
    for cb in (
        MixedPrecision('fp16', *given),
        MixedPrecision(torch.float16, *given),
        learner().to_fp16(*given).precision,
    ):
        assert cb.state_dict() == expected
    assert MixedPrecision('bf16', init_scale=2, growth_interval=5).state_dict() == {}  # fastai gives them to both
    assert MixedPrecision(BF16Precision(skip_nonfinite=True)).mode == 'bf16'


def scaler():
    return torch.amp.GradScaler('cpu')


ERRORS = {  # what to call: its error is in tests/expected/arguments.txt
    'scale 0': lambda: learner().to_fp16(init_scale=0.0),
    'scale inf': lambda: learner().to_fp16(init_scale=float('inf')),
    'scale nan': lambda: MixedPrecision('fp16', init_scale=float('nan')),
    'static scale 0': lambda: learner().to_fp16(loss_scale=0.0),
    'static scale and a scaler': lambda: learner().to_fp16(loss_scale=2.0, scaler=scaler()),
    'on_overflow': lambda: learner().to_bf16(on_overflow='stop'),
    'an unknown precision': lambda: MixedPrecision('fp4'),
    'fp32 as a precision': lambda: MixedPrecision(torch.float32),
    'None as a precision': lambda: MixedPrecision(None),
    'arguments beside a precision': lambda: MixedPrecision(BF16Precision(), skip_nonfinite=True),
    'fp32_modules, a name': lambda: learner(Attentive()).to_bf16(fp32_modules='atn'),
    'fp32_modules, a type': lambda: learner(Attentive()).to_fp16(fp32_modules=nn.Conv2d),
    'fp32_modules, a type as a name': lambda: learner(Attentive()).to_bf16(fp32_modules='LayerNorm'),
    'fp32_modules, one of several': lambda: learner(Attentive()).to_bf16(fp32_modules=['attn', 'nope']),
    'fp32_modules, a number': lambda: learner(Attentive()).to_bf16(fp32_modules=3),
    'fp32_modules, no type of modules': lambda: learner(Attentive()).to_bf16(fp32_modules=int),
    'half weights in TF32': lambda: learner().to_half_weights('tf32'),
    'half weights, static bf16': lambda: learner().to_half_weights(loss_scale=512.0),
    'half weights, scale 0': lambda: HalfWeights('fp16', 0.0),
    'half weights, flat without masters': lambda: learner().to_half_weights(flat_master=True, master_weights=False),
    'half weights, fp16 without masters': lambda: learner().to_half_weights('fp16', master_weights=False),
    'fused, an optimizer': lambda: fused(torch.optim.RMSprop),
    'fused, a name': lambda: fused('Adamw'),
    "kahan, fastai's Adam": lambda: kahan('AdamWW'),
    'precision_as': lambda: learner().precision_as('fp64').__enter__(),
}


def test_arguments_that_cannot_be_used(expected):
    "They raise at the call, and change nothing."
    learn, lines = learner().to_bf16(), []
    for name, call in ERRORS.items():
        with pytest.raises((ValueError, TypeError)) as e:
            call()
        lines += [f'# {name}', re.sub(' object at 0x[0-9a-f]+', '', f'{e.type.__name__}: {e.value}'), '']
    expected('arguments', '\n'.join(lines))
    before = list(learn.cbs)
    for method, kwargs in (
        ('fp16', dict(init_scale=-1.0)),
        ('half_weights', dict(amp_mode='fp4')),
        ('bf16', dict(fp32_modules='no')),
    ):
        with pytest.raises(ValueError):
            getattr(learn, f'to_{method}')(**kwargs)
    assert list(learn.cbs) == before and before[-1].learn is learn


UNKNOWN = [lambda: learner().to_fp16(initial_scale=2.0), lambda: MixedPrecision('fp16', 1024.0, init_scale=5.0)]


@pytest.mark.parametrize('i', range(len(UNKNOWN)))
def test_unknown_arguments_are_type_errors(i):
    with pytest.raises(TypeError):
        UNKNOWN[i]()


def test_optimizers_that_do_not_fit():
    lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS)
    for to in ('fp16', 'bf16', 'fp32'):
        with pytest.raises(TypeError, match='closure'):
            TO[to](learner(opt_func=lbfgs)).fit(1)
    meta = nn.Parameter(torch.zeros(1, device='meta'))
    meta.grad = torch.zeros(1, device='meta')
    with pytest.raises(RuntimeError, match='(?s)`fused=True` requires.*meta'):
        fused('SGD')([meta], lr=0.1).step()


def test_python_without_docstrings():
    "`python -OO` strips docstrings."
    import subprocess, sys

    code = 'import fastxtend_amp; from fastai.learner import Learner; print(Learner.to_bf16.__name__)'
    done = subprocess.run([sys.executable, '-OO', '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert done.stdout == 'to_bf16\n', done.stderr[-1000:]


def test_fastais_own_callback_warns_once_while_this_package_is_imported():
    from fastai.callback.fp16 import MixedPrecision as Fastais
    from fastxtend_amp.training import loop

    for f in vars(loop).values():  # another test may have seen the warning
        getattr(f, 'cache_clear', noop)()
    learn = learner(cbs=Fastais())
    said = told(lambda: (learn.fit(1), learn.fit(1), learner(cbs=Fastais()).fit(1)), 'MixedPrecision')
    assert len(said) == 1
