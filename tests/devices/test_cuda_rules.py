"CUDA's autocast rules on a CPU: the groups of operators, their effect, and that nothing remains afterwards."

import threading, warnings

import pytest, torch
import torchvision  # noqa: F401  registers operators of its own at both keys
from torch import nn
from torch.nn import functional as F

from fastxtend_amp.devices import cuda_rules as rules
from fastxtend_amp.devices.cuda_rules import cuda_rules, registered
from helpers import *

# PyTorch's documentation of torch.amp, "CUDA Op-Specific Behavior"; names that are no operators are in `CALLS`.
DOCUMENTED = {
    'low': """addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d linear matmul mm mv prelu""".split(),
    'fp32': """acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cumprod
        cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log_softmax log10
        log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm pdist
        poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum renorm tan
        triplet_margin_loss""".split(),
    'widest': 'addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot'.split(),
}
CALLS = {
    'low': {
        '__matmul__': lambda h: h @ h,
        'multi_dot': lambda h: torch.linalg.multi_dot([h, h, h]),
        'GRUCell': nn.GRUCell(4, 4),
        'LSTMCell': lambda h: nn.LSTMCell(4, 4)(h)[0],
        'RNNCell': nn.RNNCell(4, 4),
        'GRU, by cuDNN': lambda h: nn.GRU(4, 4)(h)[0],
        'LSTM, by cuDNN': lambda h: nn.LSTM(4, 4)(h)[0],
    },
    'fp32': {
        '__pow__': lambda h: h**2,
        '__rdiv__': lambda h: 1 / h,
        '__rpow__': lambda h: 2**h,
        'cross_entropy': lambda h: F.cross_entropy(h, torch.arange(4)),
        'normalize': F.normalize,
        'softmin': lambda h: F.softmin(h, -1),
    },
    'widest': {
        'grid_sample': lambda h: F.grid_sample(h[None, None], torch.zeros(1, 4, 4, 2), align_corners=False),
        'addcmul of half alone': lambda h: torch.addcmul(h, h, h).float(),
    },
}
# Registered for CUDA, in fp32 and not documented: `FP32` in autocast_mode.h.
UNDOCUMENTED = """frobenius_norm nuclear_norm linalg_matrix_norm linalg_matrix_sqrth linalg_vector_norm logsumexp
    huber_loss native_layer_norm rms_norm nll_loss2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""".split()


def base(name):
    return name.removeprefix('aten::').partition('.')[0]


def test_the_groups_are_those_of_the_documentation():
    assert rules.LOW >= {*DOCUMENTED['low']} and rules.WIDEST >= {*DOCUMENTED['widest']}
    assert not {*DOCUMENTED['fp32']} & (rules.LOW | rules.WIDEST) and not rules.LOW & rules.WIDEST
    there = {*map(base, registered('AutocastCUDA'))}
    assert {name for names in DOCUMENTED.values() for name in names} <= there


def test_each_operator_that_this_pytorch_registers_for_cuda_is_in_a_group():
    known = rules.LOW | rules.WIDEST | {rules.BANNED, *DOCUMENTED['fp32'], *UNDOCUMENTED}
    assert {name for name in registered('AutocastCUDA') if base(name) not in known} == set()


@pytest.mark.parametrize('group, name', [(group, name) for group in CALLS for name in CALLS[group]])
def test_what_is_documented_by_the_name_of_a_function(group, name):
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        assert CALLS[group][name](torch.rand(4, 4).bfloat16()).dtype is (
            torch.bfloat16 if group == 'low' else torch.float32
        )


def softmax_dtype():
    with torch.autocast('cpu', torch.bfloat16):
        return torch.ones(2, 2).bfloat16().softmax(-1).dtype


def kernels():
    "What is registered at the key, Python kernels included."
    return {
        name: torch._C._dispatch_dump_table(name) for name in registered('AutocastCPU') | registered('AutocastCUDA')
    }


def test_the_exit_undoes_it_also_after_an_exception():
    before = kernels()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(KeyError), cuda_rules():
            assert softmax_dtype() is torch.float32 and kernels() != before
            raise KeyError
        assert softmax_dtype() is torch.bfloat16 and kernels() == before
        with cuda_rules():
            assert softmax_dtype() is torch.float32  # a second time
    assert kernels() == before


def test_nothing_stays_if_it_cannot_be_entered(monkeypatch):
    before = kernels()
    monkeypatch.setattr(rules, 'RNNS', {'aten::softmax.there_is_none'})
    with pytest.raises(AttributeError, match='there_is_none'), cuda_rules():
        raise AssertionError
    assert kernels() == before and softmax_dtype() is torch.bfloat16


