"CUDA's autocast rules on a CPU: the groups of operators, their effect, and that nothing remains afterwards."

import warnings

import torchvision  # registers operators of its own at both keys
import pytest, torch
from torch import nn
from torch.nn import functional as F

from fastxtend_amp.devices import cuda_rules as rules
from fastxtend_amp.devices.cuda_rules import cuda_rules, registered
from helpers import Data, learner, loaders

# PyTorch's documentation of torch.amp, "CUDA Op-Specific Behavior"; calls of other names are in `CALLS`.
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
    'low': """h @ h; torch.linalg.multi_dot([h, h, h]); nn.GRUCell(4, 4)(h); nn.LSTMCell(4, 4)(h)[0];
        nn.RNNCell(4, 4)(h); nn.GRU(4, 4)(h)[0]; nn.LSTM(4, 4)(h)[0]""",  # the last two are cuDNN's
    'fp32': """h**2; 1 / h; 2**h; F.cross_entropy(h, torch.arange(4)); F.normalize(h); F.softmin(h, -1);
        F.softplus(h)""",
    'widest': 'F.grid_sample(h[None, None], torch.zeros(1, 4, 4, 2), align_corners=False)',
    'widest of half': 'torch.addcmul(h, h, h)',
}
# Registered for CUDA, in fp32 and not documented: `FP32` in autocast_mode.h.
UNDOCUMENTED = """frobenius_norm nuclear_norm linalg_matrix_norm linalg_matrix_sqrth linalg_vector_norm logsumexp
    huber_loss native_layer_norm rms_norm nll_loss2d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""".split()


class Call(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def base(name):
    return name.removeprefix('aten::').partition('.')[0]


def kernels():
    "What is registered at the key, Python kernels included."
    return {
        name: torch._C._dispatch_dump_table(name) for name in registered('AutocastCPU') | registered('AutocastCUDA')
    }


def softmax_dtype():
    with torch.autocast('cpu', torch.bfloat16):
        return torch.ones(2, 2).bfloat16().softmax(-1).dtype


def test_the_last_exit_undoes_it_also_after_an_exception(monkeypatch):
    before = kernels()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for _ in range(2):
            with pytest.raises(KeyError), cuda_rules():
                assert kernels() != before
                with cuda_rules():
                    pass
                assert softmax_dtype() is torch.float32
                raise KeyError
            assert softmax_dtype() is torch.bfloat16 and kernels() == before
    monkeypatch.setattr(rules, 'RNNS', {'aten::softmax.there_is_none'})
    with pytest.raises(AttributeError, match='there_is_none'), cuda_rules():
        raise AssertionError
    assert kernels() == before and softmax_dtype() is torch.bfloat16 and torch.backends.mha.get_fastpath_enabled()


def test_each_operator_is_in_the_group_of_the_documentation():
    assert rules.LOW >= {*DOCUMENTED['low']} and rules.WIDEST >= {*DOCUMENTED['widest']}
    assert not {*DOCUMENTED['fp32']} & (rules.LOW | rules.WIDEST) and not rules.LOW & rules.WIDEST
    there = {base(name) for name in registered('AutocastCUDA') if name.startswith('aten::')}
    assert {name for names in DOCUMENTED.values() for name in names} <= there
    assert there <= rules.LOW | rules.WIDEST | {rules.BANNED, *DOCUMENTED['fp32'], *UNDOCUMENTED}  # of this PyTorch


@pytest.mark.parametrize('group, call', [(group, call.strip()) for group in CALLS for call in CALLS[group].split(';')])
def test_functions_follow_their_group(group, call):
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        found = eval(call, {'h': torch.rand(4, 4).bfloat16(), 'nn': nn, 'F': F, 'torch': torch}).dtype
    assert found is (torch.bfloat16 if group in ('low', 'widest of half') else torch.float32)


def test_what_autocast_leaves_alone_and_forbids():
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        assert torch.ones(2, 2).addmm_(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        assert torch.ones(2).double().exp().dtype is torch.float64 and torch.ones(2).long().sum().dtype is torch.int64
        with pytest.raises(RuntimeError, match='binary_cross_entropy_with_logits'):
            F.binary_cross_entropy(torch.rand(2), torch.rand(2))


def test_operators_of_torchvision_run_in_fp32():
    x, weight = torch.randn(1, 2, 4, 4).bfloat16(), torch.randn(3, 2, 1, 1)
    offset, boxes = torch.zeros(1, 2, 4, 4), torch.tensor([[0.0, 0, 0, 3, 3]])
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        out = torchvision.ops.deform_conv2d(x, offset.bfloat16(), weight)
        assert out.dtype is torch.bfloat16 and torch.equal(out, F.conv2d(x.double(), weight.double()).bfloat16())
        assert torchvision.ops.ps_roi_pool(x, boxes, 1).dtype is torch.bfloat16


def test_a_transformers_layer_is_not_one_operator_in_evaluation():
    "On CUDA it is not fused while autocast is on, so its parts follow the rules; with gradients it never is."
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
        parts = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), parts) and parts.dtype == torch.float32  # a LayerNorm is its last part


