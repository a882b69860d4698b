"PyTorch's settings for the precision in which fp32 tensors are multiplied: read, and set inside a context."
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.backends import cuda, cudnn


# Where the attribute `fp32_precision` of each backend and operation is. 'none' follows the setting one level up, that
# of its backend or the generic one. Settings are made in this order, each after the one that it may follow.
FP32_SETTINGS = {
    ('generic', 'all'): 'torch.backends',
    ('cuda', 'all'): 'torch.backends.cudnn',
    ('cuda', 'matmul'): 'torch.backends.cuda.matmul',
    ('cuda', 'conv'): 'torch.backends.cudnn.conv',
    ('cuda', 'rnn'): 'torch.backends.cudnn.rnn',
    ('mkldnn', 'all'): 'torch.backends.mkldnn',
    ('mkldnn', 'matmul'): 'torch.backends.mkldnn.matmul',
    ('mkldnn', 'conv'): 'torch.backends.mkldnn.conv',
    ('mkldnn', 'rnn'): 'torch.backends.mkldnn.rnn',
}
Settings = dict[tuple[str, str], str]                            # 'ieee', 'tf32', 'bf16' or 'none'
DEFAULTS: Settings = {('cuda', 'conv'): 'tf32', ('cuda', 'rnn'): 'tf32'}       # PyTorch's; 'none' for the others
FULL_PRECISION: Settings = dict.fromkeys(FP32_SETTINGS, 'ieee')
TF32_SETTINGS: Settings = {('cuda', op): 'tf32' for op in ('matmul', 'conv', 'rnn')}


@contextmanager
def fp32_settings(
    wanted: Settings, # `FULL_PRECISION` or `TF32_SETTINGS`, or some of the keys of `FP32_SETTINGS`
) -> Iterator[None]:
    """Set how precisely fp32 tensors are multiplied, in the whole process, and restore it at the end.

    Inside, PyTorch's older names, `torch.get_float32_matmul_precision` and `allow_tf32`, may raise a `RuntimeError`
    when they are read; `TF32_SETTINGS` keeps `allow_tf32` readable, `FULL_PRECISION` that of cuDNN.
    """
    before, older = _values(), _older_names()
    try:
        # PyTorch's compiler and `cudnn.flags` read `allow_tf32`. It is set first, as it also writes `fp32_precision`.
        for backend in older: backend.allow_tf32 = wanted == TF32_SETTINGS
        _set(before | wanted)
        yield
    finally:
        for backend, value in older.items(): backend.allow_tf32 = value
        _set(before)


def _set(values: Settings) -> None:
    """Make settings, in the order of `FP32_SETTINGS`. For example, 'ieee' for all but the last of these, 'tf32':

        'generic', 'all'    becomes 'ieee'
        'cuda', 'all'       is 'ieee' now, from above; if it has a value of its own, that becomes 'none'
        'cuda', 'matmul'    becomes 'tf32'
    """
    for key, value in values.items():
        if get_fp32_setting(*key) != value: set_fp32_setting(*key, 'none' if value == _above(values, *key) else value)


def _older_names() -> dict[Any, bool]:
    "Return the values of `allow_tf32`, by backend; without a True of `cuda.matmul`, which may mean 'high' or 'medium'."
    found = dict[Any, bool]()
    for backend in (cuda.matmul, cudnn):
        with suppress(RuntimeError):                             # the user has set both names, to different values
            if backend is cudnn or not backend.allow_tf32: found[backend] = backend.allow_tf32
    return found


def _values() -> Settings: return {key: get_fp32_setting(*key) for key in FP32_SETTINGS}


def _above(values: Settings, backend: str, op: str) -> str:
    "Return the value that a setting follows if it has none of its own."
    return 'none' if backend == 'generic' else values['generic' if op == 'all' else backend, 'all']


def settings_note() -> str: # '' with the defaults
    "Describe the settings below full precision that are not PyTorch's default, for a message."
    values = _values()
    found = [f"`{name}.fp32_precision` is '{values[key]}'" for key, name in FP32_SETTINGS.items()
             if values[key] not in ('none', 'ieee', DEFAULTS.get(key), _above(values, *key))]
    return f"PyTorch multiplies fp32 tensors with less than full precision: {', '.join(found)}" if found else ''


# -- undocumented names of PyTorch

def get_fp32_setting(backend: str, op: str) -> str: # 'ieee', 'tf32', 'bf16', or 'none'
    """Return the setting `fp32_precision` of a backend and an operation ('cuda', 'matmul'); 'none' if it is not set.

    Relies on `torch._C._get_fp32_precision_getter` (since 2.9), which the documented attributes call: assigning to that
    of `torch.backends.mkldnn` sets the generic one. Without it and its setter: `AttributeError`.
    """
    return torch._C._get_fp32_precision_getter(backend, op)


def set_fp32_setting(backend: str, op: str, value: str) -> None:
    "Set what `get_fp32_setting` returns."
    torch._C._set_fp32_precision_setter(backend, op, value)
