"""In which dtype does each operator of PyTorch's autocast lists come out, inside a Learner's forward under the callback?

The lists are those of https://docs.pytorch.org/docs/stable/amp.html, by their names there. An operator of the list of low
precision gets fp32 inputs, one of the fp32 list inputs of low precision, one of the list of the widest type a mixture.
"""
import warnings

import pytest, torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd

from fastxtend_amp import MixedPrecision
from helpers import *

LOW, WIDE = {'fp16': torch.float16, 'bf16': torch.bfloat16}, torch.float32


def labels(r, n=4, high=3): return torch.arange(n, device=r.device) % high
def square(r, n=4): a = r(n, n, dtype=WIDE); return (a @ a.T + n * torch.eye(n, device=r.device)).to(r.dtype)
def image(r, *size): return r(2, 3, *size)
def pooled(r, d): return getattr(F, f'max_pool{d}d')(image(r, *[4] * d).float(), 2, return_indices=True)


# Each takes `r`, which makes random tensors of the dtype that goes in: fp32 for the first list, low for the second.
CPU_LOW = {
    'conv1d': lambda r: F.conv1d(image(r, 5), r(4, 3, 2)),
    'conv2d': lambda r: F.conv2d(image(r, 5, 5), r(4, 3, 2, 2)),
    'conv3d': lambda r: F.conv3d(image(r, 3, 3, 3), r(4, 3, 2, 2, 2)),
    'bmm': lambda r: torch.bmm(r(2, 3, 4), r(2, 4, 3)),
    'mm': lambda r: torch.mm(r(3, 4), r(4, 3)),
    'linalg_vecdot': lambda r: torch.linalg.vecdot(r(3, 4), r(3, 4)),
    'baddbmm': lambda r: torch.baddbmm(r(2, 3, 3), r(2, 3, 4), r(2, 4, 3)),
    'addmm': lambda r: torch.addmm(r(3, 3), r(3, 4), r(4, 3)),
    'addbmm': lambda r: torch.addbmm(r(3, 3), r(2, 3, 4), r(2, 4, 3)),
    'linear': lambda r: F.linear(r(3, 4), r(5, 4), r(5)),
    'matmul': lambda r: torch.matmul(r(3, 4), r(4, 3)),
    '_convolution': lambda r: torch._convolution(image(r, 5, 5), r(4, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True),
    'conv_tbc': lambda r: torch.conv_tbc(r(5, 2, 3), r(2, 3, 4), r(4)),
    'mkldnn_rnn_layer': lambda r: torch.mkldnn_rnn_layer(r(5, 2, 3), r(16, 3), r(16, 4), r(16), r(16), r(2, 4), r(2, 4),
                                                         False, [], 2, 4, 1, True, False, False, False)[0],
    'conv_transpose1d': lambda r: F.conv_transpose1d(image(r, 5), r(3, 4, 2)),
    'conv_transpose2d': lambda r: F.conv_transpose2d(image(r, 5, 5), r(3, 4, 2, 2)),
    'conv_transpose3d': lambda r: F.conv_transpose3d(image(r, 3, 3, 3), r(3, 4, 2, 2, 2)),
    'prelu': lambda r: F.prelu(r(3, 4), r(1)),
    'scaled_dot_product_attention': lambda r: F.scaled_dot_product_attention(r(2, 2, 4, 8), r(2, 2, 4, 8), r(2, 2, 4, 8)),
    '_native_multi_head_attention': lambda r: torch._native_multi_head_attention(
        *[r(2, 4, 8)] * 3, 8, 2, r(24, 8), r(24), r(8, 8), r(8), need_weights=False)[0],
}
CPU_FP32 = {
    'avg_pool3d': lambda r: F.avg_pool3d(image(r, 4, 4, 4), 2),
    'binary_cross_entropy': lambda r: F.binary_cross_entropy(r(4).sigmoid(), r(4).sigmoid()),
    'grid_sampler': lambda r: torch.grid_sampler(image(r, 4, 4), r(2, 3, 3, 2).tanh(), 0, 0, False),
    'grid_sampler_2d': lambda r: torch.grid_sampler_2d(image(r, 4, 4), r(2, 3, 3, 2).tanh(), 0, 0, False),
    '_grid_sampler_2d_cpu_fallback': lambda r: torch._grid_sampler_2d_cpu_fallback(image(r, 4, 4), r(2, 3, 3, 2).tanh(), 0, 0, False),
    'grid_sampler_3d': lambda r: torch.grid_sampler_3d(image(r, 4, 4, 4), r(2, 3, 3, 3, 3).tanh(), 0, 0, False),
    'polar': lambda r: torch.polar(r(4).abs(), r(4)),
    'prod': lambda r: torch.prod(r(4)),
    'quantile': lambda r: torch.quantile(r(4), .5),
    'nanquantile': lambda r: torch.nanquantile(r(4), .5),
    'stft': lambda r: torch.stft(r(32), 8, window=r(8), return_complex=True),
    'cdist': lambda r: torch.cdist(r(3, 4), r(3, 4)),
    'trace': lambda r: torch.trace(r(4, 4)),
    'view_as_complex': lambda r: torch.view_as_complex(r(4, 2)),
    'cholesky': lambda r: torch.cholesky(square(r)),
    'cholesky_inverse': lambda r: torch.cholesky_inverse(square(r).tril()),
    'cholesky_solve': lambda r: torch.cholesky_solve(r(4, 2), square(r).tril()),
    'inverse': lambda r: torch.inverse(square(r)),
    'lu_solve': lambda r: torch.lu_solve(r(4, 2), square(r), torch.arange(1, 5, dtype=torch.int32, device=r.device)),
    'orgqr': lambda r: torch.orgqr(r(4, 4), r(4)),
    'ormqr': lambda r: torch.ormqr(r(4, 4), r(4), r(4, 2)),
    'pinverse': lambda r: torch.pinverse(r(4, 3)),
    'max_pool3d': lambda r: F.max_pool3d(image(r, 4, 4, 4), 2),
    'max_unpool2d': lambda r: F.max_unpool2d(pooled(r, 2)[0].to(r.dtype), pooled(r, 2)[1], 2),
    'max_unpool3d': lambda r: F.max_unpool3d(pooled(r, 3)[0].to(r.dtype), pooled(r, 3)[1], 2),
    'adaptive_avg_pool3d': lambda r: F.adaptive_avg_pool3d(image(r, 4, 4, 4), 2),
    'reflection_pad1d': lambda r: torch.ops.aten.reflection_pad1d(image(r, 4), [1, 1]),
    'reflection_pad2d': lambda r: torch.ops.aten.reflection_pad2d(image(r, 4, 4), [1] * 4),
    'replication_pad1d': lambda r: torch.ops.aten.replication_pad1d(image(r, 4), [1, 1]),
    'replication_pad2d': lambda r: torch.ops.aten.replication_pad2d(image(r, 4, 4), [1] * 4),
    'replication_pad3d': lambda r: torch.ops.aten.replication_pad3d(image(r, 4, 4, 4), [1] * 6),
    'mse_loss': lambda r: F.mse_loss(r(4), r(4)),
    'cosine_embedding_loss': lambda r: F.cosine_embedding_loss(r(4, 3), r(4, 3), torch.ones(4, device=r.device)),
    'nll_loss': lambda r: F.nll_loss(r(4, 3), labels(r)),
    'nll_loss2d': lambda r: torch.ops.aten.nll_loss2d(image(r, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long, device=r.device), None, 1, -100),
    'hinge_embedding_loss': lambda r: F.hinge_embedding_loss(r(4), torch.ones(4, device=r.device)),
    'poisson_nll_loss': lambda r: F.poisson_nll_loss(r(4), r(4).abs()),
    'cross_entropy_loss': lambda r: F.cross_entropy(r(4, 3), labels(r)),
    'l1_loss': lambda r: F.l1_loss(r(4), r(4)),
    'huber_loss': lambda r: F.huber_loss(r(4), r(4)),
    'margin_ranking_loss': lambda r: F.margin_ranking_loss(r(4), r(4), torch.ones(4, device=r.device)),
    'soft_margin_loss': lambda r: F.soft_margin_loss(r(4), r(4).sign()),
    'triplet_margin_loss': lambda r: F.triplet_margin_loss(r(4, 3), r(4, 3), r(4, 3)),
    'multi_margin_loss': lambda r: F.multi_margin_loss(r(4, 3), labels(r)),
    'ctc_loss': lambda r: F.ctc_loss(r(5, 2, 3).log_softmax(-1).to(r.dtype), torch.ones(2, 2, dtype=torch.long, device=r.device), (5, 5), (2, 2)),
    'kl_div': lambda r: F.kl_div(r(4), r(4).sigmoid(), reduction='sum'),
    'multilabel_margin_loss': lambda r: F.multilabel_margin_loss(r(4, 3), labels(r, 12).view(4, 3)),
    'binary_cross_entropy_with_logits': lambda r: F.binary_cross_entropy_with_logits(r(4), r(4).sigmoid()),
    **{f'fft_{n}': lambda r, f=getattr(torch.fft, n): f(r(4, 4))
       for n in ('fft', 'ifft', 'fft2', 'ifft2', 'fftn', 'ifftn', 'rfft', 'irfft', 'rfft2', 'irfft2', 'rfftn', 'irfftn', 'hfft', 'ihfft')},
    'linalg_cond': lambda r: torch.linalg.cond(square(r)),
    'linalg_matrix_rank': lambda r: torch.linalg.matrix_rank(square(r)),
    'linalg_solve': lambda r: torch.linalg.solve(square(r), r(4, 2)),
    'linalg_cholesky': lambda r: torch.linalg.cholesky(square(r)),
    'linalg_svdvals': lambda r: torch.linalg.svdvals(r(4, 3)),
    'linalg_eigvals': lambda r: torch.linalg.eigvals(square(r)),
    'linalg_eigvalsh': lambda r: torch.linalg.eigvalsh(square(r)),
    'linalg_inv': lambda r: torch.linalg.inv(square(r)),
    'linalg_householder_product': lambda r: torch.linalg.householder_product(r(4, 4), r(4)),
    'linalg_tensorinv': lambda r: torch.linalg.tensorinv(square(r).view(2, 2, 4), ind=2),
    'linalg_tensorsolve': lambda r: torch.linalg.tensorsolve(square(r).view(2, 2, 4), r(2, 2)),
    'fake_quantize_per_tensor_affine': lambda r: torch.fake_quantize_per_tensor_affine(r(4), .1, 0, 0, 255),
    'geqrf': lambda r: torch.geqrf(r(4, 3)),
    '_lu_with_info': lambda r: torch._lu_with_info(square(r)),
    'qr': lambda r: torch.qr(r(4, 3)),
    'svd': lambda r: torch.svd(r(4, 3)),
    'triangular_solve': lambda r: torch.triangular_solve(r(4, 2), square(r)),
    'fractional_max_pool2d': lambda r: F.fractional_max_pool2d(image(r, 6, 6), 2, output_size=3),
    'fractional_max_pool3d': lambda r: F.fractional_max_pool3d(image(r, 6, 6, 6), 2, output_size=3),
    'adaptive_max_pool3d': lambda r: F.adaptive_max_pool3d(image(r, 4, 4, 4), 2),
    'multilabel_margin_loss_forward': lambda r: torch.ops.aten.multilabel_margin_loss_forward(r(4, 3), labels(r, 12).view(4, 3), 1),
    'linalg_qr': lambda r: torch.linalg.qr(r(4, 3)),
    'linalg_cholesky_ex': lambda r: torch.linalg.cholesky_ex(square(r)),
    'linalg_svd': lambda r: torch.linalg.svd(r(4, 3)),
    'linalg_eig': lambda r: torch.linalg.eig(square(r)),
    'linalg_eigh': lambda r: torch.linalg.eigh(square(r)),
    'linalg_lstsq': lambda r: torch.linalg.lstsq(r(4, 3), r(4, 2)),
    'linalg_inv_ex': lambda r: torch.linalg.inv_ex(square(r)),
}
# Given `r` and a second maker `w` of fp32.
CPU_WIDEST = {
    'cat': lambda r, w: torch.cat([r(3), w(3)]),
    'stack': lambda r, w: torch.stack([r(3), w(3)]),
    'index_copy': lambda r, w: torch.index_copy(r(3), 0, labels(r, 2), w(2)),
}



CUDA_LOW = {
    '__matmul__': lambda r: r(3, 4) @ r(4, 3),
    **{n: CPU_LOW[n] for n in ('addbmm', 'addmm', 'baddbmm', 'bmm', 'conv1d', 'conv2d', 'conv3d', 'conv_transpose1d', 'conv_transpose2d',
                               'conv_transpose3d', 'linear', 'matmul', 'mm', 'prelu')},
    'addmv': lambda r: torch.addmv(r(3), r(3, 4), r(4)),
    'addr': lambda r: torch.addr(r(3, 4), r(3), r(4)),
    'chain_matmul': lambda r: torch.chain_matmul(r(3, 4), r(4, 3), r(3, 2)),
    'multi_dot': lambda r: torch.linalg.multi_dot([r(3, 4), r(4, 3), r(3, 2)]),
    'GRUCell': lambda r: nn.GRUCell(3, 4, device=r.device)(r(2, 3)),
    'LSTMCell': lambda r: nn.LSTMCell(3, 4, device=r.device)(r(2, 3)),
    'mv': lambda r: torch.mv(r(3, 4), r(4)),
    'RNNCell': lambda r: nn.RNNCell(3, 4, device=r.device)(r(2, 3)),
}
CUDA_FP32 = {
    '__pow__': lambda r: r(4).abs() ** 2, '__rdiv__': lambda r: r(4).__rdiv__(2.), '__rpow__': lambda r: 2. ** r(4), '__rtruediv__': lambda r: 2. / r(4),
    **{n: lambda r, n=n: getattr(torch, n)(r(4).sigmoid())
       for n in ('acos', 'asin', 'cosh', 'erfinv', 'exp', 'expm1', 'log', 'log10', 'log1p', 'log2', 'reciprocal', 'rsqrt', 'sinh', 'tan',
                 'sum', 'prod', 'norm')},
    **{n: lambda r, n=n: getattr(torch, n)(r(4), 0) for n in ('cumprod', 'cumsum', 'softmax', 'log_softmax')},
    **{n: CPU_FP32[n] for n in ('binary_cross_entropy_with_logits', 'cosine_embedding_loss', 'cdist', 'hinge_embedding_loss', 'kl_div', 'l1_loss',
                                'margin_ranking_loss', 'mse_loss', 'multilabel_margin_loss', 'multi_margin_loss', 'nll_loss', 'poisson_nll_loss',
                                'soft_margin_loss', 'triplet_margin_loss')},
    'cosine_similarity': lambda r: F.cosine_similarity(r(4, 3), r(4, 3)),
    'cross_entropy': CPU_FP32['cross_entropy_loss'],
    'dist': lambda r: torch.dist(r(4), r(4)),
    'group_norm': lambda r: F.group_norm(r(2, 4, 3), 2),
    'layer_norm': lambda r: F.layer_norm(r(2, 4), (4,)),
    'normalize': lambda r: F.normalize(r(4, 3)),
    'pdist': lambda r: F.pdist(r(4, 3)),
    'pow': lambda r: torch.pow(r(4).abs(), 1.5),
    'smooth_l1_loss': lambda r: F.smooth_l1_loss(r(4), r(4)),
    'softmin': lambda r: F.softmin(r(4), 0),
    'softplus': lambda r: F.softplus(r(4)),
    'renorm': lambda r: torch.renorm(r(4, 3), 2, 0, 1.),
}
CUDA_WIDEST = {
    'addcdiv': lambda r, w: torch.addcdiv(r(4), r(4), w(4)),
    'addcmul': lambda r, w: torch.addcmul(r(4), r(4), w(4)),
    'atan2': lambda r, w: torch.atan2(r(4), w(4)),
    'bilinear': lambda r, w: F.bilinear(r(2, 3), r(2, 4), w(5, 3, 4)),
    'cross': lambda r, w: torch.cross(r(2, 3), w(2, 3), dim=1),
    'dot': lambda r, w: torch.dot(r(4), w(4)),
    'grid_sample': lambda r, w: F.grid_sample(r(2, 3, 4, 4), w(2, 3, 3, 2).tanh(), align_corners=False),
    'index_put': lambda r, w: torch.index_put(r(4), (labels(r, 2),), w(2)),
    'scatter_add': lambda r, w: torch.scatter_add(r(4), 0, labels(r), w(4)),
    'tensordot': lambda r, w: torch.tensordot(r(3, 4), w(4, 3), 1),
}

# What comes out otherwise than the lists say, and why; the same in PyTorch 2.9.0 and 2.15.0.
COMPLEX = {'polar', 'stft', 'view_as_complex', 'linalg_eigvals', 'linalg_eig',  # complex results are made of fp32, and are not fp32
           *(n for n in CPU_FP32 if n.startswith('fft_') and n not in ('fft_irfft', 'fft_irfft2', 'fft_irfftn', 'fft_hfft'))}
EXCEPTIONS = {
    **{n: {torch.complex64} for n in COMPLEX},
    'linalg_matrix_rank': {torch.int64},                         # a count
    'linalg_lstsq': {WIDE, torch.int64},                         # the rank beside the solution
    '_lu_with_info': {WIDE, torch.int32},                        # pivots and info beside the factors
    'linalg_cholesky_ex': {WIDE, torch.int32},                   # info beside the result
    'linalg_inv_ex': {WIDE, torch.int32},
}
REMOVED = {'cholesky', 'qr'}                                     # in 2.15.0 they only raise an error; in 2.9.0 they give fp32
NO_PRIMITIVE = 'could not create a primitive'                    # oneDNN where it has no LSTM in bf16 or fp16, as with AVX2 only


def maker(device, dtype):
    g = torch.Generator(device).manual_seed(0)
    def r(*shape, dtype=dtype): return torch.randn(*shape, generator=g, device=device).to(dtype)
    r.device, r.dtype = torch.device(device), dtype
    return r


def dtypes_of(out): return tuple(o.dtype for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor) and o.numel())


