"Half-precision copies of a model's weights, which each module takes inside its own forward."
from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..compat import copy_all, in_function_transform, is_compiled, keeps_casts, tensor_version
from ..forward import ModuleForward
from ..fp32_modules import unwrapped
from ..guard import cache_loses_gradients
from .modules import Weight, weights_to_copy
from .watch import WeightWatch

__all__ = ['HalfForward', 'WeightCopies']

# On a CPU autocast casts a weight about as fast as Python calls what is here. There a module has copies only if it has
# this many weights, and takes them only where they serve more than one batch.
FEWEST_ON_CPU = 2 ** 16
ONLY_WHERE_FASTER = True


class _AsHalf(torch.autograd.Function):
    "Stands copies in for masters; backward, gradients go to fp32 as through autocast's own casts."
    @staticmethod
    def forward(ctx, halves, *masters):  # with a `setup_context`, PyTorch binds arguments in Python
        ctx.set_materialize_grads(False)
        return tuple(h.detach() for h in halves)
    @staticmethod
    def backward(ctx, *grads): return None, *(None if g is None else g.float() for g in grads)


class Copy:
    "A master, its half-precision copy, and what tells whether the master has changed since this was written."
    def __init__(self, weight: Weight, copies: WeightCopies):
        self.module, self.name, self.master = weight
        self.copies, self.place = copies, weight.module.__dict__   # an attribute here hides the parameter of this name
        self.half: Any = None
        self.written: Any = None

    @property
    def wanted(self) -> bool:
        "Is the master still there, and is it trained? autocast does not keep the casts of others either."
        p = self.master
        return p.requires_grad and p.dtype is torch.float32 and getattr(self.module, self.name) is p

    def state(self) -> Any:
        "Differs when the master has changed: in place, in its `.data`, or by what calls for `WeightCopies.rewrite`."
        return self.copies.turn, tensor_version(self.master), self.master.data_ptr()


class HalfForward(ModuleForward):
    """The forward of a module with half-precision copies of its weights, while autocast is on.

    Outside this forward the module has its masters, for everybody. In one batch the same copies stand in the graph
    however often the module is called, as with autocast's cache, so that gradients add up alike.
    """
    transient = True

    def __init__(self, module: nn.Module, groups: list[list[Weight]], copies: WeightCopies):
        super().__init__(module)
        self.copies = copies
        self.groups = [[Copy(w, copies) for w in group] for group in groups]
        self.all = [c for group in self.groups for c in group]
        self.seen, self.barred = False, False                    # was it watched; does something else use its weights
        self.views: list[tuple[Copy, torch.Tensor]] | None = None    # in this batch's graph

    def __call__(self, *args, **kwargs) -> Any:
        copies = self.copies
        if torch.compiler.is_compiling(): return self.run(*args, **kwargs)
        if copies.watch is not None: return copies.watched_call(self, args, kwargs)
        if self.barred or not copies.usable: return self.run(*args, **kwargs)
        if self.seen: return self.with_copies(args, kwargs)
        copies.miss(self)
        return self.run(*args, **kwargs)

    def with_copies(self, args: tuple, kwargs: dict) -> Any:
        "The module's forward, with copies in the place of its weights."
        taken = self.taken(args, kwargs)
        try:
            for copy, tensor in taken: copy.place[copy.name] = tensor
            return self.run(*args, **kwargs)
        finally:
            for copy, _ in taken: copy.place.pop(copy.name, None)

    def taken(self, args: tuple, kwargs: dict) -> list[tuple[Copy, torch.Tensor]]:
        "Which weights to replace in this call, and by what."
        grad = torch.is_grad_enabled()
        if grad and self.views is not None: return [v for v in self.views if v[0].wanted]
        copies = self.copies
        wanted = [[c for c in group if c.wanted] for group in self.groups]
        if any(c.written != c.state() for group in wanted for c in group): copies.write(self)
        if not grad: return [(c, c.half) for group in wanted for c in group]
        views: list[tuple[Copy, torch.Tensor]] = []
        for group in wanted:
            if group: views += zip(group, _AsHalf.apply([c.half for c in group], *(c.master for c in group)))
        self.views = views
        copies.in_graph.append(self)
        return views


class HalfAttention(HalfForward):
    """`HalfForward` for `nn.MultiheadAttention`.

    In evaluation it computes with the masters: its fast path does so, and autocast does not touch that. Queries, keys
    and values that are not one tensor take parts of the input projection, which autocast casts in each call.
    """
    def taken(self, args, kwargs):
        if not self.module.training: return []
        taken = super().taken(args, kwargs)
        query, key, value = [*args, *(kwargs.get(n) for n in ('query', 'key', 'value')[len(args):])][:3]
        if query is key and key is value: return taken
        return [(copy, t) for copy, t in taken if not copy.name.startswith('in_proj')]


