"""Checkpoints of models sharded by FSDP2 (`fully_shard`): whole tensors in the file, shards in memory.

All processes must call `save`; rank 0 writes. Any number of processes can read the file, also without sharding.
(`torch.distributed.checkpoint.state_dict` supports only torch's optimizers.)

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from fastai.learner import Learner
from fastai.torch_core import get_model, rank_distrib

from ..learners import is_dtensor, is_sharded, optimizer_params
from .files import convert_files


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


def _load(original: Callable, self: Learner, file: Any, *args: Any, **kwargs: Any) -> Learner:
    "Call the `load` that this replaces, in which model and optimizer load this process's shards."
    if self.opt is None: self.create_opt()
    model, opt = get_model(self.model), self.opt
    of_model, of_opt = model.load_state_dict, opt.load_state_dict

    def load_model(state: Any, **kwargs: Any) -> Any:
        own = model.state_dict()
        state.update({name: _part(t, own.get(name)) for name, t in state.items()})   # in place: its `_metadata` stays
        return of_model(state, **kwargs)

    def load_opt(state: Any) -> None:
        entries, params = state['state'], optimizer_params(opt)  # a list of fastai's, or torch's dict by number
        for i, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
            entry.update({key: _part(value, params[i]) for key, value in entry.items()})
        of_opt(state)

    with patch.object(model, 'load_state_dict', load_model), patch.object(opt, 'load_state_dict', load_opt):
        return original(self, file, *args, **kwargs)


convert_files(lambda learn: is_sharded(learn.model), _whole, _load)
