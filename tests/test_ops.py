"""In which dtype does each operator of PyTorch's autocast lists come out, inside a Learner's forward under the callback?

The lists are those of https://docs.pytorch.org/docs/stable/amp.html, by their names there. An operator of the list of low
precision gets fp32 inputs, one of the fp32 list inputs of low precision, one of the list of the widest type a mixture.
"""
import warnings

import pytest, torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd

from fastxtend_amp import AMPMode, MixedPrecision
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
    '_convolution': lambda r: torch._convolution(image(r, 5, 5), r(4, 3, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True),
    'conv_tbc': lambda r: torch.conv_tbc(r(5, 2, 3), r(2, 3, 4), r(4)),
    'mkldnn_rnn_layer': lambda r: torch.mkldnn_rnn_layer(r(5, 2, 3), r(16, 3), r(16, 4), r(16), r(16), r(2, 4), r(2, 4), False, [], 2, 4, 1, True, False, False, False),
    'conv_transpose1d': lambda r: F.conv_transpose1d(image(r, 5), r(3, 4, 2)),
    'conv_transpose2d': lambda r: F.conv_transpose2d(image(r, 5, 5), r(3, 4, 2, 2)),
    'conv_transpose3d': lambda r: F.conv_transpose3d(image(r, 3, 3, 3), r(3, 4, 2, 2, 2)),
    'prelu': lambda r: F.prelu(r(3, 4), r(1)),
    'scaled_dot_product_attention': lambda r: F.scaled_dot_product_attention(r(2, 2, 4, 8), r(2, 2, 4, 8), r(2, 2, 4, 8)),
    '_native_multi_head_attention': lambda r: torch._native_multi_head_attention(*[r(2, 4, 8)] * 3, 8, 2, r(24, 8), r(24), r(8, 8), r(8), need_weights=False)[0],
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
    **{f'fft_{n}': lambda r, f=getattr(torch.fft, n): f(r(4, 4)) for n in ('fft', 'ifft', 'fft2', 'ifft2', 'fftn', 'ifftn', 'rfft', 'irfft', 'rfft2', 'irfft2', 'rfftn', 'irfftn', 'hfft', 'ihfft')},
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
