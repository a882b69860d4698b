"Facts about a device, and how each precision judges them: AMD's and Apple's chips, CPUs, and unknown devices."

import pickle
from pathlib import Path

import pandas as pd
import pytest, torch

from fastxtend_amp import precision_support
from fastxtend_amp.devices import facts
from helpers import *


def judged(device):
    "Return the support for bf16, fp16 and TF32, whether `to_amp()` scales the loss, and why bf16 is judged so."
    table, learn = precision_support(device).set_index('mode'), learner()
    learn.dls.device = torch.device(device)
    cb = learn.to_amp().precision
    return *table.support[['bf16', 'fp16', 'tf32']], bool(cb and cb.state_dict()), table.why['bf16']


def as_gpu(monkeypatch, capability, name, arch=None):
    "As if PyTorch found one GPU: AMD's if it has an architecture."
    properties = type('Properties', (), {'name': name, 'gcnArchName': arch or ''})
    for fact, value in dict(
        is_available=True,
        device_count=1,
        get_device_capability=capability,
        get_device_name=name,
        get_device_properties=properties,
        is_bf16_supported=True,  # as on ROCm
    ).items():
        monkeypatch.setattr(torch.cuda, fact, lambda *args, value=value, **kwargs: value)
    monkeypatch.setattr(torch.version, 'hip', None if arch is None else '7.0')


AMD = {  # support for bf16, fp16, TF32; does `to_amp()` scale the loss?
    'gfx1010 gfx1012 gfx1030 gfx1031 gfx1032 gfx1035': ('unsupported', 'native', 'unsupported', True),
    'gfx900 gfx906 gfx909 gfx90c': ('emulated', 'native', 'unsupported', True),
    'gfx908 gfx90a gfx90a:sramecc+:xnack- gfx1100 gfx1201': ('native', 'native', 'unsupported', False),
    'gfx940 gfx942 gfx942:sramecc+:xnack-': ('native', 'native', 'native', False),
}


@pytest.mark.parametrize('arch, expected', [(arch, AMD[names]) for names in AMD for arch in names.split()])
def test_amd_gpus(monkeypatch, arch, expected):
    as_gpu(monkeypatch, (10, 3), 'AMD Radeon', arch)
    *found, why = judged('cuda')
    assert found == [*expected] and facts.amd_architecture(torch.device('cuda')) == arch.partition(':')[0]
    if expected[0] != 'native':
        assert arch in why
    if expected[0] == 'unsupported':  # an error before the first batch, where bf16 would end the process
        learn = learner()
        learn.dls.device = torch.device('cuda', 0)
        with pytest.raises(ValueError, match=rf'(?s)bf16.*{arch}.*learn\.to_fp16\(\)'), learn.to_bf16().amp_context():
            pass


def test_an_nvidia_gpu_has_no_amd_architecture(monkeypatch):
    as_gpu(monkeypatch, (8, 6), 'NVIDIA GeForce RTX 3090')
    gpu = torch.device('cuda', 0)
    assert (facts.cuda_capability(gpu), facts.gpu_name(gpu)) == ((8, 6), 'NVIDIA GeForce RTX 3090')
    assert facts.amd_architecture(gpu) is None


CHIPS = {'emulated': ('M1', 'M1 Pro', 'M1 Ultra', 'M2', 'M2 Ultra'), 'native': ('M3', 'M3 Pro', 'M4 Max', 'M10', 'M12')}


@pytest.mark.parametrize('bf16, chip', [(bf16, f'Apple {chip}') for bf16 in CHIPS for chip in CHIPS[bf16]])
def test_apple_chips(monkeypatch, chip, bf16):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(facts, 'apple_chip', lambda: chip)
    *found, why = judged('mps')
    assert found == [bf16, 'native', 'unsupported', bf16 == 'emulated'] and chip in why


@pytest.mark.parametrize(
    'flags, bf16, fp16',  # the relevant ones of /proc/cpuinfo
    [
        ('avx2 avx512f avx512bw avx512vl', 'emulated', 'emulated'),  # Intel Skylake-SP
        ('avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16', 'native', 'emulated'),  # Cooper Lake, Ryzen 7000
        ('avx2 fma f16c', 'emulated', 'emulated'),  # AMD Ryzen 5000
        ('avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8', 'native', 'native'),  # Intel Sapphire Rapids
        ('fp asimd fphp asimdhp', 'emulated', 'native'),  # AWS Graviton2
        ('fp asimd fphp asimdhp svebf16 bf16', 'native', 'native'),  # AWS Graviton3
    ],
)
def test_cpus_by_their_flags(monkeypatch, flags, bf16, fp16):
    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset(flags.split()))
    assert judged('cpu')[:4] == (bf16, fp16, 'unsupported', bf16 == 'emulated' and fp16 == 'native')


def test_this_machine(monkeypatch):
    "Its CPU's flags are read; without the command `sysctl` there is no Apple chip."
    if Path('/proc/cpuinfo').exists():
        assert 'processor' in facts.cpu_features()
    assert all(name == name.lower() for name in facts.cpu_features())
    monkeypatch.setenv('PATH', '')
    facts.apple_chip.cache_clear()
    assert facts.apple_chip() == ''


@pytest.mark.parametrize('device, bf16, why', [('hpu', 'native', 'backend'), ('vulkan', 'unsupported', 'no autocast')])
def test_devices_without_a_rule(device, bf16, why):
    "PyTorch has autocast for the first, and does not know it for the second."
    table = precision_support(device).set_index('mode')
    assert (table.support['bf16'], table.support['tf32']) == (bf16, 'unsupported') and why in table.why['bf16']


@pytest.mark.parametrize('width', [40, 80])
def test_the_table_is_a_data_frame_that_is_printed_whole(width):
    table = precision_support('cpu')
    with pd.option_context('display.width', width, 'display.max_columns', 0):
        assert repr(table) == str(table) and '...' not in str(table)
    assert isinstance(table, pd.DataFrame) and pickle.loads(pickle.dumps(table)).equals(table)
    assert all(str(x) in str(table) for x in (*table, *table.values.flat))
