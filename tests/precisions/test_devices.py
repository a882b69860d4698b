"Which precisions a device supports natively, and the messages where it does not."

import pytest, torch
from fastai.callback import fp16
from torch import nn

from fastxtend_amp import AMPMode, precision_support
from fastxtend_amp.devices import facts
from fastxtend_amp.precisions import PRECISIONS, fastest_native
from helpers import *

CUDA = torch.device('cuda:0')
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
    assert expected.dtype is (
        torch.float16 if expected is FP16 else torch.bfloat16
    ) and expected.needs_loss_scaling is (expected is FP16)


# -- devices


@pytest.fixture
def gpu(monkeypatch):
    "Return a function that replaces the capability queries by those of an imagined NVIDIA GPU."

    def replace(capability, bf16=True, name='Tesla T4'):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device=None: name)
        monkeypatch.setattr(
            torch.cuda, 'is_bf16_supported', lambda including_emulation=True: bf16 or capability >= (8, 0)
        )
        monkeypatch.setattr(torch.version, 'hip', None)

    return replace


def statuses(device):
    table = precision_support(device).set_index('mode')
    return table.support['bf16'], table.support['fp16']


@pytest.mark.parametrize(
    'capability, emulates, bf16, fp16, tf32, fp8, auto',
    [
        ((5, 2), True, 'emulated', 'emulated', 'unsupported', 'emulated', None),
        ((6, 0), True, 'emulated', 'native', 'unsupported', 'emulated', 'fp16'),
        ((6, 1), True, 'emulated', 'emulated', 'unsupported', 'emulated', None),
        ((7, 5), False, 'unsupported', 'native', 'unsupported', 'unsupported', 'fp16'),
        ((8, 0), True, 'native', 'native', 'native', 'emulated', 'bf16'),
        ((8, 9), True, 'native', 'native', 'native', 'native', 'bf16'),
        ((12, 0), True, 'native', 'native', 'native', 'native', 'bf16'),
    ],
)
def test_nvidia_gpus(gpu, capability, emulates, bf16, fp16, tf32, fp8, auto):
    gpu(capability, emulates)
    assert statuses('cuda:0') == (bf16, fp16) and fastest_native(CUDA) == auto
    assert tuple(precision_support('cuda:0').set_index('mode').support[['tf32', 'fp8']]) == (tf32, fp8)
    assert [fastest_native(CUDA, [BF16, FP16])] == [None]
    assert '{}.{}'.format(*capability) in precision_support('cuda').why[0] and set(precision_support().device) >= {
        'cpu',
        'cuda:0',
    }


@pytest.mark.parametrize(
    'name, fp16',
    [
        *(
            (f'NVIDIA {name}', 'emulated')
            for name in ('GeForce GTX 1650', 'GeForce GTX 1660 Ti', 'GeForce MX450', 'T600')
        ),
        *((name, 'emulated') for name in ('Quadro T2000 with Max-Q Design', 'NVIDIA T1000 8GB')),
        *((name, 'native') for name in ('Tesla T4', 'NVIDIA GeForce RTX 2080 Ti', 'Quadro RTX 5000', 'TITAN RTX')),
    ],
)
def test_cards_of_capability_7_5_without_tensor_cores_train_in_fp32(gpu, name, fp16):
    gpu((7, 5), name=name)
    assert statuses('cuda:0') == ('emulated', fp16)
    assert fastest_native(CUDA) == (None if fp16 == 'emulated' else FP16)
    assert ('NaN' in PRECISIONS['fp16'].support(CUDA).why) is (fp16 == 'emulated')


def test_messages_for_gpus(gpu):
    gpu((7, 5), False)
    with pytest.raises(ValueError) as e:
        PRECISIONS['bf16']().check_device(CUDA)
    assert all(s in str(e.value) for s in ('bf16', 'cuda:0', 'On this device, use `learn.to_fp16()`.'))


def test_other_gpus(gpu, monkeypatch):
    "AMD's GPUs support both; Intel's GPUs without fp64 do not scale the loss."
    gpu((5, 2))
    monkeypatch.setattr(torch.version, 'hip', '7.0')
    monkeypatch.setattr(facts, 'amd_architecture', lambda device: 'gfx942')
    assert statuses('cuda') == ('native', 'native')
    monkeypatch.setattr(torch.xpu, 'is_available', lambda: True)
    monkeypatch.setattr(torch.xpu, 'get_device_capability', lambda d=None: {'has_fp64': False, 'has_fp16': True})
    table = precision_support('xpu').set_index('mode')
    assert table.support['fp16'] == 'unsupported' and 'float64' in table.why['fp16']


def fake_cpu(monkeypatch, features):
    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset(features.split()))


@pytest.mark.parametrize(
    'features, bf16, fp16',
    [
        ('avx2', 'emulated', 'emulated'),
        ('avx512_bf16', 'native', 'emulated'),
        ('amx_bf16 avx512_fp16', 'native', 'native'),
        ('bf16 fphp', 'native', 'native'),
    ],
)
def test_cpus(monkeypatch, features, bf16, fp16):
    fake_cpu(monkeypatch, features)
    assert statuses('cpu') == (bf16, fp16)


def test_devices_that_cannot_and_those_that_do_not_exist():
    for device in ('meta', *(['cuda'] if not torch.cuda.is_available() else [])):
        assert statuses(device) == ('unsupported',) * 2
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


# -- the warning about emulation, and 'auto'


def test_an_emulated_mode_warns_in_each_fit_at_the_users_line(monkeypatch):
    fake_cpu(monkeypatch, 'avx512_bf16')
    learn = learner().to_fp16()
    with pytest.warns(UserWarning, match=r"(?s)fp16 is emulated on device 'cpu'.*learn\.to_amp\(\)") as caught:
        learn.fit(2)
    assert [w.filename for w in caught if 'emulated' in str(w.message)] == [__file__]
    assert not told(lambda: (learn.validate(), learn.to_bf16().fit(1)), 'emulated')


def test_before_the_first_fit_the_device_of_the_dataloaders_is_asked(gpu):
    gpu((7, 5))  # bf16 is emulated there, fp16 is not
    learn = learner()
    learn.dls.device = CUDA  # fastai moves the model when the first fit starts
    learn.to_amp()
    assert next(learn.model.parameters()).device.type == 'cpu' and learn.precision.state_dict()['scale'] == 65536.0


# -- layers that a CPU cannot run


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_an_lstm_runs_or_the_error_says_how_to_keep_it_in_fp32():
    learn = learner(Recurrent(6, 1)).to_fp16(init_scale=256.0)
    try:
        learn.fit(1)
    except RuntimeError as e:  # on most CPUs oneDNN has no fp16 LSTM kernel
        assert 'precision_report()' in ''.join(getattr(e, '__notes__', ['precision_report()']))
        assert is_outside_a_fit(learn)
        learn.to_fp16(init_scale=256.0, fp32_modules=nn.LSTM).fit(1)
    assert finite(learn)


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
