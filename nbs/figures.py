"Draws `speed.png` and writes `speed.md` from the stored benchmarks: `python nbs/figures.py`."
from __future__ import annotations

import json, sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nbs.benchmarks.show import DOTS, OPTIMIZER, marked, plot  # noqa: E402

MACHINES = {'A': 'native_bf16', 'B': 'native_bf16_another_machine'}


def rows() -> list[tuple[str, str, dict]]:
    "Return model, machine, and what was measured by mode and contestant; the model that gains most first."
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
    lines = ['| model | machine | fastxtend_amp | plain loop | fastai\'s own | fp32, ms | bf16, ms | blocks |',
             '|---|:-:|--:|--:|--:|--:|--:|--:|']
    for what, machine, found in rows():
        ours = found['bf16', 'fastxtend_amp']
        ratios = [marked(found['bf16', c]['vs_fp32'], found['bf16', c]['blocks'])
                  for c in ('fastxtend_amp', 'plain loop', "fastai's own")]
        lines.append(f"| {what} | {machine} | {' | '.join(ratios)} | {found['fp32', 'fastai loop']['ms']:.1f} | "
                     f"{ours['ms']:.1f} | {ours['blocks']} |")
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    labelled = [(f'{what}, {machine}', {c: found['bf16', c] for c in DOTS}) for what, machine, found in rows()]
    plot({'Training in bf16 on two CPUs, A and B, with native bf16': labelled}, HERE / 'speed.png')
    (HERE / 'speed.md').write_text(table(), encoding='utf-8')