def attempt(f, *args):
    try: return dtypes_of(f(*args))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as e: return f'{type(e).__name__}: {str(e).splitlines()[0]}'


class Ops(nn.Module):
    "A model that calls every operator in its forward and writes down what came out."
    def __init__(self, mode, lists): super().__init__(); self.last, self.mode, self.lists, self.seen = nn.Linear(6, 1), mode, lists, {}
    def forward(self, x):
        low, wide = maker(x.device, LOW[self.mode]), maker(x.device, WIDE)
        to_low, to_wide, to_widest = self.lists
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            self.seen = {n: attempt(f, wide) for n, f in to_low.items()} | {n: attempt(f, low) for n, f in to_wide.items()}
            self.seen |= {(n, 'mixed'): attempt(f, low, wide) for n, f in to_widest.items()} | {(n, 'low'): attempt(f, low, low) for n, f in to_widest.items()}
        return self.last(x)


def seen_in_a_batch(mode, lists, device='cpu'):
    dls = loaders(n=4).to(torch.device(device))
    learn = learner(Ops(mode, lists).to(device), dls, cbs=MixedPrecision(mode))
    learn.fit(1, .01)
    return learn.model.seen


@pytest.fixture(scope='module', params=['bf16', 'fp16'])
def on_cpu(request): return request.param, seen_in_a_batch(request.param, (CPU_LOW, CPU_FP32, CPU_WIDEST))


