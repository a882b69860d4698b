"What did fastai v1's to_fp16 do, done right? Half-precision weights in the forward and backward pass, fp32 masters everywhere else."
from __future__ import annotations

import inspect, warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper, pytorch_hp_map
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ..callback import MixedPrecision
from ..convert import HALF, map_tensors
from .flat_masters import FlatMasters, trial_optimizer
from ..fp32_modules import Fp32Modules, unwrapped
from ..mode import AMPMode, model_device
from ..common import random_state_kept
from ..insight.restore import effects_undone
from .copies import WeightCopies

__all__ = ['HalfWeights', 'bytes_per_parameter', 'kahan']


def check_model(model: nn.Module, opt: Any) -> None:
    "Raise a `ValueError` that names a parameter that cannot have a half-precision copy, or whose gradient `opt` cannot take."
    for path, module in unwrapped(model).named_modules():
        for name, p in module._parameters.items():
            where = f"parameter '{path + '.' if path else ''}{name}'"
            if p is None: continue
            if is_lazy(p):
                raise ValueError(f"to_half_weights: {where} has no shape yet. Call `learn.model` once on a batch before `fit`.")
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(f"to_half_weights: {where} is in a TorchScript module, whose weights cannot be replaced. Keep the module around it with `fp32_modules`, "
                                 "or use `learn.to_bf16()`.")
            if p.dtype in HALF and p.requires_grad:
                raise ValueError(f"to_half_weights: {where} is {p.dtype} already, so it can have no fp32 master. Call `learn.model.float()` first.")
            if getattr(module, 'sparse', False) and p.requires_grad and (why := _sparse_trouble(opt)):
                kind = type(getattr(opt, 'opt', opt)).__name__
                raise ValueError(f"to_half_weights: {where} has sparse gradients, which this {kind} cannot take ({why}). Use an optimizer that can, such as SGD "
                                 "without momentum, or `sparse=False`.")


def _sparse_trouble(opt) -> str | None:
    "What a trial step on a small sparse gradient ends with; None if it works."
    if type(opt) is not Optimizer and not isinstance(opt, OptimWrapper): return None
    p = nn.Parameter(torch.ones(3, 2))
    try:
        trial = trial_optimizer(opt, [p])
        for _ in range(2):
            p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=False)
            trial.step()
    except (RuntimeError, TypeError) as e: return str(e).splitlines()[0]
    return None


class _Moves:
    "Which share of the weights do the first steps leave where they were?"
    steps = 8
    def __init__(self): self.n, self.unmoved, self.total, self.before = 0, 0, 0, None
    def before_step(self, params): self.before = [(p, p.detach().clone(), p.grad.detach().to_dense() != 0) for p in params if p.grad is not None]
    def after_step(self, params) -> bool:
        before, self.before = self.before, None
        if before is None: return False
        for p, old, had in before:
            self.total += int(had.sum())
            self.unmoved += int((had & (p.detach() == old)).sum())
        self.n += 1
        return self.n == self.steps
    @property
    def share(self) -> float: return self.unmoved / max(self.total, 1)


def compensates(opt: Any) -> bool:
    "Does `opt` keep what rounding to half precision loses? optimi's do by Kahan summation, unless told not to."
    inner = getattr(opt, 'opt', opt)
    return type(inner).__module__.partition('.')[0] == 'optimi' and all(g.get('kahan_sum') is not False for g in inner.param_groups)


