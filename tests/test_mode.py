"Which precision a device does natively, and what is said where it does not."
import re, warnings

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


def emulation_warnings(f):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter('always')
        f()
    return [w for w in record if 'emulated' in str(w.message)]


def test_emulated_mode_warns_once_for_a_learner_and_mode_at_the_users_line(monkeypatch):
    fake_cpu(monkeypatch, 'avx512_bf16')
    learn = learner().to_fp16()
    told, = emulation_warnings(lambda: learn.fit(2))
    assert re.search(r'fp16 is emulated.*10 to 100 times slower.*\n.*learn\.to_bf16\(\)', str(told.message)) and told.filename == __file__
    assert not emulation_warnings(lambda: learn.fit(1)) and not emulation_warnings(lambda: learn.to_fp16().fit(1))
    assert len(emulation_warnings(lambda: learner().to_fp16().fit(1))) == 1
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
    monkeypatch.setattr(mode.torch.amp, 'is_autocast_available', lambda d: False)
    learn = learner().to_bf16()
    with pytest.raises(ValueError, match="(?s)device 'cpu'.*to_fp32"): learn.fit(1)
    assert learn.precision._fit is None and 'scaler' not in learn.__dict__
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
        with pytest.raises(ValueError, match=rf"(?s)'rnn' \({kind.__name__}\).*PyTorch says.*fp32_modules=nn.{kind.__name__}") as e: learn.fit(1)
        assert not drawn and 'primitive' in str(e.value) and learn.precision._fit is None
        with pytest.raises(ValueError, match=kind.__name__): learn.get_preds()
    for spec in (torch.nn.LSTM, 'rnn', '*'):
        learn = getattr(learner(Recurrent()), f'to_{mode}')(fp32_modules=spec)
        learn.fit(1)
        assert all(p.isfinite().all() for p in learn.model.parameters()) and len(learn.recorder.losses)


def test_a_layer_that_is_refused_is_named(monkeypatch):
    "As on a CPU that has the kernels or lacks them, whatever this one does."
    from fastxtend_amp import mode as module
    monkeypatch.setattr(module, 'refused_layer', lambda kind, mode: 'no kernel' if kind is torch.nn.LSTM else None)
    with pytest.raises(ValueError, match="(?s)'rnn' \\(LSTM\\).*PyTorch says: no kernel"): learner(Recurrent()).to_bf16().fit(1)
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


# -- which device is asked

def test_before_the_first_fit_the_device_of_the_dataloaders_is_asked(gpu, monkeypatch):
    gpu((7, 5))                                                  # bf16 is emulated there, fp16 is not
    learn = learner()
    learn.dls.device = CUDA                                      # fastai moves the model when the first fit starts
    learn.to_amp()
    assert next(learn.model.parameters()).device.type == 'cpu' and learn.precision.scales_loss
    assert learn.precision.state_dict()['scale'] == 65536.
    context = learn.amp_context()
    assert context.device == 'cuda' and context.fast_dtype is torch.float16


def test_a_default_device_does_not_change_what_probes_find(monkeypatch):
    from fastxtend_amp.guard import cache_loses_gradients
    from fastxtend_amp.mode import refused_layer
    expected = refused_layer(torch.nn.LSTM, AMPMode.FP16), cache_loses_gradients(), precision_support('cpu').values.tolist()
    refused_layer.cache_clear(); cache_loses_gradients.cache_clear()
    torch.set_default_device('meta')
    try: found = refused_layer(torch.nn.LSTM, AMPMode.FP16), cache_loses_gradients(), precision_support('cpu').values.tolist()
    finally: torch.set_default_device(None)
    assert found == expected


def test_pascal_consumer_cards_do_not_do_fp16_natively(gpu):
    gpu((6, 1)); assert mode.mode_support(AMPMode.FP16, CUDA).status == 'emulated' and mode.fastest_native(CUDA) is None
    gpu((6, 0)); assert mode.mode_support(AMPMode.FP16, CUDA).status == 'native'


def test_intel_gpus_without_fp64_do_not_scale_the_loss(monkeypatch):
    monkeypatch.setattr(torch.xpu, 'is_available', lambda: True)
    for fp64, expected in ((False, 'unsupported'), (True, 'native')):
        monkeypatch.setattr(torch.xpu, 'get_device_capability', lambda d=None: {'has_fp64': fp64, 'has_fp16': True})
        found = mode._xpu(AMPMode.FP16, torch.device('xpu'))
        assert found.status == expected and ('float64' in found.why) is not fp64


def test_a_model_given_as_device_is_refused_by_name():
    with pytest.raises(ValueError, match='device=Linear.*is not a torch device'): precision_support(torch.nn.Linear(2, 2))


def test_to_amp_with_a_mode_names_the_method():
    with pytest.raises(TypeError, match=r'(?s)to_amp\(.bf16.\).*learn\.to_bf16\(\)'): learner().to_amp('bf16')


def test_the_callback_lists_its_own_names_and_shows_mode_and_scale():
    learn = learner().to_fp16(init_scale=1024.)
    assert 'plot_scales' in dir(learn.precision) and 'dls' not in dir(learn.precision) and 'lin' not in dir(learn.precision)
    assert repr(learn.precision) == "MixedPrecision('fp16', scale=1024)" and learn.precision.scale == 1024.
    assert learner().to_bf16().precision.scale is None and learner().precision is None
    with pytest.raises(ValueError, match=r"MixedPrecision\('fp16', scale=1024\), MixedPrecision\('bf16'\)"):
        learn.fit(1, cbs=MixedPrecision('bf16'))


def test_advice_names_every_argument_that_is_not_the_default():
    learn = learner().to_fp16(init_scale=1024., fp32_modules=torch.nn.BatchNorm1d, max_skips=4)
    assert learn.precision.as_call() == "learn.to_fp16(init_scale=1024.0, fp32_modules=['1'], max_skips=4)"
    assert learn.precision.as_call(fp32_modules=['1', '3']) == "learn.to_fp16(init_scale=1024.0, fp32_modules=['1', '3'], max_skips=4)"
    assert learn.precision.as_call(amp_mode='bf16') == "learn.to_bf16(fp32_modules=['1'], max_skips=4)"
    assert learner().to_amp(loss_scale=8.).precision.as_call() == 'learn.to_amp(loss_scale=8.0)'
    assert learner().to_bf16().precision.as_call() == 'learn.to_bf16()'


@pytest.mark.parametrize('name,expected', [('float16', 'fp16'), ('half', 'fp16'), ('Half', 'fp16'), ('bfloat16', 'bf16'), ('BFloat16', 'bf16')])
def test_torchs_names_of_dtypes(name, expected): assert AMPMode(name) == expected and MixedPrecision(name).mode == expected