# -- the report on a GPU that is not there


def dice(x):
    "The overlap of two maps, as sums over all pixels: more than 65,504 (fp16), and than 8 bits can count (bf16)."
    p = torch.sigmoid(x)
    return (2 * (p * p).sum((1, 2, 3)) / (p.sum((1, 2, 3)) + p.sum((1, 2, 3)) + 1))[:, None]


def spectrum(x):
    return torch.fft.rfft2(x).abs().mean((2, 3))


def noise(x):
    return F.rrelu(x, training=True).mean((1, 2, 3))[:, None]


SAFE, KEEP = 'safe so far', 'keep modules in fp32'


@pytest.mark.parametrize(
    'f, side, precision, on_cpu, on_cuda, why',
    [
        (dice, 384, 'fp16', KEEP, SAFE, ''),
        (dice, 384, 'bf16', None, SAFE, ''),
        (spectrum, 8, 'fp16', SAFE, 'not known', 'Unsupported dtype'),
        (spectrum, 8, 'bf16', SAFE, KEEP, 'Unsupported dtype'),
        # A kernel that only the CPU lacks, as that of the FFT in fp16.
        (noise, 8, 'fp16', KEEP, 'not known', "this CPU has no fp16 kernel for '1', which CUDA may have"),
    ],
)
def test_a_report_for_a_gpu(f, side, precision, on_cpu, on_cuda, why):
    torch.manual_seed(0)
    data = Data(torch.randn(4, 1, side, side), torch.rand(4, 1))
    learn = learner(nn.Sequential(nn.Conv2d(1, 1, 1), Call(f)), loaders(bs=2, train=data, valid=data))
    if on_cpu:
        assert learn.precision_report(precision, device='cpu').verdicts[precision].verdict == on_cpu
    report = learn.precision_report(precision, device='cuda')
    found = report.verdicts[precision]
    assert (found.verdict, found.modules) == (on_cuda, ['1'] * (on_cuda == KEEP)) and why in found.reason
    assert any("on this CPU with CUDA's autocast rules" in note and 'kernels' in note for note in report.notes)
    if on_cuda == 'not known':
        assert found.call == 'learn.to_fp32()'
    assert softmax_dtype() is torch.bfloat16  # from here on, the CPU's rules apply again


def test_devices_that_the_report_accepts():
    own, named = (learner().precision_report('bf16', **given) for given in ({}, {'device': torch.device('cpu')}))
    assert repr(own) == repr(named) and not any('CUDA' in note for note in named.notes)
    for device in ('xpu', 'gpu', 0, 'mps:0'):
        with pytest.raises(ValueError, match="(?s)device=.* cannot be used.*device='cuda'"):
            learner().precision_report(device=device)
