"""`Precision`: an object that says which devices support it, what it opens around a fit and a batch, and how it scales.

A subclass registers itself under its `name`. From the registry come `Learner.to_<name>`, `MixedPrecision('<name>')`,
rows of `precision_support`, and the precision's place in reports, comparisons, checks and plots. `bf16.py` is a
short example.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch
from fastai.learner import Learner
from fastai.torch_core import ismin_torch
from torch import nn
from torch.amp import GradScaler

from ..devices import facts
from .fp32_modules import Fp32Forward, Replaced
from .matching import match_modules, tests_of

PRECISIONS: dict[str, type[Precision]] = {}                      # by name, in the order of tables
_followers: list[Callable[[type[Precision]], object]] = []
# Before PyTorch 2.13 autocast's cache can hand a weight cast under `no_grad` to code that needs its gradient.
_CACHE = None if ismin_torch('2.13') else False                  # None: as the user has set it


class Support(NamedTuple):
    "Support of a precision by a device: 'native', 'emulated' (it works, without hardware for it) or 'unsupported'."
    status: str
    why: str


class Precision:
    """Plain fp32, and the base class of every other precision.

    A precision belongs to one `MixedPrecision` callback and lives as long as that does. The `__exit__` of a context
    around a fit may be called twice, and after an interrupted `__enter__`.
    """
    name: ClassVar[str] = 'fp32' # In calls, tables and files
    dtype: torch.dtype | None = None # Autocast's dtype; None without autocast
    color: ClassVar[str] = '#4c566a' # In plots
    automatic: ClassVar[bool] = False # Whether `to_amp()` may select it without measuring: the first native one
    state_key: str = '' # Where a file's optimizer state keeps `state_dict`; by default the name
    in_tables: ClassVar[bool] = True # Whether tables of precisions have a row for it
    package: ClassVar[str] = '' # A package that it needs besides torch and fastai
    rules: ClassVar[dict[str, Callable[[torch.device], Support]]] = {} # By device type: how it runs this precision
    arguments: dict[str, Any] # Of the constructor, defaults included
    around_step: Callable[[Learner], AbstractContextManager] | None = None # Makes a context for the optimizer's step

    def __init_subclass__(cls) -> None:
        if 'name' not in vars(cls): return
        PRECISIONS[cls.name] = cls
        cls.state_key = vars(cls).get('state_key', cls.name)
        for follow in _followers: follow(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Precision:
        self = super().__new__(cls)
        # Partial: a copy is made without arguments, and then gets its attributes.
        bound = inspect.Signature([*parameters_of(cls).values()]).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        self.arguments = dict(bound.arguments)
        return self

    def __init__(self,
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        self.fp32_modules = fp32_modules
        tests_of(fp32_modules, 'fp32_modules')                   # raises `TypeError`

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Precision:
        "Return the precision with those of the arguments that it has."
        return cls(**{name: value for name, value in arguments.items() if name in parameters_of(cls)})

    def __repr__(self) -> str: return repr(self.name)

    @property
    def mode(self) -> AMPMode | None:
        "The member of `AMPMode` that the model computes in; None for fp32."
        return AMPMode(self.name) if self.name in PRECISIONS else None

    def _set_learn(self, learn): # As fastai does on each callback that it adds
        kind = type(self).__name__
        raise TypeError(f'{kind}() is a precision, not a callback: write `cbs=MixedPrecision({kind}())`.')
    learn = property(None, _set_learn)

    # -- devices

    @classmethod
    def support(cls, device: torch.device) -> Support:
        "Return how `device` runs this precision: the rule for its type decides, if PyTorch's autocast supports it."
        why = facts.missing(device) or (cls.dtype and facts.autocast_refusal(device.type, cls.dtype))
        if why: return Support('unsupported', why)
        rule = cls.rules.get(device.type)
        return rule(device) if rule else Support('native', 'as its backend says')

    def on(self, device: torch.device) -> Precision:
        "Return the precision to use on `device`. Raises `ValueError` if the device does not support it."
        support = self.support(device)
        if support.status != 'unsupported': return self
        raise ValueError(f"{self.name} mixed precision does not run on device '{device}': {support.why}.\n"
                         f'On this device, use `{_faster_call(self.name, device)}`.')

    def emulation_warning(self, device: torch.device) -> str: # '' if it is native
        "Return a warning for a device without hardware for this precision, with the call for a faster one."
        support = self.support(device)
        if support.status != 'emulated': return ''
        return (f"{self.name} is emulated on device '{device}' ({support.why}): usually slower than fp32, and much "
                f'slower for large layers.\nUse `{_faster_call(self.name, device)}` there; '
                f"`learn.compare_precision('{self.name}')` measures the difference.")

    # -- what training needs; overridden by precisions that need more

    def check(self, model: nn.Module) -> None:
        "Raise `ValueError` or `TypeError` if the arguments do not fit `model`."
        self.kept_in_fp32(model)

    def check_training(self, learn: Learner) -> None:
        "Raise `ValueError` if the learner's model or optimizer cannot be trained in this precision."

    def kept_in_fp32(self, model: nn.Module) -> dict[str, nn.Module]:
        "Return the modules to keep in fp32, by name. Raises `ValueError` if `fp32_modules` matches nothing in `model`."
        return match_modules(model, self.fp32_modules)

    def around_fit(self, model: nn.Module) -> list[Any]:
        "Return contexts for a whole fit or validation."
        return [Replaced(self.kept_in_fp32, Fp32Forward, model)]

    def around_training(self, learn: Learner) -> list[Any]:
        "Return contexts from a fit's first training batch to its end."
        return []

    def around_batch(self, device: torch.device) -> list[AbstractContextManager]:
        "Return new contexts for a forward pass and its loss."
        return [torch.autocast(device.type, dtype=self.dtype, cache_enabled=_CACHE)] if self.dtype else []

    def scaler(self, device: torch.device) -> GradScaler | None:
        "Return what scales the loss in a fit on `device`; None without loss scaling."
        return None

    # -- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        "Return what training has to continue from besides weights and optimizer, as plain numbers."
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        "Continue from `state`; None resets to the arguments. Raises `ValueError` for a state that cannot be used."


class Auto(Precision):
    "The first automatic precision that a device supports natively, bf16 before fp16; fp32 if there is none."
    def __init__(self, **arguments: Any):
        super().__init__(arguments.get('fp32_modules'))
        self.arguments = arguments
        # One each for all fits; arguments that cannot be used raise here.
        self.made = {cls.name: cls.from_arguments(arguments) for cls in PRECISIONS.values() if cls.automatic}
    def __repr__(self) -> str: return "'auto'"
    def on(self, device: torch.device) -> Precision:
        mode = fastest_native(device)
        return self.made[mode] if mode else Precision()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        for precision in self.made.values(): precision.load_state_dict(state)


def parameters_of(cls: type[Precision]) -> dict[str, inspect.Parameter]:
    "Return the parameters of a precision's constructor by name."
    _, *own = inspect.signature(cls.__init__).parameters.items()   # the first is `self`
    return dict(own)


def each_precision(follow: Callable[[type[Precision]], object]) -> None:
    "Call `follow` for each registered precision, and for each one that will be."
    _followers.append(follow)
    for cls in [*PRECISIONS.values()]: follow(cls)


def cpu_support(
    name: str, # Of the precision
    *instructions: str, # Names of instruction sets for it, in lower case
) -> Support:
    "Return how this CPU runs a precision: natively if it has one of the instruction sets."
    found = ', '.join(sorted({*instructions} & facts.cpu_features()))
    if found: return Support('native', f'the CPU has {found}')
    return Support('emulated', f'the CPU has no {name} arithmetic')


def xla_support(
    *hardware: str, # What has the precision, of 'TPU', 'CUDA' and 'ROCM'
) -> Support:
    "Return how the hardware behind XLA runs a precision."
    kind = facts.xla_hardware()
    return Support('native' if kind in hardware else 'emulated', f'XLA on {kind}')


# -- names

_ALIASES = {'float16': 'fp16', 'half': 'fp16', '16-mixed': 'fp16', 'bfloat16': 'bf16', 'bf16-mixed': 'bf16'}


class AMPMode(str, Enum):
    """Names of the precisions below fp32: strings, with the same values as in fastai's own `AMPMode`.

    `AMPMode(value)` accepts the name of every registered precision in any letter case, Lightning's names ('16-mixed',
    'bf16-mixed'), torch dtypes and their names ('float16', 'half', 'bfloat16'), and members of fastai's own `AMPMode`.
    Raises `ValueError` for anything else.
    """
    FP16 = 'fp16'
    BF16 = 'bf16'
    TF32 = 'tf32'
    FP8 = 'fp8'

    @classmethod
    def _missing_(cls, value):
        name = str(getattr(value, 'value', value)).lower().removeprefix('torch.')   # a dtype, fastai's AMPMode
        name = _ALIASES.get(name, name)
        if name in PRECISIONS and name not in cls._value2member_map_:   # a precision that somebody registered
            member = cls._value2member_map_[name] = str.__new__(cls, name)
            member._name_, member._value_ = name.upper(), name
        if name in cls._value2member_map_: return cls._value2member_map_[name]
        names = ', '.join(map(repr, PRECISIONS))
        raise ValueError(f"amp_mode={value!r} is not a precision.\n"
                         f"Allowed: {names}, in any letter case; also 'float16', 'half', '16-mixed', 'bfloat16', "
                         "'bf16-mixed', torch.float16 and torch.bfloat16. `MixedPrecision` also accepts 'auto'.\n"
                         "For plain fp32 use `learn.to_fp32()`, or 'fp32' in `precision_as`.")

    def __eq__(self, other): return super().__eq__(getattr(other, 'value', other))
    __hash__ = str.__hash__

    def support(self, device: torch.device) -> Support:
        "Return how `device` runs the precision."
        return PRECISIONS[self].support(device)

    @property
    def dtype(self) -> Any:
        "The dtype in which autocast runs eligible operators; None for TF32, which needs no autocast."
        return PRECISIONS[self].dtype

    @property
    def needs_loss_scaling(self) -> bool:
        "True if gradients underflow without loss scaling: fp16 has 5 bits of exponent, bf16 has 8 as fp32."
        return self.dtype is torch.float16


def find_precision(name: Any) -> type[Precision]:
    "Return the precision with this name, in any form that `AMPMode` accepts."
    return PRECISIONS[AMPMode(name)]


# -- which precision for which device?

def fastest_native(
    device: torch.device,
    failed: Iterable[str] = (), # Names of precisions that do not work for a model
) -> AMPMode | None:
    "Return the fastest precision that `device` runs natively: bf16 (no loss scaling), then fp16; None for fp32."
    left = (cls for name, cls in PRECISIONS.items() if cls.automatic and name not in [*failed])
    return next((AMPMode(cls.name) for cls in left if cls.support(device).status == 'native'), None)


def _faster_call(name: str, device: torch.device) -> str:
    faster = fastest_native(device, [name])
    return f'learn.to_{faster.value}()' if faster else 'learn.to_fp32()'


class _Table(pd.DataFrame):
    "A table that prints all of its columns, however narrow the terminal is."
    def __repr__(self) -> str: return self.to_string(index=False)


def precision_support(
    device: str | torch.device | None = None, # The device to ask about; all devices of this machine if None
) -> pd.DataFrame: # One row per device and precision; columns device, mode, support, why
    """Return which precisions run natively, emulated, or not at all.

    `support` is 'native', 'emulated' (it works, but usually slower than fp32) or 'unsupported'; `why` is the reason.
    Raises `torch.device`'s own error for a name that PyTorch does not know.
    """
    devices = facts.all_devices() if device is None else [torch.device(device)]
    rows = [(str(d), cls.name, *cls.support(d)) for d in devices for cls in PRECISIONS.values() if cls.in_tables]
    return _Table(rows, columns=['device', 'mode', 'support', 'why'])
