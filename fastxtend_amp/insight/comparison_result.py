"The result of `Learner.compare_precision`: a table, losses, the recommendation and a plot."
from dataclasses import dataclass

import numpy as np
import pandas as pd
from fastai.learner import Learner

from ..messages import check_argument
from .choices import CHANNELS_LAST, Choice
from .display import Shown
from .speed import COLUMNS, Speed


@dataclass(repr=False, eq=False)
class PrecisionComparison(Shown):
    """The result of `Learner.compare_precision`.

    In `table`, nan means that there is no value. A dropped row has no speed, as it ran in fewer rounds than the others:
    `note` compares it with another row in these rounds.

    | column of `table` | meaning |
    |---|---|
    | `support` | 'native' or 'emulated' on this device; 'failed' after an error; 'dropped' |
    | `steps`, `rounds` | training steps, and the rounds in which they were timed |
    | `ms per step` | median in fp32; for others, that divided by the speed-up |
    | `speed-up`, `speed-up low`, `speed-up high` | speed relative to fp32: median of the rounds, 95% interval |
    | `loss`, `loss difference` | mean of the last fifth of the steps, and its difference from fp32 |
    | `skipped`, `final scale` | skipped steps, and the loss scale after the last step (fp16) |
    | `peak MB` | the most that a step allocates on an accelerator |
    | `weights moved` | how far the weights moved per step, relative to fp32 |
    | `note` | why a row failed or was dropped |
    """
    table: pd.DataFrame # One row per precision, memory format and choice of layers in fp32
    losses: dict[str, list[float]] # The loss of each step, by row
    seed_losses: list[list[float]] # The same, of fp32 with other seeds
    recommended: str # The row to use
    reason: str # Why, and how certain that is
    notes: list[str] # How the comparison was made, and what limits it
    choices: dict[str, Choice]

    @property
    def calls(self) -> dict[str, str]:
        "The call that selects each row."
        return {name: str(choice) for name, choice in self.choices.items()}

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        precision: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Switch the learner to the recommended row, and keep its `fp32_modules`."
        row = precision or self.recommended
        check_argument('precision', row, self.choices.__contains__, f'one of {[*self.choices]}')
        self.choices[row].apply(learn)
        return learn

    def _parts(self):
        yield f'Recommended: {self.recommended}. {self.reason}\nNext: `{self.calls[self.recommended]}`'
        table = self.table.drop(columns=['rounds', *COLUMNS[1:], 'weights moved', 'note'])
        table['speed-up'] = [str(Speed(*row)) for row in self.table[COLUMNS].values]
        yield table.dropna(axis=1, how='all')
        dropped = self.table['note'][self.table['support'] == 'dropped'].items()     # `reason` has the errors
        yield '\n'.join([f'{name}: {note}.' for name, note in dropped] + self.notes)

    def plot(self): # The two matplotlib axes
        "Plot speeds and loss curves."
        import matplotlib.pyplot as plt
        _, (curves, bars) = plt.subplots(2, figsize=(6, 6), layout='constrained')
        colors = [choice.precision.color for choice in self.choices.values()]
        # '_' hides all but one from the legend.
        seeds = {'_' * i + 'fp32, other seeds': losses for i, losses in enumerate(self.seed_losses)}
        values = pd.DataFrame.from_dict(seeds | self.losses, orient='index', dtype=float).T
        smooth = values.ewm(alpha=.2).mean().where(np.isfinite(values))      # nan where a loss is not finite
        lines = ['--' if CHANNELS_LAST in choice.changes else '-' for choice in self.choices.values()]
        smooth.plot(ax=curves, color=['#b4bdcc'] * len(seeds) + colors, style=['-'] * len(seeds) + lines,
                    xlabel='step', ylabel='loss', title='Training loss (smoothed)')
        curves.get_lines()[len(seeds)].set_linewidth(4)          # fp32, seen under the others
        curves.legend()
        self.table['speed-up'].plot.barh(ax=bars, color=colors, xlabel='steps per second, fp32 = 1', ylabel='',
                                         title=f'Recommended: {self.recommended}')
        bars.bar_label(bars.containers[0], [str(Speed(mid)) for mid in self.table['speed-up']], padding=6)
        bars.margins(x=.15)
        bars.invert_yaxis()
        return curves, bars
