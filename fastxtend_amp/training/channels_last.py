"fastai's `ChannelsLast`: it adds our precision callback, and converts the optimizer's state with the model."
import torch
from fastai.callback import channelslast
from fastcore.basics import patch

from ..learners import inner_optimizer
from ..tensors import map_tensors
from .callback import MixedPrecision

channelslast.MixedPrecision = MixedPrecision                     # which fastai's `to_channelslast` adds


@patch
def before_fit(self: channelslast.ChannelsLast) -> None:
    """Convert the model to channels last, and the optimizer's state with it.

    Fused optimizers step through memory, and would pair weights with the state of others.
    """
    def converted(t): return t.to(memory_format=torch.channels_last) if t.dim() == 4 else t
    self.learn.model.to(memory_format=torch.channels_last)
    if not (opt := inner_optimizer(self.learn.opt)): return                 # in a validation before the first fit
    for p, state in opt.state.items(): opt.state[p] = map_tensors(converted, state)
