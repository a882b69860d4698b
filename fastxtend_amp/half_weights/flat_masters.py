"How does an optimizer step on few flat masters, unseen by everybody else?"
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from fastai.optimizer import Optimizer, OptimWrapper
from fastcore.foundation import L
from torch import nn

from .copies import GradMemory

__all__ = ['FlatMasters', 'trial_optimizer']


def trial_optimizer(opt: Any, params: list[nn.Parameter]) -> Any:
    "An optimizer of `params` with the rule of `opt` and nothing in its state."
    if type(opt) is Optimizer: return Optimizer(params, opt.cbs, **{**opt.hypers[0], 'lr': .01})
    inner = opt.opt
    try: trial = type(inner)(params, **inner.defaults)
    except TypeError:                                            # its arguments have other names than its defaults
        trial = copy.copy(inner)
        trial.state, trial.param_groups = defaultdict(dict), [{'params': params}]
    for g in trial.param_groups: g.update({**inner.param_groups[0], 'params': params, 'lr': .01})
    return trial


def _is_elementwise(opt) -> bool:
    "Do trial steps change the same numbers alike, whether they are one tensor or two?"
    device = next(p.device for pl in opt.param_lists for p in pl)
    numbers = torch.linspace(-1, 30, 10, device=device)
    def stepped(*tensors):
        params = [nn.Parameter(t.clone()) for t in tensors]
        trial = trial_optimizer(opt, params)
        for _ in range(2):
            for p in params: p.grad = p.detach().sin()
            trial.step()
        state = [(p, v) for p in params for v in trial.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        return torch.cat([p.detach().flatten() for p in params]), all(v.numel() == 1 or v.shape == p.shape for p, v in state)
    try: (two, fits), (one, _) = stepped(numbers[:6].view(3, 2), numbers[6:]), stepped(numbers)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError): return False   # it wants matrices, a closure, ...
    return fits and torch.allclose(two, one)


class FlatMasters:
    """The masters of each parameter group as few flat tensors, and the optimizer's state too; every master is a view of one.

    Only while the optimizer steps does it see the flat ones: learner, checkpoints and callbacks meet one entry for each
    parameter. Parameters share a flat tensor if group, device, weight-decay exemption, `force_train`, the state that
    is not a tensor of their shape (such as the step count) and having a gradient agree; it is built anew when that changes.
    """
    def __init__(self): self._forget()
    def _forget(self): self.sets, self.pattern, self.lists, self.opt, self.strides = [], None, None, None, {}

    @staticmethod
    def check(opt: Any) -> None:
        "Raise a `ValueError` that names an optimizer whose step is not the same for each element; found by trial steps."
        plain = type(opt) is Optimizer                           # others, such as Lookahead, have counters and weights of their own
        if (plain or isinstance(opt, OptimWrapper)) and _is_elementwise(opt): return
        name = type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__
        if plain: name = getattr(getattr(opt.cbs[-1], 'func', opt.cbs[-1]), '__name__', name).removesuffix('_step').title()
        raise ValueError(f"flat_master=True cannot be used with {name}, whose step depends on which parameter tensor an element is in. "
                         "Use `learn.to_half_weights(flat_master=False)`, or an element-wise optimizer such as Adam or SGD.")

    @staticmethod
    def _store(opt): return opt.opt.state if isinstance(opt, OptimWrapper) else opt.state

    def _look(self, opt):
        store = self._store(opt)
        return [(id(p), p.grad is not None, p.data_ptr(), id(store.get(p)), p.requires_grad, *(opt.state.get(p, {}).get(k) for k in ('do_wd', 'force_train')))
                for pl in opt.param_lists for p in pl]

    def _build(self, opt, memories):
        store, sets = self._store(opt), {}
        for memory in memories.values(): memory.tensor = None
        for g, pl in enumerate(opt.param_lists):
            for p in pl:
                if p.grad is None: continue
                if p.grad.layout is not torch.strided:
                    raise ValueError(f"flat_master=True cannot be used with sparse gradients (a parameter of shape {tuple(p.shape)} has them). Use "
                                     "`learn.to_half_weights(flat_master=False)`.")
                fixed, state = opt.state.get(p, {}), store.get(p, {})
                like = tuple((k, 'flat' if _like(v, p) else v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v if not isinstance(v, torch.Tensor)
                              else _refuse(opt, k, v, p)) for k, v in sorted(state.items()))
                key = (g, p.device, p.dtype, fixed.get('do_wd'), fixed.get('force_train'), p.requires_grad, like)
                sets.setdefault(key, []).append(p)
        self.sets = [_FlatSet(key[0], ps, store, self.strides) for key, ps in sets.items()]

    def step(self, opt: Any, step: Callable, memories: dict[nn.Parameter, GradMemory]) -> None:
        "`step()`, with the flat tensors in `opt`; from then on gradients arrive in a flat tensor, too, where `memories` can lend it."
        if self.pattern is None or self.pattern != self._look(opt): self._build(opt, memories)
        store = self._store(opt)
        self.lists, self.opt = opt.param_lists, opt
        try:
            for s in self.sets:
                s.gather(memories)
                store[s.flat] = s.state
            opt.param_lists = L(L(s.flat for s in self.sets if s.group == g) for g in range(len(self.lists)))
            step()
        finally:
            self.restore()
        for s in self.sets: s.share(store)
        self.pattern = self._look(opt)

    def restore(self) -> None:
        "Give the optimizer its own parameters back; may be interrupted and called again."
        if self.lists is None: return
        self.opt.param_lists = self.lists
        for s in self.sets:
            s.state = self._store(self.opt).pop(s.flat, s.state)
            s.flat.grad = None
        self.lists = None

    def close(self) -> None:
        "Each parameter and its state in memory of its own again."
        self.restore()
        for p, stride in self.strides.items():
            own = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device)
            own.copy_(p.data)
            if p.grad is not None: p.grad = p.grad.clone()
            p.data = own
        if self.opt is not None:
            store = self._store(self.opt)
            for s in self.sets:
                for p in s.params:
                    state = store.get(p, {})
                    for k, v in state.items():
                        if _like(v, p): state[k] = v.clone()
        self._forget()


