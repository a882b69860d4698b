"Checkpoints of models sharded by FSDP2 (`fully_shard`): whole tensors in the file, shards in memory."
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fastai.learner import Learner
from fastai.torch_core import get_model, rank_distrib

from ..training.checkpoint import FORMATS, FileFormat
from ..common import is_dtensor, is_sharded, optimizer_params
from ..convert import map_tensors

__all__ = ['Sharded']


class Sharded(FileFormat):
    """The format of plain learners' files, with whole tensors, for a model whose parameters are DTensors.

    All processes must call `save`; rank 0 writes. Any number of processes can read the file, also without sharding.
    (`torch.distributed.checkpoint.state_dict` supports only torch's optimizers.)

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html.
    """
    device = 'cpu'

    def applies(self, learn: Learner) -> bool: return is_sharded(learn.model)

    def read(self, learn: Learner, with_opt: bool) -> tuple[Any, Any]:
        return map_tensors(_whole, super().read(learn, with_opt))

    def load_model(self, learn: Learner, state: Any, **options: Any) -> None:
        own = get_model(learn.model).state_dict()
        super().load_model(learn, {name: _part(t, own.get(name)) for name, t in state.items()}, **options)

    def load_opt(self, learn: Learner, state: Any) -> None:
        params, entries = optimizer_params(learn.opt), state['state']  # a list of fastai's, or torch's dict by number
        for i, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
            entry.update({key: _part(value, params[i]) for key, value in entry.items()})
        super().load_opt(learn, state)


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


FORMATS.append(Sharded())