@pytest.fixture(scope='module', params=['bf16', 'fp16'])
def on_cuda(request): return request.param, seen_in_a_batch(request.param, (CUDA_LOW, CUDA_FP32, CUDA_WIDEST), 'cuda')


@pytest.mark.parametrize('op', CPU_LOW)
def test_cpu_low_precision(on_cpu, op):
    mode, seen = on_cpu
    if op == 'mkldnn_rnn_layer' and NO_PRIMITIVE in seen[op]:    # it was given fp32, which this CPU can do; so it was cast
        assert attempt(CPU_LOW[op], maker('cpu', WIDE)) == (WIDE,) and attempt(CPU_LOW[op], maker('cpu', LOW[mode])) == seen[op]
    else: assert seen[op] == (LOW[mode],)


@pytest.mark.parametrize('op', CPU_FP32)
def test_cpu_fp32(on_cpu, op):
    mode, seen = on_cpu
    if op in REMOVED and isinstance(seen[op], str): assert 'is now removed' in seen[op]
    else: assert set(seen[op]) == EXCEPTIONS.get(op, {WIDE})


@pytest.mark.parametrize('op', CPU_WIDEST)
def test_cpu_widest(on_cpu, op):
    mode, seen = on_cpu
    assert seen[op, 'mixed'] == (WIDE,) and seen[op, 'low'] == (LOW[mode],)


