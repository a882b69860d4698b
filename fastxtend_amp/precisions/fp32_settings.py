"PyTorch's settings for the precision in which fp32 tensors are multiplied: read, and set inside a context."
from __future__ import annotations

import threading
from typing import Any

from torch.backends import cuda, cudnn

from ..compat import get_fp32_setting, set_fp32_setting

# Where the attribute `fp32_precision` of each backend and operation is, and its default. One that is 'none' follows the
# one above it: an operation its backend, a backend the generic one. So a setting stands behind those that it follows.
FP32_SETTINGS = {
    ('generic', 'all'): ('torch.backends', 'none'),
    ('cuda', 'all'): ('torch.backends.cudnn', 'none'),
    ('cuda', 'matmul'): ('torch.backends.cuda.matmul', 'none'),
    ('cuda', 'conv'): ('torch.backends.cudnn.conv', 'tf32'),
    ('cuda', 'rnn'): ('torch.backends.cudnn.rnn', 'tf32'),
    ('mkldnn', 'all'): ('torch.backends.mkldnn', 'none'),
    ('mkldnn', 'matmul'): ('torch.backends.mkldnn.matmul', 'none'),
    ('mkldnn', 'conv'): ('torch.backends.mkldnn.conv', 'none'),
    ('mkldnn', 'rnn'): ('torch.backends.mkldnn.rnn', 'none'),
}
Settings = dict[tuple[str, str], str]                            # 'ieee', 'tf32', 'bf16' or 'none'
FULL_PRECISION: Settings = dict.fromkeys(FP32_SETTINGS, 'ieee')
TF32_SETTINGS: Settings = dict.fromkeys([('cuda', 'matmul'), ('cuda', 'conv'), ('cuda', 'rnn')], 'tf32')

_lock = threading.RLock()
_open: list[fp32_settings] = []                                  # in the order in which they were entered
_before: Settings = {}                                           # what was set before the first; empty without one
_forbidding: list[Any] = []                                      # backends whose `allow_tf32` was False then


class fp32_settings:
    """Context that sets how precisely fp32 tensors are multiplied, in all threads.

    Several may be open at once, in any threads: the one entered last decides, and what was set before the first is
    restored when the last one ends, also after an exception. Inside, PyTorch's older names,
    `torch.get_float32_matmul_precision` and `allow_tf32`, may raise a `RuntimeError` when they are read;
    `TF32_SETTINGS` keeps `allow_tf32` readable, which PyTorch's compiler reads.
    """
    def __init__(self,
        wanted: Settings, # `FULL_PRECISION` or `TF32_SETTINGS`, or some of the keys of `FP32_SETTINGS`
    ):
        self.wanted = wanted

    def __enter__(self) -> fp32_settings:
        with _lock:
            if not _before:
                _forbidding[:] = filter(_forbids_tf32, (cuda.matmul, cudnn))
                _before.update(_values())
            _open.append(self)
            try: _apply()
            except BaseException:                                # an interrupt: `with` would not leave it
                self.__exit__()
                raise
        return self

    def __exit__(self, *args: object) -> None: # It may be called without `__enter__`, or again after an interrupt
        with _lock:
            if self in _open: _open.remove(self)
            if _before: _apply()


def _apply() -> None:
    "Set what the context that was entered last wants; without one, what was set before the first."
    wanted = _open[-1].wanted if _open else {}
    for backend in _forbidding: backend.allow_tf32 = wanted is TF32_SETTINGS
    values = {**_before, **wanted}
    for key, value in values.items():                            # some already read so: they follow one above
        if get_fp32_setting(*key) != value: set_fp32_setting(*key, 'none' if value == _above(values, *key) else value)
    if not _open: _before.clear()


def _forbids_tf32(backend: Any) -> bool:
    try: return not backend.allow_tf32
    except RuntimeError: return False                            # the user has set both names, to different values


def _values() -> Settings: return {key: get_fp32_setting(*key) for key in FP32_SETTINGS}


def _above(values: Settings, backend: str, op: str) -> str:
    "Return the value that a setting follows if it has none of its own."
    return 'none' if backend == 'generic' else values['generic' if op == 'all' else backend, 'all']


def settings_note() -> str: # '' with the defaults
    "Describe the settings below full precision that are not PyTorch's default, for a message."
    values = _values()
    found = [f"`{name}.fp32_precision` is '{values[key]}'" for key, (name, default) in FP32_SETTINGS.items()
             if values[key] not in ('none', 'ieee', default, _above(values, *key))]
    return f"PyTorch multiplies fp32 tensors with less than full precision: {', '.join(found)}" if found else ''
