"The result of a comparison: its table, and how it shows itself."
from __future__ import annotations

import math, weakref
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner

from .advice import as_html
from .choices import PrecisionChoice, use_choice
from .comparison_plot import plot_comparison
from .phases import PHASES
from .recommend import notes_on, recommend

__all__ = ['PrecisionComparison', 'build_comparison']


class PrecisionComparison:
    """Precisions side by side on one learner; the result of `Learner.compare_precision`.

    `table`: a DataFrame with a row for each mode: how the device runs it, steps trained, samples per second (median
    over the turns), speed-up over fp32 (median of the ratios within each turn, and their quartiles), peak memory in
    bytes (CUDA), the mean loss of the last steps, its difference from fp32's on the same samples, the standard
    deviation of that loss between fp32 trainings with other seeds, skipped steps, the loss scale at the end; where the
    time of a step goes, in seconds (`data`, `forward`, `backward`, `optimizer`, `rest`), page faults in a step, a note.

    `losses`: the loss of each step by mode; `seed_losses`: those of fp32 with other seeds. `recommended` is one mode,
    `reason` says why, `calls[mode]` is the call that trains in it; `apply()` makes it.
    """
    def __init__(self, table: pd.DataFrame, losses: dict[str, list[float]], seed_losses: list[list[float]], device: str,
                 recommended: str, reason: str, notes: list[str], calls: dict[str, str],
                 choices: dict[str, PrecisionChoice], samples: dict[str, int | None], learn: Learner):
        self.table, self.losses, self.seed_losses, self.device = table, losses, seed_losses, device
        self.recommended, self.reason, self.notes, self.calls = recommended, reason, notes, calls
        self.samples = samples                                   # of each batch that a mode saw; None for all
        self._choices, self._learn = choices, weakref.ref(learn)

    def __getstate__(self): return {**self.__dict__, '_learn': None}

    def apply(self,
        learn: Learner | None = None, # The learner; the one that was compared if None
        mode: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Have the learner train in the recommended precision, with the modules in fp32 and other arguments that it had."
        mode = self.recommended if mode is None else mode
        if mode not in self._choices:
            raise ValueError(f"mode={mode!r} cannot be used: it was not compared. Take one of "
                             f"{', '.join(map(repr, self._choices))}.")
        if learn is None and self._learn is not None: learn = self._learn()
        if learn is None:
            raise ValueError("apply() cannot find the learner that was compared: hand it over as learn=...")
        use_choice(learn, self._choices[mode])
        return learn

    def _shown(self) -> list[pd.DataFrame]:
        "The tables for people: fewer columns, rounded; of results, and of milliseconds in a step where known."
        t, text = self.table, lambda f, values: ['-' if v != v else f(v) for v in values]
        shown = pd.DataFrame({'support': t['support'], 'steps': t['steps']}, index=t.index)
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
        times = pd.DataFrame({f'{phase} ms': text(lambda v: f'{v * 1000:.3g}', times[phase]) for phase in times},
                             index=times.index)
        return [shown, times] if len(times) else [shown]

    def _lines(self):
        notes = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        return [f'Recommended: {self.recommended}. {self.reason}', *notes, *self.notes]

    def __repr__(self) -> str:
        first, *rest = (fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in self._lines())
        tables = [t.rename_axis(None).to_string() for t in self._shown()]
        return '\n'.join([first, '', f'Precisions on {self.device}:', '\n\n'.join(tables), '', *rest])

    def _repr_html_(self) -> str:
        first, *rest = map(as_html, self._lines())
        def html(table): return table.rename_axis(None).to_html().replace('<td>', '<td style="white-space: nowrap">')
        tables = map(html, self._shown())
        parts = [f'<p><b>{first}</b></p>', f'<p>Precisions on {as_html(self.device)}:</p>', '<br>'.join(tables)]
        return ''.join([*parts, *(f'<p>{line}</p>' for line in rest)])

    def plot(self,
        axs: Sequence | None = None, # Three matplotlib axes to draw on; new ones if None
    ): # The three matplotlib axes
        "The loss curves, other fp32 seeds in grey; the speed of each mode against fp32; where the time of a step goes."
        return plot_comparison(self, axs)


def build_comparison(work: Any) -> PrecisionComparison:
    "The result of a `_Comparison` that has run."
    runs, n_last = [r for r in work.runs if not r.hidden], work.n_last
    tails = [_tail(l, n_last) for l in [runs[0].losses, *work.seed_losses]]
    spread = float(np.std(tails, ddof=1)) if len(tails) > 1 else math.nan
    table = pd.DataFrame([_row(run, n_last, spread, work.batches.seconds) for run in runs]).set_index('mode')
    calls = {r.name: r.call for r in runs}
    recommended, reason = recommend(table, calls)
    notes = _how_measured(work, runs, spread)
    notes += notes_on(table, recommended, work.batches, work.fused_name, work.device)
    losses, choices, samples = ({r.name: getattr(r, n) for r in runs} for n in ('losses', 'choice', 'samples'))
    return PrecisionComparison(table, losses, work.seed_losses, _device_name(work.device), recommended, reason, notes,
                               calls, choices, samples, work.learn)


def _row(run, n_last, spread, data_seconds):
    n, base = len(run.losses), run.measure
    ratios = [a / b for a, b in zip(_timed(run.speeds), _timed(base.speeds[:len(run.speeds)]))]
    low, mid, high = np.percentile(ratios, (25, 50, 75)) if ratios else [math.nan] * 3
    scaled = run.cb is not None and run.choice.mode.needs_loss_scaling and n > 0
    skips = run.cb.scaling.history.skips[run.n_before:] if scaled else ()
    last = min(n_last, n, len(base.losses))
    own = run.losses[:len(base.losses)]
    speed = float(np.median(_timed(run.speeds))) if run.speeds else math.nan
    scale = run.cb.scaling.state_dict().get('scale', math.nan) if scaled else math.nan
    faults = run.faults / run.clock.n if run.clock.n else math.nan
    difference = _tail(own, last) - _tail(base.losses[:len(own)], last)
    return {'mode': run.name, 'support': run.support, 'steps': n, 'turns': len(run.speeds),
            'samples/s': speed, 'speed-up': mid,
            'speed-up q1': low, 'speed-up q3': high, 'peak memory': run.peak, 'loss': _tail(run.losses, min(n_last, n)),
            'loss difference': difference, 'seed spread': spread, 'skipped': int(sum(skips)), 'final scale': scale,
            'data': data_seconds, **run.clock.per_step(), 'page faults': faults, 'note': run.note}


def _how_measured(work, runs, spread):
    n, n_seeds = len(runs[0].losses), len(work.seed_losses)
    spread = (f'; its standard deviation over {n_seeds + 1} fp32 trainings that differ in the order of batches and in '
              f'random draws is {spread:.2g}') if n_seeds else ''
    notes = [f'Loss: mean of the last {work.n_last} of {n} training steps{spread}.']
    if n_seeds < work.n_seeds:
        notes.append(f'For {work.n_seeds - n_seeds} of {work.n_seeds} seeds there was no time '
                     f'(`max_seconds={work.max_seconds:g}`).')
    if len(work.batches) < n: notes.append(f'The steps took {len(work.batches)} batches in turn.')
    cold = [r.name for r in runs if len(r.speeds) == 1]
    if cold:
        notes.append(f"The speed of {' and '.join(cold)} is that of the first step, which is slow; a larger `n_steps` "
                     'leaves it out.')
    return notes


def _timed(speeds): return speeds[1:] or speeds                  # the first step warms up
def _tail(losses, n): return float(np.mean(losses[-n:])) if n and losses else math.nan


def _device_name(device: torch.device) -> str:
    if device.type == 'cuda': return f'{device} ({torch.cuda.get_device_name(device)})'
    n = torch.get_num_threads()
    return f"{device} ({n} thread{'s' * (n != 1)})" if device.type == 'cpu' else str(device)
