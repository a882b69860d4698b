"Names of precisions, messages where a device does not support one, and precisions as classes."

import pytest, torch
from fastai.callback import fp16

from fastxtend_amp import AMPMode, precision_support
from helpers import *

FP16, BF16 = AMPMode.FP16, AMPMode.BF16


@pytest.mark.parametrize(
    'expected, names',
    [
        (FP16, ['fp16', 'FP16', '16-Mixed', 'float16', 'Half', torch.float16, fp16.AMPMode.FP16]),
        (BF16, ['bf16', 'Bf16', 'bf16-mixed', 'bfloat16', torch.bfloat16, fp16.AMPMode.BF16, BF16]),
    ],
)
def test_names_of_a_mode(expected, names):
    for name in names:
        assert AMPMode(name) is expected and MixedPrecision(name).mode is expected
    dtype = torch.float16 if expected is FP16 else torch.bfloat16
    assert expected.dtype is dtype and expected.needs_loss_scaling is (expected is FP16)


# -- devices; tests/devices/test_facts.py has each kind


def test_devices_that_cannot_and_those_that_do_not_exist():
    for device in ('meta', *(['cuda'] if not torch.cuda.is_available() else [])):
        assert {*precision_support(device).support} == {'unsupported'}
    for wrong in ('gpu', 'cuda:x', '', nn.Linear(2, 2)):
        with pytest.raises((RuntimeError, TypeError), match='(?i)device'):
            precision_support(wrong)
    table = precision_support()
    assert [*table.columns] == ['device', 'mode', 'support', 'why'] and table.why.str.len().all()


def test_a_device_without_autocast(monkeypatch):
    learn = learner().to_bf16()
    with monkeypatch.context() as m:
        m.setattr(torch.amp, 'is_autocast_available', lambda d: False)
        with pytest.raises(ValueError, match="(?s)device 'cpu'.*to_fp32"):
            learn.fit(1)
    assert is_outside_a_fit(learn)
    learn.fit(1)


# -- the warning about emulation


def test_an_emulated_mode_warns_in_each_fit_at_the_users_line(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'fp16' else 'native')
    learn = learner().to_fp16()
    with pytest.warns(UserWarning, match=r"(?s)fp16 is emulated on device 'cpu'.*learn\.to_amp\(\)") as caught:
        learn.fit(2)
    assert [w.filename for w in caught if 'emulated' in str(w.message)] == [__file__]
    assert not told(lambda: (learn.validate(), learn.to_bf16().fit(1)), 'emulated')
    assert told(lambda: learn.to_half_weights('fp16').fit(1), 'half_weights is emulated')
    assert not told(lambda: learn.to_half_weights('bf16').fit(1), 'emulated')


def test_an_error_about_dtypes_says_where_to_look():
    class Fills(nn.Linear):
        def forward(self, x):
            return super().forward(x).masked_fill(x[:, :1] > 0, -1e9).float()

    for model, note in ((Fills(6, 1), True), (nn.Linear(7, 1), False)):
        with pytest.raises(RuntimeError) as e:
            learner(model).to_fp16().fit(1)
        assert ('precision_report' in ''.join(getattr(e.value, '__notes__', []))) is note or not hasattr(
            e.value, 'add_note'
        )


# -- precisions as classes

ROWS = {
    'no docstring': """
class NoDocstring(Precision):
    name = 'mxfp8'
learner().to_mxfp8().fit(1)""",
    'AMPMode': "assert AMPMode.MXFP8 == 'mxfp8' == MixedPrecision('MXFP8').mode",
    '**kwargs': """
class Keywords(Precision):
    "With any arguments."
    name = 'keywords'
    def __init__(self, **kwargs):
        super().__init__()
        self.size = kwargs['size']
assert learner().to_keywords(size=3).precision.precision.size == 3""",
    'required': """
class Needs(Precision):
    "With an argument that must be given."
    name = 'needs'
    def __init__(self, what):
        super().__init__()
        self.what = what
assert copy.deepcopy(learner().to_needs('x').precision).precision.what == 'x'""",
    'dataclass': """
@dataclasses.dataclass
class Data(Precision):
    "A dataclass."
    name = 'data'
    size: int = 3
assert learner().to_data(size=5).precision.precision.size == 5""",
}
RUN = """
import sys; sys.path.insert(0, {path!r})
import copy, dataclasses, linecache
from fastxtend_amp import AMPMode
from fastxtend_amp.precisions import Precision
from helpers import *
for name, code in {rows!r}.items():
    file = {folder!r} + '/row.py'
    open(file, 'w').write(code)
    linecache.clearcache()
    try: exec(compile(code, file, 'exec'))
    except Exception as e: print(name, repr(e))
"""


def test_classes_that_are_written_in_other_ways(tmp_path):
    "In a process of their own, because a registered precision stays."
    import subprocess, sys
    from pathlib import Path

    code = RUN.format(folder=str(tmp_path), path=str(Path(__file__).parents[1]), rows=ROWS)
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ('', 0), done.stderr[-1500:]
