"Names of precisions, messages where a device does not support one, and precisions as classes."

import math, warnings

import pytest, torch
from fastai.callback import fp16
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastxtend_amp import AMPMode, MixedPrecision, precision_support
from fastxtend_amp.precisions import find_precision
from fastxtend_amp.training.current import precision_callback
from helpers import At, dataset, finite, is_outside_a_fit, learner, mlp, python, set_support, told

FP16, BF16 = AMPMode.FP16, AMPMode.BF16


@pytest.mark.parametrize(
    'expected, names',
    [
        (FP16, ['fp16', 'FP16', '16-Mixed', 'float16', 'Half', torch.float16, fp16.AMPMode.FP16]),
        (BF16, ['bf16', 'Bf16', 'bf16-mixed', 'bfloat16', torch.bfloat16, fp16.AMPMode.BF16, BF16]),
        (None, ['fp32', 'FP32', 'float32', '32-true', '32', 'no', torch.float32]),
    ],
)
def test_names_of_a_precision(expected, names):
    for name in names:
        cls = find_precision(name)
        assert MixedPrecision(name).amp_mode is expected and cls.name == getattr(expected, 'value', 'fp32')
        with learner().to_tf32().precision_as(name) as learn:
            assert getattr(precision_callback(learn), 'amp_mode', None) is expected


# -- devices; tests/devices/test_facts.py has each kind


def test_devices_that_cannot_and_those_that_do_not_exist():
    for device in ('meta', *(['cuda'] if not torch.cuda.is_available() else [])):
        assert {*precision_support(device).support} == {'unsupported'}
    for wrong in ('gpu', 'cuda:x', '', nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r'(?s)^device=.* cannot be used: it must be .*; this machine has cpu'):
            precision_support(wrong)
    table = precision_support()
    assert [*table.columns] == ['device', 'precision', 'support', 'why'] and table.why.str.len().all()


def test_pytorchs_loaders_have_no_device_so_fastai_uses_the_default_one(monkeypatch):
    monkeypatch.setattr('fastxtend_amp.learners.default_device', lambda: torch.device('meta'))
    loader = torch.utils.data.DataLoader(dataset(), 8)
    learn = Learner(DataLoaders(loader, loader), mlp(), nn.MSELoss())
    with pytest.raises(ValueError, match="does not run on device 'meta'"):  # as the fit would
        learn.to_bf16().fit(1)


def test_a_device_without_autocast(monkeypatch):
    learn = learner().to_bf16()
    with monkeypatch.context() as m:
        m.setattr(torch.amp, 'is_autocast_available', lambda d: False)
        with pytest.raises(ValueError, match="(?s)device 'cpu'.*to_fp32"):
            learn.fit(1)
    assert is_outside_a_fit(learn)
    learn.fit(1)


# -- the warning about emulation


def test_emulation_warns_once_at_the_users_line(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'fp16' else 'native')
    learn = learner().to_fp16()
    with pytest.warns(UserWarning, match=r"(?s)fp16 is emulated on device 'cpu'.*learn\.to_amp\(\)") as caught:
        learn.fit(2)
    assert [w.filename for w in caught if 'emulated' in str(w.message)] == [__file__]
    assert not told(
        lambda: (learn.fit(1), learn.validate(), learn.to_bf16().fit(1), learn.to_fp16().fit(1)), 'emulated'
    )
    assert told(learner().to_fp16().validate, 'emulated')  # as slow as in a fit


def test_each_fit_of_a_loop_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')  # which shows equal words at one line once
        for _ in range(2):
            learner(loss_func=lambda p, y: (p - y).square().mean() * math.inf).to_bf16().fit(1)
    assert [w.filename for w in caught if 'training failed' in str(w.message)] == [__file__] * 2


def test_parameters_that_autocast_leaves_alone_are_named_once():
    class Complex(nn.Linear):
        def __init__(self):
            super().__init__(6, 1)
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, x):
            return super().forward(x) * self.phase.real

    learn = learner(Complex()).to_bf16()
    assert len(told(lambda: (learn.fit(1), learn.fit(1)), "'phase' is torch.complex64")) == 1 and finite(learn)
    words = "Gradients of complex parameters, such as 'phase', cannot be scaled"
    verdict = learn.precision_report('fp16').verdicts['fp16']
    assert verdict.verdict == 'cannot run' and verdict.reason.startswith(words)
    for options in (dict(skip_nonfinite=True), dict(on_overflow='fix')):
        with pytest.raises(ValueError, match=words):
            learn.to_bf16(**options).fit(1)
    with pytest.raises(ValueError, match=words):
        learn.to_fp16().fit(1)
    learn.validate()
    late = At('before_fit', lambda l: setattr(l, 'model', Complex()) or l.create_opt())
    with pytest.raises(ValueError, match=words):
        learner(cbs=late).to_fp16().fit(1)


