"How does one file hold parameters that are spread over several processes, as FSDP2's are?"
from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from fastai.torch_core import get_model, rank_distrib
from torch import nn

from ..convert import map_tensors


def _is_shard(t: Any) -> bool:
    module = sys.modules.get('torch.distributed.tensor')         # who has a DTensor has imported it
    return module is not None and isinstance(t, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    "Is any parameter of `model` a DTensor, as after FSDP2's `fully_shard`?"
    return any(map(_is_shard, model.parameters()))


def whole(state: Any) -> Any: # On rank 0 the same with whole tensors on the CPU; elsewhere nothing of use
    "Put the tensors in `state` together from all processes, which must all call this: rank 0 alone saves."
    keep = rank_distrib() == 0
    def gather(t):
        if not _is_shard(t): return t
        full = t.full_tensor()
        return full.cpu() if keep else t
    return map_tensors(gather, state)


def _shard_like(t: Any, like: Any) -> Any:
    "This process's part of `t`, cut as `like` is; `t` itself if there is nothing to cut."
    if not isinstance(t, torch.Tensor) or _is_shard(t) or not _is_shard(like) or t.shape != like.shape: return t
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)  # each process has read all of it


def shard_model_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    "A whole model state as `model.load_state_dict` needs it in this process."
    own = get_model(model).state_dict()
    return {k: _shard_like(v, own.get(k)) for k, v in state.items()}


def shard_opt_state(state: Any, params: list[nn.Parameter]) -> Any:
    "A whole optimizer state, fastai's (a list) or torch's (a dict by number), as the optimizer of `params` needs it here."
    if not isinstance(state, Mapping) or 'state' not in state: return state
    cut = lambda i, s: {k: _shard_like(v, params[i]) for k, v in s.items()} if i < len(params) and isinstance(s, Mapping) else s
    entries = state['state']
    entries = {i: cut(i, s) for i, s in entries.items()} if isinstance(entries, Mapping) else [cut(i, s) for i, s in enumerate(entries)]
    return {**state, 'state': entries}
