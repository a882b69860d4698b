"Facts about a device, and how each precision judges them: NVIDIA's, AMD's and Apple's chips, CPUs, unknown devices."

from pathlib import Path

import pandas as pd
import pytest, torch

from fastxtend_amp import precision_support
from fastxtend_amp.devices import facts
from fastxtend_amp.precisions import fastest_native
from helpers import *


def judged(device):
    """Return the support for bf16, fp16, TF32 and FP8, what `to_amp()` selects, and why fp16 is judged so.

    The model is on the CPU: fastai moves it to the device of the DataLoaders when the first fit starts.
    """
    table, learn = precision_support(device).set_index('precision'), learner()
    learn.dls.device = torch.device(device)
    cb = precision_callback(learn.to_amp())
    return [*table.support[['bf16', 'fp16', 'tf32', 'fp8']], cb.precision.name if cb else 'fp32'], table.why['fp16']


def as_gpu(monkeypatch, gpu, has_bf16=True):
    "As if PyTorch found one GPU: NVIDIA's by compute capability and name, or AMD's by its architecture."
    number, _, name = gpu.partition(' ')
    amd = number.startswith('gfx')
    for fact, value in dict(
        is_available=True,
        device_count=1,
        get_device_capability=(10, 3) if amd else tuple(map(int, number.split('.'))),
        get_device_name=name,
        get_device_properties=type('Properties', (), {'name': name, 'gcnArchName': number if amd else ''}),
        is_bf16_supported=has_bf16,
    ).items():
        monkeypatch.setattr(torch.cuda, fact, lambda *args, value=value, **kwargs: value)
    monkeypatch.setattr(torch.version, 'hip', '7.0' if amd else None)


GPUS = {  # support for bf16, fp16, TF32 and FP8, and what `to_amp()` selects
    'emulated emulated unsupported emulated fp32': """5.2; 6.1; 7.5 NVIDIA GeForce GTX 1650; 7.5 NVIDIA T600;
        7.5 NVIDIA GeForce GTX 1660 Ti; 7.5 NVIDIA GeForce MX450; 7.5 NVIDIA T1000 8GB;
        7.5 Quadro T2000 with Max-Q Design""",
    'emulated native unsupported emulated fp16': """6.0; 7.5 Tesla T4; 7.5 NVIDIA GeForce RTX 2080 Ti; 7.5 TITAN RTX;
        7.5 Quadro RTX 5000; gfx900; gfx906; gfx909; gfx90c""",
    'unsupported native unsupported unsupported fp16': 'gfx1010; gfx1012; gfx1030; gfx1031; gfx1032; gfx1035',
    'native native unsupported emulated bf16': 'gfx908; gfx90a; gfx90a:sramecc+:xnack-; gfx1100; gfx1201',
    'native native native emulated bf16': '8.0; gfx940; gfx942; gfx942:sramecc+:xnack-',
    'native native native native bf16': '8.9; 12.0',
}


@pytest.mark.parametrize(
    'gpu, expected', [(gpu.strip(), expected) for expected, gpus in GPUS.items() for gpu in gpus.split(';')]
)
def test_gpus(monkeypatch, gpu, expected):
    as_gpu(monkeypatch, gpu)
    found, why = judged('cuda')
    assert found == expected.split() and gpu.partition(' ')[0].partition(':')[0] in why
    assert {'cpu', 'cuda:0'} <= {*precision_support().device}
    assert fastest_native(torch.device('cuda'), ['bf16', 'fp16']).name == 'fp32'


@pytest.mark.parametrize('gpu', ['gfx1030', '7.5 Tesla T4'])
def test_a_gpu_where_bf16_would_end_the_process(monkeypatch, gpu):
    "An error before the first batch."
    as_gpu(monkeypatch, gpu, has_bf16=False)
    learn = learner()
    learn.dls.device = torch.device('cuda', 0)
    with (
        pytest.raises(ValueError, match=r"(?s)bf16.*'cuda:0'.*use `learn\.to_fp16\(\)`"),
        learn.to_bf16().amp_context(),
    ):
        pass


def test_an_intel_gpu_without_fp64_does_not_scale_the_loss(monkeypatch):
    monkeypatch.setattr(torch.xpu, 'is_available', lambda: True)
    monkeypatch.setattr(torch.xpu, 'get_device_capability', lambda d=None: {'has_fp64': False, 'has_fp16': True})
    table = precision_support('xpu').set_index('precision')
    assert table.support['fp16'] == 'unsupported' and 'float64' in table.why['fp16']


CHIPS = {'emulated': ('M1', 'M1 Pro', 'M1 Ultra', 'M2', 'M2 Ultra'), 'native': ('M3', 'M3 Pro', 'M4 Max', 'M10', 'M12')}


@pytest.mark.parametrize('bf16, chip', [(bf16, f'Apple {chip}') for bf16 in CHIPS for chip in CHIPS[bf16]])
def test_apple_chips(monkeypatch, chip, bf16):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(torch.backends.mps, 'is_macos_or_newer', lambda *version: True)  # PyTorch 2.9 asks
    monkeypatch.setattr(facts, 'apple_chip', lambda: chip)
    found, _ = judged('mps')
    assert found == [bf16, 'native', 'unsupported', 'emulated', 'bf16' if bf16 == 'native' else 'fp16']


CPUS = {  # the relevant ones of the flags in /proc/cpuinfo
    'avx2 avx512f avx512bw avx512vl': 'emulated emulated unsupported emulated fp32',  # Intel Skylake-SP
    'avx512f avx512_vnni avx512_bf16': 'native emulated unsupported emulated bf16',  # Cooper Lake, Ryzen 7000
    'avx2 fma f16c': 'emulated emulated unsupported emulated fp32',  # AMD Ryzen 5000
    'avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile': 'native emulated unsupported emulated bf16',  # Sapphire Rapids
    'fp asimd fphp asimdhp': 'emulated native unsupported emulated fp16',  # AWS Graviton2
    'fp asimd fphp asimdhp svebf16 bf16': 'native native unsupported emulated bf16',  # AWS Graviton3
}


@pytest.mark.parametrize('flags', CPUS)
def test_cpus_by_their_flags(monkeypatch, flags):
    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset(flags.split()))
    assert judged('cpu')[0] == CPUS[flags].split()


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
    "PyTorch has autocast for the first, does not know it for the second, and raises an error for the third."
    table = precision_support(device).set_index('precision')
    assert (table.support['bf16'], table.support['tf32']) == (bf16, 'unsupported') and why in table.why['bf16']


@pytest.mark.parametrize('width', [40, 80])
def test_the_table_is_printed_whole(width):
    table = precision_support('cpu')
    with pd.option_context('display.width', width, 'display.max_columns', 0):
        assert repr(table) == str(table) and '...' not in str(table)
    assert all(str(x) in str(table) for x in (*table, *table.values.flat))
