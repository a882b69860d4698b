"autocast for the device type 'sim', after the lists in torch's aten/autocast_mode.h; for 'cuda' C++'s own runs."
from __future__ import annotations

import torch

from .memory import Tensor, here

_LOW = '''
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell scaled_dot_product_attention
'''.split()
_FP32 = '''
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
'''.split()
_SET_DTYPE = '''
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList
'''.split()
_PROMOTE = '''
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
'''.split()
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_cache: dict = {}
_libraries: list = []


def _eligible(t):
    return (
        isinstance(t, Tensor) and t.device.type == here.kind and t.is_floating_point() and t.dtype is not torch.float64
    )


def _cast(t, dtype):
    if isinstance(t, (list, tuple)): return [_cast(x, dtype) for x in t]
    if not _eligible(t) or t.dtype is dtype: return t
    is_weight = t.dtype is torch.float32 and t.requires_grad and t.is_leaf and not t._is_view()
    if not is_weight or dtype is not torch.get_autocast_dtype(here.kind) or not torch.is_autocast_cache_enabled():
        return t.to(dtype)
    at = (id(t), torch.is_grad_enabled())
    if at not in _cache: _cache[at] = (t, t.to(dtype))
    return _cache[at][1]


def _widest(args):
    flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if _eligible(t)]
    return torch.float32 if any(t.dtype is torch.float32 for t in flat) else torch.get_autocast_dtype(here.kind)


def _casting(op, dtype_of):
    "The operator with its tensors cast to the dtype that `dtype_of(arguments)` says."
    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            dtype = dtype_of(args)
            return op(*[_cast(a, dtype) for a in args], **{k: _cast(v, dtype) for k, v in kwargs.items()})
    return run


def _accumulating(op):
    "The operator with fp32 results, unless its caller wants another dtype."
    at = [a.name for a in op._schema.arguments].index('dtype')
    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            wanted = kwargs.get('dtype') or (args[at] if len(args) > at else None)
            if wanted or not _eligible(args[0]): return op(*args, **kwargs)
            return op(*args[:at], **{**kwargs, 'dtype': torch.float32})
    return run


def register():
    "Give `torch.autocast('sim')` its operators, and a cache that ends when torch's does."
    library, aten = (torch.library.Library(name, 'IMPL', 'AutocastPrivateUse1') for name in ('_', 'aten'))
    library.fallback(torch.library.fallthrough_kernel)
    _libraries.extend((library, aten))
    rules = {
        'low': lambda args: torch.get_autocast_dtype(here.kind),
        'fp32': lambda args: torch.float32,
        'widest': _widest,
    }
    for rule, names in (('low', _LOW), ('fp32', _FP32), ('widest', _PROMOTE), (None, _SET_DTYPE)):
        for name in names:
            base, _, overload = name.partition('.')
            op = getattr(getattr(torch.ops.aten, base, None), overload or 'default', None)
            if op is not None: aten.impl(name, _accumulating(op) if rule is None else _casting(op, rules[rule]))
    clear = torch.clear_autocast_cache
    def clear_both():
        _cache.clear()
        clear()
    torch.clear_autocast_cache = clear_both
