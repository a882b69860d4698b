"""Checkpoints: the precision's state, such as the loss scale, in the files of `Learner.save`, which are written whole.

Importing this file replaces `Learner.save`, `Learner.load`, which `TextLearner` overrides, and `Learner.export`, which
writes fp32. Each calls what it replaces, and without a precision callback does nothing else.
"""
from __future__ import annotations

import functools, os, shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import fastai.learner
from fastai.learner import Learner, join_path_file
from fastai.text.learner import TextLearner
from fastai.torch_core import get_model
from fastcore.foundation import L

from ..common import warn_user
from ..precisions import PRECISIONS
from .loop import PRECISION_CALLBACKS, in_batch, precision_callback
from .metrics import PrecisionMetric

__all__ = ['FORMATS', 'FileFormat', 'put_over', 'written_whole']

# -- files that are whole or not there

@contextmanager
def written_whole(file: str | os.PathLike | BinaryIO) -> Iterator[BinaryIO]: # A file to write to
    """Write to a file beside `file`, which replaces it when it is complete; file objects are written to directly.

    An exception, a full disk or a killed process leaves the old file whole. The next call removes what a killed
    process has left.
    """
    if not isinstance(file, (str, os.PathLike)):
        yield file
        return
    target = Path(os.path.realpath(file))
    for left in target.parent.glob(f'.{target.name}.*.part'):
        if not _is_running(left.name.split('.')[-3]): left.unlink(missing_ok=True)
    part = target.with_name(f'.{target.name}.{os.getpid()}.{uuid4().hex[:8]}.part')   # each writer has its own
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


def _is_running(pid: str) -> bool:
    "Return whether a process may still be running; on Windows, where asking would end it, always True."
    if os.name != 'posix': return True
    try: os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError): return False
    except PermissionError: pass
    return True


# -- what a file holds

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


@contextmanager
def _standing_in(learn: Learner, model: _StandIn, opt: _StandIn | None) -> Iterator[None]:
    "Give fastai's `save` and `load`, and patches of them, stand-ins for the learner's model and optimizer."
    own = learn.model, learn.opt
    try:
        learn.model, learn.opt = model, opt
        yield
    finally: learn.model, learn.opt = own


# -- the methods

def save(original: Callable, self: Learner, file: str | os.PathLike | BinaryIO, **kwargs: Any) -> Path:
    """Call the `save` that this replaces; with a precision the file holds its state, and is written whole.

    The state of sharded parameters is put together from all processes, which must all call this.
    """
    cb = precision_callback(self)
    file_format = _format(self)
    if cb is None and file_format is _PLAIN: return original(self, file, **kwargs)
    with_opt = kwargs.get('with_opt', True) and self.opt is not None
    model_state, opt_state = file_format.read(self, with_opt)
    own = cb.state_dict() if cb is not None else {}
    # In the optimizer's state: fastai reads a file with a third key as that of a model without an optimizer.
    if own and isinstance(opt_state, Mapping): opt_state = {**opt_state, cb.state_key: own}
    opt = _StandIn(opt_state) if with_opt else None
    with _standing_in(self, _StandIn(model_state), opt): return original(self, file, **kwargs)


def save_model(original: Callable, file: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    "Call fastai's `save_model`; the file of a learner with a precision is written whole."
    if not isinstance(model, _StandIn) or fastai.learner.rank_distrib(): return original(file, model, *args, **kwargs)
    with written_whole(file) as f: original(f, model, *args, **kwargs)


def load(original: Callable, self: Learner, file: str | os.PathLike | BinaryIO, *args: Any, **kwargs: Any) -> Learner:
    """Call the `load` that this replaces; the file may hold a precision's state.

    With a precision, the whole file is read and the state is checked before anything is loaded, so a damaged file
    leaves the learner unchanged.
    """
    cb = precision_callback(self)
    file_format = _format(self)
    if cb is None and file_format is _PLAIN: return original(self, file, *args, **kwargs)
    # Weights that are bf16 in a fit become fp32. In a batch fp16 goes on: its scale continues from the file.
    if cb is not None and (cb.mode != 'fp16' or not in_batch(self)): cb.close()
    if self.opt is None: self.create_opt()
    model, opt = _StandIn(), _StandIn()
    if file_format.device: args, kwargs = (), {**kwargs, 'device': file_format.device}
    with _standing_in(self, model, opt): original(self, file, *args, **kwargs)
    if not kwargs.get('with_opt', True): opt.state = None        # which fastai's `TextLearner.load` ignores
    keys = [cls.state_key for cls in PRECISIONS.values() if isinstance(opt.state, dict) and cls.state_key in opt.state]
    states = {key: opt.state.pop(key) for key in keys}
    own = cb.state_dict() if cb is not None else {}
    if own and opt.state is not None:
        try: cb.load_state_dict(states.get(cb.state_key))
        except ValueError as e:
            where = getattr(file, 'name', join_path_file(file, self.path/self.model_dir, ext='.pth'))
            raise ValueError(f'{e}\nThis is in {where}. `learn.load(..., with_opt=False)` loads only the model; '
                             '`learn.to_fp32()` or `learn.to_bf16()` before `load` leaves the scale out.') from e
    try: file_format.load_model(self, model.state, **model.options)
    except BaseException:
        if own: cb.load_state_dict(own)
        raise
    if opt.state is None: return self
    try: file_format.load_opt(self, opt.state)
    except Exception: warn_user('Could not load the optimizer state.')   # as fastai has it
    if 'grad_scaler' in states and not own:
        warn_user('The file holds the loss scale of fp16 training, which this learner does not use.\n'
                  'To continue in fp16, call `learn.to_fp16()` before `learn.load`.')
    return self


def export(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> Any:
    "Call the `export` that this replaces, while what fastxtend_amp has put on the learner is off it."
    cb = precision_callback(self)
    if cb is not None and not in_batch(self): cb.close()
    metrics, cbs, attributes = self.metrics, self.cbs, vars(self)
    ours = ('mixed_precision', '_scopes', 'scaler', 'precision_decision')
    kept = {name: attributes[name] for name in ours if name in attributes}
    try:
        for name in kept: del attributes[name]
        self.metrics = metrics.filter(lambda metric: not isinstance(metric, PrecisionMetric))
        self.cbs = L([c for c in cbs if not isinstance(c, PRECISION_CALLBACKS)])
        result = original(self, *args, **kwargs)
    finally:
        self.metrics, self.cbs = metrics, cbs
        attributes.update(kept)
    if cb is not None and not cb.has_exported:
        cb.has_exported = True
        warn_user('Exported in fp32, for a file that loads without fastxtend_amp.\nTo train or predict in 16 bits '
                  'after `load_learner`, call `to_bf16()` or another method on what it returns.')
    return result


def put_over(
    owner: Any,
    name: str, # Of one of its methods or functions
    new: Callable, # Called in its place, with the original and then its arguments
) -> None:
    "Put `new(original, ...)` in the place of `owner.name`."
    original = getattr(owner, name)
    @functools.wraps(original)
    def replacement(*args, **kwargs): return new(original, *args, **kwargs)
    setattr(owner, name, replacement)


put_over(fastai.learner, 'save_model', save_model)
put_over(Learner, 'save', save)
put_over(Learner, 'load', load)
put_over(TextLearner, 'load', load)
put_over(Learner, 'export', export)
