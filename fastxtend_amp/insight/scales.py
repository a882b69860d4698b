"`plot_scales`: the loss scale by optimizer step, with skipped steps marked."
from __future__ import annotations

import pandas as pd
from fastcore.basics import patch

from ..training.callback import MixedPrecision


@patch
def plot_scales(self: MixedPrecision,
    ax = None, # The matplotlib axes to draw on; new ones if None
): # The matplotlib axes
    "Plot the loss scale by optimizer step, with skipped steps marked. Raises `ValueError` if there was none."
    if not self.scales:
        raise ValueError('plot_scales has nothing to plot: no optimizer step was made with a loss scale.\n'
                         'Train in fp16 first; bf16 and fp32 need no loss scaling.')
    scales = pd.Series(self.scales)
    columns = {'loss scale': scales, f'skipped steps ({self.n_skipped:,})': scales.where(self.skips)}
    ax = pd.DataFrame(columns).plot(ax=ax, style=['-', 'rx'], drawstyle='steps-post', xlabel='optimizer step',
                                    ylabel='loss scale', title='Loss scale in training')
    ax.set_yscale('log', base=2)
    return ax
