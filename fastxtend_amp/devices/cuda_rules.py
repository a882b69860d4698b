"""CUDA's autocast rules for CPU tensors, which show in which precision a model would compute on a GPU.

PyTorch's lists of autocast operators differ by device. On CUDA sums, norms, softmax, `exp` and `pow` run in fp32; on a
CPU they stay in low precision. A CPU runs FFTs, linear algebra and 3-d pooling in fp32; CUDA does not. `cuda_rules`
replaces the CPU's autocast kernels by Python functions that cast as CUDA's do. It reads the operators from the
dispatcher, which lists those of CUDA even in a build without CUDA, and their groups from the tables below.

Only casts are simulated, not kernels. Weights are cast at each use, as with `cache_enabled=False`.

Source: "CUDA Ops that can autocast to float16", "... to float32" and "... that promote to the widest input type" in
https://docs.pytorch.org/docs/stable/amp.html, and the same lists in PyTorch's `aten/src/ATen/autocast_mode.h`.
"""
import threading, warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.backends import mha

from ..compat import tree_leaves, tree_map

# Operators that run in autocast's dtype.
LOW = frozenset("""
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _cudnn_rnn scaled_dot_product_attention _scaled_dot_product_flash_attention
    """.split())
# Operators that run in the widest dtype of their inputs.
WIDEST = frozenset("""addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot
    """.split())
BANNED = 'binary_cross_entropy'
# On CUDA these call `_cudnn_rnn`, which runs in autocast's dtype; on a CPU they have their own kernels.
RNNS = frozenset(f'aten::{rnn}.{overload}' for rnn in ('lstm', 'gru', 'rnn_tanh', 'rnn_relu')
                 for overload in ('input', 'data'))
# Everything else that is registered for CUDA runs in fp32; the rest of the CPU's list runs in the dtype of its inputs.

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def registered(key: str) -> set[str]: # {'aten::linear', 'aten::softmax.int', 'torchvision::nms', ...}
    "Return the names of operators that have a kernel at a dispatch key, for example 'AutocastCUDA'."
    return {*torch._C._dispatch_get_registrations_for_dispatch_key(key)}


_lock, _users = threading.RLock(), list[ExitStack]()             # the first user's stack holds the kernels


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Context manager in which autocast on a CPU chooses dtypes as it does on CUDA.

    Kernels belong to the process: autocast in other threads follows CUDA's rules as well, until the last thread that
    entered has left. Entering takes about 30 ms the first time, then 3 ms.

    Relies on `torch.library._scoped_library` and `torch._C._ExcludeDispatchKeyGuard` (seen in 2.9 to 2.15).
    """
    with _lock: _users.append(ExitStack() if _users else _registered_kernels())
    try: yield
    finally:
        with _lock: _users.pop().close()                         # the last one to leave closes the first stack


def _registered_kernels() -> ExitStack:
    "Replace the CPU's autocast kernels by ones that cast as CUDA's do, until the returned stack is closed."
    cuda, cpu, has_fastpath = registered('AutocastCUDA') | RNNS, registered('AutocastCPU'), mha.get_fastpath_enabled()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter('ignore')                          # PyTorch's, that kernels are replaced
        # In evaluation a transformer's layer is one operator, unless CUDA's autocast is on.
        stack.callback(mha.set_fastpath_enabled, has_fastpath)
        mha.set_fastpath_enabled(False)
        libraries = {namespace: stack.enter_context(torch.library._scoped_library(namespace, 'IMPL'))
                     for namespace in {name.partition('::')[0] for name in cuda}}
        for full_name in cuda | cpu:
            namespace, _, name = full_name.partition('::')
            if namespace != 'aten' and full_name in cpu: continue    # torchvision registers some for both devices
            kernel = _kernel(full_name) if full_name in cuda else torch.library.fallthrough_kernel
            libraries[namespace].impl(name, kernel, 'AutocastCPU')
        libraries['aten'].impl('_fft_r2c', _cufft, 'AutocastCPU')
        return stack.pop_all()


def _kernel(full_name: str) -> Callable[..., Any]:
    "Return the function that casts the inputs of an operator as CUDA's autocast does, and calls it without autocast."
    namespace, _, name = full_name.partition('::')
    name, _, overload = name.partition('.')
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload or 'default')

    def kernel(*args, **kwargs):
        if name == BANNED:
            raise RuntimeError(f"CUDA's autocast does not allow {name} (nn.BCELoss): use "
                               'binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss)')
        is_low, low = name in LOW or full_name in RNNS, torch.get_autocast_dtype('cpu')
        given = [x.dtype for x in tree_leaves((args, kwargs)) if _may_cast(x)]
        if name in WIDEST:
            is_low = torch.float32 not in given
            if is_low and {*given} - {low}:                      # PyTorch's own words
                raise RuntimeError('Unexpected floating ScalarType in at::autocast::prioritize')
        args, kwargs = _cast((args, kwargs), low if is_low else torch.float32)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU): out = op(*args, **kwargs)
        if namespace == 'aten' or not given: return out
        return _cast(out, given[0])                              # torchvision's kernels cast back
    return kernel


def _cast(x: Any, dtype: torch.dtype) -> Any: # Nested
    "Return `x` with this dtype where autocast may cast."
    return tree_map(lambda t: t.to(dtype) if _may_cast(t) else t, x)


def _cufft(x: torch.Tensor, dim: list[int], *args: Any) -> torch.Tensor:
    "Run a real FFT, such as that of `torch.stft`, as cuFFT does: in fp16, which CPUs lack, on powers of two only."
    are_powers_of_two = not any(x.shape[d] & (x.shape[d] - 1) for d in dim)
    if x.dtype is torch.bfloat16 or (x.dtype is torch.float16 and not are_powers_of_two):
        raise RuntimeError('cuFFT has no bf16, and fp16 only in lengths that are powers of two')
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
        if x.dtype is not torch.float16: return torch.ops.aten._fft_r2c(x, dim, *args)
        return torch.ops.aten._fft_r2c(x.float(), dim, *args).to(torch.complex32)


def _may_cast(x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type != 'cpu': return False
    return x.is_floating_point() and x.dtype is not torch.float64
