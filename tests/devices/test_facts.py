"Facts about a device, and how each precision judges them: NVIDIA's, AMD's, Intel's and Apple's chips, CPUs, XLA."

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd, pytest, torch

from fastxtend_amp import precision_support
from fastxtend_amp.devices import facts
from fastxtend_amp.precisions import fastest_native
from fastxtend_amp.training.current import precision_callback
from helpers import learner


def pose(monkeypatch, kind, chip):
    """As if PyTorch found this device: NVIDIA's GPU by compute capability and name, AMD's by its architecture.

    Apple's chip by its name, a CPU by the relevant flags in /proc/cpuinfo, Intel's GPU by what it lacks.
    """
    number, _, name = chip.partition(' ')
    amd = number.startswith('gfx')
    capability = tuple(map(int, number.split('.'))) if kind == 'cuda' and not amd else (10, 3)
    lacks = dict.fromkeys(chip.split(), False)
    for place, fact, value in [
        (torch.cuda, 'is_available', kind == 'cuda'),
        (torch.cuda, 'device_count', 1),
        (torch.cuda, 'get_device_capability', capability),
        (torch.cuda, 'get_device_name', name),
        (torch.cuda, 'get_device_properties', SimpleNamespace(gcnArchName=number)),
        (torch.xpu, 'is_available', kind == 'xpu'),
        (torch.xpu, 'get_device_capability', lacks),
        (torch.mps, 'is_available', kind == 'mps'),
        (torch.backends.mps, 'is_macos_or_newer', True),  # PyTorch 2.9 asks
        (facts, 'apple_chip', chip),
        (facts, 'cpu_features', frozenset(chip.split())),
        (facts, 'xla_hardware', chip),
    ]:
        monkeypatch.setattr(place, fact, lambda *args, value=value, **kwargs: value)
    monkeypatch.setattr(torch.version, 'hip', '7.0' if amd else None)
    monkeypatch.setitem(sys.modules, 'torch_xla', None)


DEVICES = {  # by the support for bf16, fp16, TF32 and FP8, and what `to_amp()` selects
    # The last two are Intel's Skylake-SP and AMD's Ryzen 5000.
    'emulated emulated unsupported emulated fp32': """cuda 5.2; cuda 6.1; cuda 7.5 NVIDIA GeForce GTX 1650;
        cuda 7.5 NVIDIA T600; cuda 7.5 NVIDIA GeForce GTX 1660 Ti; cuda 7.5 NVIDIA GeForce MX450;
        cuda 7.5 NVIDIA T1000 8GB; cuda 7.5 Quadro T2000 with Max-Q Design; xla CPU;
        cpu avx2 avx512f avx512bw avx512vl; cpu avx2 fma f16c""",
    # The last one is AWS's Graviton2.
    'emulated native unsupported emulated fp16': """cuda 6.0; cuda 7.5 Tesla T4; cuda 7.5 NVIDIA GeForce RTX 2080 Ti;
        cuda 7.5 TITAN RTX; cuda 7.5 Quadro RTX 5000; cuda gfx900; cuda gfx906; cuda gfx909; cuda gfx90c;
        mps Apple M1; mps Apple M1 Pro; mps Apple M2 Ultra; xpu has_bfloat16_conversions; cpu fp asimd fphp asimdhp""",
    'unsupported native unsupported unsupported fp16': """cuda gfx1010; cuda gfx1012; cuda gfx1030; cuda gfx1031;
        cuda gfx1032; cuda gfx1035""",
    # Intel's Cooper Lake or AMD's Ryzen 7000, and Intel's Sapphire Rapids.
    'native emulated unsupported emulated bf16': """xla TPU; cpu avx512f avx512_vnni avx512_bf16;
        cpu avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile""",
    'native unsupported unsupported emulated bf16': 'xpu has_fp64',
    # The last one is AWS's Graviton3.
    'native native unsupported emulated bf16': """cuda gfx908; cuda gfx90a; cuda gfx90a:sramecc+:xnack-; cuda gfx1100;
        cuda gfx1201; mps Apple M3; mps Apple M4 Max; mps Apple M10; mps Apple M12; xpu; xla CUDA;
        cpu fp asimd fphp asimdhp svebf16 bf16""",
    'native native native emulated bf16': 'cuda 8.0; cuda gfx940; cuda gfx942; cuda gfx942:sramecc+:xnack-',
    'native native native native bf16': 'cuda 8.9; cuda 12.0',
}


@pytest.mark.parametrize(
    'device, expected', [(' '.join(d.split()), expected) for expected, ds in DEVICES.items() for d in ds.split(';')]
)
def test_what_a_device_supports_and_what_is_selected(monkeypatch, device, expected):
    "The model is on the CPU: fastai moves it to the device of the DataLoaders when the first fit starts."
    kind, _, chip = device.partition(' ')
    pose(monkeypatch, kind, chip)
    table, learn = precision_support(kind).set_index('precision'), learner()
    learn.dls.device = torch.device(kind)
    cb = precision_callback(learn.to_amp())
    assert [*table.support[['bf16', 'fp16', 'tf32', 'fp8']], cb.precision.name if cb else 'fp32'] == expected.split()
    assert fastest_native(torch.device(kind), ['bf16', 'fp16']).name == 'fp32'
    if kind == 'cuda':
        assert chip.partition(' ')[0].partition(':')[0] in table.why['fp16']
        assert {'cpu', 'cuda:0'} <= {*precision_support().device}
        assert {*precision_support('cuda:9').why[:2]} == {'PyTorch finds only cuda:0'}


def test_a_gpu_where_bf16_would_end_the_process(monkeypatch):
    "An error before the first batch."
    pose(monkeypatch, 'cuda', 'gfx1030')
    learn = learner().to_bf16()
    learn.dls.device = torch.device('cuda', 0)
    with pytest.raises(ValueError, match=r"(?s)bf16.*'cuda:0'.*use `learn\.to_fp16\(\)`"), learn.amp_context():
        pass


def test_this_machine(monkeypatch, pytestconfig):
    "Its CPU's flags are read, unless `--cpu` names others; without the command `sysctl` there is no Apple chip."
    if Path('/proc/cpuinfo').exists() and not pytestconfig.getoption('cpu'):
        assert 'processor' in facts.cpu_features()
    assert all(name == name.lower() for name in facts.cpu_features())
    monkeypatch.setenv('PATH', '')
    facts.apple_chip.cache_clear()
    assert facts.apple_chip() == ''


WITHOUT_RULE = [('hpu', 'native', 'backend'), ('vulkan', 'unsupported', 'no autocast')]
WITHOUT_RULE += [('privateuseone', 'unsupported', 'has not registered')]


@pytest.mark.parametrize('device, bf16, why', WITHOUT_RULE)
def test_devices_without_a_rule(device, bf16, why):
    "PyTorch has autocast for the first, does not know it for the second, and raises an error for the third_batch."
    table = precision_support(device).set_index('precision')
    assert (table.support['bf16'], table.support['tf32']) == (bf16, 'unsupported') and why in table.why['bf16']


@pytest.mark.parametrize('width', [40, 80])
def test_the_table_is_printed_whole(width):
    table = precision_support('cpu')
    with pd.option_context('display.width', width, 'display.max_columns', 0):
        assert repr(table) == str(table) and '...' not in str(table)
    assert all(str(x) in str(table) for x in (*table, *table.values.flat))
