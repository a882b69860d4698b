"""Reads learners that versions 0.3 and 0.4 pickled or exported, whose classes had other places and attributes.

Importing this file adds modules with the former names to `sys.modules`, and replaces `Learner.__setstate__`, which
leaves out what those versions put on a learner. `tests/files/` holds such files.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.foundation import L

from ..precisions import BF16, FP16, AMPMode, Auto, find_precision, parameters_of
from .callback import MixedPrecision
from .checkpoint import put_over
from .metrics import loss_scale, skipped_steps

__all__ = []

_PACKAGE = __name__.partition('.')[0]


class _Former:
    "Any object of a former class; its attributes are read by `_FormerCallback`."
    def __call__(self, *args: Any) -> None: raise RuntimeError('This learner was pickled by an earlier version.')


class _FormerCallback(MixedPrecision):
    "A precision callback of a former version, which becomes one of this version."
    def _with_events(self, *args: Any) -> None: "Stands for the method that 0.3 put on the learner."

    def __setstate__(self, state: dict[str, Any]) -> None:
        given, scaling = {**state, **state.get('arguments', {})}, vars(state['_scaling'])
        mode = 'half_weights' if 'master_weights' in state else given['amp_mode']
        cls = FP16 if mode == 'auto' else find_precision(mode)
        known = {**parameters_of(cls), **(parameters_of(BF16) if mode == 'auto' else {})}
        own = {name: given[name] for name in known if given.get(name) is not None}
        if mode == 'half_weights' and AMPMode(own['amp_mode']) is AMPMode.BF16: own.pop('loss_scale', None)
        self.__dict__.clear()
        self.__class__ = MixedPrecision
        MixedPrecision.__init__(self, Auto(**own) if mode == 'auto' else cls(**own),
                                on_overflow=given['on_overflow'], max_skips=given['max_skips'])
        self._learn = state['_learn']
        if isinstance(self.precision, Auto) and state['mode']: self.current = self.precision.made[state['mode'].value]
        history = vars(scaling['history']) if 'history' in scaling else scaling
        for scale, skipped in zip(history.get('_scales', ()), history.get('_skips', ())):
            self.history.add(torch.tensor(scale), bool(skipped))
        if self.current is not None and scaling.get('state'): self.current.load_state_dict(scaling['state'])


def _module(name: str, **contents: Any) -> None:
    full = f'{_PACKAGE}.{name}'
    module = sys.modules[full] = ModuleType(full, 'The name of a module of version 0.4.')
    vars(module).update(contents)


_module('callback', MixedPrecision=_FormerCallback)
_module('half_weights', HalfWeights=_FormerCallback, _Lowered=_Former)
_module('mode', AMPMode=AMPMode)
_module('scaling', LossScaling=_Former, NoScaling=_Former, StepHistory=_Former)
_module('fp32_modules', Fp32Modules=_Former)
_module('fp8', Fp8Modules=_Former)
_module('loop', Loop=_Former)
_module('metrics', loss_scale=loss_scale(), skipped_steps=skipped_steps())


def _setstate(original: Callable, self: Learner, state: dict[str, Any]) -> None:
    "Leave out the loop and the watch of a former version."
    former = {'_with_events', 'precision_watch'} & {*state}
    original(self, {k: v for k, v in state.items() if not (former and k in (*former, 'scaler'))})
    if former: self.cbs = L([cb for cb in self.cbs if isinstance(cb, Callback)])


put_over(Learner, '__setstate__', _setstate)
