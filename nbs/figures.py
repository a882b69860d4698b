"Makes charts and tables of speeds anew from the stored runs: `python nbs/figures.py`."
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
    "Return the figures of the shown run as a Markdown table, and what other machines measured before."
    fp32 = {r['model']: r['ms'] for r in stored(SHOWN)['rows']
            if (r['contestant'], r['optimizer']) == ('fastai loop', OPTIMIZER)}
    before = [dict(by_model(stored(stem), 'bf16')) for stem in EARLIER]
    lines = ['| model | bf16 over fp32 | plain loop | x plain | fp32, ms | bf16, ms | other machines |',
             '|---|--:|--:|--:|--:|--:|--:|']
    for title, found in rows():
        ours, plain = found['fastxtend_amp'], found['plain loop']
        ratios = [marked(q, ours['blocks']) for q in (ours['vs_fp32'], plain['vs_fp32'], ours['vs_plain_loop'])]
        others = sorted(run[title]['fastxtend_amp']['vs_fp32'][1] for run in before if title in run)
        lines.append(f"| {title} | {' | '.join(ratios)} | {fp32[ours['model']]:.1f} | {ours['ms']:.1f} | "
                     f"{', '.join(f'{x:.2f}' for x in others) or '-'} |")
    return '\n'.join(lines) + '\n'


def real_models() -> str:
    "Return the figures of models that people train as a Markdown table."
    lines = ['| model | image, batch | fp32, ms | bf16 over fp32 (quartiles) |', '|---|---|--:|--:|']
    lines += [f'| {name} | {size} px, {batch} | {ms:,} | {median:.2f} ({low:.2f} to {high:.2f}) |'
              for name, size, batch, ms, (low, median, high) in stored('real_models')['rows']]
    return '\n'.join(lines) + '\n'


def texts() -> dict[str, str]:
    "Return each stored text by its path under `nbs`."
    reports = {f'benchmarks/{stem}.md': tables(stored(stem)) for stem in STORED}
    return {'speed.md': speeds(), 'real_models.md': real_models(), **reports}


if __name__ == '__main__':
    for name, text in texts().items(): (HERE / name).write_text(text, encoding='utf-8')
    for file, narrow in (('speed.png', False), ('speed_narrow.png', True)): plot({TITLE: rows()}, HERE / file, narrow)
