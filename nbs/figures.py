"Draws the charts of the stored runs: `python nbs/figures.py`."
from __future__ import annotations

import json, re, sys
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from nbs.benchmarks.show import by_model, finding, plot, tables  # noqa: E402

RUNS = HERE / 'benchmarks'
SHOWN = 'native_bf16'
STORED = SHOWN, 'emulated', 'emulated_fp16'
NIGHT = (13, 17, 23)                                             # what white becomes


def stored(stem: str) -> dict:
    "Return what `nbs.benchmarks` wrote into a file."
    return json.loads((RUNS / f'{stem}.json').read_text(encoding='utf-8'))


def rows() -> list[tuple[str, dict]]:
    "Return each model's title and its records by contestant; the model that gains most first."
    return by_model(stored(SHOWN), 'bf16')


def cases() -> str:
    "Return the result of `nbs/cases.py` in two sentences."
    text = (RUNS / 'cases.md').read_text(encoding='utf-8').partition('<!-- cases -->\n')[2].partition('<!-- end -->')[0]
    total, *_, healthy = text.strip().split('\n\n')
    return f'{total} {len(healthy.splitlines())} of the models are healthy.'


def report() -> str:
    "Return the verdicts of the tutorial's report, shortened, as for a GPU that emulates neither precision."
    cells = json.loads((HERE / '01_tutorial.ipynb').read_text(encoding='utf-8'))['cells']
    cell = next(cell for cell in cells if 'report = ' in ''.join(cell['source']))
    said = re.sub(r', where .*?\):\s', ': ', ''.join(cell['outputs'][0]['data']['text/plain']), flags=re.S)
    verdicts, cause = re.findall('^.*Next: .*$', said, re.M), re.search('^ +values .*?;', said, re.M)[0]
    return '\n'.join(['```', ">>> learn.precision_report(device='cuda')", *verdicts, f'{cause} ...', '```'])


def reports() -> dict[Path, str]:
    "Return the report of each stored run by its file."
    return {RUNS / f'{stem}.md': tables(stored(stem)) for stem in STORED}


def dark(image: np.ndarray) -> np.ndarray: # RGB, 8 bits
    "Return a picture for dark pages: its lightness inverted, with the same hues."
    image, night = image.astype(float), np.array(NIGHT)
    inverted = image + 255 - image.max(-1, keepdims=True) - image.min(-1, keepdims=True)
    return (night + inverted / 255 * (255 - night)).round().astype('uint8')


def save_dark(file: Path) -> None:
    "Write the dark variant of a picture beside it."
    image = Image.fromarray(dark(np.array(Image.open(file).convert('RGB'))))
    image.quantize(64, dither=Image.Dither.NONE).save(file.with_stem(file.stem + '_dark'), optimize=True)


def draw_scales() -> None:
    "Draw the loss scale of a small fit on digits that starts far too high, with the package's own plot."
    import torch
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.torch_core import set_seed
    from fastxtend_amp.tools.demo import digits

    set_seed(42)
    layers = torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    learn = Learner(digits(torch.device('cpu'), size=8), torch.nn.Sequential(*layers), CrossEntropyLossFlat())
    learn.to_fp16(init_scale=2.**24, growth_interval=20)
    with learn.no_bar(), learn.no_logging(): learn.fit(4, 1e-3)
    figure = learn.mixed_precision.plot_scales().figure
    figure.set_size_inches(5.7, 3)
    figure.tight_layout()
    file = HERE / 'scales_2x.png'
    figure.savefig(file, dpi=200)
    Image.open(file).convert('RGB').quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    draw_scales()
    version = stored(SHOWN)['machine']['fastxtend_amp']
    title = f"CPU: {finding('bf16', rows())}"
    below = f'; CPU with native bf16; fastxtend_amp {version}'
    for name, dpi in (('speed', 100), ('speed_2x', 200), ('speed_narrow_2x', 200)):
        file = HERE / f'{name}.png'
        plot({title: rows()}, file, 'narrow' in name, dpi, below)
        Image.open(file).convert('RGB').quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    save_dark(HERE / 'report_2x.png')


if __name__ == '__main__': main()