def test_a_device_that_is_missing_gets_no_advice_on_precisions(monkeypatch):
    monkeypatch.setattr('fastxtend_amp.devices.facts.missing', lambda device: 'it is not there')
    with pytest.raises(ValueError) as e:
        find_precision('bf16')().check_device(torch.device('mps'))
    assert str(e.value) == "bf16 does not run on device 'mps': it is not there."


class Fills(nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(x[:, :1] > 0, -1e9).float()


@pytest.mark.filterwarnings('ignore:Error detected')
@pytest.mark.parametrize(
    'make, scale, note',
    [(lambda: Fills(6, 1), 1.0, 'report'), (lambda: nn.Linear(7, 1), 1.0, ''), (mlp, 1e30, 'Switch off')],
)
def test_errors_of_pytorch_say_what_to_do(make, scale, note):
    with torch.autograd.set_detect_anomaly(scale > 1), pytest.raises(RuntimeError) as e:
        learner(make()).to_fp16(init_scale=scale).fit(1)
    notes = getattr(e.value, '__notes__', [])
    assert not hasattr(e.value, 'add_note') or len(notes) == bool(note) and note in ''.join(notes)


# -- precisions as classes

ROWS = {
    'no docstring': """
class NoDocstring(Precision):
    name = 'silent'
learner().to_silent().fit(1)
assert MixedPrecision('SILENT').amp_mode is None""",
    'defined again, as a notebook cell is': """
for i in 1, 2:
    class Silent(Precision):
        name, size = 'again', i
assert learner().to_again().mixed_precision.precision.size == 2""",
    'names that cannot be used': """
before = Learner.to_amp, Learner.to_detach, dict(PRECISIONS)
for name in 'BF16Body', 'two words', '', 'half', 'amp', 'detach', 'channelslast', 'fp32', 'bf16', 'silent':
    try: type('Mine', (Precision,), dict(name=name))
    except ValueError as e: assert f'name={name!r} cannot be used for Mine' in str(e)
    else: raise AssertionError(name)
assert (Learner.to_amp, Learner.to_detach, PRECISIONS) == before""",
    'AMPMode': "assert [*AMPMode] == ['fp16', 'bf16', 'tf32', 'fp8'] == [AMPMode[m.name] for m in AMPMode]",
    '**kwargs': """
class Keywords(Precision):
    "With any arguments."
    name = 'keywords'
    def __init__(self, **kwargs):
        super().__init__()
        self.size = kwargs['size']
assert learner().to_keywords(size=3).mixed_precision.precision.size == 3""",
    'required': """
class Needs(Precision):
    "With an argument that must be given."
    name = 'needs'
    def __init__(self, what):
        super().__init__()
        self.what = what
assert copy.deepcopy(learner().to_needs('x').mixed_precision).precision.what == 'x'""",
    'dataclass': """
@dataclasses.dataclass
class Data(Precision):
    "A dataclass."
    name = 'data'
    size: int = 3
assert learner().to_data(size=5).mixed_precision.precision.size == 5""",
}
RUN = """
import copy, dataclasses, linecache
from fastai.learner import Learner
from fastxtend_amp import AMPMode, MixedPrecision, Precision
from fastxtend_amp.precisions import PRECISIONS
from helpers import learner
for name, code in {rows!r}.items():
    file = {folder!r} + '/row.py'
    open(file, 'w').write(code)
    linecache.clearcache()
    try: exec(compile(code, file, 'exec'))
    except Exception as e: print(name, repr(e))
"""


def test_classes_that_are_written_in_other_ways(tmp_path):
    "In a process of their own, because a registered precision stays."
    done = python('-c', RUN.format(folder=str(tmp_path), rows=ROWS))
    assert (done.stdout, done.returncode) == ('', 0), done.stderr[-1500:]
