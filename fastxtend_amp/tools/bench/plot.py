"The benchmark's chart: how many times faster than fp32 each model trains in low precision."
from __future__ import annotations

from pathlib import Path
from typing import Any

from ...common import PRECISION_COLORS
from .contestants import OPTIMIZERS
from .models import MODELS

__all__ = ['plot']

Key = tuple[str, str, str]                 # model, mode, optimizer


def plot(
    figures: dict[str, Any], # From `bench` or `read_figures`
    file: str | Path, # The PNG to write
) -> None:
    "Write one chart: times as fast as fp32 by model, in this package's autocast, with a bar for each optimizer."
    from matplotlib.figure import Figure
    ratios = _ratios(figures)
    modes = list(dict.fromkeys(mode for _, mode, _ in ratios))
    bars = [(mode, opt) for mode in modes for opt in reversed(OPTIMIZERS)]   # fused AdamW on top
    models = _models(ratios, bars)
    figure = Figure(figsize=(8, 1.9 + (.2 * len(bars) + .14) * len(models)), layout='constrained')
    figure.suptitle(_title(figures, ratios, modes), fontsize=13, fontweight='bold')
    if ratios: _draw(figure, figures, ratios, models, bars)
    figure.savefig(file, dpi=130)


def _draw(figure: Any, figures: dict[str, Any], ratios: dict[Key, list[float]], models: list[str],
          bars: list[tuple[str, str]]) -> None:
    ax = figure.subplots()
    for i, (mode, opt) in enumerate(bars):
        y = [models.index(model) + (i - (len(bars) - 1) / 2) * .8 / len(bars) for model in models]
        _bars(ax, y, [ratios.get((model, mode, opt)) for model in models], mode, opt, .7 / len(bars))
    _axes(ax, models, ratios)
    figure.legend(loc='outside lower center', ncols=len(bars), frameon=False, title=_what(figures, models),
                  title_fontsize=8.5)


def _ratios(figures: dict[str, Any]) -> dict[Key, list[float]]:
    "Quartiles of the times faster than fp32, of this package's autocast."
    return {(r['model'], r['mode'], r['optimizer']): r['vs_fp32'] for r in figures['rows']
            if r['contestant'] == 'fastxtend_amp' and r['vs_fp32']}


def _models(ratios: dict[Key, list[float]], bars: list[tuple[str, str]]) -> list[str]:
    "The models that were measured, the one that gains most first."
    def gain(model): return max(ratios[model, mode, opt][1] for mode, opt in bars if (model, mode, opt) in ratios)
    return sorted(dict.fromkeys(model for model, _, _ in ratios), key=gain, reverse=True)


def _bars(ax: Any, y: list[float], quartiles: list[list[float] | None], mode: str, opt: str, height: float) -> None:
    "Bars that start at fp32's speed; the ratio as text right of the axes."
    color = PRECISION_COLORS[mode] if opt == 'fused AdamW' else _lighter(PRECISION_COLORS[mode])
    label: str | None = f'{mode}, {opt}'
    for at, q in zip(y, quartiles):
        if q is None: continue
        low, median, high = q
        ax.barh(at, median - 1, height, left=1, color=color, label=label)
        ax.plot([low, high], [at, at], color='#222', lw=1)
        ax.text(1.015, at, f'{median:.2f}', transform=ax.get_yaxis_transform(), va='center', fontsize=8)
        label = None


def _axes(ax: Any, models: list[str], ratios: dict[Key, list[float]]) -> None:
    lows, highs = [q[0] for q in ratios.values()], [q[2] for q in ratios.values()]
    ax.set_xscale('log', base=2)
    ax.set_xlim(min([.5, *(x / 1.1 for x in lows)]), max([2, *(x * 1.1 for x in highs)]))
    left, right = ax.get_xlim()
    ax.set_xticks([t for t in (*(2.**k for k in range(-12, 12)), .75, 1.5) if left <= t <= right])
    ax.xaxis.set_major_formatter(lambda x, _: f'{x:.3g}')
    ax.xaxis.set_minor_locator(_no_ticks())
    ax.axvline(1, color=PRECISION_COLORS['fp32'], lw=1.5)
    ax.set_yticks(range(len(models)), [MODELS[m].title if m in MODELS else m for m in models])
    ax.set_ylim(len(models) - .5, -.5)
    ax.set_xlabel('times as fast as fp32 with the same optimizer')
    ax.grid(axis='x', color='#ddd', lw=.6)
    ax.set_axisbelow(True)
    ax.tick_params(axis='y', length=0)
    for side in ('top', 'right', 'left'): ax.spines[side].set_visible(False)


def _lighter(color: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb
    return tuple(1 - .45 * (1 - c) for c in to_rgb(color))


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator
    return NullLocator()


def _title(figures: dict[str, Any], ratios: dict[Key, list[float]], modes: list[str]) -> str:
    "What there is to be seen, in a sentence for each mode."
    if not ratios: return 'Nothing was measured beside fp32'
    return '\n'.join(_sentence(mode, figures['support'][mode][0], ratios) for mode in modes)


def _sentence(mode: str, support: str, ratios: dict[Key, list[float]]) -> str:
    best: dict[str, float] = {}
    for (model, m, _), q in ratios.items():
        if m == mode: best[model] = max(best.get(model, 0), q[1])
    faster, most = sum(x > 1 for x in best.values()), max(best.values())
    emulated = ' (emulated here)' if support == 'emulated' else ''
    if len(best) == 1: return f'{mode}{emulated} trains {next(iter(best))} {most:.2f} times as fast as fp32'
    if not faster: return f'{mode}{emulated} is slower than fp32 on all {len(best)} models'
    return f'{mode}{emulated} is faster than fp32 on {faster} of {len(best)} models, up to {most:.1f} times'


def _what(figures: dict[str, Any], models: list[str]) -> str:
    m = figures['machine']
    threads = f"{m['threads']} thread{'s' * (m['threads'] != 1)}"
    absent = [x['name'] for x in figures['models'] if x['name'] not in models]
    left_out = f"; not measured: {', '.join(absent)}" if absent else ''
    return f"{m.get('gpu', m['cpu'])}, {threads}, torch {m['torch']}; whole training step; line: quartiles{left_out}"
