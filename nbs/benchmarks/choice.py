"""The measured choice, tried: `python -m nbs.benchmarks.choice` beside whole epochs, `--simulate` by simulation.

`--rows` tries six models of timm at 128 x 128: after each choice all rows are timed in 15 rounds, whatever
they cost, and the chosen row is compared with the fastest. That takes about 15 minutes on two cores.

Without `--models` it tries eight kinds of model, twice each. The epochs are timed in pairs, fp32 and the precision in
turn, after the choice and on the same batches.

The simulation calls the package's own rules, with ratios and losses that are drawn: a turn's ratio is the true speed-up
times noise on both sides; a mode's loss is that of fp32's trainings, worse by some of their standard deviations.
"""
from __future__ import annotations

import argparse, io, math, time, warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from fastai.data.core import DataLoaders
from fastai.layers import Flatten, SimpleCNN
from fastai.learner import Learner
from fastai.tabular.model import TabularModel
from fastai.vision.learner import create_unet_model
from fastcore.basics import noop
from torch import nn
from torchvision.models import resnet18

from fastxtend_amp import fused
from fastxtend_amp.insight.choices import Choice, native_precisions, to_compare
from fastxtend_amp.insight.compare import Plan
from fastxtend_amp.insight.recommendation import recommend, tolerance
from fastxtend_amp.insight.rounds import Rounds
from fastxtend_amp.insight.speed import COLUMNS, Speed
from fastxtend_amp.insight.trial import Trial
from fastxtend_amp.precisions import Precision
from fastxtend_amp.tools.arguments import usable_device

from .models import MODELS, Model


class _Tabular(nn.Module):
    "fastai's, on one tensor: eight columns of categories, and sixteen of numbers."
    def __init__(self):
        super().__init__()
        self.net = TabularModel([(100, 20)] * 8, 16, 10, [200, 100])
    def forward(self, x): return self.net(x[:, :8].long(), x[:, 8:])


def _cnn(big: bool) -> Model:
    def net(): return nn.Sequential(SimpleCNN([3, 16, 32, 64]), nn.Linear(64, 10))
    return Model('small CNN at 32x32', net, lambda: torch.randn(512 if big else 64, 3, 32, 32))


def _resnet(big: bool) -> Model:
    n = 256 if big else 32
    return Model('ResNet-18 at 64x64', partial(resnet18, num_classes=10), lambda: torch.randn(n, 3, 64, 64))


def _tabular(big: bool) -> Model:
    def rows(): return torch.cat([torch.randint(100, (256, 8)).float(), torch.randn(256, 16)], 1)
    return Model('tabular model', _Tabular, rows)


def _unet(big: bool) -> Model:
    size = (128, 128) if big else (64, 64)
    def net():                             # a class of each picture, the mean over its pixels
        unet = create_unet_model(resnet18, 10, size, pretrained=False)
        return nn.Sequential(unet, nn.AdaptiveAvgPool2d(1), Flatten())
    return Model('U-Net on ResNet-18', net, lambda: torch.randn(64 if big else 8, 3, *size))


KINDS = {'small-cnn': _cnn, 'resnet18': _resnet, 'lstm': MODELS['lstm'], 'tabular': _tabular,
         'wide-256': MODELS['wide-256'], 'tiny': MODELS['tiny'], 'unet': _unet}
if 'vit-tiny' in MODELS: KINDS['vit-tiny'] = MODELS['vit-tiny']


def turns_until_decided(
    rng: np.random.Generator,
    true: float, # Speed-up
    noise: float, # Standard deviation of the logarithm of a turn's time
    most: int, # Turns
) -> tuple[bool | None, int]: # What was decided, and after how many turns
    ratios, speed = [], Speed(np.nan)
    while speed.is_undecided and len(ratios) < most:
        ratios.append(true * np.exp(noise * (rng.standard_normal() - rng.standard_normal())))
        speed = Speed.of(ratios)
    return (None if speed.is_undecided else bool(speed.pays)), len(ratios)


class _Drawn(Trial):
    "A training whose times are drawn."
    def __init__(self, name: str, seconds: Callable[[], float], rounds: Rounds):
        self.name, self.seconds, self.rounds = name, seconds, rounds
        self.choice = Choice(Precision(), changes=tuple(name.split(', ')[1:]))
        self.copy, self.losses, self.times = None, [], []
    def train(self, steps: Sequence[int]) -> None:
        seconds = self.seconds()
        self.rounds.end -= seconds * len(steps)                  # instead of a clock that goes on
        if self.losses: self.times.append(seconds)               # after a warm-up
        self.losses += [0.] * len(steps)


