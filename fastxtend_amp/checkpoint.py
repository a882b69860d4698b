"Checkpoints: the loss scale in the files of `Learner.save` and `load`, and files that are written whole."
from __future__ import annotations

import os, shutil, sys, threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fastai.learner
import torch
from fastai.learner import Learner
from fastai.optimizer import Lookahead
from fastai.torch_core import get_model, rank_distrib
from fastcore.foundation import L
from torch import nn

from .common import put_over, warn_user
from .compat import syncfree_state, tensors_in
from .convert import map_tensors
from .lifecycle import precision_callback_of
from .observer import ON_ATTACH
from .scaling import optimizer_params
from .scaling_args import check_scaler_state

__all__ = ['ADAPTERS', 'StateAdapter', 'place_state', 'written_whole']

# Inside the optimizer's state: fastai takes a file for one with an optimizer only if it has no other keys.
KEY = 'grad_scaler'
_HAS_OPT = {'model', 'opt'}


class StateAdapter:
    "How model and optimizer state go into a file and come back, where they are not plain tensors of this process."
    def applies(self, model: nn.Module) -> bool:
        "Is `model` of the kind that needs this?"
        return False
    def to_file(self, state: Any) -> Any:
        "`state` with whole tensors on the CPU; called in every process, rank 0's result is written."
        return state
    def model_from_file(self, state: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        "A model state from a file as `model.load_state_dict` needs it in this process."
        return state
    def opt_from_file(self, state: Any, params: list[nn.Parameter]) -> Any:
        "An optimizer state from a file as the optimizer of `params` needs it in this process."
        return state


ADAPTERS: list[StateAdapter] = []                                # rooms add theirs
_PLAIN = StateAdapter()
_writing = threading.RLock()                                     # two threads may save to one name
_reading = threading.Lock()  # fastai's `load_model` changes torch's list of safe classes meanwhile


def _adapter(model: nn.Module) -> StateAdapter:
    return next((a for a in ADAPTERS if a.applies(model)), _PLAIN)


@contextmanager
def written_whole(file: Any) -> Iterator[Any]: # A file to write to
    """Write to a file beside `file`, which takes its place when it is complete; file objects are written to directly.

    After an exception, a full disk or a killed process the old file is whole.
    """
    if not isinstance(file, (str, os.PathLike)):
        yield file
        return
    target = Path(os.path.realpath(file))
    part = target.with_name(f'.{target.name}.part')  # always the same name: a killed process leaves one file, not many
    with _writing:
        try:
            with open(part, 'wb') as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            if target.exists(): shutil.copymode(target, part)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _on(device: torch.device, t: torch.Tensor) -> torch.Tensor: return t if t.device == device else t.to(device)


def place_state(
    opt: Any, # fastai's `Optimizer`, `OptimWrapper` or `Lookahead`
) -> None:
    """Move what `opt` remembers to where its parameters are; step counts go where the optimizer wants them.

    Called at a load and when training starts: fastai moves the model to its device at the start of a fit.
    """
    inner = opt
    while hasattr(inner, 'opt'): inner = inner.opt
    groups = inner.param_groups if isinstance(inner, torch.optim.Optimizer) else []
    on_host = {p for g in groups if not (g.get('capturable') or g.get('fused')) for p in g['params']}
    for p, state in getattr(inner, 'state', {}).items():
        if not isinstance(p, torch.Tensor): continue
        # Single numbers alone are where the optimizer put them: NAdam keeps one on the CPU.
        others = [t for k, v in state.items() if k != 'step' for t in tensors_in(v) if t.dim() or not p.dim()]
        moved = any(t.device != p.device for t in others)
        for key, value in state.items():
            if key != 'step' and not moved: continue
            host = key == 'step' and p in on_host and not syncfree_state(inner, state)
            device = torch.device('cpu') if host else p.device
            state[key] = map_tensors(partial(_on, device), value)
    if isinstance(opt, Lookahead) and opt.slow_weights is not None:
        pairs = zip(opt.slow_weights, opt.param_lists)
        opt.slow_weights = L(L(w.to(p.device) for w, p in zip(ws, ps)) for ws, ps in pairs)


class _Saved:
    "Stands for a model or an optimizer in fastai's `save_model`, which asks it for its state."
    def __init__(self, state: Any): self.state = state
    def state_dict(self) -> Any: return self.state


class _Loaded:
    "Stands for a model or an optimizer in fastai's `load_model`, which hands it its state; holds that."
    def __init__(self): self.given, self.state, self.kwargs = False, {}, {}
    def load_state_dict(self, state: Any, **kwargs) -> None: self.given, self.state, self.kwargs = True, state, kwargs


def save_model(original: Callable, file: Any, model: nn.Module, opt: Any, with_opt: bool = True, **kwargs) -> None:
    """fastai's `save_model`; for a learner with a precision callback with its loss scale, and in a file written whole.

    The state of sharded parameters is put together from all processes, which must all call this.
    """
    cb, adapter = precision_callback_of(model, opt), _adapter(model)
    if cb is None and adapter is _PLAIN: return original(file, model, opt, with_opt=with_opt, **kwargs)
    with_opt = with_opt and opt is not None
    model_state = adapter.to_file(get_model(model).state_dict())
    opt_state = adapter.to_file(opt.state_dict()) if with_opt else None
    scaler = cb.state_dict() if cb is not None else {}
    if scaler and isinstance(opt_state, Mapping): opt_state = {**opt_state, KEY: scaler}
    if rank_distrib(): return None
    with written_whole(file) as f:
        return original(f, _Saved(model_state), _Saved(opt_state) if with_opt else None, with_opt=with_opt, **kwargs)


def load_model(original: Callable, file: Any, model: nn.Module, opt: Any, with_opt: bool | None = True,
               device: Any = None, **kwargs) -> None:
    """fastai's `load_model` or `load_model_text`, for any learner: the file may hold a loss scale.

    fastai reads the file; model, optimizer and scaler are loaded when all of it has been read and the scaler's state
    was found usable, so that a damaged file leaves the learner untouched.
    """
    cb, adapter = precision_callback_of(model, opt), _adapter(model)
    if str(device).startswith('xla'): device = 'cpu'             # torch.load cannot place tensors on XLA devices
    in_file, opt_in_file = _Loaded(), _Loaded()
    with _reading: original(file, in_file, opt_in_file, with_opt=with_opt, device=device, **kwargs)
    scaler = opt_in_file.state.pop(KEY, None) if isinstance(opt_in_file.state, dict) else None
    scaled = cb is not None and cb.scales_loss
    if scaled and scaler is not None:
        check_scaler_state(scaler, str(getattr(file, 'name', file)), cb.scaling.has_own_state,
                           "`learn.load(..., with_opt=False)` loads the model alone; `learn.to_fp32()` or "
                           "`learn.to_bf16()` before `load` leaves the scaler out.")
    get_model(model).load_state_dict(adapter.model_from_file(in_file.state, model), **in_file.kwargs)
    if not opt_in_file.given: return
    _load_optimizer(opt, adapter.opt_from_file(opt_in_file.state, optimizer_params(opt)),
                    place=cb is not None or adapter is not _PLAIN)
    if scaled and scaler is None: cb.scaling.reset(opt)
    elif scaled: cb.load_state_dict(scaler)
    elif scaler is not None and (cb is None or cb.mode != 'fp16'):
        warn_user("The file holds the loss scale of fp16 training, which this learner does not use.\n"
                  "To go on in fp16, call `learn.to_fp16()` before `learn.load`.")


def _load_optimizer(opt: Any, state: Any, place: bool) -> None:
    try: opt.load_state_dict(state)
    except Exception: warn_user('Could not load the optimizer state.')   # as fastai has it
    else:
        if place: place_state(opt)


# -- how fastai comes to call them

def _put_over_text(learn: Learner | None = None) -> None:
    "`TextLearner.load` calls a function of its own, in a module that may be imported after this one."
    text = sys.modules.get('fastai.text.learner')
    if text is not None: put_over(text, 'load_model_text', load_model)


put_over(fastai.learner, 'save_model', save_model)
put_over(fastai.learner, 'load_model', load_model)
_put_over_text()
ON_ATTACH.append(_put_over_text)
