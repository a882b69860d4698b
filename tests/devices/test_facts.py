"Facts about a device, and how each precision judges them: AMD's and Apple's chips, CPUs, and unknown devices."

import pytest, torch

from fastxtend_amp import precision_support
from fastxtend_amp.devices import facts
from helpers import *

CUDA = torch.device('cuda', 0)


def status(device):
    "How the device runs each precision, by name."
    table = precision_support(device)
    return dict(zip(table['mode'], table.support))


def why(device, mode):
    return precision_support(device).set_index('mode').why[mode]


def automatic_scales_the_loss(device):
    "Whether `to_amp()` uses fp16 on the device."
    learn = learner()
    learn.dls.device = torch.device(device)
    return bool(learn.to_amp().precision.state_dict())


# -- the facts themselves, read from PyTorch and from the system


class Properties:
    def __init__(self, name, arch):
        self.name, self.gcnArchName = name, arch


def as_gpu(monkeypatch, capability, name, arch=None):
    "As if PyTorch found one GPU: AMD's if it has an architecture."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device=None: name)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device=None: Properties(name, arch or ''))
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: True)  # as on ROCm
    monkeypatch.setattr(torch.version, 'hip', None if arch is None else '7.0')


def test_facts_of_an_nvidia_gpu(monkeypatch):
    as_gpu(monkeypatch, (8, 6), 'NVIDIA GeForce RTX 3090')
    assert facts.cuda_capability(CUDA) == (8, 6)
    assert facts.gpu_name(CUDA) == 'NVIDIA GeForce RTX 3090'
    assert facts.amd_architecture(CUDA) is None


@pytest.mark.parametrize(
    'reported, expected',
    [('gfx1030', 'gfx1030'), ('gfx90a:sramecc+:xnack-', 'gfx90a'), ('gfx942:sramecc+:xnack-', 'gfx942')],
)
def test_facts_of_an_amd_gpu(monkeypatch, reported, expected):
    as_gpu(monkeypatch, (10, 3), 'AMD Radeon', reported)
    assert facts.amd_architecture(CUDA) == expected


def test_facts_of_this_cpu():
    features = facts.cpu_features()
    assert isinstance(features, frozenset)
    assert all(name == name.lower() for name in features)


def test_a_machine_without_an_apple_chip_has_none():
    import platform

    if platform.system() != 'Darwin':
        assert facts.apple_chip() == ''


# -- AMD


def as_amd(monkeypatch, arch):
    as_gpu(monkeypatch, (10, 3), 'AMD Radeon', arch)
    monkeypatch.setattr(facts, 'amd_architecture', lambda device: arch)


RDNA_1_AND_2 = ['gfx1010', 'gfx1012', 'gfx1030', 'gfx1031', 'gfx1032', 'gfx1035']
VEGA = ['gfx900', 'gfx906', 'gfx909', 'gfx90c']
WITH_BF16 = ['gfx908', 'gfx90a', 'gfx940', 'gfx942', 'gfx950', 'gfx1100', 'gfx1101', 'gfx1151', 'gfx1200', 'gfx1201']


@pytest.mark.parametrize('arch', RDNA_1_AND_2)
def test_amd_gpus_on_which_bf16_ends_the_process(monkeypatch, arch):
    as_amd(monkeypatch, arch)
    found = status(CUDA)
    assert found['bf16'] == 'unsupported'
    assert found['fp8'] == 'unsupported'
    assert found['fp16'] == 'native'
    assert arch in why(CUDA, 'bf16')
    assert automatic_scales_the_loss(CUDA)


@pytest.mark.parametrize('arch', VEGA)
def test_amd_gpus_without_bf16(monkeypatch, arch):
    as_amd(monkeypatch, arch)
    found = status(CUDA)
    assert found['bf16'] != 'native'
    assert found['fp16'] == 'native'
    assert arch in why(CUDA, 'bf16')
    assert automatic_scales_the_loss(CUDA)


@pytest.mark.parametrize('arch', WITH_BF16)
def test_amd_gpus_with_bf16(monkeypatch, arch):
    as_amd(monkeypatch, arch)
    found = status(CUDA)
    assert (found['bf16'], found['fp16']) == ('native', 'native')
    assert not automatic_scales_the_loss(CUDA)


def test_bf16_on_such_a_gpu_is_an_error_before_the_first_batch(monkeypatch):
    as_amd(monkeypatch, 'gfx1030')
    learn = learner()
    learn.dls.device = CUDA
    with pytest.raises(ValueError, match=r'(?s)bf16.*gfx1030.*learn\.to_fp16\(\)'):
        with learn.to_bf16().amp_context():
            pass


@pytest.mark.parametrize(
    'arch, expected',
    [('gfx940', 'native'), ('gfx942', 'native')]
    + [(arch, 'unsupported') for arch in ('gfx906', 'gfx908', 'gfx90a', 'gfx1030', 'gfx1100', 'gfx1201')],
)
def test_tf32_on_amd_gpus(monkeypatch, arch, expected):
    "CDNA3 has it."
    as_amd(monkeypatch, arch)
    assert status(CUDA)['tf32'] == expected


# -- Apple


def as_mac(monkeypatch, chip):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(facts, 'apple_chip', lambda: chip)


@pytest.mark.parametrize(
    'chip, bf16',
    [(f'Apple {chip}', 'emulated') for chip in ('M1', 'M1 Pro', 'M1 Max', 'M1 Ultra', 'M2', 'M2 Pro', 'M2 Ultra')]
    + [(f'Apple {chip}', 'native') for chip in ('M3', 'M3 Pro', 'M3 Ultra', 'M4', 'M4 Max', 'M5', 'M10', 'M12 Pro')],
)
def test_apple_chips(monkeypatch, chip, bf16):
    as_mac(monkeypatch, chip)
    found = status('mps')
    assert (found['bf16'], found['fp16']) == (bf16, 'native')
    assert found['tf32'] == 'unsupported'
    assert chip in why('mps', 'bf16')
    assert automatic_scales_the_loss('mps') is (bf16 == 'emulated')


# -- CPUs: the relevant flags of /proc/cpuinfo

CPUS = {
    'Intel Skylake-SP': ('avx2 avx512f avx512bw avx512vl', 'emulated', 'emulated'),
    'Intel Cooper Lake': ('avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16', 'native', 'emulated'),
    'AMD Ryzen 5000': ('avx2 fma f16c', 'emulated', 'emulated'),
    'AMD Ryzen 7000': ('avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16', 'native', 'emulated'),
    'Intel Sapphire Rapids': ('avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8', 'native', 'native'),
    'AWS Graviton2': ('fp asimd fphp asimdhp', 'emulated', 'native'),
    'AWS Graviton3': ('fp asimd fphp asimdhp svebf16 bf16', 'native', 'native'),
}


@pytest.mark.parametrize('name', CPUS)
def test_cpus_by_their_flags(monkeypatch, name):
    flags, bf16, fp16 = CPUS[name]
    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset(flags.split()))
    found = status('cpu')
    assert (found['bf16'], found['fp16']) == (bf16, fp16)
    assert automatic_scales_the_loss('cpu') is (bf16 == 'emulated' and fp16 == 'native')


# -- an unknown device type


def test_an_unknown_device_is_taken_at_its_backends_word():
    "PyTorch has autocast for it, but no rule names it."
    found = precision_support('hpu').set_index('mode')
    assert found.support['bf16'] == 'native'
    assert 'backend' in found.why['bf16']
    assert found.support['tf32'] == 'unsupported'