# Speed-ups as in channels_last_native_bf16.md, plain rows first; fp32 is 1.
CONTESTS = {
    'three': dict(bf16=1.5, fp16=1.02),
    'three, nearer': dict(bf16=1.2, fp16=1.08),
    'ResNet-18': {'bf16': 1.72, 'fp32, channels last': 1.11, 'bf16, channels last': 2.01},
    'RegNet': {'bf16': 1.28, 'bf16, grouped in fp32': 1.05, 'fp32, channels last': 1.25, 'bf16, channels last': 1.55,
               'bf16, grouped in fp32, channels last': 1.2},
    'EfficientNet-B0': {'bf16': .96, 'bf16, depthwise in fp32': 1.03, 'fp32, channels last': 1.25,
                        'bf16, channels last': 1.04, 'bf16, depthwise in fp32, channels last': 1.2},
    'MobileNetV3': {'bf16': 1.03, 'bf16, depthwise in fp32': 1.14, 'fp32, channels last': 1.2,
                    'bf16, channels last': .97, 'bf16, depthwise in fp32, channels last': 1.37},
}


def contest(
    rng: np.random.Generator,
    true: dict[str, float], # Speed-up by row
    noise: float, # Standard deviation of the logarithm of a round's time
    step: float, # Seconds in fp32
    seconds: float = 60.,
) -> tuple[float, float]: # The true speed-up of what is chosen, relative to the best row's, and the seconds used
    "Run the package's own rounds on drawn times, and choose as it does; losses are alike."
    rounds = Rounds({}, n_steps=50, n_seeds=3, end=time.monotonic() + seconds, tick=noop)
    found = {'fp32': 1., **true}
    def drawn(speed): return step * np.exp(noise * rng.standard_normal()) / speed
    rounds.trials = {name: _Drawn(name, partial(drawn, speed), rounds) for name, speed in found.items()}
    rounds.train()
    left = rounds.left
    rows = {name: dict(zip(COLUMNS, trial.speed_up(rounds.base))) | {
        'support': trial.status or 'native', 'steps': 50, 'rounds': len(trial.times), 'skipped': 0, 'weights moved': 1.,
        'loss': 1., 'loss difference': 0., 'note': trial.reason} for name, trial in rounds.trials.items()}
    changes = {name: (name == 'fp16', len(trial.choice.changes)) for name, trial in rounds.trials.items()}
    chosen, _ = recommend(pd.DataFrame(rows).T.infer_objects(), (1., ''), changes)
    return found[chosen] / max(found.values()), seconds - left


def simulate_contests(trials: int = 200) -> list[str]:
    "Return a table in Markdown: how often what is chosen is the best row, or within 5% of it."
    rng, lines = np.random.default_rng(0), [
        '', f'Of {trials} choices in 60 seconds, `n_steps` 50:', '',
        '| model | rows | noise of a round | fp32 step, s | within 5% of the best | seconds, mean |',
        '|---|--:|--:|--:|--:|--:|']
    for name, true in CONTESTS.items():
        for noise, step in ((.05, .1), (.1, .1), (.2, .1), (.1, .5), (.1, 1.)):
            found = np.array([contest(rng, true, noise, step) for _ in range(trials)])
            lines.append(f'| {name} | {1 + len(true)} | {100 * noise:.0f}% | {step} | '
                         f'{100 * (found[:, 0] > .952).mean():.0f}% | {found[:, 1].mean():.0f} |')
    return lines


