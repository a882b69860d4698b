"Which precision a device does natively, and what is said where it does not."
import warnings

import pytest, torch
from fastai.callback import fp16

import fastxtend_amp.mode as mode
from fastxtend_amp import AMPMode, MixedPrecision, precision_support
from helpers import *

CUDA = torch.device('cuda:0')


@pytest.mark.parametrize('value,expected', [
    ('fp16', 'fp16'), ('FP16', 'fp16'), ('16-mixed', 'fp16'), ('16-Mixed', 'fp16'), (torch.float16, 'fp16'), (fp16.AMPMode.FP16, 'fp16'),
    ('bf16', 'bf16'), ('Bf16', 'bf16'), ('bf16-mixed', 'bf16'), (torch.bfloat16, 'bf16'), (fp16.AMPMode.BF16, 'bf16'), (AMPMode.BF16, 'bf16')], ids=str)
def test_names_of_a_mode(value, expected):
    assert AMPMode(value) == expected and AMPMode(value) is AMPMode(expected) and MixedPrecision(value).mode is AMPMode(expected)


@pytest.mark.parametrize('value', ['fp8', 'fp32', '', None, 16, torch.float32, True, ['fp16'], {}], ids=str)
def test_unknown_mode(value):
    with pytest.raises(ValueError, match='bf16-mixed') as e: MixedPrecision(value)
    assert repr(value) in str(e.value) and "'16-mixed'" in str(e.value) and 'to_fp32' in str(e.value)


def test_mode_properties():
    assert (AMPMode.FP16.dtype, AMPMode.BF16.dtype) == (torch.float16, torch.bfloat16)
    assert AMPMode.FP16.needs_loss_scaling and not AMPMode.BF16.needs_loss_scaling


@pytest.fixture
def gpu(monkeypatch):
    "A function that replaces the capability queries by those of an imagined NVIDIA card."
    def replace(capability, bf16=True):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
        monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: bf16 if capability < (8, 0) else True)
        monkeypatch.setattr(torch.version, 'hip', None)
    return replace


@pytest.mark.parametrize('capability,bf16_emulated,bf16,fp16,auto', [
    ((5, 2), True, 'emulated', 'emulated', None), ((7, 0), True, 'emulated', 'native', 'fp16'), ((7, 5), False, 'unsupported', 'native', 'fp16'),
    ((8, 0), True, 'native', 'native', 'bf16'), ((9, 0), True, 'native', 'native', 'bf16'), ((12, 0), True, 'native', 'native', 'bf16')], ids=str)
def test_cuda_rules(gpu, capability, bf16_emulated, bf16, fp16, auto):
    gpu(capability, bf16_emulated)
    table = precision_support('cuda:0').set_index('mode').support
    assert (table['bf16'], table['fp16']) == (bf16, fp16)
    assert mode.fastest_native(CUDA) == auto
    assert f'{capability[0]}.{capability[1]}' in precision_support('cuda').why[0]
    assert set(precision_support().device) >= {'cpu', 'cuda:0'}


def test_cuda_messages(gpu):
    gpu((7, 5))
    message = mode.emulation_warning(AMPMode.BF16, CUDA)
    assert 'bf16 is emulated' in message and "'cuda:0'" in message and 'to_fp16()' in message and '7.5' in message
    gpu((7, 5), False)
    with pytest.raises(ValueError) as e: mode.check_supported(AMPMode.BF16, CUDA)
    assert all(s in str(e.value) for s in ('bf16', 'cuda:0', '`to_fp16()`', '`to_fp32()`')) and 'to_bf16' not in str(e.value)
    gpu((5, 2)); assert 'to_fp32()' in mode.emulation_warning(AMPMode.FP16, CUDA)


def test_rocm(gpu, monkeypatch):
    gpu((9, 4)); monkeypatch.setattr(torch.version, 'hip', '7.0')
    assert list(precision_support('cuda').support) == ['native', 'native']


@pytest.mark.parametrize('features,bf16,fp16', [
    ('avx2', 'emulated', 'emulated'), ('avx512_bf16', 'native', 'emulated'), ('amx_bf16 avx512_fp16', 'native', 'native'), ('bf16 fphp', 'native', 'native')])
def test_cpu_rules(monkeypatch, features, bf16, fp16):
    monkeypatch.setattr(mode, 'cpu_features', lambda: frozenset(features.split()))
    table = precision_support('cpu').set_index('mode').support
    assert (table['bf16'], table['fp16']) == (bf16, fp16)


def test_devices_that_cannot():
    assert set(precision_support('meta').support) == {'unsupported'}
    if not torch.cuda.is_available(): assert set(precision_support('cuda').support) == {'unsupported'}
    for wrong in ('gpu', 'cuda:x', ''):
        with pytest.raises(ValueError, match='is not a torch device'): precision_support(wrong)
    table = precision_support()
    assert list(table.columns) == ['device', 'mode', 'support', 'why'] and len(table) % 2 == 0 and table.why.str.len().all()


def fake_cpu(monkeypatch, features): monkeypatch.setattr(mode, 'cpu_features', lambda: frozenset(features.split()))