def test_cpu_lists_are_complete_and_the_rest_is_left_alone(on_cpu):
    mode, seen = on_cpu
    assert (len(CPU_LOW), len(CPU_FP32), len(CPU_WIDEST)) == (20, 90, 3)    # `inverse` is in the page's list twice
    assert EXCEPTIONS.keys() | REMOVED <= CPU_FP32.keys()
    low, wide = maker('cpu', LOW[mode]), maker('cpu', WIDE)
    others = {'add': lambda r, w: r(3) + w(3), 'relu': lambda r, w: torch.relu(r(3)), 'explicit dtype': lambda r, w: torch.sum(r(3), dtype=torch.float64),
              'in place': lambda r, w: w(3, 3).addmm_(w(3, 4), w(4, 3)), 'fp64': lambda r, w: torch.mm(w(3, 4).double(), w(4, 3).double())}
    learn = learner(cbs=MixedPrecision(mode)); learn.create_opt()
    with learn.amp_context(): out = {n: attempt(f, low, wide)[0] for n, f in others.items()}
    assert out == {'add': WIDE, 'relu': LOW[mode], 'explicit dtype': torch.float64, 'in place': WIDE, 'fp64': torch.float64}


@pytest.mark.parametrize('mode', LOW)
def test_amp_context_has_the_same_rules(mode):
    learn = learner(cbs=MixedPrecision(mode))
    r = maker('cpu', WIDE)
    with learn.amp_context(): assert attempt(CPU_LOW['mm'], r) == (LOW[mode],) and attempt(CPU_FP32['mse_loss'], maker('cpu', LOW[mode])) == (WIDE,)
    assert attempt(CPU_LOW['mm'], r) == (WIDE,)