def simulate(trials: int = 400, most: int = 60) -> str:
    "Return tables in Markdown: how often speeds and losses are judged rightly."
    rng = np.random.default_rng(0)
    lines = [f'Of {trials} trials with at most {most} turns:', '',
             '| noise of a turn | true speed-up | pays | does not | undecided | turns, mean |',
             '|--:|--:|--:|--:|--:|--:|']
    for noise in (.1, .2, .3):
        for true in (.9, 1., 1.15, 1.5, 2.):
            found = [turns_until_decided(rng, true, noise, most) for _ in range(trials)]
            share = Counter(decided for decided, _ in found)
            said = ' | '.join(f'{100 * share[what] / trials:.0f} %' for what in (True, False, None))
            lines.append(f'| {100 * noise:.0f} % | {true} | {said} | {np.mean([n for _, n in found]):.1f} |')
    lines += ['', f'Of {10 * trials} trials, the loss of fp32 trainings 1 with a standard deviation of 0.05:', '',
              '| seeds | standard deviations worse | taken |', '|--:|--:|--:|']
    for n_seeds in (1, 3):
        for worse in (0, 5, 10):
            taken = 0
            for _ in range(10 * trials):
                first, other, *seeds = 1 + .05 * rng.standard_normal(2 + n_seeds)
                taken += other + .05 * worse - first <= tolerance([2., first], seeds)[0]
            lines.append(f'| {n_seeds} | {worse} | {10 * taken / trials:.0f} % |')
    return '\n'.join(lines + simulate_contests(trials // 2))


class _All(Rounds):
    "Rounds in which every row stays."
    def is_due(self) -> bool: return len(self.base.times) < 15
    def drop_slow(self) -> None: pass


SIX = 'resnet18', 'resnet50', 'regnetx_004', 'convnext_atto', 'efficientnet_b0', 'mobilenetv3_large_100'


def choose_row(name: str, device: torch.device, max_seconds: float) -> str:
    "Return a row of a table: what is chosen, what is fastest, and how near the chosen one comes."
    import timm
    torch.manual_seed(0)
    n = 8 if name == 'resnet50' else 16
    batches = [(torch.randn(n, 3, 128, 128, device=device), torch.randint(10, (n,), device=device)) for _ in range(8)]
    model = timm.create_model(name, num_classes=10).to(device)
    dls = DataLoaders(batches * 5, batches[:1], device=device)
    learn = Learner(dls, model, nn.functional.cross_entropy, opt_func=fused('AdamW'))
    with learn.no_bar(), learn.no_logging(), redirect_stdout(io.StringIO()):
        choices = to_compare(learn, [Choice.for_learner(learn, cls) for cls in native_precisions(learn)])
        start = time.perf_counter()
        plain = learn.model.state_dict()
        learn.to_amp(measure=True, max_seconds=max_seconds)
        seconds, chosen = time.perf_counter() - start, learn.precision_decision.recommended
        fresh = timm.create_model(name, num_classes=10).to(device)
        fresh.load_state_dict(plain)
        learn = Learner(dls, fresh, nn.functional.cross_entropy, opt_func=fused('AdamW'))
        with patch('fastxtend_amp.insight.compare.Rounds', _All):
            found = Plan(learn, 'choose_row', math.inf, 16, 0).compare(choices).table['speed-up']
    speeds = '; '.join(f'{row} {speed:.2f}' for row, speed in found.items())
    return f'{chosen} | {found.idxmax()} | {found[chosen] / found.max():.2f} | {seconds:.0f} | {speeds}'


def epochs_of(learn: Learner, mode: str, pairs: int) -> str: # '1.42 (1.40 to 1.45)'
    "Return how much faster whole epochs are than in fp32: the median of the pairs, and their range."
    def seconds(call):
        getattr(learn, call)()
        start = time.perf_counter()
        learn.fit(1)
        return time.perf_counter() - start
    for call in ('to_fp32', f'to_{mode}'): seconds(call)                # warms up
    ratios = [seconds('to_fp32') / seconds(f'to_{mode}') for _ in range(pairs)]
    return f'{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'


def choose(name: str, device: torch.device, max_seconds: float, pairs: int) -> str:
    "Return the row of one model: what was chosen, how sure, in what time, and the line that was printed."
    model = {**MODELS, **KINDS}[name](device.type != 'cpu')
    batches = [model.batch(device) for _ in range(8)]
    def loss(p, y): return nn.functional.cross_entropy(p.flatten(0, -2), y.flatten())
    dls = DataLoaders(batches * 5, batches[:1], device=device)
    learn = Learner(dls, model.build(device), loss, opt_func=fused('AdamW'))
    line, start = io.StringIO(), time.perf_counter()
    with learn.no_bar(), learn.no_logging():
        with redirect_stdout(line): learn.to_amp(measure=True, max_seconds=max_seconds)
        spent, decision = time.perf_counter() - start, learn.precision_decision
        rows = [f'{m}: {r["speed-up"]:.2f} ({r["speed-up low"]:.2f} to {r["speed-up high"]:.2f}), {r["rounds"]} rounds'
                for m, r in decision.table.drop('fp32').iterrows()]
        epochs = [f'{m}: {epochs_of(learn, m, pairs)}' for m in decision.table.index if pairs and m != 'fp32']
    return f"{decision.recommended} | {'; '.join(rows)} | {spent:.0f} | {'; '.join(epochs)} | {line.getvalue().strip()}"


def main(argv: Sequence[str] | None = None) -> None:
    "Print a table."
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks.choice', description=(
        'Have `to_amp(measure=True)` choose a precision for the models of the benchmark, several times each.'))
    add = parser.add_argument
    add('--simulate', action='store_true', help='no model: how often the rules decide rightly, by simulation')
    add('--rows', action='store_true', help='six models of timm: is the chosen row the fastest?')
    add('--device', metavar='D', help='torch device (default: the accelerator, if there is one)')
    names = {**KINDS, **MODELS}
    add('--models', nargs='+', default=list(KINDS), choices=names, metavar='M', help=f"of {', '.join(names)}")
    add('--times', type=int, default=2, metavar='N', help='choices for each model (default %(default)s)')
    add('--pairs', type=int, default=3, metavar='N', help='pairs of epochs to time; 0 for none (default %(default)s)')
    add('--max-seconds', type=float, default=60., metavar='S', help='for each choice (default %(default)s)')
    args = parser.parse_args(argv)
    if args.simulate: return print(simulate())
    device = usable_device(parser, args.device)
    warnings.simplefilter('ignore')
    if args.rows:
        print('| model | chosen | fastest | chosen / fastest | seconds | speed-ups |\n|---|---|---|--:|--:|---|')
        for name in SIX: print(f'| {name} | {choose_row(name, device, args.max_seconds)} |', flush=True)
        return
    print('| model | chosen | speed-up | seconds | whole epochs | line |\n|---|---|---|--:|---|---|', flush=True)
    for name in args.models:
        for _ in range(args.times):
            print(f'| {name} | {choose(name, device, args.max_seconds, args.pairs)} |', flush=True)


if __name__ == '__main__': main()