def test_emulated_mode_warns_once_per_fit(monkeypatch):
    fake_cpu(monkeypatch, 'avx512_bf16')
    learn = learner().to_fp16()
    for _ in range(2):
        with pytest.warns(UserWarning, match=r'fp16 is emulated.*learn\.to_bf16\(\)') as record: learn.fit(2)
        assert sum('emulated' in str(w.message) for w in record) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*emulated.*')
        learn.validate(); learn.to_bf16().fit(1)


@pytest.mark.parametrize('features,expected', [('avx512_bf16 avx512_fp16', 'bf16'), ('avx512_fp16', 'fp16'), ('', None)])
def test_auto(monkeypatch, features, expected):
    fake_cpu(monkeypatch, features)
    learn, dtypes = learner().to_amp(init_scale=256.), set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
    cb = learn.mixed_precision
    assert cb.amp_mode == 'auto' and cb.mode is None
    with warnings.catch_warnings(record=True) as record: warnings.simplefilter('always'); learn.fit(2)
    assert sum('fp32' in str(w.message) for w in record) == (expected is None)
    assert cb.amp_mode == 'auto' and cb.mode == expected
    assert dtypes == {AMPMode(expected).dtype if expected else torch.float32}
    assert set(cb.scales) == ({256.} if expected == 'fp16' else set())
    with learn.amp_context(): assert torch.is_autocast_enabled('cpu') == (expected is not None)


def test_auto_takes_scaler_and_loss_scale(monkeypatch):
    fake_cpu(monkeypatch, '')
    scaler = torch.amp.GradScaler('cpu', init_scale=4.)
    assert [c.amp_mode for c in (MixedPrecision('AUTO', scaler=scaler), MixedPrecision('auto', loss_scale=8.))] == ['auto', 'auto']
    fake_cpu(monkeypatch, 'fphp')
    learn = learner().to_amp(scaler=scaler); learn.fit(1); assert learn.mixed_precision.scaling.scaler is scaler


def test_device_without_autocast(monkeypatch):
    monkeypatch.setattr(mode.torch.amp.autocast_mode, 'is_autocast_available', lambda d: False)
    learn = learner().to_bf16()
    with pytest.raises(ValueError, match="device 'cpu'.*to_fp32"): learn.fit(1)
    assert not {'one_batch', 'scaler'} & learn.__dict__.keys()
    monkeypatch.undo(); learn.fit(1)


# -- layers that a CPU cannot run

class Recurrent(torch.nn.Module):
    def __init__(self, kind=torch.nn.LSTM): super().__init__(); self.rnn, self.head = kind(6, 4, batch_first=True), torch.nn.Linear(4, 1)
    def forward(self, x): return self.head(self.rnn(x[:, None])[0][:, 0])


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_recurrent_layers_run_or_are_refused_by_name_when_fit_starts(mode):
    from fastxtend_amp.mode import refused_layer
    drawn = []
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        try: kind(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError: continue                            # a GRU on the CPU, once torch_xla has made an XLA device
        learn = getattr(learner(Recurrent(kind)), f'to_{mode}')()
        learn.add_cb(At('before_batch', drawn.append, -50))
        if refused_layer(kind, AMPMode(mode)) is None: learn.fit(1); continue
        drawn.clear()
        with pytest.raises(ValueError, match=rf"'rnn' \({kind.__name__}\): PyTorch says.*fp32_modules=nn.{kind.__name__}") as e: learn.fit(1)
        assert not drawn and 'primitive' in str(e.value) and 'one_batch' not in vars(learn)
        with pytest.raises(ValueError, match=kind.__name__): learn.get_preds()
    for spec in (torch.nn.LSTM, 'rnn', '*'):
        learn = getattr(learner(Recurrent()), f'to_{mode}')(fp32_modules=spec)
        learn.fit(1)
        assert all(p.isfinite().all() for p in learn.model.parameters()) and len(learn.recorder.losses)


def test_a_layer_that_is_refused_is_named(monkeypatch):
    "As on a CPU that has the kernels or lacks them, whatever this one does."
    from fastxtend_amp import mode as module
    monkeypatch.setattr(module, 'refused_layer', lambda kind, mode: 'no kernel' if kind is torch.nn.LSTM else None)
    with pytest.raises(ValueError, match="'rnn' \\(LSTM\\): PyTorch says: no kernel"): learner(Recurrent()).to_bf16().fit(1)
    learner(Recurrent()).to_fp32().fit(1)
    monkeypatch.setattr(module, 'refused_layer', lambda kind, mode: None)
    assert learner(Recurrent(torch.nn.RNN)).to_bf16().fit(1) is None


def test_a_layer_that_fails_in_fp32_too_is_not_refused():
    from fastxtend_amp.mode import refused_layer
    class Broken(torch.nn.RNN):
        def forward(self, x): raise RuntimeError('in any precision')
    class Low(torch.nn.RNN):
        def forward(self, x):
            if torch.is_autocast_enabled('cpu'): raise RuntimeError('no kernel')
            return super().forward(x)
    assert refused_layer(Broken, AMPMode.BF16) is None and refused_layer(Low, AMPMode.BF16) == 'no kernel'