class _FlatSet:
    "One flat master, the parameters that are views of it, and its state in the optimizer."
    def __init__(self, group: int, params: list[nn.Parameter], store: dict, strides: dict):
        self.group, self.params, self.sizes = group, params, [p.numel() for p in params]
        self.flat = nn.Parameter(torch.cat([p.data.reshape(-1) for p in params]))
        self.grad, self.views = torch.empty_like(self.flat.data), self.parts(self.flat.data)
        self.grads = self.parts(self.grad)
        states = [store.get(p, {}) for p in params]
        self.state = {k: torch.cat([s[k].reshape(-1) for s in states]) if _like(v, params[0]) else v.clone() if isinstance(v, torch.Tensor) else v
                      for k, v in states[0].items()}
        for p, view in zip(params, self.views):
            strides.setdefault(p, p.stride())
            p.data = view
        self.seen: dict[str, torch.Tensor] = {}

    def parts(self, flat): return [t.view(p.shape) for t, p in zip(flat.split(self.sizes), self.params)]

    def gather(self, memories: dict[nn.Parameter, GradMemory]) -> None:
        "Bring those gradients that are elsewhere to the flat one."
        self.flat.grad = self.grad
        given = [(p, p.grad, part) for p, part in zip(self.params, self.grads) if p.grad is not None]
        if self.grad.device.type not in ('cpu', 'cuda'):         # where memory has no address to compare
            torch.cat([grad.reshape(-1) for _, grad, _ in given], out=self.grad)
            return
        apart = [x for x in given if x[1].data_ptr() != x[2].data_ptr()]
        if apart: torch._foreach_copy_([part for _, _, part in apart], [grad for _, grad, _ in apart])
        for p, _, part in apart:
            p.grad = part.data                                   # no view to autograd: the optimizer may detach it in place
            if p in memories: memories[p].tensor, memories[p].lent = part, True

    def share(self, store):
        "Hand each parameter its part of the state."
        states = [store.setdefault(p, {}) for p in self.params]
        for k, v in self.state.items():
            if not isinstance(v, torch.Tensor):
                for s in states: s[k] = v
            elif v.shape != self.flat.shape or v.dim() == 0:     # of its own for each parameter: an optimizer without us would count it up for each
                for s in states:
                    if k not in s: s[k] = v.clone()
                torch._foreach_copy_([s[k] for s in states], [v] * len(states))
            elif self.seen.get(k) is not v:
                for s, part in zip(states, self.parts(v)): s[k] = part
                self.seen[k] = v


def _like(v, p): return isinstance(v, torch.Tensor) and v.shape == p.shape and v.dim() > 0


def _refuse(opt, key, v, p):
    raise ValueError(f"flat_master=True cannot be used with {type(getattr(opt, 'opt', opt)).__name__}: its state '{key}' of shape {tuple(v.shape)} belongs "
                     f"to a whole parameter of shape {tuple(p.shape)}, not to its elements. Use `learn.to_half_weights(flat_master=False)`.")
