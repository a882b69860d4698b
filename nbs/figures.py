"Makes the tables of speeds from the stored runs, and draws their charts: `python nbs/figures.py`."
from __future__ import annotations

import json, sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nbs.benchmarks.show import OPTIMIZER, by_model, marked, plot, tables  # noqa: E402

RUNS = HERE / 'benchmarks'
SHOWN, EARLIER = 'native_bf16', ('native_bf16_0.3.0', 'native_bf16_0.2.0', 'native_bf16_0.2.0_b')
STORED = (SHOWN, *EARLIER, 'emulated')
TITLE = 'Training in bf16, CPU with native bf16'


def stored(stem: str) -> dict:
    "Return what `nbs.benchmarks` wrote into a file."
    return json.loads((RUNS / f'{stem}.json').read_text(encoding='utf-8'))


def rows() -> list[tuple[str, dict]]:
    "Return each model's title and its records by contestant; the model that gains most first."
    return by_model(stored(SHOWN), 'bf16')


def speeds() -> str:
    "Return the speed-ups of the shown run as a Markdown table, with earlier runs and single measurements."
    fp32 = {r['model']: r['ms'] for r in stored(SHOWN)['rows']
            if (r['contestant'], r['optimizer']) == ('fastai loop', OPTIMIZER)}
    before = [dict(by_model(stored(stem), 'bf16')) for stem in EARLIER]
    found = []
    for title, records in rows():
        ours, plain = records['fastxtend_amp'], records['plain loop']
        ratios = [marked(q, ours['blocks']) for q in (ours['vs_fp32'], plain['vs_fp32'], ours['vs_plain_loop'])]
        others = sorted(run[title]['fastxtend_amp']['vs_fp32'][1] for run in before if title in run)
        row = (title, *ratios, f'{fp32[ours["model"]]:,.1f}', f'{ours["ms"]:,.1f}',
               ', '.join(f'{x:.2f}' for x in others) or '-')
        found.append((ours['vs_fp32'][1], row))
    for name, size, batch, ms, (_, median, _) in stored('real_models')['rows']:
        row = (f'{name} at {size}x{size}, batch {batch}*', f'{median:.2f}', '-', '-', f'{ms:,.1f}', '-', '-')
        found.append((median, row))
    lines = ['| model | fastxtend_amp | PyTorch loop | ratio | fp32, ms | bf16, ms | other machines |',
             '|---|--:|--:|--:|--:|--:|--:|']
    lines += [f'| {" | ".join(row)} |' for _, row in sorted(found, reverse=True)]
    return '\n'.join(lines)


def reports() -> dict[str, str]:
    "Return the report of each stored run by its path under `nbs`."
    return {f'benchmarks/{stem}.md': tables(stored(stem)) for stem in STORED}


if __name__ == '__main__':
    for file, narrow in (('speed.png', False), ('speed_narrow.png', True)): plot({TITLE: rows()}, HERE / file, narrow)
