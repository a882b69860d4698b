"Flat masters: the optimizer steps on a few large tensors instead of one for each parameter."
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn

from ..compat import copy_all, tensor_version
from .optimizers import fills_its_memory, is_elementwise, memory_of, optimizer_name, state_of, stepped_as_it_is

__all__ = ['BLOCK', 'FlatMasters']

# Elements in a flat tensor (512 KB in fp32): an optimizer's temporary tensors of that size stay in a CPU's cache, and
# glibc keeps blocks of that size where it gives larger ones back to the system. Measured best of 2^16 to 2^20.
BLOCK = 2 ** 17

# Parameters in a flat tensor: fewer save the optimizer less than it takes to join them.
FEWEST = 4

# Each parameter begins at a cache line of 64 bytes: kernels that compute with it may round differently elsewhere.
LINE = 16


class FlatMasters:
    """The masters of each parameter group in a few flat tensors, and the optimizer's state, too.

    Only while the optimizer steps does it see the flat ones: learner, checkpoints and callbacks meet one entry for each
    parameter. Parameters share flat tensors if group, device, having a gradient, and the state that is not a tensor of
    their shape (such as the step count, or fastai's exemption from weight decay) agree; they are built anew when that
    changes. None has more than `BLOCK` elements or fewer than `FEWEST` parameters; a larger parameter, one left out, or
    one with sparse gradients is stepped on as it is. So are all of an optimizer that takes many at once by itself, or
    that has code of the user's own around its step.
    """
    def __init__(self): self._forget()

    def _forget(self):
        self.moved: dict[nn.Parameter, tuple] = {}               # to where, of those that were ever put into a block
        self.blocks: list[_Block] = []
        self.flat_lists = L()                                    # what the optimizer steps on, by group
        self.pattern: Any = None                                 # what they were built for
        self.lists: Any = None                                   # the optimizer's own, while it sees the flat ones
        self.model: Any = None
        self.opt: Any = None  # after `moved`: an interrupt may strike in between, and `close` is called again

    @staticmethod
    def check(opt: Any) -> None:
        "Raise a `ValueError` that names an optimizer whose step may not be the same for each element."
        if stepped_as_it_is(opt) or is_elementwise(opt): return
        raise ValueError(f"flat_master=True cannot be used with {optimizer_name(opt)}, which is not one of the "
                         "element-wise optimizers of fastai, PyTorch and optimi. Use "
                         "`learn.to_half_weights(flat_master=False)`, or one such as Adam.")

    def _look(self, opt):
        "What the blocks depend on, but for the state; this is asked in each step, of each parameter."
        return [id(opt), *map(len, opt.param_lists), *(
            (id(p), p.grad is None or p.grad.layout, p.data_ptr(), p.is_contiguous())
            for pl in opt.param_lists for p in pl)]

    def _build(self):
        listed = Counter(p for pl in self.opt.param_lists for p in pl)
        others = self._others()
        store, alike = state_of(self.opt), {}
        self.blocks, self.pattern = [], None
        lists: list[list] = [[] for _ in self.opt.param_lists]
        for group, pl in enumerate(self.opt.param_lists):
            for p in pl:
                if p.grad is None: continue
                if self._stands(p): alone = not others[memory_of(p)]
                else: alone = others[memory_of(p)] == 1 and fills_its_memory(p)
                # Without a dimension its state cannot be told from a step count; not contiguous: another memory format.
                plain = p.dim() and p.is_contiguous() and (p.grad.dtype, p.grad.layout) == (p.dtype, torch.strided)
                kind = _kind(store.get(p, {}), p) if plain and alone and listed[p] == 1 else None
                alike.setdefault((group, kind or len(alike)), []).append(p)   # or by itself
        for (group, _), same in alike.items():
            for part in _parts(same):
                if len(part) >= FEWEST:
                    block = _Block(part, store)
                    for p, view in zip(part, block.parts(block.memory)): self.moved[p], p.data = _place(view), view
                    self.blocks.append(block)
                    part = [block.flat]
                lists[group] += part
        self.flat_lists = L(map(L, lists))

    def _stands(self, p): return p in self.moved and self.moved[p] == _place(p)   # where it was put

    def _others(self):
        "By memory, how many lie in it that were not put there: somebody has them share it."
        everyone = {*self.moved, *self.model.parameters(), *self.model.buffers()}.union(*self.opt.param_lists)
        return Counter(memory_of(t) for t in everyone if not self._stands(t))

    def step(self,
        model: nn.Module, # The model that it trains
        opt: Any, # fastai's `Optimizer` or `OptimWrapper`
        step: Callable, # Takes the step
    ) -> None:
        "`step()`, with the flat tensors in `opt`."
        if stepped_as_it_is(opt):
            self.pattern = None                                  # it changes the state behind the blocks
            return step()
        self.check(opt)
        store = state_of(opt)
        anew = self.pattern != self._look(opt) or not all(b.is_current(store) for b in self.blocks)
        self.opt, self.model = opt, model
        if anew:
            self._build()
            self.pattern = self._look(opt)
        if not self.blocks: return step()
        self.lists = opt.param_lists
        try:
            for b in self.blocks:
                b.gather()
                store[b.flat] = b.state
            opt.param_lists = self.flat_lists
            step()
        finally: self.restore()                                  # `close` calls it again if it is interrupted

    def restore(self) -> None:
        "Give the optimizer its own parameters and their state back; may be interrupted and called again."
        if self.lists is None: return
        self.opt.param_lists, store = self.lists, state_of(self.opt)
        for b in self.blocks:
            b.state = store.get(b.flat, b.state)
            store.pop(b.flat, None)
            b.flat.grad = None
            b.share(store)
        self.lists = None

    def close(self) -> None:
        "Each parameter and its state in memory of its own again."
        self.restore()
        others = self._others() if self.moved else {}
        for p in self.moved:
            if self._stands(p) and not others[memory_of(p)]: p.data = p.data.clone()
            if p.grad is not None: p.grad = p.grad.clone()
            state = state_of(self.opt).get(p, {})
            for k, v in state.items():
                if _like(v, p): state[k] = v.clone()
        self._forget()


