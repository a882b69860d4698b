"The result of `Learner.precision_report`: its tables, notes and plot."
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from ..precisions.fp16 import FP16
from .shown import Shown
from .verdict import Verdict, some


class Row(NamedTuple):
    "One row of `PrecisionReport.table`, which documents the columns."
    precision: str
    module: str
    type: str
    format: str
    largest: float
    headroom: float
    error: float
    grad: float
    underflow: float
    flagged: bool


class Constant(NamedTuple):
    "One row of `PrecisionReport.constants`."
    module: str
    line: str
    operator: str
    constant: float
    fp16: float
    bf16: float
    flagged: bool


@dataclass(repr=False, eq=False)
class PrecisionReport(Shown):
    """The result of `Learner.precision_report`.

    `table` has one row per precision and module, in execution order, of the first run without an error. In that run,
    only your own `fp32_modules`, and modules that raise an error in 16 bits, compute in fp32.

    | column of `table` | meaning | unit |
    |---|---|---|
    | `precision` | the precision | its name, such as 'bf16' |
    | `module` | '(model)' is the model's own `forward` | name |
    | `type` | class of the module | name |
    | `format` | `precision`, or 'fp32' if no result is 16-bit; `headroom` is then inf | name |
    | `largest` | largest absolute value that the module computes, in fp32 | value |
    | `headroom` | largest number of the precision, divided by the largest 16-bit result or input; nan on NaN | ratio |
    | `error` | relative error of its own arithmetic, on the inputs it got; inf on overflow, nan if unknown | ratio |
    | `grad` | largest absolute gradient of its outputs and parameters, in fp32 without loss scaling | value |
    | `underflow` | share of these gradients that are 0 in the precision, with the loss scale, but not in fp32 | ratio |
    | `flagged` | whether the module is flagged | bool |

    Columns of `constants`: `module`, `line` ('norm.py:33'), `operator`, `constant`, its values in `fp16` and `bf16`,
    `flagged`.

    `largest` ignores likely attention masks: outlying large negative values, and tensors of one or two distinct values.
    """
    table: pd.DataFrame # One row per precision and module
    verdicts: dict[str, Verdict] # By precision
    notes: list[str] # Causes besides modules, what was looked at, and what was left out
    constants: pd.DataFrame # One row per constant in the code that becomes 0, 1, -1 or infinity in 16 bits

    @property
    def fp32_modules(self) -> list[str]:
        "All modules that the verdicts keep in fp32, for `learn.to_amp(fp32_modules=...)`."
        return [*dict.fromkeys(m for v in self.verdicts.values() for m in v.modules)]

    def plot(self): # The matplotlib axes
        """Plot the largest value in each module against the range of fp16; bf16 has the range of fp32.

        Flagged modules are red, those in fp32 hollow. Only flagged modules and those with the largest values are drawn,
        30 at most, in execution order.
        """
        import matplotlib.pyplot as plt
        modules = self.table.groupby('module', sort=False)[['largest', 'flagged']].max().reset_index()
        rows = modules.sort_values(['flagged', 'largest'])[-30:].sort_index()
        _, ax = plt.subplots(layout='constrained', figsize=(8, 2 + len(rows) / 5))
        colors = rows['flagged'].map({True: '#c0392b', False: '#4c566a'})
        in_fp32 = (self.table['format'] == 'fp32').groupby(self.table['module']).all()[rows['module']]
        ax.scatter(rows['largest'], rows['module'], edgecolors=colors, c=colors.where(~in_fp32.values, 'none'))
        if 'fp16' in self.verdicts:
            ax.axvline(65504, color=FP16.color, label='largest fp16 number, 65,504: inf above')
            ax.axvline(6.1e-5, color=FP16.color, ls=':', label='smallest normal fp16 number: digits lost below')
            ax.figure.legend(loc='outside lower center')
        ax.set(xscale='log', xlabel='largest absolute value in fp32; red: flagged, hollow: in fp32')
        ax.invert_yaxis()
        titles = [f'{v.precision}: {v.verdict}'.replace('modules', some(v.modules)) for v in self.verdicts.values()]
        ax.figure.suptitle('\n'.join(titles), wrap=True)
        return ax

    def _parts(self):
        yield '\n'.join([*map(str, self.verdicts.values()), *self.notes])
        for name, table in self.table.groupby('precision', sort=False):
            if self.verdicts[name].verdict.startswith('safe'): continue              # see `table`
            rows = table.sort_values(['flagged', 'error'], ascending=False)[:10]
            yield f'{name}: the {len(rows)} most critical of {len(table)} modules; `report.table` has all'
            yield rows.drop(columns=['precision', 'grad', 'underflow']).set_index('module').rename_axis(None)
