"What a trace records: of each module, and of the batches as a whole."
from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..precisions import AMPMode

LOSS = 'loss function'  # its name among the modules; includes callbacks after the forward pass


@dataclass
class Seen:
    "Records of one module: of its own operators, not those of modules inside; over all calls and batches."
    name: str
    type: str
    largest: float = 0.                                          # absolute finite result; of the twin, if there is one
    half: float = 0.                                             # the same, of 16-bit results only
    failed: bool = False                                         # whether NaN or inf first appears in it
    error: float = math.nan                                      # of its own arithmetic, relative; the largest
    vanished: float = 0.                                         # a constant that rounds to 0, next to values near 0
    grad: float = 0.                                             # largest absolute, of its outputs and own parameters
    grad_sum: float = 0.                                         # of the absolute values of all these gradients
    n_grads: int = 0                                             # that are finite and not 0
    unseen: set[str] = field(default_factory=set)                # what cannot be read or compared in it


@dataclass
class Trace:
    "Records of some batches in one precision."
    mode: AMPMode | None = None                                  # fp32 if None
    reference: Trace | None = None                               # in a lower precision: the records in fp32
    # The modules, in the order in which their last calls finish, and the loss function.
    seen: dict[str, Seen] = field(default_factory=dict)
    has_loss: bool = False                                       # whether a batch gave one
    not_finite: str = ''                                         # 'loss', or 'gradient' if no loss was
    error: str = ''                                              # why it ended: the text of an exception
    failed_in: str = ''                                          # the module that raised it; '' before a batch
    in_fp8: list[str] = field(default_factory=list)              # the layers that round as FP8 does
