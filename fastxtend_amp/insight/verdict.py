"The verdict on one precision, and the names of modules in messages."
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..precisions.matching import ROOT
from .recorder import BACKWARD, LOSS

MANY = 4                # modules or reasons that a sentence names; it counts the others


@dataclass
class Verdict:
    """The effect of one precision on a model, and what to do.

    | `verdict` | meaning |
    |---|---|
    | 'safe so far' | nothing was flagged on these batches with the current weights |
    | 'safe with loss scaling' | the same, but gradients would underflow without loss scaling |
    | 'keep modules in fp32' | some modules fail, overflow, come close to it, or have an error above 10% |
    | 'gradient differs' | the mean gradient of some batches is far from that in fp32: a warning sign, not a proof |
    | 'do not use' | nothing that was tried helps |
    | 'cannot run' | the device has no kernel for it, or the model's code or weights do not allow it |
    | 'not known' | the time limit was reached, fp32 fails as well, or no batch gave a loss |
    """
    precision: str # Its name, such as 'bf16'
    verdict: str # One of the above
    reason: str # What was found
    call: str = '' # The next call to make; empty if fp32 fails as well
    modules: list[str] = field(default_factory=list) # Modules to keep in fp32
    scale_range: tuple[float, float] | None = None # Loss scales without underflow or overflow (fp16)
    flagged: list[str] = field(default_factory=list) # Flagged modules; '(model)' is the model's own `forward`
    init_scale: float | None = None # Loss scale to start from, if the default is outside `scale_range` or near its top
    error: float = math.nan # Relative difference of the predictions in validation from those in fp32; nan if unknown

    def __str__(self):
        following = f' Next: `{self.call}`' if self.call else ''
        return f'{self.precision}: {self.verdict}.{following}\n    {self.reason}'


def named(name: str) -> str:
    "Return the name of a module, or of what else failed, for a message."
    own = {ROOT: "the model's own `forward`", LOSS: 'the loss function', BACKWARD: 'the backward pass'}
    return name if name.startswith('callback `') else own.get(name, f"'{name}'")


def some(words: Iterable[str], between: str = ', ') -> str:
    "Return the first words, and how many more there are."
    words = [*words]
    return between.join(words[:MANY]) + (f' and {len(words) - MANY} more' if len(words) > MANY else '')
