"The result of `Learner.precision_report`: verdicts, tables, notes and a plot."
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from ..precisions.fp16 import FP16
from ..tensors import FP16_LARGEST, FP16_NORMAL
from .choices import Choice
from .display import Shown, some


@dataclass(repr=False, frozen=True)
class Verdict:
    """The effect of one precision on a model, and what to do.

    | `verdict` | meaning |
    |---|---|
    | 'safe so far' | no module has to stay in fp32 on these batches, with the current weights |
    | 'safe with loss scaling' | the same, but without it gradients would underflow |
    | 'keep modules in fp32' | modules were flagged, and keeping them in fp32 helps |
    | 'gradient differs' | the mean gradient is far from that in fp32: a warning sign, not a proof |
    | 'do not use' | nothing that was tried helps |
    | 'cannot run' | the device or the model does not support it |
    | 'not known' | time ran out, fp32 fails as well or is not fp32, or no batch gave a loss |
    """
    precision: str
    verdict: str
    reason: str # What was found
    next: Choice | str = ''
    modules: list[str] = field(default_factory=list) # Modules to keep in fp32
    scale_range: tuple[float, float] | None = None # Loss scales without underflow or overflow (fp16)
    flagged: list[str] = field(default_factory=list)
    init_scale: float | None = None # First loss scale, if the default does not suit
    prediction_error: float = math.nan # Relative difference of predictions from those in fp32
    is_emulated: bool = False # Whether this device emulates the precision of `call`; not with `device='cuda'`

    @property
    def call(self) -> str:
        "The next call to make, if there is one."
        return str(self.next)                                    # a precision, or another measurement

    @property
    def is_safe(self) -> bool: return self.verdict in ('safe so far', 'safe with loss scaling')

    def __repr__(self):
        name, following = self.precision, f': `{self.call}`'
        if self.is_emulated:
            following = f', where {name} is native (this device emulates it, usually more slowly than fp32){following}'
        return f'{name}: {self.verdict}.' + (f' Next{following}' if self.call else '') + f'\n    {self.reason}'


@dataclass(repr=False, eq=False)
class PrecisionReport(Shown):
    """The result of `precision_report`.

    In `table`, only your own `fp32_modules`, and modules that raise an error in 16 bits, were in fp32.

    | column of `table` | meaning |
    |---|---|
    | `precision`, `module`, `type`, `flagged` | '(model)' is the model's own `forward` |
    | `format` | the precision, or 'fp32' if no result is 16-bit |
    | `largest` | largest absolute value in fp32, without likely attention masks |
    | `headroom` | largest number of the precision, divided by the largest 16-bit result or input (below 1: overflow) |
    | `error` | relative error of the module's own arithmetic |
    | `grad` | largest absolute gradient of its outputs and parameters, in fp32, unscaled |
    | `underflow` | share of these gradients that become 0 in the precision, despite the loss scale |
    """
    table: pd.DataFrame # One row per precision and module, in execution order
    verdicts: dict[str, Verdict] # By precision
    notes: list[str] # What was looked at and left out, and causes besides modules

    @property
    def fp32_modules(self) -> list[str]:
        "All modules that the verdicts keep in fp32."
        return [*dict.fromkeys(m for v in self.verdicts.values() for m in v.modules)]

    def plot(self): # The matplotlib axes
        """Plot the largest value in each module against the range of fp16.

        Flagged modules are red, those in fp32 hollow. Only flagged modules and those with the largest values are drawn,
        30 at most, in execution order.
        """
        import matplotlib.pyplot as plt
        modules = self.table.assign(is_half=self.table['format'] != 'fp32').groupby('module', sort=False)
        rows = modules[['largest', 'flagged', 'is_half']].max().reset_index()
        rows = rows.sort_values(['flagged', 'largest'])[-30:].sort_index()
        _, ax = plt.subplots(layout='constrained', figsize=(8, 2 + len(rows) / 5))
        colors = rows['flagged'].map({True: '#c0392b', False: '#4c566a'})
        faces = colors.where(rows['is_half'], 'none')
        ax.scatter(rows['largest'], rows['module'], edgecolors=colors, c=faces)
        if 'fp16' in self.verdicts:
            ax.axvline(FP16_LARGEST, color=FP16.color, label='largest fp16 number, 65,504: inf above')
            ax.axvline(FP16_NORMAL, color=FP16.color, ls=':', label='smallest normal fp16 number: digits lost below')
            ax.figure.legend(loc='outside lower center')
        ax.set(xscale='log', xlabel='largest absolute value in fp32; red: flagged, hollow: in fp32')
        ax.invert_yaxis()
        titles = [f'{v.precision}: {v.verdict}'.replace('modules', some(v.modules)) for v in self.verdicts.values()]
        ax.figure.suptitle('\n'.join(titles).replace('$', r'\$'), wrap=True)     # not mathematics
        for label in ax.get_yticklabels(): label.set_parse_math(False)
        return ax

    def _parts(self):
        yield '\n'.join([*map(str, self.verdicts.values()), *self.notes])
        for name, table in self.table.groupby('precision', sort=False):
            if self.verdicts[name].is_safe: continue              # see `table`
            rows = table.sort_values(['flagged', 'error'], ascending=False)[:10]
            yield f'{name}: the {len(rows)} most critical of {len(table)} modules; `report.table` has all'
            yield rows.drop(columns=['precision', 'grad', 'underflow']).set_index('module').rename_axis(None)


# -- the table, whose columns `PrecisionReport` documents

_COLUMNS = 'precision module type format largest headroom error grad underflow flagged'.split()


def table_of(
    runs: Iterable[Any], # `Recording`s, one of each precision; None if it cannot run
    verdicts: Mapping[str, Verdict], # By precision
) -> pd.DataFrame:
    "Return the table of modules."
    rows = (row for run in runs if run for row in _rows(run, verdicts[run.precision.name].flagged))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _rows(run, flagged):
    name, limit = run.precision.name, torch.finfo(run.precision.dtype).max
    for m in run.modules.values():
        in_fp32, is_flagged = m.reference, m.name in flagged
        if not (in_fp32.largest or is_flagged): continue         # it computes nothing
        headroom = math.nan if m.is_half else math.inf           # 16-bit results that are NaN or 0 have none
        if m.largest_half: headroom = limit / m.largest_half
        underflow = max(m.n_zeros - in_fp32.n_zeros, 0) / max(in_fp32.n_grads, 1)
        yield (name, m.name, m.type, name if m.is_half else 'fp32', in_fp32.largest or m.largest, headroom,
               math.inf if m.failed else m.error, in_fp32.grad or math.nan, underflow, is_flagged)
