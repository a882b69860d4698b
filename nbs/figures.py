"Makes the tables of speeds from the stored runs, and draws their charts: `python nbs/figures.py`."
from __future__ import annotations

import json, sys
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nbs.benchmarks.show import OPTIMIZER, by_model, finding, marked, plot, tables  # noqa: E402

RUNS = HERE / 'benchmarks'
SHOWN, EARLIER = 'native_bf16', ('native_bf16_0.4.0', 'native_bf16_0.3.0', 'native_bf16_0.2.0', 'native_bf16_0.2.0_b')
STORED = (SHOWN, *EARLIER, 'emulated')
PICTURES = 'speed', 'speed_narrow', 'report', 'demo'             # of the README, each with a dark variant
NIGHT = (13, 17, 23)                                             # what white becomes


def stored(stem: str) -> dict:
    "Return what `nbs.benchmarks` wrote into a file."
    return json.loads((RUNS / f'{stem}.json').read_text(encoding='utf-8'))


def rows() -> list[tuple[str, dict]]:
    "Return each model's title and its records by contestant; the model that gains most first."
    return by_model(stored(SHOWN), 'bf16')


def speeds() -> str:
    "Return the speed-ups of the shown run as a Markdown table, with those of earlier runs."
    fp32 = {r['model']: r['ms'] for r in stored(SHOWN)['rows']
            if (r['contestant'], r['optimizer']) == ('fastai loop', OPTIMIZER)}
    before = [dict(by_model(stored(stem), 'bf16')) for stem in EARLIER]
    lines = ['| model | fastxtend_amp | PyTorch loop | fp32, ms | bf16, ms | other machines |',
             '|---|--:|--:|--:|--:|--:|']
    for title, records in rows():
        ours, plain = records['fastxtend_amp'], records['plain loop']
        ratios = [marked(q, ours['blocks']) for q in (ours['vs_fp32'], plain['vs_fp32'])]
        others = sorted(run[title]['fastxtend_amp']['vs_fp32'][1] for run in before if title in run)
        row = (title, *ratios, f'{fp32[ours["model"]]:,.1f}', f'{ours["ms"]:,.1f}',
               ', '.join(f'{x:.2f}' for x in others) or '-')
        lines.append(f'| {" | ".join(row)} |')
    return '\n'.join(lines)


def predictions() -> str:
    "Return the stored run of `nbs.benchmarks.predictions` as a Markdown table: one row per model, by batch size."
    lines = (RUNS / 'predictions.md').read_text(encoding='utf-8').splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('| ')][1:]
    found: dict[str, dict[int, str]] = {}
    for model, size, _, ours, plain, *_ in cells:
        if model in ('wide-64', 'wide-1024'): continue           # the network of wide-256, as only training has batches
        found.setdefault(model, {})[int(size)] = f'{ours.split()[0]} ({plain.split()[0]})'
    sizes = sorted({size for row in found.values() for size in row})
    titles = {m['name']: m['what'] for m in stored(SHOWN)['models']} | {'wide-256': 'wide MLP'}
    head = [f'| model | {" | ".join(f"batch {size}" for size in sizes)} |', f'|---|{"--:|" * len(sizes)}']
    rows = [f'| {titles.get(model, model)} | {" | ".join(row.get(size, "-") for size in sizes)} |'
            for model, row in found.items()]
    return '\n'.join(head + rows)


def reports() -> dict[str, str]:
    "Return the report of each stored run by its path under `nbs`."
    return {f'benchmarks/{stem}.md': tables(stored(stem)) for stem in STORED}


def dark(image: np.ndarray) -> np.ndarray: # RGB, 8 bits
    "Return a picture for dark pages: its lightness inverted, with the same hues."
    image, night = image.astype(float), np.array(NIGHT)
    inverted = image + 255 - image.max(-1, keepdims=True) - image.min(-1, keepdims=True)
    return (night + inverted / 255 * (255 - night)).round().astype('uint8')


def save_dark(file: Path) -> None:
    "Write the dark variant of a picture beside it, and of its larger one."
    for light in (file, large(file)):
        if not light.exists(): continue
        image = np.array(Image.open(light).convert('RGB'))
        night = light.with_stem(f'{file.stem}_dark{light.stem[len(file.stem):]}')
        Image.fromarray(dark(image)).save(night, optimize=True)


def large(file: Path) -> Path:
    "Return the path of a picture's variant with twice as many pixels each way."
    return file.with_stem(file.stem + '_2x')


def main() -> None:
    version = stored(SHOWN)['machine']['fastxtend_amp']
    title = f"On a CPU, {finding('bf16', rows())}"
    below = f'; CPU with native bf16; fastxtend_amp {version}'
    for name, narrow in (('speed', False), ('speed_narrow', True)):
        for file, dpi in ((HERE / f'{name}.png', 100), (large(HERE / f'{name}.png'), 200)):
            plot({title: rows()}, file, narrow, dpi, below)
            Image.open(file).convert('RGB').quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    for name in PICTURES: save_dark(HERE / f'{name}.png')


if __name__ == '__main__': main()