def test_the_overload_of_convolution_that_takes_allow_tf32_is_in_no_list(on_cpu):
    mode, r = on_cpu[0], maker('cpu', WIDE)
    with learner(cbs=MixedPrecision(mode)).amp_context():
        assert torch._convolution(image(r, 5, 5), r(4, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True).dtype is WIDE


@pytest.mark.cuda
@pytest.mark.parametrize('op', CUDA_LOW)
def test_cuda_low_precision(on_cuda, op):
    mode, seen = on_cuda
    assert set(seen[op]) == {LOW[mode]}


@pytest.mark.cuda
@pytest.mark.parametrize('op', CUDA_FP32)
def test_cuda_fp32(on_cuda, op): assert on_cuda[1][op] == (WIDE,)


@pytest.mark.cuda
@pytest.mark.parametrize('op', CUDA_WIDEST)
def test_cuda_widest(on_cuda, op):
    mode, seen = on_cuda
    assert seen[op, 'mixed'] == (WIDE,) and seen[op, 'low'] == (LOW[mode],)


@pytest.mark.parametrize('op', [*CUDA_LOW, *CUDA_FP32])
def test_calls_of_the_cuda_lists_are_sound(op):
    "They run on the CPU in fp32, where there is no GPU to run them on."
    assert set(attempt({**CUDA_LOW, **CUDA_FP32}[op], maker('cpu', WIDE))) == {WIDE}


# -- autograd functions of a user's own, and a loss that is not safe in low precision

def function(device, **cast):
    "x * w with its own backward pass, and what each of the two saw: dtypes, autocast on or off, its dtype."
    saw = {}
    def note(where, *ts): saw[where] = ({t.dtype for t in ts}, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    class Linear(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, **cast)
        def forward(ctx, x, w):
            note('forward', x, w); ctx.save_for_backward(x, w)
            return x.mm(w.t())
        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            out = g.mm(w), g.t().mm(x)
            note('backward', *out)
            return out
    return Linear, saw


class WithFunction(nn.Module):
    def __init__(self, f): super().__init__(); torch.manual_seed(0); self.f, self.first, self.weight = f, nn.Linear(6, 8), nn.Parameter(torch.randn(1, 8) / 3)
    def forward(self, x): return self.f.apply(torch.relu(self.first(x)), self.weight)


def fit_with(f, mode, device='cpu'):
    model = WithFunction(f).to(device)
    cb = MixedPrecision(mode, **({'init_scale': 256.} if mode == 'fp16' else {}))
    learn = learner(model, loaders().to(torch.device(device)), cbs=cb, opt_func=OPTIMIZERS['sgd'])
    before = params(learn); learn.fit(1, .01)
    assert not any(torch.equal(p, q) for p, q in zip(before, params(learn))) and all(p.isfinite().all() for p in params(learn))
    return learn


DEVICES = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])