class _Block:
    "One flat master, the parameters that are views of it, and its state in the optimizer."
    def __init__(self, params: list[nn.Parameter], store: dict):
        self.params = params
        self.sizes = [_room(p) for p in params]
        self.memory = self._join([p.data for p in params])       # which the parameters become views of
        self.flat = nn.Parameter(self.memory)
        states = [store.get(p, {}) for p in params]
        self.state: dict[str, Any] = {}
        for k, v in states[0].items():
            if _like(v, params[0]): v = self._join([s[k] for s in states])
            elif isinstance(v, torch.Tensor): v = v.clone()
            self.state[k] = v
        self.shared: dict[str, torch.Tensor] = {}  # the flat state that the parameters have their parts of
        self.own: list[str] = []                   # names of tensors of which each parameter has one of its own
        self.handed: tuple[list, list] = [], []    # the state of the parameters, as `share` left it

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        "What of `flat` belongs to each parameter, in its shape."
        return [t[:p.numel()].view(p.shape) for t, p in zip(flat.split(self.sizes), self.params)]

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        "One flat tensor of these, one for each parameter, with zeros between them."
        flat = torch.zeros(sum(self.sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        copy_all(self.parts(flat), tensors)
        return flat

    def gather(self) -> None:
        "Join the gradients, unless they are one tensor already: fastai's optimizers keep them from step to step."
        grads = [p.grad for p in self.params]
        flat = _joined(grads, self.sizes)
        if flat is None:
            flat = self._join([g.detach() for g in grads])       # type: ignore[union-attr]
            for p, part in zip(self.params, self.parts(flat)):
                p.grad = part.data  # no view to autograd: the optimizer may detach it in place
        self.flat.grad = flat

    def share(self, store: dict) -> None:
        "Hand each parameter its part of the state, all at once: an interrupt leaves none with half of it."
        states = [store.setdefault(p, {}) for p in self.params]
        new: list[dict[str, Any]] = [{} for _ in states]
        self.own = []
        for k, v in self.state.items():
            if not isinstance(v, torch.Tensor):
                for n in new: n[k] = v
            elif not _like(v, self.flat):                        # it is counted up by itself later
                self.own.append(k)
                for s, n in zip(states, new): n[k] = s[k] if k in s else v.clone()
                copy_all([n[k] for n in new], [v] * len(new))
            elif self.shared.get(k) is not v:
                for n, part in zip(new, self.parts(v)): n[k] = part
        for s, n in zip(states, new): s.update(n)
        self.shared = {k: v for k, v in self.state.items() if isinstance(v, torch.Tensor)}
        self.handed = self._entries(store)

    def _entries(self, store: dict) -> tuple[list, list]:
        "What is in the state of the parameters; where its tensors lie, and versions of those that are not the block's."
        states = [*map(store.get, self.params, repeat({}))]
        values = [*chain.from_iterable(map(dict.values, states))]
        places = map(torch.Tensor.data_ptr, [v for v in values if isinstance(v, torch.Tensor)])
        return values, [*places, *(tensor_version(s.get(k)) for k in self.own for s in states)]

    def is_current(self, store: dict) -> bool:
        "Is the state of the parameters as `share` left it? What is written into their parts is in the block's, too."
        (then, rest_then), (now, rest) = self.handed, self._entries(store)
        return len(then) == len(now) and all(map(operator.is_, then, now)) and rest_then == rest


def _kind(state: dict, p: nn.Parameter) -> tuple | None:
    "What is the same for all parameters in a block; None if some of its state belongs to it as a whole."
    kind: list[Any] = [p.device, p.dtype]
    for k, v in sorted(state.items()):
        if isinstance(v, torch.Tensor):
            if not _like(v, p) and v.numel() != 1: return None
            v = (v.dtype, v.device, None if _like(v, p) else float(v))
        elif not isinstance(v, (int, float, str, type(None))): return None
        kind.append((k, v))
    return tuple(kind)


def _place(p: torch.Tensor) -> tuple: return p.data_ptr(), p.shape, p.stride()


def _room(p: nn.Parameter) -> int:
    "How many elements `p` takes in a block: whole cache lines."
    return -(-p.numel() // LINE) * LINE


def _parts(params: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    "`params` in lists of at most `BLOCK` elements; one as large as that by itself."
    part: list[nn.Parameter] = []
    size = 0
    for p in params:
        if _room(p) >= BLOCK:                                    # the small ones around it still go together
            yield [p]
            continue
        size += _room(p)
        if size > BLOCK:
            yield part
            part, size = [], _room(p)
        part.append(p)
    if part: yield part


def _joined(grads: list, sizes: list[int]) -> torch.Tensor | None:
    "The tensor that these are parts of, one after the other, each with a place of its size; None if they are not."
    first, places = grads[0], [*accumulate(sizes, initial=grads[0].storage_offset())]
    if first.device.type not in ('cpu', 'cuda'): return None     # where memory has no address to compare
    memory = first.untyped_storage()
    for g, place in zip(grads, places):
        if not g.is_contiguous() or g.storage_offset() != place: return None
        if g.untyped_storage().data_ptr() != memory.data_ptr(): return None
    if places[-1] * first.element_size() > memory.nbytes(): return None
    return first.as_strided((sum(sizes),), (1,))


def _like(v, p): return isinstance(v, torch.Tensor) and v.shape == p.shape and v.dim() > 0