class WeightCopies:
    "The half-precision copies for one model during a fit."
    patience = 8                                                 # batches to wait for a module that was missed

    def __init__(self,
        model: nn.Module, # The model
        device_type: str, # Type of the device that autocast is on for
        dtype: torch.dtype, # autocast's dtype
    ):
        self.model, self.device_type, self.dtype = unwrapped(model), device_type, dtype
        self.turn, self.on = 0, False                            # each turn all copies are written anew
        self.in_graph: list[HalfForward] = []                    # whose views this batch has made
        # Compiled code has autocast's casts traced into it, where they are cheap.
        found = {} if any(map(is_compiled, model.modules())) else weights_to_copy(model, device_type, dtype)
        self.sparing = ONLY_WHERE_FASTER and device_type == 'cpu'
        if self.sparing: found = {m: groups for m, groups in found.items() if _size(groups) >= FEWEST_ON_CPU}
        def forward_of(m): return HalfAttention if type(m) is nn.MultiheadAttention else HalfForward
        self.forwards: list[HalfForward] = [forward_of(m)(m, groups, self) for m, groups in found.items()]
        self.watch: WeightWatch | None = None                    # of this batch
        self.watches: list[WeightWatch] = []                     # of all batches
        self.called: dict[HalfForward, int] = {}                 # how often, in a watched batch
        self.missed: set[HalfForward] = set()                    # called in batches that were not watched
        self.n_watched = 1                                       # batches that may still be watched

    def install(self) -> None:
        "Put the forwards on their modules."
        for f in self.forwards: f.install()

    def fits(self, model: nn.Module) -> bool:
        "Is `model` still the one that this was built for, as it is or wrapped?"
        return unwrapped(model) is self.model

    # -- the part of a batch in which autocast is on

    def enter(self,
        training: bool, # Whether this batch is to be trained on
        keep: bool, # Whether the copies will be used again after it, before the next step
    ) -> None:
        "Modules may take their copies from now on; in training, batches are watched for modules not yet known."
        self.leave(keep)
        watch = training and self.n_watched
        if not self.forwards or (self.sparing and not keep and not watch): return
        if watch:
            self.n_watched -= 1
            self.watch = WeightWatch(c.master for f in self.forwards for c in f.all)
            self.watches.append(self.watch)
            self.watch.__enter__()
        self.on = True

    def leave(self,
        keep: bool = True, # As for `enter`
    ) -> None:
        "No more; copies that are not kept live on in the graph alone. May be interrupted and called again."
        self.on = False
        if not keep: self.drop()
        for f in self.in_graph: f.views = None
        self.in_graph.clear()
        if self.watch is None: return
        self.watch.leave()
        for f in self.forwards:
            f.barred |= any(id(c.master) in self.watch.used for c in f.all)
        for f, n in self.called.items():  # the cache may be cleared between two calls: autocast's job
            f.seen, f.barred = True, f.barred or (n > 1 and cache_loses_gradients())
        self.missed -= self.called.keys()
        if not self.missed: self.n_watched = 0
        self.called.clear()
        self.watch = None

    @property
    def usable(self) -> bool:
        "Would autocast cast here and now, and keep the casts for the batch?"
        kind = self.device_type
        return (self.on and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self.dtype
                and keeps_casts() and not in_function_transform()
                and not torch.is_inference_mode_enabled())

    def watched_call(self, f: HalfForward, args: tuple, kwargs: dict) -> Any:
        "Run a module in a batch that is watched: by autocast alone, unless it has been watched before."
        watch, usable = self.watch, self.usable
        assert watch is not None
        watch.own = True
        try:
            if usable and f.seen and not f.barred: return f.with_copies(args, kwargs)
            if usable: self.called[f] = self.called.get(f, 0) + 1
            return f.run(*args, **kwargs)
        finally: watch.own = False

    def miss(self, f: HalfForward) -> None:
        "Watch the next batches for a module that was called in none of those before."
        if f in self.missed or not torch.is_grad_enabled(): return
        self.missed.add(f)
        self.n_watched = self.patience

    # -- writing

    def rewrite(self) -> None:
        "Have each copy written anew when it is next used: its master may have changed."
        self.turn += 1

    def drop(self) -> None:
        "Let go of the copies, so that their memory is free as soon as the graph's is, as that of autocast's casts."
        for f in self.forwards:
            for c in f.all: c.half = c.written = None

    def write(self, forward: HalfForward) -> None:
        """Write the copies of `forward`, in memory of their own, as the last ones may be in a graph.

        On an accelerator those of all modules in use, which is one launch; on a CPU, with its caches, one at a time.
        """
        with_it = [forward] if self.device_type == 'cpu' else [f for f in self.forwards if f.seen and not f.barred]
        by_device: dict[torch.device, list] = defaultdict(list)
        for c in (c for f in with_it for c in f.all if c.wanted and c.written != c.state()):
            c.half = torch.empty_like(c.master, dtype=self.dtype, requires_grad=False)
            by_device[c.master.device].append(c)
        with torch.no_grad():
            for group in by_device.values(): copy_all([c.half for c in group], [c.master for c in group])
        for group in by_device.values():
            for c in group: c.written = c.state()

    # -- the end

    def uncover(self) -> None:
        "Where an interrupt struck inside a module's forward: show its masters again."
        for f in self.forwards:
            for c in f.all: c.place.pop(c.name, None)

    def remove(self) -> None:
        "Take everything off the model; may be interrupted and called again."
        self.leave(keep=False)
        for watch in self.watches: watch.leave()                 # whatever an interrupt has left entered
        self.uncover()
        for f in self.forwards: f.remove()


def _size(groups: list[list[Weight]]) -> int: return sum(w.param.numel() for group in groups for w in group)
