"A precision in one file of its own, as CONTRIBUTING.md describes it: bf16 under another name."

from typing import Any

import torch

from fastxtend_amp.precisions import Precision, Support


class BF16Again(Precision):
    "Train as in bf16, under another name; counts its fits, and keeps the count in checkpoints."

    name, dtype, color = 'bf16again', torch.bfloat16, '#123abc'

    def __init__(
        self,
        fp32_modules: Any = None,  # Modules kept in fp32
        first: int = 0,  # The number to count from
    ):
        super().__init__(fp32_modules)
        self.fits = first

    @classmethod
    def support(cls, device):
        return Support('native', 'it is bf16 again')

    def around_fit(self, model):
        self.fits += 1
        return super().around_fit(model)

    def state_dict(self):
        return {'fits': self.fits}

    def load_state_dict(self, state):
        self.fits = 0 if state is None else state['fits']
