"""Checkpoints: the loss scale in the files of `Learner.save` and `load`, which are written whole.

Three methods of fastai are replaced: `Learner.save`, `Learner.load`, which `TextLearner` overrides, and
`Learner.export`, which writes fp32. Without a precision callback they do what fastai's do.
"""
from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import fastai.learner
from fastai.learner import Learner, join_path_file
from fastai.text.learner import TextLearner, load_model_text
from fastai.torch_core import distrib_barrier, get_model, rank_distrib
from fastcore.basics import ifnone

from .callback import precision_callback
from .common import loaders_device, warn_user
from .loop import Loop
from .metrics import PrecisionMetric
from .scaling import check_scaler_state

__all__ = ['FORMATS', 'FileFormat', 'put_over', 'written_whole']

KEY = 'grad_scaler'  # in the optimizer's state: fastai takes a file with a third key for one of a model alone


@contextmanager
def written_whole(file: str | os.PathLike | BinaryIO) -> Iterator[BinaryIO]: # A file to write to
    """Write to a file beside `file`, which takes its place when it is complete; file objects are written to directly.

    After an exception, a full disk or a killed process the old file is whole.
    """
    if not isinstance(file, (str, os.PathLike)):
        yield file
        return
    target = Path(os.path.realpath(file))
    part = target.with_name(f'.{target.name}.{uuid4().hex[:8]}.part')   # another writer of `file` has another one
    try:
        with open(part, 'xb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if target.exists(): shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _StandIn:
    "A stand-in for a model or an optimizer while fastai asks for its state, or gives it one."
    def __init__(self, state: Any = None): self.state, self.options = state, dict[str, Any]()
    def state_dict(self) -> Any: return self.state
    def load_state_dict(self, state: Any, **options: Any) -> None: self.state, self.options = state, options


class FileFormat:
    "The state of a learner's model and optimizer as it is in a file; a device may need another one."
    device: str | None = None  # where `load` reads the file to; the learner's own if None
    def applies(self, learn: Learner) -> bool:
        "Return whether the learner needs this format."
        return False
    def read(self, learn: Learner, with_opt: bool) -> tuple[Any, Any]:
        "Return the states of model and optimizer to write; called in every process."
        return get_model(learn.model).state_dict(), learn.opt.state_dict() if with_opt else None
    def load_model(self, learn: Learner, state: Any, **options: Any) -> None:
        "Load the model's state from a file."
        get_model(learn.model).load_state_dict(state, **options)
    def load_opt(self, learn: Learner, state: Any) -> None:
        "Load the optimizer's state from a file."
        learn.opt.load_state_dict(state)


FORMATS: list[FileFormat] = []                                   # devices add theirs
_PLAIN = FileFormat()


def _format(learn: Learner) -> FileFormat: return next((f for f in FORMATS if f.applies(learn)), _PLAIN)


def save(original: Callable, self: Learner, file: str | os.PathLike | BinaryIO, **kwargs: Any) -> Path:
    """Call fastai's `Learner.save`; with a precision callback the file holds its loss scale, and is written whole.

    The state of sharded parameters is put together from all processes, which must all call this.
    """
    cb, file_format = precision_callback(self), _format(self)
    if cb is None and file_format is _PLAIN: return original(self, file, **kwargs)
    with_opt = kwargs.get('with_opt', True) and self.opt is not None
    model_state, opt_state = file_format.read(self, with_opt)
    scale = cb.state_dict() if cb is not None else {}
    if scale and isinstance(opt_state, Mapping): opt_state = {**opt_state, KEY: scale}
    target = join_path_file(file, self.path/self.model_dir, ext='.pth')
    if rank_distrib(): return target
    opt = _StandIn(opt_state) if with_opt else None
    with written_whole(target) as f: fastai.learner.save_model(f, _StandIn(model_state), opt, **kwargs)
    return target


def load(original: Callable, self: Learner, file: str | os.PathLike | BinaryIO, *args: Any, **kwargs: Any) -> Learner:
    """Call fastai's `load`; the file may hold a loss scale.

    Model, optimizer and scale are loaded when all of the file has been read and the scale was found usable, so that a
    damaged file leaves the learner untouched.
    """
    cb, file_format = precision_callback(self), _format(self)
    if self.opt is None: self.create_opt()
    model, opt = _StandIn(), _StandIn()
    given = {**dict(zip([*signature(original).parameters][2:], args)), **kwargs}
    given['device'] = file_format.device or ifnone(given.get('device'), loaders_device(self))
    where = join_path_file(file, self.path/self.model_dir, ext='.pth')
    read = load_model_text if isinstance(self, TextLearner) else fastai.learner.load_model
    distrib_barrier()
    read(where, model, opt, **given)
    scale = opt.state.pop(KEY, None) if isinstance(opt.state, dict) else None
    takes_scale = cb is not None and cb.needs_loss_scaling
    if takes_scale and scale is not None:
        check_scaler_state(scale, str(getattr(file, 'name', where)),
                           "`learn.load(..., with_opt=False)` loads the model alone; `learn.to_fp32()` or "
                           "`learn.to_bf16()` before `load` leaves the scale out.")
    file_format.load_model(self, model.state, **model.options)
    if opt.state is None: return self
    try: file_format.load_opt(self, opt.state)
    except Exception: warn_user('Could not load the optimizer state.')   # as fastai has it
    if cb is not None and takes_scale: cb.load_state_dict(scale)
    elif scale is not None:
        warn_user("The file holds the loss scale of fp16 training, which this learner does not use.\n"
                  "To go on in fp16, call `learn.to_fp16()` before `learn.load`.")
    return self


def export(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> None:
    "Call fastai's `export` on the learner in fp32, without this package's metrics: the file loads without the package."
    metrics, has_precision = self.metrics, precision_callback(self) is not None
    try:
        self.metrics = metrics.filter(lambda metric: not isinstance(metric, PrecisionMetric))
        with self.precision_as('fp32') if has_precision else nullcontext(), _unwrapped(self):
            original(self, *args, **kwargs)
    finally: self.metrics = metrics
    if not has_precision: return
    warn_user('Exported in fp32, for a file that loads without fastxtend_amp.\nTo train or predict in low precision '
              'after `load_learner`, call `to_bf16()` or another on what it returns.')


@contextmanager
def _unwrapped(learn: Learner) -> Iterator[None]:
    "Take the loop, which stays on a learner in a fit, off meanwhile."
    attributes = vars(learn)
    loop = attributes.get('_with_events')
    try:
        if isinstance(loop, Loop): del attributes['_with_events']
        yield
    finally:
        if isinstance(loop, Loop): attributes['_with_events'] = loop


def put_over(
    owner: type,
    name: str, # Of one of its methods
    new: Callable, # Called in its place, with the method and then its arguments
) -> None:
    "Put `new(original, ...)` in the place of the method `owner.name`."
    original = getattr(owner, name)
    @functools.wraps(original)
    def replacement(*args, **kwargs): return new(original, *args, **kwargs)
    setattr(owner, name, replacement)


put_over(Learner, 'save', save)
put_over(Learner, 'load', load)
put_over(TextLearner, 'load', load)
put_over(Learner, 'export', export)
