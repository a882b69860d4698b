"A copy of a learner to train on: model, optimizer and the callbacks that shape a training step."
from __future__ import annotations

import copy, tempfile, threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.callback.mixup import MixHandler
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.callback.training import BnFreeze, GradientAccumulation, GradientClip
from fastai.learner import CastToTensor, Learner
from fastcore.basics import noop
from fastcore.foundation import L
from torch import nn

from ..callback import PRECISION_CALLBACKS, MixedPrecision
from ..compat import is_compiled_in_place
from ..convert import map_tensors

__all__ = ['runs_in_steps', 'takes_part', 'trial_learner']

# Of fastai's own callbacks those that shape a training step; MixHandler is MixUp and CutMix.
TRAINING_CALLBACKS = (TrainEvalCallback, CastToTensor, MixHandler, GradientAccumulation, GradientClip, BnFreeze,
                      ModelResetter, RNNCallback, RNNRegularizer, ChannelsLast)
_STEP_EVENTS = ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step',
                'after_step')


def takes_part(cb: Callback) -> bool:
    "Does `cb` shape a training step? See `Learner.compare_precision` for the rule."
    if isinstance(cb, PRECISION_CALLBACKS): return False
    if isinstance(cb, TRAINING_CALLBACKS): return True
    return not type(cb).__module__.startswith('fastai.') and runs_in_steps(cb)


def runs_in_steps(cb: Callback) -> bool:
    "Has `cb` an event from `before_batch` to `after_step`, of its class or its own?"
    return any(hasattr(type(cb), e) or e in vars(cb) for e in _STEP_EVENTS)


def trial_learner(
    learn: Learner, # The learner; nothing in it changes
    cbs: Iterable[Callback], # Those of its callbacks that take part; its precision callback does in any case
    folder: str, # A temporary one: the copy gets one inside, for the files that callbacks write through the learner
) -> Learner: # Another learner of the same class, on the same data, with a model and an optimizer of its own
    """Copy `learn` so that training the copy leaves no trace: not in it, its callbacks, its loggers or its recorder.

    The model is taken out of `DistributedDataParallel`, so the copy does not communicate with other processes. Data is
    shared. What cannot be copied, such as a lock, a file or a thread that a callback holds, is shared, too. `save`,
    `load` and `export` of the copy take files by their names alone, in its temporary folder.
    """
    memo = _shared(learn)
    trial = object.__new__(type(learn))
    memo[id(learn)] = trial
    trial.__dict__.update({k: v for k, v in vars(learn).items() if not _overrides_method(learn, k)})
    trial.model = _copied(_without_ddp(learn.model), memo)
    for m in trial.model.modules():                              # a copy that waits for no other process
        if isinstance(m, nn.SyncBatchNorm): m.__dict__['forward'] = MethodType(nn.BatchNorm1d.forward, m)
    trial.loss_func = _copied(learn.loss_func, memo)
    trial.opt = None if learn.opt is None else _copied_optimizer(learn.opt, memo)
    trial.cbs, trial.logger, trial.lock = L(), noop, threading.Lock()
    taking_part = {id(cb) for cb in cbs}
    for cb in learn.cbs:
        own = isinstance(cb, MixedPrecision)
        if not own and (id(cb) not in taking_part or isinstance(cb, PRECISION_CALLBACKS)): continue
        new = _copied_callback(cb, memo)
        trial.cbs.append(new)
        trial.__dict__[cb.name] = new
    # The wrappers that a callback has put around the learner's methods come along, bound to their copies.
    for name in vars(learn):
        method = vars(learn)[name]
        if not (_overrides_method(learn, name) and isinstance(method, MethodType)): continue
        trial.__dict__[name] = copy.deepcopy(method, memo)
    trial.path, trial.model_dir = Path(tempfile.mkdtemp(dir=folder)), 'models'
    for name in ('save', 'load', 'export'): trial.__dict__[name] = partial(_with_names_alone, getattr(trial, name))
    return trial


def _with_names_alone(method: Callable, *args: Any, **kwargs: Any) -> Any:
    "Call `method` with the name of each file alone: an absolute path, or `..`, leads out of a learner's folder."
    def name(value): return Path(value).name if isinstance(value, (str, Path)) else value
    return method(*map(name, args), **{k: name(v) for k, v in kwargs.items()})


