"""`Precision`: an object that says which devices support it, what it opens around a fit and a batch, and how it scales.

A subclass registers itself under its `name`. From the registry come `Learner.to_<name>`, `MixedPrecision('<name>')`,
rows of `precision_support`, and the precision's place in reports, comparisons, checks and plots.
`tf32.py` is a short example.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from fastai.learner import Learner
from fastai.torch_core import ismin_torch
from fastcore.foundation import L
from torch import nn
from torch.amp import GradScaler

from ..devices import facts
from .as_code import as_code
from .flat_master import check_flat, flat_step
from .forwards import Fp32Forward, replaced_forwards
from .matching import match_modules, matchers_of
from .names import OTHER_NAMES
from .support import Support
from .weights_to_fp32 import weights_to_fp32

PRECISIONS: dict[str, type[Precision]] = {}                      # by name, in the order of tables
on_register: list[Callable[[type[Precision]], object]] = []      # called with each precision that registers itself
# Before PyTorch 2.13 autocast's cache can hand a weight cast under `no_grad` to code that needs its gradient.
_CACHE = None if ismin_torch('2.13') else False                  # None: as the user has set it


class Precision:
    """Plain fp32, and the base class of every other precision.

    `repr` is the call that selects it: `learn.to_bf16(fp32_modules=['head'])`. A callback uses a copy of the precision
    that it is given.
    """
    name: ClassVar[str] = 'fp32' # In calls, tables and files
    dtype: torch.dtype | None = None # Autocast's dtype; None without autocast
    color: ClassVar[str] = '#4c566a' # In plots
    automatic: ClassVar[bool] = False # Whether `to_amp()` may select it without measuring: the first native one
    state_key: ClassVar[str] = '' # Where a file's optimizer state keeps `state_dict`; by default the name
    package: ClassVar[str] = '' # A package that it needs besides torch and fastai
    rules: ClassVar[dict[str, Callable[[torch.device], Support]]] = {} # By device type: how it runs this precision
    arguments: dict[str, Any] # Of its constructor, by name, defaults included
    first_scale = 1. # Loss scale to start from
    fp32_modules: Any = None # As given
    module_arguments: ClassVar[tuple[str, ...]] = ('fp32_modules',) # Those that name modules
    scales_loss: ClassVar[bool] = False # Whether gradients underflow without loss scaling
    flat_master = False # Whether the optimizer steps on a few large tensors
    skip_nonfinite = False # Without loss scaling: whether to skip steps whose gradients are not finite

    def __init_subclass__(cls) -> None:
        if 'name' not in vars(cls): return
        if not (cls.name.isidentifier() and cls.name.islower()) or cls.name in OTHER_NAMES:
            raise ValueError(f"name={cls.name!r} cannot be used for {cls.__name__}: `learn.to_<name>` needs lower-case "
                             "letters, digits and underscores, such as 'bf16_body', and no other name of a precision "
                             f"of this package ({', '.join(OTHER_NAMES)}).")
        cls.state_key = vars(cls).get('state_key', cls.name)
        if init := vars(cls).get('__init__'): init.__qualname__ = f'learn.to_{cls.name}'     # in Python's TypeError
        for call in on_register: call(cls)                       # before it is registered, as they may raise an error
        PRECISIONS[cls.name] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Precision:
        self, defaults = super().__new__(cls), defaults_of(cls)
        arguments = defaults | dict(zip(defaults, args)) | kwargs
        for name, value in arguments.items():                    # the owner of a list may change it
            if isinstance(value, (list, set, L)): arguments[name] = value.copy()
        # In `vars`, as a subclass may be a frozen dataclass; here, as its `__init__` may not call this one's.
        vars(self)['arguments'] = arguments
        return self

    def __init__(self,
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        self.fp32_modules = fp32_modules
        matchers_of(fp32_modules, 'fp32_modules')                # raises `TypeError`

    @property
    def changed(self) -> dict[str, Any]:
        "The arguments that differ from their defaults, by name."
        defaults = defaults_of(type(self))
        return {name: value for name, value in self.arguments.items() if value != defaults.get(name)}

    def like(self, **changes: Any) -> Precision:
        "Return a new precision with these arguments changed."
        return type(self)(**self.arguments | changes)

    def __repr__(self) -> str: return f'learn.to_{self.name}({as_code(self.changed)})'

    # -- devices

    @classmethod
    def support(cls, device: torch.device) -> Support:
        "Return how `device` runs this precision, by the rule for its type; PyTorch's autocast must support it."
        why = facts.missing(device) or (cls.dtype and facts.autocast_refusal(device.type, cls.dtype))
        if why: return Support('unsupported', why)
        rule = cls.rules.get(device.type)
        return rule(device) if rule else Support('native', 'as its backend says')

    def check_device(self, device: torch.device) -> None:
        "Raise a `ValueError` if `device` does not support this precision."
        support = self.support(device)
        if support.status != 'unsupported': return
        other = fastest_native(device, [self.name])
        advice = '' if facts.missing(device) else f'\nOn this device, use `learn.to_{other.name}()`.'
        raise ValueError(f"{self.name} does not run on device '{device}': {support.why}.{advice}")

    # -- what training needs; overridden by precisions that need more:
    #
    #    set on a learner    check
    #    a fit begins        check_device, check, prepare, scaler
    #    first batch         around_fit, prepare again (model or optimizer may be new), around_training
    #    each batch          around_batch
    #    each step           step
    #    files               state_dict, load_state_dict

    def check(self, model: nn.Module) -> None:
        "Raise `ValueError` or `TypeError` if the arguments do not fit `model`."
        self.kept_in_fp32(model)

    def kept_in_fp32(self, model: nn.Module) -> dict[str, nn.Module]:
        "Return the modules to keep in fp32, by name. Raises `ValueError` if `fp32_modules` matches nothing in `model`."
        return match_modules(model, self.fp32_modules)

    def prepare(self, learn: Learner) -> None:
        "Check the learner for training, and make changes that stay. Raises `ValueError` for what cannot be trained."
        if self.flat_master: check_flat(learn)
        if self.dtype: weights_to_fp32(learn.model, learn.opt)

    def simulated_forwards(self, model: nn.Module) -> dict[str, Callable]: # By module; called with it and its inputs
        "Return forwards that round further than autocast does, for reports on devices without this precision."
        return {}

    def around_fit(self, model: nn.Module) -> list[Any]:
        "Return contexts for a whole fit or validation."
        return [replaced_forwards(self.kept_in_fp32(model), Fp32Forward)]

    def around_training(self, learn: Learner) -> list[Any]:
        "Return contexts from the first batch of a fit that trains to its end."
        return []

    def around_batch(self, device: torch.device) -> list[AbstractContextManager]:
        "Return new contexts for a forward pass and its loss."
        if not self.dtype: return []
        return [torch.autocast(device.type, dtype=self.dtype, cache_enabled=_CACHE)]

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        "Run the optimizer's step."
        if self.flat_master: flat_step(learn, step)
        else: step()

    def scaler(self, device: torch.device) -> GradScaler | None:
        "Return what scales the loss in a fit on `device`; None without loss scaling."
        return None

    # -- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        "Return what training has to continue from besides weights and optimizer, as plain numbers."
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        "Continue from `state`; None resets to the arguments."


def parameters_of(cls: type[Precision]) -> dict[str, inspect.Parameter]:
    "Return the named parameters of a precision's constructor."
    _, *own = inspect.signature(cls.__init__).parameters.items()   # the first is `self`
    return {name: p for name, p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def defaults_of(cls: type[Precision]) -> dict[str, Any]:
    "Return the defaults of the constructor's named parameters."
    return {name: p.default for name, p in parameters_of(cls).items()}


# -- the registry

def find_precision(
    name: Any, # In any letter case; torch dtypes, and members of an `AMPMode` as well
) -> type[Precision]: # `Precision` itself for fp32
    "Return the precision with this name. Raises `ValueError` for an unknown one."
    word = str(getattr(name, 'value', name)).lower().removeprefix('torch.')     # a dtype, or fastai's own AMPMode
    known: dict[str, type[Precision]] = {Precision.name: Precision, **PRECISIONS}
    cls = known.get(OTHER_NAMES.get(word, word))
    if cls is None: raise ValueError(f"{name!r} is not a precision. Use one of {', '.join(map(repr, known))}.")
    return cls


def fastest_native(
    device: torch.device,
    failed: Collection[str] = (), # Names of precisions that do not work for a model
) -> type[Precision]: # `Precision` itself for fp32
    "Return the fastest precision that `device` runs natively: bf16 (no loss scaling), then fp16, then fp32."
    left = (cls for name, cls in PRECISIONS.items() if cls.automatic and name not in failed)
    return next((cls for cls in left if cls.support(device).status == 'native'), Precision)
