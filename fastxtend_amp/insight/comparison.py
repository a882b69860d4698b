"The result of a comparison: its table, and how it shows itself."
from __future__ import annotations

import weakref
from collections.abc import Sequence
from textwrap import fill

import pandas as pd
from fastai.learner import Learner

from .verdict import as_html
from .comparison_plot import plot_comparison
from .phases import PHASES
from .precisions import PrecisionChoice, use_choice

__all__ = ['PrecisionComparison']


class PrecisionComparison:
    """Precisions side by side on one learner; the result of `Learner.compare_precision`.

    `table`: a DataFrame with a row for each mode, and one for fp32 on fewer samples where a mode is emulated:

    - `support`: how the device runs it; `measure`: the row it is compared to; `steps` trained; `turns` in which
    - `samples` of each batch; `samples/s`, median over the turns; `speed-up` over its measure, median of the ratios
      within each turn, and their quartiles `speed-up q1` and `q3`
    - `peak memory` in bytes (CUDA)
    - `loss`: mean of the last steps; `loss difference` from its measure's; `seed spread`: the standard deviation of
      that loss between fp32 trainings with other seeds
    - `skipped` steps, the loss scale at the end (`final scale`)
    - seconds in a step: `data`, `forward`, `backward`, `optimizer`, `rest`; `page faults` in a step; a `note`

    `losses`: the loss of each step by row; `seed_losses`: those of fp32 with other seeds. `recommended` is one mode,
    `reason` says why, `calls[mode]` is the call that trains in it; `apply()` makes it.
    """
    def __init__(self, table: pd.DataFrame, losses: dict[str, list[float]], seed_losses: list[list[float]], device: str,
                 recommended: str, reason: str, notes: list[str], calls: dict[str, str],
                 choices: dict[str, PrecisionChoice], learn: Learner):
        self.table, self.losses, self.seed_losses, self.device = table, losses, seed_losses, device
        self.recommended, self.reason, self.notes, self.calls = recommended, reason, notes, calls
        self.choices, self._learn = choices, weakref.ref(learn)

    def __getstate__(self): return {**self.__dict__, '_learn': None}

    def apply(self,
        learn: Learner | None = None, # The learner; the one that was compared if None
        mode: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Have the learner train in the recommended precision, with the modules in fp32 and other arguments that it had."
        mode = self.recommended if mode is None else mode
        if mode not in self.choices:
            raise ValueError(f"mode={mode!r} cannot be used: it was not compared. Take one of "
                             f"{', '.join(map(repr, self.choices))}.")
        if learn is None and self._learn is not None: learn = self._learn()
        if learn is None:
            raise ValueError("apply() cannot find the learner that was compared: hand it over as learn=...")
        use_choice(learn, self.choices[mode])
        return learn

    def _shown(self) -> list[pd.DataFrame]:
        "Return the tables for people: fewer columns, rounded; of results, and of milliseconds in a step where known."
        t, text = self.table, lambda f, values: ['-' if v != v else f(v) for v in values]
        shown = t[['support', 'steps']].copy()
        shown['samples/s'] = text(lambda v: f'{v:,.0f}' if v >= 10 else f'{v:.2g}', t['samples/s'])
        shown['speed-up'] = ['-' if s != s else f'{s:.2f}' + (f' ({l:.2f} to {h:.2f})' if l < h else '')
                             for s, l, h in zip(t['speed-up'], t['speed-up q1'], t['speed-up q3'])]
        if t['peak memory'].notna().any(): shown['peak MiB'] = text(lambda v: f'{v / 2**20:,.0f}', t['peak memory'])
        shown['loss'] = text('{:.4g}'.format, t['loss'])
        shown['from fp32'] = text(lambda v: f'{v:+.2g}' if v else '0', t['loss difference'])
        if t['final scale'].notna().any():
            shown['skipped'] = t['skipped']
            shown['final scale'] = text(lambda v: f'{v:,.0f}' if v >= 1 else f'{v:.2g}', t['final scale'])
        times = t[['data', *PHASES, 'rest']].dropna()
        times = (times * 1000).map('{:.3g}'.format).add_suffix(' ms')
        return [shown, times] if len(times) else [shown]

    def _lines(self) -> list[str]:
        notes = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        return [f'Recommended: {self.recommended}. {self.reason}', *notes, *self.notes]

    def __repr__(self) -> str:
        first, *rest = (fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in self._lines())
        tables = [t.rename_axis(None).to_string() for t in self._shown()]
        return '\n'.join([first, '', f'Precisions on {self.device}:', '\n\n'.join(tables), '', *rest])

    def _repr_html_(self) -> str:
        first, *rest = map(as_html, self._lines())
        def html(table): return table.rename_axis(None).to_html().replace('<td>', '<td style="white-space: nowrap">')
        parts = [f'<p><b>{first}</b></p><p>Precisions on {as_html(self.device)}:</p>',
                 '<br>'.join(map(html, self._shown()))]
        return ''.join([*parts, *(f'<p>{line}</p>' for line in rest)])

    def plot(self,
        axs: Sequence | None = None, # Four matplotlib axes to draw on, of which the second may stay empty; new if None
    ): # The matplotlib axes
        """Draw the loss curves, other fp32 seeds in grey; those of modes that saw fewer samples, beside fp32 on the
        same; the speed of each mode against fp32; and where the time of a step goes."""
        return plot_comparison(self.table, self.losses, self.seed_losses, self.recommended, axs)