def kahan(
    opt: str = 'AdamW', # The name of one of optimi's optimizers
    **kwargs # Its arguments
) -> Callable: # To hand to `Learner(opt_func=...)`
    """An optimizer with Kahan summation for `to_half_weights(master_weights=False)`, with the names that fastai's schedules need.

    Needs the package torch-optimi (`pip install fastxtend_amp[kahan]`). Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    cls = getattr(optimi, opt, None) if isinstance(opt, str) else opt
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        known = sorted(n for n, o in vars(optimi).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer))
        raise ValueError(f"opt={opt!r} is not one of optimi's optimizers. Take one of {', '.join(known)}.")
    return partial(OptimWrapper, opt=partial(cls, **{'kahan_sum': True, **kwargs}), hp_map={**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'})


def bytes_per_parameter(
    learn: Learner, # A learner in the middle of a fit, with gradients
) -> dict[str, float]: # weights, gradients, masters, optimizer state, cast cache; bytes for each of the model's numbers
    """What training holds for each parameter, counted from the tensors there are, each memory once. Call it before or after a step.

    autocast's cache lives as long as a batch: for its size the model runs forward once more on the batch at hand, without effect.
    """
    cb = next((o for o in learn.cbs if isinstance(o, MixedPrecision)), None)
    half = cb if isinstance(cb, HalfWeights) else None
    params, weights = [*learn.model.parameters()], half and half._weights
    copies = weights.halves if weights else []
    lent = [m.tensor for m in weights.memories.values() if m.tensor is not None] if weights else []
    inner = getattr(learn.opt, 'opt', learn.opt)
    state = [v for s in inner.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    n = sum(p.numel() for p in params)
    def size(tensors): return sum({(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}.values()) / n
    copied = {id(p) for p in weights.masters} if weights and copies else set()
    return {'weights': size([*copies, *(p for p in params if id(p) not in copied)]),
            'gradients': size([*(p.grad for p in params if p.grad is not None), *lent]),
            'masters': size([p for p in params if id(p) in copied]), 'optimizer state': size(state), 'cast cache': _cast_cache(learn, cb) / n if cb else 0.}


class _Casts(TorchDispatchMode):
    "Remembers the copies in another dtype that are made of `params`."
    def __init__(self, params):
        super().__init__()
        self.params, self.made = {p.untyped_storage().data_ptr() for p in params}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.params:
            self.made.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        return out


def _cast_cache(learn, cb) -> int:
    "Bytes of the weights' copies that are left when a forward pass is over and nothing but autocast's cache can hold them."
    model = unwrapped(learn.model)
    with effects_undone([model]), random_state_kept(model_device(model, 'cpu')), cb.context(), _Casts(model.parameters()) as casts:
        model(*learn.xb)
        return sum(size for ref, size in casts.made if not ref.expired())


class _InModel:
    "The copies in the model, as a context; inside another one it does nothing."
    def __init__(self, cb): self.cb = cb
    def __enter__(self):
        self.weights = weights = self.cb._weights
        self.outer = weights.inside
        if weights.on: weights.enter()
    def __exit__(self, *exc):
        if not self.outer: self.weights.leave()


class HalfWeights(MixedPrecision):
    """Half-precision weights with fp32 masters: what fastai v1's `to_fp16` did, without what it lost.

    The model's parameters stay fp32: they are the masters that the optimizer steps on. During `fit`, validation in it
    included, the forward and backward pass run with half-precision copies of them, rewritten after each step, and
    floating inputs in the same dtype. Normalisation layers and `fp32_modules` stay in fp32; each module with weights casts
    what it is given to its weights' dtype, so activations may be fp32 in between. Predictions and the loss are fp32.
    Gradients are brought to fp32 as they arrive, once per batch, and accumulate there; DDP reduces them in fp32. After a
    step the next gradients take their memory, as with fastai's own optimizers: clone what you keep.
    Loss scaling, skipped steps, history and diagnosis are `MixedPrecision`'s.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    def __init__(self,
        dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
        loss_scale: float | None = None, # A static loss scale; dynamic scaling if None (fp16)
        flat_master: bool = False, # Whether the optimizer steps on few flat tensors instead of one for each parameter
        master_weights: bool = True, # Whether there are fp32 masters; without, the optimizer steps on half-precision weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
        *,
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        try: mode = AMPMode(dtype)
        except ValueError: raise ValueError(f"dtype={dtype!r} cannot be used: dtype must be 'bf16' or 'fp16' (or the torch dtypes). For plain "
                                            "fp32 use `learn.to_fp32()`.") from None
        if mode is AMPMode.BF16 and loss_scale is not None:
            raise ValueError(f"loss_scale={loss_scale!r} cannot be used with dtype='bf16', which needs no loss scaling. Leave it out, or take dtype='fp16'.")
        if not master_weights and flat_master:
            raise ValueError("flat_master=True cannot be used with master_weights=False: there is no master to make flat. Leave one of them out.")
        if not master_weights and mode is AMPMode.FP16:
            raise ValueError("master_weights=False cannot be used with dtype='fp16', whose gradients must be unscaled in fp32. Take dtype='bf16', or keep "
                             "the masters.")
        super().__init__(mode, loss_scale=loss_scale, on_overflow=on_overflow, max_skips=max_skips)
        self._fp32_modules = Fp32Modules(fp32_modules)
        self.dtype, self.flat_master, self.master_weights = mode.dtype, flat_master, master_weights
        self._weights: WeightCopies | Any = None                  # during a fit
        self._given, self._flat, self._lowered, self._moves = None, FlatMasters(), False, None

    keep_call = "learn.to_half_weights('{mode}', fp32_modules=['{name}'])"

    @contextmanager
    def diagnosing(self):
        "The masters in the model inside."
        weights = self._weights
        inside = weights is not None and weights.inside
        if inside: weights.leave()
        try: yield
        finally:
            if inside: weights.enter()

    def context(self):
        "The half-precision copies in the model, inside and outside `fit`; see `Learner.amp_context`."
        return self._in_model()

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        own = self._weights is None
        if own: self._renew(has_masters=True)
        weights = self._weights
        try:
            on, weights.on = weights.on, True
            try:
                with _InModel(self): yield
            finally: weights.on = on
        finally:
            if own:
                weights.close()
                self._weights = None

    # -- the events of fastai's loop

    def before_train(self):
        super().before_train()
        self._ready()
        self._weights.on = True
        if not self.master_weights: self._lower()
        self._changed()
    def before_validate(self): self._changed()

    def before_batch(self):
        "Put the half-precision weights into the model and bring floating inputs to their dtype."
        if self._fit is None: self._open()                       # added in the middle of a fit
        self._ready()
        if self.learn.training:
            self._weights.on = True
            if self._weights.stepped: self._weights.lend()
        if not self.master_weights and self._weights.on: self._lower()
        super().before_batch()
        if not self._weights.on: return                          # `validate` and `get_preds` outside `fit`
        dtype, xb = self.dtype, self.learn.xb
        self.learn.xb = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, xb)
        self._given = xb, self.learn.xb

    def after_pred(self):
        "Give the loss and the metrics fp32, and callbacks the inputs as they came."
        super().after_pred()
        self._inputs_back()

    def _after_forward(self):
        "The backward pass may run parts of the forward pass again (activation checkpointing)."
        if not self.learn.training: self._exit_autocast()

    def after_backward(self):
        "Put the masters back: the step is theirs."
        self._exit_autocast()

    def before_step(self):
        super().before_step()
        if self._moves is not None: self._moves.before_step(self._weights.masters)

    def after_step(self):
        super().after_step()
        self._changed()
        if self._weights is not None: self._weights.stepped = True
        if self._moves is not None and self._moves.after_step(self._weights.masters): self._warn_unmoved()

    def after_train(self):
        super().after_train()
        if self._moves is not None and self._moves.n: self._warn_unmoved()

    # -- how that is done

    def _lower(self):
        if self._lowered: return
        self._lowered, self._moves = True, None if compensates(self.learn.opt) else _Moves()
        if isinstance(self.learn.model, nn.parallel.DistributedDataParallel):
            raise ValueError("master_weights=False cannot be used with DistributedDataParallel, which would not reduce the gradients of weights that "
                             "change their dtype. Use `learn.to_half_weights()`, with masters.")
        self._weights.lower()

    def _warn_unmoved(self):
        moves, self._moves = self._moves, None
        warnings.warn(f"master_weights=False with {type(getattr(self.learn.opt, 'opt', self.learn.opt)).__name__}, which does not compensate for rounding: "
                      f"small updates are lost. In the first {moves.n} steps {moves.share:.0%} of the weights with a gradient did not move. Use an "
                      "optimizer with Kahan summation (`fastxtend_amp.kahan`), or keep the masters.")

    def _changed(self):
        if self._weights is not None: self._weights.stale = True

    def _inputs_back(self):
        given, self._given = self._given, None
        if given is not None and self.learn.xb is given[1]: self.learn.xb = given[0]

    def _ready(self):
        if self._weights is None or not (self._weights.inside or self._weights.fits(self.learn.model)): self._renew()

    def _renew(self, has_masters=None):
        on = self._weights is not None and self._weights.on
        if self._weights is not None: self._weights.close()
        self._weights = WeightCopies(self.learn.model, self.dtype, self._fp32_modules.check(self.learn.model),
                                    self.master_weights if has_masters is None else has_masters)
        self._weights.on = on
        self._weights.hook()

    def _step(self, step):
        if self.flat_master: self._flat.step(self.learn.opt, step, self._weights.memories)
        else: step()

    def _check_layers(self, mode, device): pass                  # without autocast PyTorch runs LSTMs by other kernels

    def _check_training(self):
        super()._check_training()
        check_model(self.learn.model, self.learn.opt)
        if self.flat_master: FlatMasters.check(self.learn.opt)

    def _new_context(self): return _InModel(self)

    def _enter_batch(self):
        batch = super()._enter_batch()
        if batch is not None: batch.inside = self._weights is not None and self._weights.inside
        return batch

    def _leave_batch(self, batch, error):
        "Also after an interrupt in the middle of putting the weights in or out."
        if self._weights is not None and not batch.inside: self._weights.leave()
        self._inputs_back()
        super()._leave_batch(batch, error)

    def _close(self):
        if self._weights is not None: self._weights.close()
        self._weights = self._given = self._moves = None
        self._lowered = False
        self._flat.close()
        super()._close()


HalfWeights.__signature__ = inspect.signature(HalfWeights.__init__).replace(
    parameters=list(inspect.signature(HalfWeights.__init__).parameters.values())[1:])
