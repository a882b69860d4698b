"What of mixed precision is in a checkpoint, and is the file whole?"
from __future__ import annotations

import functools, inspect, math, os, threading, warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastai.learner import Learner
from fastai.optimizer import Lookahead
from fastai.torch_core import get_model
from fastcore.foundation import L
from torch import nn

from .callback import MixedPrecision
from .convert import map_tensors
from .mode import model_device
from .scaling import _is_number, _params, syncfree_state

__all__ = ['ADAPTERS', 'StateAdapter', 'place_state']

KEY = 'grad_scaler'  # inside the optimizer's state: fastai takes a file for one with an optimizer only if it has no other keys
_HAS_OPT = {'model', 'opt'}


class StateAdapter:
    "How model and optimizer state go into a file and come back, where they are not plain tensors of this process."
    def applies(self, model: nn.Module) -> bool: return False
    def to_file(self, state: Any) -> Any: return state           # whole tensors on the CPU; called in every process, rank 0's result is written
    def model_from_file(self, state: Any, model: nn.Module) -> Any: return state
    def opt_from_file(self, state: Any, params: list[nn.Parameter]) -> Any: return state


ADAPTERS: list[StateAdapter] = []


def _adapters(model): return [a for a in ADAPTERS if a.applies(model)]


def check_state(
    state: Any, # What the file holds
    file: Any, # Where it was read from, for the message
    own: bool = False, # Whether it is for a scaler that reads states of its own kind: then it only has to be a dict
) -> None:
    "Raise a `ValueError` that says what is wrong if `state` is not one that `GradScaler.state_dict` could have given."
    def refuse(what):
        raise ValueError(f"The loss scaler's state in {file} cannot be used: {what}. Nothing was loaded. `learn.load(..., with_opt=False)` "
                         "loads the model alone; `learn.to_fp32()` or `learn.to_bf16()` before `load` leaves the scaler out.")
    if not isinstance(state, Mapping): refuse(f'it is a {type(state).__name__}, not a dict')
    for key in () if own else ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker'):
        if key not in state: refuse(f'{key!r} is missing')
        if not _is_number(state[key]): refuse(f'{key!r} is {state[key]!r}, not a number')
        if not math.isfinite(state[key]) or state[key] < 0 or (state[key] == 0 and key != '_growth_tracker'):
            refuse(f'{key!r} is {state[key]!r}, not finite and above 0')


@contextmanager
def _replaced(name: str, wrapper: Callable):
    "Put `wrapper(original, ...)` in the place of `torch.<name>`, for calls from this thread, while fastai saves or loads."
    original, thread = getattr(torch, name), threading.get_ident()
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        if threading.get_ident() != thread: return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)
    setattr(torch, name, replacement)
    try: yield
    finally: setattr(torch, name, original)


def write_whole(save: Callable, obj: Any, file: Any, *args, **kwargs) -> None:
    "`save(obj, file, ...)`, but beside `file` and moved into its place when it is complete; file objects are written to directly."
    if not isinstance(file, (str, os.PathLike)): return save(obj, file, *args, **kwargs)
    target = Path(os.path.realpath(file))
    part = target.with_name(f'.{target.name}.part')             # always the same name: a killed process leaves one file, not many
    try:
        with open(part, 'wb') as f:
            save(obj, f, *args, **kwargs)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def place_state(
    opt: Any, # fastai's `Optimizer`, `OptimWrapper` or `Lookahead`
) -> None:
    "Move what `opt` remembers to where its parameters are; step counts go where the optimizer wants them."
    inner = opt
    while hasattr(inner, 'opt'): inner = inner.opt
    groups = inner.param_groups if isinstance(inner, torch.optim.Optimizer) else []
    on_host = {p for g in groups if not (g.get('capturable') or g.get('fused')) for p in g['params']}
    for p, state in inner.state.items():
        if not isinstance(p, torch.Tensor): continue             # fastai takes a recurrent layer's `bias`, True, for a parameter
        for key, value in state.items():
            host = key == 'step' and p in on_host and not syncfree_state(inner, state)
            state[key] = map_tensors(partial(torch.Tensor.to, device='cpu' if host else p.device), value)
    if isinstance(opt, Lookahead) and opt.slow_weights is not None:
        opt.slow_weights = L(L(w.to(p.device) for w, p in zip(ws, ps)) for ws, ps in zip(opt.slow_weights, opt.param_lists))


