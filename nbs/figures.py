"Draws `speed.png` and writes `speed.md` from the stored benchmarks: `python nbs/figures.py`."
from __future__ import annotations

import json, sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nbs.benchmarks.measure import noisy  # noqa: E402
from nbs.benchmarks.show import DOTS, marked  # noqa: E402

MACHINES = {'A': 'native_bf16', 'B': 'native_bf16_another_machine'}
OPTIMIZER = 'fused AdamW'


def rows() -> list[tuple[str, str, dict]]:
    "Return model, machine and its measurements in bf16 by contestant; the model that gains most first."
    found = []
    for machine, stem in MACHINES.items():
        run = json.loads((HERE / 'benchmarks' / f'{stem}.json').read_text(encoding='utf-8'))
        for model in run['models']:
            measured = {(r['mode'], r['contestant']): r for r in run['rows']
                        if r['model'] == model['name'] and r['optimizer'] == OPTIMIZER}
            found.append((model['what'], machine, measured))
    first = {what: m['bf16', 'fastxtend_amp']['vs_fp32'][1] for what, machine, m in found if machine == 'A'}
    return sorted(found, key=lambda row: (-first[row[0]], row[1]))


def table() -> str:
    "Return the figures of both machines as a Markdown table."
    lines = ['| model | machine | fp32, ms | bf16, ms | fastxtend_amp | plain loop | fastai\'s own | blocks |',
             '|---|---|--:|--:|--:|--:|--:|--:|']
    for what, machine, found in rows():
        ours = found['bf16', 'fastxtend_amp']
        ratios = [marked(found['bf16', c]['vs_fp32'], found['bf16', c]['blocks'])
                  for c in ('fastxtend_amp', 'plain loop', "fastai's own")]
        lines.append(f"| {what} | {machine} | {found['fp32', 'fastai loop']['ms']:.1f} | {ours['ms']:.1f} | "
                     f"{' | '.join(ratios)} | {ours['blocks']} |")
    return '\n'.join(lines) + '\n'


def draw(file: Path) -> None:
    "Draw a line for each model and machine, with a dot for each contestant; hollow ones are too noisy to tell."
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5.2), layout='constrained')
    ax, labels = figure.subplots(), []
    for y, (what, machine, found) in enumerate(rows()):
        labels.append(f'{what}, {machine}')
        for contestant, (shape, color) in DOTS.items():
            r = found['bf16', contestant]
            low, median, high = r['vs_fp32']
            face = 'white' if noisy(r['vs_fp32'], r['blocks']) else color
            ax.plot([low, high], [y, y], color=color, lw=1.2, zorder=2)
            ax.plot(median, y, shape, color=color, mfc=face, ms=6.5, zorder=3)
        ours = found['bf16', 'fastxtend_amp']
        ax.text(1.02, y, marked(ours['vs_fp32'], ours['blocks']), transform=ax.get_yaxis_transform(), va='center')
    for contestant, (shape, color) in DOTS.items(): ax.plot([], [], shape, color=color, label=contestant)
    ax.text(1.02, 1.01, 'fastxtend_amp', transform=ax.transAxes, fontsize=8)
    ax.axvline(1, color='#888', lw=1, zorder=0)
    ax.set_xscale('log', base=2)
    ax.set_xticks([.5, .7, 1, 1.5, 2, 3])
    ax.xaxis.set_major_formatter(lambda x, _: f'{x:g}')
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - .5, -.5)
    ax.set_xlabel('times as fast as fp32 in the same loop')
    ax.grid(axis='both', color='#ddd', lw=.6)
    ax.spines[['top', 'right', 'left']].set_visible(False)
    figure.suptitle('Training in bf16 on two CPUs, A and B, with native bf16', fontsize=12, fontweight='bold')
    figure.legend(*ax.get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False, title_fontsize=9,
                  title='whole training step, fused AdamW; line: quartiles; hollow dot and ~: too noisy to tell')
    figure.savefig(file, dpi=130)


if __name__ == '__main__':
    draw(HERE / 'speed.png')
    (HERE / 'speed.md').write_text(table(), encoding='utf-8')