def test_a_transformers_layer_is_not_one_operator_in_evaluation():
    "On CUDA it is not fused while autocast is on, so its parts follow the rules."
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    with torch.no_grad(), cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        found = layer(x)
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):  # with gradients it never is
        parts = layer(x)
    assert torch.equal(found, parts) and found.dtype == torch.float32  # a LayerNorm is its last part
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_last_of_several_users_undoes_it():
    "A thread that enters while another is inside, and leaves after it."
    entered, left, seen = threading.Event(), threading.Event(), []

    def second():
        with cuda_rules():
            entered.set()
            left.wait(10)
            seen.append(softmax_dtype())

    thread = threading.Thread(target=second)
    with cuda_rules():
        thread.start()
        assert entered.wait(10)
    assert softmax_dtype() is torch.float32  # of the whole process
    left.set()
    thread.join(10)
    assert seen == [torch.float32] and softmax_dtype() is torch.bfloat16


def test_fp64_and_integers_are_left_alone_and_bce_raises_as_on_cuda():
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        assert torch.ones(2).double().exp().dtype is torch.float64 and torch.ones(2).long().sum().dtype is torch.int64
        with pytest.raises(RuntimeError, match='binary_cross_entropy_with_logits'):
            F.binary_cross_entropy(torch.rand(2), torch.rand(2))


# -- the report on a GPU that is not there


class Dice(nn.Module):
    "The overlap of two maps, as sums over all pixels."

    def forward(self, x):
        p = torch.sigmoid(x)
        return (2 * (p * p).sum((1, 2, 3)) / (p.sum((1, 2, 3)) + p.sum((1, 2, 3)) + 1))[:, None]


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft2(x).abs().mean((2, 3))


def pictures(model, side):
    torch.manual_seed(0)
    data = Data(torch.randn(4, 1, side, side), torch.rand(4, 1))
    return learner(nn.Sequential(nn.Conv2d(1, 1, 1), model), loaders(bs=2, train=data, valid=data))


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_sums_of_a_dice_score_are_safe_on_a_gpu(mode):
    "262,144 pixels: more than 65,504 (fp16), and than 8 bits of mantissa can count (bf16)."
    learn = pictures(Dice(), 512)
    verdict = learn.precision_report('fp16').verdicts['fp16']
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['1']
    assert learn.precision_report(mode, device='cuda').verdicts[mode].verdict == 'safe so far'


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_an_fft_is_kept_in_fp32_on_a_gpu(mode):
    learn = pictures(Spectrum(), 8)
    assert learn.precision_report(mode).verdicts[mode].verdict == 'safe so far'
    report = learn.precision_report(mode, device='cuda')
    verdict = report.verdicts[mode]
    assert (
        verdict.verdict == 'keep modules in fp32' and verdict.modules == ['1'] and 'Unsupported dtype' in verdict.reason
    )
    assert any("on this CPU with CUDA's autocast rules" in note and 'kernels' in note for note in report.notes)
    assert softmax_dtype() is torch.bfloat16  # from here on, the CPU's rules apply again


def test_a_kernel_that_only_the_cpu_lacks_leaves_the_verdict_open():
    class Act(nn.Module):
        def forward(self, x):
            return F.rrelu(x, training=True)

    def verdict(**kwargs):
        return learner(nn.Sequential(nn.Linear(6, 8), Act(), nn.Linear(8, 1))).precision_report('fp16', **kwargs)

    assert verdict().verdicts['fp16'].verdict == 'keep modules in fp32'
    found = verdict(device='cuda').verdicts['fp16']
    assert found.verdict == 'not known' and "this CPU has no fp16 kernel for '1', which CUDA may have" in found.reason
    assert found.call == 'learn.to_bf16()'  # which CUDA has, whatever this CPU computes in


@pytest.mark.parametrize('device', ['xpu', 'gpu', 0, 'mps:0'])
def test_the_report_answers_for_no_other_device(device):
    with pytest.raises(ValueError, match="(?s)device=.* cannot be used.*device='cuda'"):
        learner().precision_report(device=device)


@pytest.mark.parametrize('device', ['cpu', torch.device('cpu')])
def test_the_learners_own_device_is_what_is_reported_on_anyway(device):
    own, named = (learner().precision_report('bf16', **kwargs) for kwargs in ({}, {'device': device}))
    assert repr(own) == repr(named) and not any('CUDA' in note for note in named.notes)
