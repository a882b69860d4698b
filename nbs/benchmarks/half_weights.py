"""16-bit weights compared with autocast on the benchmark's models: time per step, bytes per parameter, loss.

`python -m nbs.benchmarks.half_weights` prints a Markdown table. It needs torch-optimi and a quiet machine.
"""

from __future__ import annotations

import argparse, sys, warnings
from functools import partial

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.basics import noop
from torch.utils._python_dispatch import TorchDispatchMode

from fastxtend_amp import kahan

from . import contestants, measure, models

WAYS = {
    'fp32': noop,
    'bf16': Learner.to_bf16,
    'no masters': partial(Learner.to_bf16, master_weights=False),
}


class Casts(TorchDispatchMode):
    "Counts the bytes of the copies that autocast makes of parameters."

    def __init__(self, params):
        super().__init__()
        self.places, self.bytes = {p.data_ptr() for p in params}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.places:
            self.bytes += out.nbytes
        return out


class Bytes(Callback):
    "Record the bytes per parameter of weights, gradients, optimizer state and casts in a step."

    order = 90  # after the step

    def before_batch(self):
        self.casts = Casts(self.learn.model.parameters())
        self.casts.__enter__()

    def after_loss(self):
        self.casts.__exit__(None, None, None)

    def after_step(self):
        params = [p for p in self.learn.model.parameters() if p.grad is not None]
        state = [v for p in params for v in self.learn.opt.opt.state[p].values() if torch.is_tensor(v) and v.dim()]
        held = sum(t.nbytes for t in [*params, *(p.grad for p in params), *state])
        self.each = (held + self.casts.bytes) / sum(p.numel() for p in params)


def learner(task, way):
    learn = contestants.learner(task, contestants.FUSED)
    if way == 'no masters':
        learn.opt_func = kahan('AdamW')
    WAYS[way](learn)
    return learn


def row(name, rounds):
    device = torch.device('cpu')
    model, ms, each = models.MODELS[name](False), {way: [] for way in WAYS}, {}
    torch.manual_seed(1)
    batches = measure.Batches(device, [model.batch(device) for _ in range(2)])
    task = contestants.Task(partial(model.build, device), batches, device)
    learners = {way: learner(task, way) for way in WAYS}
    slowest = 0
    for way, learn in learners.items():
        noted = Bytes()
        torch.manual_seed(0)
        with learn.added_cbs(noted):
            learn.fit(1)
        each[way], slowest = noted.each, max(slowest, batches.ms)
    batches.n = min(10, max(1, int(400 / slowest)))  # the same for all, so that losses can be compared
    for k in range(rounds):
        first = k % len(WAYS)
        for way in [*WAYS][first:] + [*WAYS][:first]:
            torch.manual_seed(k)  # the same dropout for all
            learners[way].fit(1)
            ms[way].append(batches.ms)

    def ratio(way):
        found = measure.quartiles(b / a for a, b in zip(ms['bf16'], ms[way]))
        return f"{'~' * measure.noisy(found, rounds)}{found[1]:.2f}"

    return [
        model.title,
        f"{measure.quartiles(ms['bf16'])[1]:,.1f}",
        ratio('no masters'),
        *(f'{each[way]:.1f}' for way in WAYS),
        *(f'{float(learn.recorder.losses[-1]):.4f}' for learn in learners.values()),
        str(2 + rounds * (batches.n + 1)),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--models', nargs='+', default=list(models.MODELS))
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    head = [
        'model',
        'bf16, ms',
        *(f'{w}: time' for w in list(WAYS)[2:]),
        *(f'{w}: bytes' for w in WAYS),
        *(f'{w}: loss' for w in WAYS),
        'steps',
    ]
    print('| ' + ' | '.join(head) + ' |\n|---' + '|--:' * (len(head) - 1) + '|')
    for name in args.models:
        try:
            print('| ' + ' | '.join(row(name, args.rounds)) + ' |', flush=True)
        except ValueError as e:
            print(f'{name}: {e}', file=sys.stderr)  # no kernel on this device


if __name__ == '__main__':
    main()
