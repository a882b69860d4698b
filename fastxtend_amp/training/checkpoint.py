"""Checkpoints: the precision's state, such as the loss scale, in the files of `Learner.save`, which are written whole.

Importing this file wraps `Learner.save`, fastai's `save_model`, `Learner.load`, `TextLearner.load`, and
`Learner.export`, which then writes fp32. Without a precision callback they run fastai's own code, except on devices
that need a `FileFormat`.
"""
from __future__ import annotations

import functools, glob, os, shutil, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import fastai.learner
from fastai.learner import Learner, replacing_yield
from fastai.text.learner import TextLearner
from fastai.torch_core import get_model, rank_distrib
from fastcore.basics import risinstance

from ..common import warn_user
from ..convert import map_tensors
from .loop import PRECISION_CALLBACKS, in_batch, precision_callback
from .metrics import PrecisionMetric
from .optimizers import place_state

_STALE = 3600  # seconds; a file that nobody has written to for so long was left by a killed process


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]: # A file to write to
    """Write to a file beside `path`, which replaces it when it is complete.

    An exception, a full disk or a killed process leaves the old file whole. What a killed process has left is removed
    by a later call, after an hour.
    """
    path = path.resolve()
    for left in path.parent.glob(f'.{glob.escape(path.name)}.*.part'):
        with suppress(OSError):                                  # another writer may have removed it
            if time.time() - left.stat().st_mtime > _STALE: left.unlink()
    part = path.with_name(f'.{path.name}.{uuid4().hex}.part')    # each writer has its own
    try:
        with open(part, 'xb') as f: yield f
        if path.exists(): shutil.copymode(path, part)
        os.replace(part, path)
    finally: part.unlink(missing_ok=True)


class FileFormat(NamedTuple):
    "Two conversions for learners on special devices, so that their files are those of a plain learner on a CPU."
    applies: Callable # Returns whether a learner needs this format
    to_file: Callable # Returns what to write for a tensor of a state; called in every process
    from_file: Callable # Returns what to load, from a learner and the states of model and optimizer in a file


FORMATS: list[FileFormat] = []                                   # devices add theirs


def _format(learn: Learner) -> FileFormat | None: return next((f for f in FORMATS if f.applies(learn)), None)


@dataclass
class _StandIn:
    "A stand-in for a model or an optimizer while fastai asks for its state, or gives it one."
    state: Any = None
    def state_dict(self) -> Any: return self.state
    def load_state_dict(self, state: Any, strict: bool = True) -> None: self.state = state


_replaced = contextmanager(replacing_yield)


# -- the methods

def save(original: Callable, self: Learner, file: Any, **kwargs: Any) -> Any: # The path
    """Call the `save` that this replaces; with a precision the file holds its state, and is written whole.

    The state of sharded parameters is put together from all processes, which must all call this.
    """
    cb, file_format = precision_callback(self), _format(self)
    if not (cb or file_format): return original(self, file, **kwargs)
    opt = self.opt if kwargs.get('with_opt', True) else None
    states: Any = [get_model(self.model).state_dict(), opt and opt.state_dict()]
    model_state, opt_state = map_tensors(file_format.to_file, states) if file_format else states
    # In the optimizer's state: fastai reads a file with a third key as that of a model without an optimizer.
    if opt and cb and (own := cb.state_dict()): opt_state = {**opt_state, cb.state_key: own}
    with _replaced(self, 'model', _StandIn(model_state)), _replaced(self, 'opt', opt and _StandIn(opt_state)):
        return original(self, file, **kwargs)


def save_model(original: Callable, file: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    "Call fastai's `save_model`; a file of `save` above is written whole."
    is_ours = isinstance(model, _StandIn) and isinstance(file, Path) and not rank_distrib()
    with written_whole(file) if is_ours else nullcontext(file) as f: original(f, model, *args, **kwargs)


def load(original: Callable, self: Learner, file: Any, *args: Any, **kwargs: Any) -> Learner:
    """Call the `load` that this replaces; the file may hold a precision's state.

    With a precision, the whole file is read and the state is checked before anything is loaded, so a damaged file
    leaves the learner unchanged.
    """
    cb, file_format = precision_callback(self), _format(self)
    if not (cb or file_format): return original(self, file, *args, **kwargs)
    # Ending the fit makes weights fp32 that are bf16 in it. In a batch fp16 goes on, with the scale from the file.
    if cb and (cb.mode != 'fp16' or not in_batch(self)): cb.close()
    if self.opt is None: self.create_opt()
    model, opt = _StandIn(), _StandIn()
    if file_format: args, kwargs = (), {**kwargs, 'device': 'cpu'}
    with _replaced(self, 'model', model), _replaced(self, 'opt', opt): original(self, file, *args, **kwargs)
    if not kwargs.get('with_opt', True): opt.state = None        # which fastai's `TextLearner.load` ignores
    if file_format: model.state, opt.state = file_format.from_file(self, model.state, opt.state)
    own = cb and cb.state_dict()
    try:
        if own and opt.state: cb.load_state_dict(opt.state.get(cb.state_key))
        get_model(self.model).load_state_dict(model.state, strict=kwargs.get('strict', True))
    except BaseException:
        if own: cb.load_state_dict(own)
        raise
    try:
        if opt.state: self.opt.load_state_dict(opt.state)
    except Exception: warn_user('Could not load the optimizer state.')   # as fastai has it
    place_state(self.opt)
    return self


def export(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> None:
    "Call the `export` that this replaces, while what fastxtend_amp has put on the learner is off it."
    cb = precision_callback(self)
    if cb and not in_batch(self): cb.close()
    kept = {**vars(self)}
    try:
        for name in '_scopes', 'scaler', 'precision_decision': vars(self).pop(name, None)
        self.metrics = self.metrics.filter(risinstance(PrecisionMetric), negate=True)
        self.cbs = self.cbs.filter(risinstance(PRECISION_CALLBACKS), negate=True)
        original(self, *args, **kwargs)
        if not kept.get('_scopes'): kept['opt'] = self.opt       # fastai makes a new one; a fit keeps its own
    finally: vars(self).update(kept)
    if cb and not cb.has_exported:
        cb.has_exported = True
        warn_user('Exported in fp32, for a file that loads without fastxtend_amp.\nTo train or predict in 16 bits '
                  'after `load_learner`, call `to_bf16()` or another method on what it returns.')


def put_over(
    owner: Any,
    name: str, # Of one of its methods or functions
    new: Callable, # Called in its place, with the original and then its arguments
) -> None:
    "Put `new(original, ...)` in the place of `owner.name`."
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: new(original, *args, **kwargs)))


put_over(fastai.learner, 'save_model', save_model)
put_over(Learner, 'save', save)
put_over(Learner, 'load', load)
put_over(TextLearner, 'load', load)
put_over(Learner, 'export', export)
