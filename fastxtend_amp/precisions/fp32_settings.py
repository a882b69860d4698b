"PyTorch's settings for the precision in which fp32 tensors are multiplied: read, and set inside a context."
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.backends import cuda, cudnn

from ..compat import get_fp32_setting, set_fp32_setting

__all__ = ['FP32_SETTINGS', 'FULL_PRECISION', 'TF32_SETTINGS', 'fp32_settings', 'other_fp32_settings', 'settings_note']

# Backend and operation of each attribute `fp32_precision`, and its default. One that is 'none' follows the one above
# it: an operation its backend, a backend the generic one. So a setting stands behind those that it follows.
FP32_SETTINGS = {
    'torch.backends': ('generic', 'all', 'none'),
    'torch.backends.cudnn': ('cuda', 'all', 'none'),
    'torch.backends.cuda.matmul': ('cuda', 'matmul', 'none'),
    'torch.backends.cudnn.conv': ('cuda', 'conv', 'tf32'),
    'torch.backends.cudnn.rnn': ('cuda', 'rnn', 'tf32'),
    'torch.backends.mkldnn': ('mkldnn', 'all', 'none'),
    'torch.backends.mkldnn.matmul': ('mkldnn', 'matmul', 'none'),
    'torch.backends.mkldnn.conv': ('mkldnn', 'conv', 'none'),
    'torch.backends.mkldnn.rnn': ('mkldnn', 'rnn', 'none'),
}
FULL_PRECISION = dict.fromkeys(FP32_SETTINGS, 'ieee')
TF32_SETTINGS = dict.fromkeys(('torch.backends.cuda.matmul', 'torch.backends.cudnn.conv',
                               'torch.backends.cudnn.rnn'), 'tf32')


_lock = threading.RLock()
_open: list[fp32_settings] = []                                  # in the order in which they were entered
_undo: list[Callable] = []                                       # brings back what was set before the first


class fp32_settings:
    """Context that sets how precisely fp32 tensors are multiplied, in all threads.

    Several may be open at once, in any threads: the one entered last decides, and what was set before the first is
    restored when the last one ends, also after an exception. Inside, PyTorch's older names,
    `torch.get_float32_matmul_precision` and `allow_tf32`, may raise a `RuntimeError` when they are read;
    `TF32_SETTINGS` keeps `allow_tf32` readable, which PyTorch's compiler reads.
    """
    def __init__(self,
        wanted: Mapping[str, str], # Precision, 'ieee', 'tf32' or 'bf16', by a name in `FP32_SETTINGS`
    ):
        self.wanted = wanted

    def __enter__(self) -> fp32_settings:
        with _lock:
            _open.append(self)
            try: _apply()
            except BaseException:                                # an interrupt: `with` would not leave it
                self.__exit__()
                raise
        return self

    def add(self, model: object) -> None: "Do nothing: the settings hold for every model."

    def __exit__(self, *args: object) -> None:
        with _lock:
            if self in _open: _open.remove(self)
            _apply()


def _apply() -> None:
    "Restore the settings, then set what the open contexts want; each change is noted before it is made."
    while _undo:
        _undo[-1]()
        del _undo[-1]
    wanted = {name: value for settings in _open for name, value in settings.wanted.items()}
    is_tf32 = bool(_open) and _open[-1].wanted is TF32_SETTINGS
    old_names: Any = [flags for flags in (cuda.matmul, cudnn) if is_tf32 and _forbids_tf32(flags)]
    before = _values()
    for name, (backend, op, _) in FP32_SETTINGS.items():
        # One that follows another, which is set already, stays: what is read is either its own value or that one's.
        if name not in wanted or get_fp32_setting(backend, op) == wanted[name]: continue
        follows = before[backend, op] == _above(before, backend, op)
        _undo.append(partial(set_fp32_setting, backend, op, 'none' if follows else before[backend, op]))
        set_fp32_setting(backend, op, wanted[name])
    for flags in old_names:
        _undo.append(partial(setattr, flags, 'allow_tf32', False))
        flags.allow_tf32 = True


def _forbids_tf32(flags: Any) -> bool:
    try: return not flags.allow_tf32
    except RuntimeError: return False                            # the user has set both names, to different values


def _values() -> dict[tuple[str, str], str]:
    return {(backend, op): get_fp32_setting(backend, op) for backend, op, _ in FP32_SETTINGS.values()}


def _above(values: dict[tuple[str, str], str], backend: str, op: str) -> str:
    "Return the value that a setting follows if it has none of its own."
    return 'none' if backend == 'generic' else values['generic' if op == 'all' else backend, 'all']


def other_fp32_settings() -> dict[str, str]: # Such as {'torch.backends.cuda.matmul': 'tf32'}
    "Return the settings below full precision that are not PyTorch's default, without those that follow one of them."
    values, found = _values(), {}
    for name, (backend, op, default) in FP32_SETTINGS.items():
        value = values[backend, op]
        if value not in ('none', 'ieee', default, _above(values, backend, op)): found[name] = value
    return found


def settings_note() -> str: # Such as "fp32 has less than full precision here: ... = 'tf32'"; '' with the defaults
    "Describe the settings that are not PyTorch's default, for a message."
    found = [f"`{name}.fp32_precision` is '{value}'" for name, value in other_fp32_settings().items()]
    return f"PyTorch multiplies fp32 tensors with less than full precision: {', '.join(found)}" if found else ''