def _on_xla(learn): return model_device(learn.model, 'cpu').type == 'xla'


def _precision(learn: Learner) -> MixedPrecision | None:
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


def _outermost(method: Callable) -> Callable:
    "`method(original, learn, ...)` as a wrapper for a `Learner` method that does nothing inside another of its kind (super())."
    def decorate(original):
        if getattr(original, '_fastxtend_amp', False): return original
        @functools.wraps(original)
        def inner(self, *args, **kwargs):
            if _busy.learners.get(id(self)): return original(self, *args, **kwargs)
            _busy.learners[id(self)] = True
            try: return method(original, self, *args, **kwargs)
            finally: del _busy.learners[id(self)]
        inner._fastxtend_amp = True
        return inner
    return decorate


class _Busy(threading.local):
    def __init__(self): self.learners = {}
_busy = _Busy()


def _with_opt(method: Callable, args: tuple, kwargs: dict) -> bool:
    "Was `with_opt` asked for in this call of `save` or `load`? TextLearner's None is True."
    names = list(inspect.signature(method).parameters)[1:]
    return {**dict(zip(names, args)), **kwargs}.get('with_opt') in (None, True)


@_outermost
def _saving(original, self, *args, **kwargs):
    cb = _precision(self)
    scaler = cb.state_dict() if cb is not None else {}
    full = None
    for a in _adapters(self.model):                              # in every process, before rank 0 goes on alone
        opt = getattr(self, 'opt', None) if _with_opt(original, args, kwargs) else None
        full = {'model': a.to_file(get_model(self.model).state_dict()), 'opt': None if opt is None else a.to_file(opt.state_dict())}
    def save(torch_save, obj, f, *args, **kwargs):
        if full is not None and isinstance(obj, Mapping):
            if set(obj) == _HAS_OPT: obj = full
            elif obj.keys() == full['model'].keys(): obj = full['model']
        if scaler and isinstance(obj, dict) and set(obj) == _HAS_OPT and isinstance(obj['opt'], Mapping):
            obj = {**obj, 'opt': {**obj['opt'], KEY: scaler}}
        return write_whole(torch_save, obj, f, *args, **kwargs)
    with _replaced('save', save): return original(self, *args, **kwargs)


@_outermost
def _loading(original, self, *args, **kwargs):
    cb = _precision(self)
    with_opt, seen = _with_opt(original, args, kwargs), {}
    def load(torch_load, f, *args, **kwargs):
        if str(kwargs.get('map_location')).startswith('xla'): kwargs['map_location'] = 'cpu'
        state = torch_load(f, *args, **kwargs)
        has_opt = isinstance(state, dict) and set(state) == _HAS_OPT
        if has_opt and with_opt:
            seen['state'] = state['opt'].get(KEY) if isinstance(state['opt'], Mapping) else None
            if cb is not None and cb.scales_loss and seen['state'] is not None: check_state(seen['state'], f, cb.scaling.has_own_state)
        for a in _adapters(self.model):
            if not has_opt: state = a.model_from_file(state, self.model)
            else: state = {'model': a.model_from_file(state['model'], self.model),
                           'opt': a.opt_from_file(state['opt'], _params(self.opt)) if with_opt else state['opt']}
        return state
    with _replaced('load', load): result = original(self, *args, **kwargs)
    if _on_xla(self) and self.opt is not None: place_state(self.opt)
    if 'state' not in seen: return result
    if cb is not None and cb.scales_loss: cb.load_state_dict(seen['state'] if seen['state'] is not None else cb.scaling.initial_state)
    elif seen['state'] is not None and (cb is None or cb.mode != 'fp16'):
        warnings.warn("The file holds the loss scale of fp16 training, which this learner does not use. To go on in fp16, call "
                      "`learn.to_fp16()` before `learn.load`.")
    return result


def patch_learner(cls: type[Learner]) -> None:
    "Wrap `save` and `load` where `cls`, or a subclass that there is by now, defines them."
    for name, wrap in (('save', _saving), ('load', _loading)):
        if name in cls.__dict__: setattr(cls, name, wrap(cls.__dict__[name]))
    for sub in cls.__subclasses__(): patch_learner(sub)


def _patch_new_subclass(cls, **kwargs):
    super(Learner, cls).__init_subclass__(**kwargs)
    patch_learner(cls)


patch_learner(Learner)
Learner.__init_subclass__ = classmethod(_patch_new_subclass)
