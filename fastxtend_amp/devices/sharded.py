"""Checkpoints of models sharded by FSDP2 (`fully_shard`): whole tensors in the file, shards in memory.

All processes must call `save`; rank 0 writes. Any number of processes can read the file, also without sharding.
(`torch.distributed.checkpoint.state_dict` supports only torch's optimizers.)

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fastai.learner import Learner
from fastai.torch_core import get_model, rank_distrib

from ..common import is_dtensor, is_sharded, optimizer_params
from ..training.checkpoint import FORMATS, FileFormat


def _needs_it(learn: Learner) -> bool: return is_sharded(learn.model)


def _whole(t: torch.Tensor) -> torch.Tensor:
    "Gather a DTensor; all processes must call this. On rank 0, which writes, it is on the CPU."
    if not is_dtensor(t): return t
    whole = t.full_tensor()                                      # type: ignore[attr-defined]
    return t if rank_distrib() else whole.cpu()


def _part(t: Any, like: Any) -> Any:
    "Return this process's part of `t`, sharded as the DTensor `like` is; `t` itself if that does not fit."
    if not isinstance(t, torch.Tensor) or not is_dtensor(like) or t.shape != like.shape: return t
    from torch.distributed.tensor import distribute_tensor
    # None: every process has read the whole tensor from the file, so none has to send it.
    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _from_file(learn: Learner, model_state: Any, opt_state: Any) -> tuple[Any, Any]:
    "Return this process's shards of the states in a file."
    own, params = get_model(learn.model).state_dict(), optimizer_params(learn.opt)
    entries = opt_state['state'] if opt_state else []            # a list of fastai's, or torch's dict by number
    for i, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
        entry.update({key: _part(value, params[i]) for key, value in entry.items()})
    return {name: _part(t, own.get(name)) for name, t in model_state.items()}, opt_state


FORMATS.append(FileFormat(_needs_it, _whole, _from_file))
