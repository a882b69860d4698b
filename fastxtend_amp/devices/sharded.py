"Checkpoints of models sharded by FSDP2 (`fully_shard`): whole tensors in the file, each process's part in memory."
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fastai.torch_core import get_model, rank_distrib
from torch import nn

from ..checkpoint import ADAPTERS, StateAdapter
from ..common import is_dtensor
from ..convert import map_tensors

__all__ = ['Sharded', 'is_sharded']


def is_sharded(
    model: nn.Module, # The model, sharded as a whole or in parts
) -> bool: # Whether any of its parameters is a DTensor
    "Whether `model` is sharded over several processes, as by FSDP2's `fully_shard`."
    return any(map(is_dtensor, model.parameters()))


class Sharded(StateAdapter):
    """Writes DTensors as whole tensors, and cuts whole tensors from a file as the model's DTensors are cut.

    A file written by one number of processes can be read by another, or by a single process without sharding.

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
    """
    def applies(self, model: nn.Module) -> bool: return is_sharded(model)

    def to_file(self, state: Any) -> Any:
        "Gather every DTensor in `state`, which all processes must call; rank 0 gets whole tensors on the CPU."
        is_writer = rank_distrib() == 0                          # as fastai's `save_model` asks
        def gather(t: Any) -> Any:
            if not is_dtensor(t): return t
            whole = t.full_tensor()
            return whole.cpu() if is_writer else t               # elsewhere the whole tensor is freed at once
        return map_tensors(gather, state)

    def model_from_file(self, state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        "A whole model state, cut as `model.load_state_dict` needs it in this process."
        own = get_model(model).state_dict()
        return {name: _cut_like(t, own.get(name)) for name, t in state.items()}

    def opt_from_file(self, state: Any, params: list[nn.Parameter]) -> Any:
        "A whole optimizer state, fastai's (a list) or torch's (a dict by number), cut as `params` are."
        if not isinstance(state, Mapping): return state
        state = dict(state)
        entries = state.get('state')
        if isinstance(entries, Mapping): state['state'] = {i: _cut_entry(s, params, i) for i, s in entries.items()}
        elif entries is not None: state['state'] = [_cut_entry(s, params, i) for i, s in enumerate(entries)]
        if state.get('slow_weights') is not None: state['slow_weights'] = _cut_groups(state['slow_weights'], params)
        return state


def _cut_like(t: Any, like: Any) -> Any:
    "This process's part of `t`, cut as the DTensor `like` is; `t` itself where it does not correspond to a DTensor."
    if not isinstance(t, torch.Tensor) or is_dtensor(t) or not is_dtensor(like) or t.shape != like.shape: return t
    from torch.distributed.tensor import distribute_tensor
    # None: every process has read the whole tensor from the file, so none has to send it.
    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _cut_entry(entry: Any, params: list[nn.Parameter], i: int) -> Any:
    "What the optimizer remembers of parameter `i`."
    if not isinstance(entry, Mapping) or i >= len(params): return entry
    return {key: _cut_like(value, params[i]) for key, value in entry.items()}


def _cut_groups(groups: Any, params: list[nn.Parameter]) -> list[list[Any]]:
    "Lookahead's slow weights: a list for each parameter group."
    remaining = iter(params)
    return [[_cut_like(w, next(remaining, None)) for w in group] for group in groups]


ADAPTERS.append(Sharded())