def _overrides_method(learn, name): return callable(getattr(type(learn), name, None))


def _without_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _shared(learn) -> dict[Any, Any]:
    "What a deep copy shares with the original, as its memo: data, and the learner's lock and paths."
    loaders = list(getattr(learn.dls, 'loaders', ()))
    datasets = [getattr(dl, 'dataset', None) for dl in loaders]
    objects = [learn.dls, *loaders, *datasets, getattr(learn, 'lock', None), learn.logger]
    return {id(o): o for o in objects if o is not None}


def _copied(o: Any, memo: dict[Any, Any]) -> Any:
    "A deep copy of `o`; parts that refuse to be copied are shared."
    modules = _modules(o)
    for m in modules: _detach_results(m, memo)
    while True:
        before = [dict(vars(m)) for m in modules]
        try: new = _attempt(o, memo)
        except Exception:
            refused = {id(v): v for v in _refusing(o, memo)}
            if not refused.keys() - memo.keys(): raise
            memo.update(refused)
            continue
        finally:
            # Recurrent layers refresh their list of weights when they are copied.
            for m, attributes in zip(modules, before): vars(m).update(attributes)
        if isinstance(o, nn.Module): _compile_again(o, new)
        return new


def _attempt(o, memo):
    "A deep copy of `o`, noted in `memo` if it succeeds: one that fails leaves half-built objects behind."
    attempt = dict(memo)
    new = copy.deepcopy(o, attempt)
    memo.update(attempt)
    memo.setdefault('kept', []).append(attempt)                  # it notes itself by its id, which must not come again
    return new


def _modules(o) -> list[nn.Module]: return list(o.modules()) if isinstance(o, nn.Module) else []


def _detach_results(module: nn.Module, memo: dict[Any, Any]) -> None:
    "Tensors that a module has computed and kept, as weight normalization does, cannot be deep-copied with their graph."
    def note(t):
        if t.grad_fn is not None and id(t) not in memo: memo[id(t)] = t.detach().clone()
        return t
    for value in list(vars(module).values()): map_tensors(note, value)


def _refusing(o: Any, memo: dict[Any, Any]) -> Iterator[Any]:
    "The attributes of `o`, or of its modules, and entries of those that are containers, that cannot be copied."
    owners = _modules(o) or [o]
    inside = {**memo, **{id(m): m for m in owners}}
    for owner in owners:
        for value in list(getattr(owner, '__dict__', {}).values()):
            if _copies(value, inside): continue
            entries = list(value.values()) if isinstance(value, dict) else value
            if not isinstance(entries, (list, tuple, set)): yield value
            else: yield from (e for e in entries if not _copies(e, inside))


def _copies(value, memo) -> bool:
    try: copy.deepcopy(value, dict(memo))
    except Exception: return False
    return True


def _copied_callback(cb: Callback, memo: dict[Any, Any]) -> Callback:
    "A copy of `cb` on the copied learner; attribute by attribute, as a callback looks up what it lacks on its learner."
    new = object.__new__(type(cb))
    memo[id(cb)] = new
    for name, value in vars(cb).items():
        try: new.__dict__[name] = _attempt(value, memo)
        except Exception: new.__dict__[name] = value             # a file, a thread, a lock, or what holds one
    return new


def _copied_optimizer(opt: Any, memo: dict[Any, Any]) -> Any:
    "A copy of `opt` on the copied parameters, with its state and what a deep copy leaves out: flags of a fused kernel."
    new = _copied(opt, memo)
    for old, own in ((opt, new), (getattr(opt, 'opt', None), getattr(new, 'opt', None))):
        if not isinstance(old, torch.optim.Optimizer): continue
        flags = {k: v for k, v in vars(old).items() if k not in vars(own) and isinstance(v, (bool, int, float, str))}
        vars(own).update(flags)
    return new


def _compile_again(model: nn.Module, new: nn.Module) -> None:
    "A module that was compiled in place loses that in a copy."
    for old, own in zip(model.modules(), new.modules()):
        if is_compiled_in_place(old): own.compile()
