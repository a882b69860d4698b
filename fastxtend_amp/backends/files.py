"Files of learners on XLA or sharded by FSDP2: `save` writes plain CPU tensors, which every learner can load."
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from fastai.learner import Learner
from fastai.text.learner import TextLearner
from fastai.torch_core import get_model

from ..tensors import map_tensors
from ..training.checkpoint import wrap_method


def convert_files(
    applies: Callable[[Learner], bool], # Whether a learner needs it
    to_file: Callable[..., Any], # Returns what to write for a tensor of a state; called in every process
    load: Callable[..., Learner], # Gets the original `load`, then its arguments; only for learners to which it applies
) -> None:
    "Wrap `Learner.save` and `Learner.load`."
    def save(original: Callable, self: Learner, file: Any, **kwargs: Any) -> Any:
        if not applies(self): return original(self, file, **kwargs)
        with ExitStack() as stack:
            for part in (get_model(self.model), self.opt if kwargs.get('with_opt', True) else None):
                if part is None: continue
                state = part.state_dict()
                state.update(map_tensors(to_file, state))        # in place: its `_metadata` stays
                stack.enter_context(patch.object(part, 'state_dict', lambda state=state: state))
            return original(self, file, **kwargs)

    def load_if(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> Learner:
        return load(original, self, *args, **kwargs) if applies(self) else original(self, *args, **kwargs)

    wrap_method(Learner, 'save', save)
    for cls in (Learner, TextLearner): wrap_method(cls, 'load', load_if)
