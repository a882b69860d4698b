"""Checkpoints: the precision's state, such as the loss scale, in the files of `Learner.save`.

It is stored inside the optimizer's state: fastai loads a file with a third key as one without an optimizer. Importing
this file wraps `Learner.save`, `Learner.load` and `TextLearner.load`, which give the optimizer another `state_dict` or
`load_state_dict` for the call; and `Learner.export`, which leaves out mixed precision.
"""
import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from shutil import copymode
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from fastai.callback import fp16
from fastai.learner import Learner
from fastai.text.learner import TextLearner
from fastai.torch_core import rank_distrib
from fastcore.xtras import join_path_file

from ..learners import is_sharded, loaded_states, training_device
from ..messages import package_of
from ..precisions import PRECISIONS
from ..precisions.forwards import remove_forwards
from .current import precision_callback


def _save(original: Callable, self: Learner, file: Any, **kwargs: Any) -> Any: # The path
    """Call the `save` that this replaces; with a precision the file holds its state.

    The file is written beside the old one, which it replaces when it is complete.
    """
    cb, opt = precision_callback(self), self.opt
    states = {**loaded_states(self)}                             # of a file that was loaded without that precision
    if cb is not None: states[cb.precision.state_key] = cb.precision.state_dict()
    if not states: return original(self, file, **kwargs)
    with ExitStack() as stack:
        if opt:
            of_optimizer = opt.state_dict
            states = {key: state for key, state in states.items() if state}
            stack.enter_context(patch.object(opt, 'state_dict', lambda: {**of_optimizer(), **states}))
        path = join_path_file(file, self.path/self.model_dir, ext='.pth')
        is_open_file = path is file
        if is_open_file or rank_distrib(): return original(self, file, **kwargs)   # the other ranks write nothing
        target = path.resolve()                                  # what a link points to
        with TemporaryDirectory(dir=target.parent) as folder:
            original(self, Path(folder, 'part'), **kwargs)       # fastai appends '.pth'
            part = Path(folder, 'part.pth')
            if target.exists(): copymode(target, part)
            part.replace(target)
    return path


def _load(original: Callable, self: Learner, file: Any, *args: Any, **kwargs: Any) -> Learner:
    """Call the `load` that this replaces; the file may hold a precision's state.

    The state of a precision that the learner does not have is kept on the learner until that precision is set.
    """
    cb = precision_callback(self)
    if cb is not None:
        if cb.in_batch: raise RuntimeError('load() cannot run in a batch: call it in `after_batch` (order > 10).')
        cb.close()                                               # converts weights that are bf16 in a fit to fp32
        self.model.to(training_device(self))                     # torch's optimizers load their state to its device
    if self.opt is None: self.create_opt()
    with_opt = kwargs.get('with_opt')                            # None if it is not given, which means True to fastai
    if args and isinstance(self, TextLearner): with_opt = args[0]     # whose `load` has `device` after it
    of_optimizer, in_file = self.opt.load_state_dict, dict[str, Any]()

    def load_state_dict(state: Any) -> None:
        if with_opt is False: return                             # which `TextLearner.load` ignores
        in_file.update(state)
        of_optimizer(state)

    with patch.object(self.opt, 'load_state_dict', load_state_dict): original(self, file, *args, **kwargs)
    # Not above: fastai turns each error of `load_state_dict` into a warning, and then the optimizer has no state.
    if in_file:
        states = {cls.state_key: in_file[cls.state_key] for cls in PRECISIONS.values() if cls.state_key in in_file}
        if cb is not None: cb.load_state_dict(states.pop(cb.precision.state_key, None))
        self.loaded_precision = states                           # instead of those of an earlier file
    return self


def _export(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> None:
    "Call the `export` that this replaces, without what fastxtend_amp has added to the learner."
    cb = precision_callback(self)
    if cb is not None:
        if cb.in_batch: raise RuntimeError('export() cannot run in a batch: call it in `after_batch` (order > 10).')
        if is_sharded(self.model):
            raise RuntimeError('export() cannot write a sharded learner: `save` it, `load` the file into an unsharded '
                               'one, and export that.')
        cb.close()
    remove_forwards(self.model)
    kept = {**vars(self)}
    try:
        for name, value in kept.items():
            if _is_ours(value) or name == 'loaded_precision': del vars(self)[name]
        self.metrics = self.metrics.filter(_is_ours, negate=True)
        self.cbs = self.cbs.filter(_is_ours, negate=True)
        original(self, *args, **kwargs)
    finally: vars(self).update(kept)
    if cb is None or rank_distrib(): return
    name, call = cb.precision.name, repr(cb.precision)
    print(f'Exported without mixed precision. To predict in {name}, on a device that has it, call `{call}` after '
          '`load_learner`.')


def _is_ours(x: Any) -> bool:
    return isinstance(x, fp16.MixedPrecision) or package_of(type(x)) == 'fastxtend_amp'


def wrap_method(
    owner: Any,
    name: str, # Of the method
    new: Callable, # Gets the original, then the arguments of a call
) -> None:
    "Replace a method by one that calls `new(original, ...)`."
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any: return new(original, *args, **kwargs)
    setattr(owner, name, wrapper)


wrap_method(Learner, 'save', _save)
for owner in (Learner, TextLearner): wrap_method(owner, 'load', _load)
wrap_method(Learner, 'export', _export)