@DEVICES
@pytest.mark.parametrize('mode', LOW)
def test_custom_fwd_and_bwd_run_under_the_same_autocast(mode, device):
    f, saw = function(device)
    learn = fit_with(f, mode, device)
    # The gradients are of low precision because autocast is on again in backward, which runs outside the callback's own.
    assert saw == {'forward': ({WIDE, LOW[mode]}, True, LOW[mode]), 'backward': ({LOW[mode]}, True, LOW[mode])}
    assert learn.model.weight.grad is None or learn.model.weight.grad.dtype is WIDE


@DEVICES
@pytest.mark.parametrize('mode', LOW)
def test_custom_fwd_that_asks_for_fp32(mode, device):
    f, saw = function(device, cast_inputs=torch.float32)
    fit_with(f, mode, device)
    for where in ('forward', 'backward'): assert saw[where][:2] == ({WIDE}, False)


@pytest.mark.parametrize('mode', LOW)
def test_custom_function_gives_what_autograd_gives(mode):
    f, _ = function('cpu')
    class Plain:
        apply = staticmethod(lambda x, w: x.mm(w.t()))
    for p, q in zip(params(fit_with(f, mode)), params(fit_with(Plain, mode))): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)


def bce_learner(mode, loss, device='cpu'):
    data = dataset(24); data = Data(data.tensors[0], (data.tensors[1] > 0).float())
    model = mlp() if isinstance(loss, nn.BCEWithLogitsLoss) else nn.Sequential(*mlp(), nn.Sigmoid())
    return learner(model.to(device), loaders(train=data, valid=data).to(torch.device(device)), loss, cbs=MixedPrecision(mode))


@pytest.mark.cuda
@pytest.mark.parametrize('mode', LOW)
def test_bce_loss_on_cuda_is_refused_with_pytorchs_hint(mode):
    with pytest.raises(RuntimeError, match='(?s)unsafe to autocast.*binary_cross_entropy_with_logits'): bce_learner(mode, nn.BCELoss(), 'cuda').fit(1)
    learn = bce_learner(mode, nn.BCEWithLogitsLoss(), 'cuda'); learn.fit(1, .01)
    assert all(l.isfinite() for l in learn.recorder.losses)


@pytest.mark.parametrize('loss', [nn.BCELoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize('mode', LOW)
def test_bce_loss_on_the_cpu_is_in_fp32(mode, loss):
    learn, dtypes = bce_learner(mode, loss()), set()
    learn.add_cb(At('after_loss', lambda l: dtypes.add((l.pred.dtype, l.loss_grad.dtype)), 5))
    learn.fit(4, .05)
    assert dtypes == {(WIDE, WIDE)}
    assert all(l.isfinite() for l in learn.recorder.losses) and learn.recorder.losses[-1] < learn.recorder.losses[0]
