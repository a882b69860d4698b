"The console script `fastxtend_amp_check`: tests mixed precision on a device; the output can go into an issue."
import argparse, math, platform, tempfile, warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from typing import NamedTuple

import torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from fastai.torch_core import set_seed
from torch import nn

from ..devices.fp32_settings import settings_note
from ..messages import first_line
from ..precisions import PRECISIONS, Precision, fastest_native
from ..training.optimizers import fused
from .demo import digits
from .arguments import add_device, usable_device
from .precision_support import precision_support

EPOCHS, LR = 3, 5e-3
SLACK = .1            # how far the validation loss may lie above that of fp32: this share of it, plus .02
Seen = Iterator[tuple[str, bool]]          # what a check has seen, and whether that is right


class Result(NamedTuple):
    "One check: its precision, what it checks, whether it passed, and what was seen."
    precision: str
    what: str
    passed: bool
    seen: str

    def __str__(self):
        mark = 'ok' if self.passed else 'FAILED'
        return f'{mark:<9}{self.precision:<13}{self.what:<26}{self.seen}'


class Checks:
    "The checks on one device."
    fp32_loss = math.nan                                         # of a validation; NaN if training in fp32 failed

    def __init__(self, device: torch.device): self.device, self.state = device, _state(device)

    def of(self, cls: type[Precision]) -> Iterator[tuple[str, Callable[..., Seen]]]:
        "Iterate over the checks of a precision and their names."
        yield 'fp32 reference' if cls is Precision else 'trains as fp32', self.trains
        if cls.scales_loss:
            yield 'skips a step, Adam', self.skips
            if _has_fused(self.device): yield 'skips a step, fused AdamW', partial(self.skips, opt_func=fused('AdamW'))
        yield 'save and load', self.resumes
        if cls is not Precision: yield 'after an exception', self.recovers

    def learner(self, cls, opt_func=Adam, path=None, **kwargs) -> Learner:
        "Return a small network, always from the same seed, in a precision."
        set_seed(0, reproducible=False)
        hidden = nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU()
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))
        model.to(self.device)
        learn = Learner(digits(self.device, size=8), model, CrossEntropyLossFlat(), opt_func, path=path)
        return getattr(learn, f'to_{cls.name}')(**kwargs)

    def trains(self, cls) -> Seen:
        learn, dtypes = self.learner(cls), list[torch.dtype]()
        learn.model[1].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
        _fit(learn, EPOCHS)
        yield f'computes in {dtypes[-1]}'.replace('torch.', ''), dtypes[-1] is (cls.dtype or torch.float32)
        loss = float(learn.recorder.values[-1][-1])
        if cls is Precision: self.fp32_loss = loss
        seen = f'validation loss {loss:.4f} ({loss - self.fp32_loss:+.4f} from fp32)'
        yield seen, loss < self.fp32_loss * (1 + SLACK) + .02

    def skips(self, cls, opt_func=Adam) -> Seen:
        learn, steps = self.learner(cls, opt_func), count(1)
        weight = learn.model[1].weight
        weight.register_hook(lambda grad: grad * math.inf if next(steps) == 10 else grad)
        _fit(learn)
        yield 'weights finite after an infinite gradient', bool(weight.isfinite().all())
        scale, after = learn.mixed_precision.scales[9:11]
        yield f'loss scale {scale:,g}, then {after:,g}', after == scale / 2

    def resumes(self, cls) -> Seen:
        with tempfile.TemporaryDirectory() as folder:
            scaling = dict(init_scale=1024., growth_interval=6) if cls.scales_loss else {}
            learn, other = self.learner(cls, path=folder, **scaling), self.learner(cls, path=folder)
            _fit(learn).save('check')
            other.load('check')
        pairs = zip(learn.model.parameters(), other.model.parameters())
        yield 'weights as saved', all(torch.equal(p, q) for p, q in pairs)
        if cls.scales_loss:
            before, after = (l.mixed_precision.scale for l in (learn, other))
            yield f'loss scale {before:,g}, then {after:,g}', before == after
        _fit(other)

    def recovers(self, cls) -> Seen:
        learn = self.learner(cls)
        def interrupt(*args): raise InterruptedError
        hook = learn.model.register_forward_hook(interrupt)
        with suppress(InterruptedError): _fit(learn)
        yield 'autocast and gradient mode restored', _state(self.device) == self.state
        yield 'weights in fp32', {p.dtype for p in learn.model.parameters()} == {torch.float32}
        hook.remove()
        _fit(learn)


def _fit(learn, n=1) -> Learner:
    with learn.no_bar(), learn.no_logging(): learn.fit(n, LR)
    return learn


def _state(device):
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type), torch.is_grad_enabled()


def _has_fused(device):
    p = nn.Parameter(torch.zeros(1, device=device))
    p.grad = torch.zeros_like(p)
    try: torch.optim.AdamW([p], fused=True).step()               # some devices raise an error only here
    except RuntimeError: return False
    return True


def check(device: torch.device) -> Iterator[Result]:
    "Train a small network in each precision that `device` supports; check overflow, save and load, and exceptions."
    if find_spec('torchvision'):
        try: import_module('torchvision')                        # as `fastai.vision` does
        except Exception as e:
            yield Result('any', 'import torchvision', False, f'{e}: reinstall it from where torch is from')
    checks = Checks(device)
    classes: list[type[Precision]] = [Precision, *PRECISIONS.values()]
    for cls in classes:
        if cls.package or cls.support(device).status == 'unsupported': continue
        for what, run in checks.of(cls):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                try: facts = [*run(cls)]
                except Exception as e: facts = [(f'{type(e).__name__}: {first_line(e)}', False)]
            seen = [text if is_right else f'WRONG: {text}' for text, is_right in facts]
            seen += [str(w.message) for w in caught if 'failed' in str(w.message)]
            passed = all(is_right for _, is_right in facts)
            yield Result(cls.name, what, passed, ' '.join(', '.join(seen).split()))


def head(device: torch.device) -> str:
    "Return versions, the device, its support for each precision, and fp32 settings that are not the default."
    packages = [f'{name} {version(name)}' for name in ('fastxtend_amp', 'fastai', 'fastcore')]
    versions = [*packages, f'torch {torch.__version__}', f'Python {platform.python_version()}', platform.platform()]
    get_name = getattr(getattr(torch, device.type, None), 'get_device_name', None)   # there is no torch.xla
    name = f'{device} ({get_name(device)})' if get_name else device
    rows = [f'  {r.precision}: {r.support} ({r.why})' for r in precision_support(device).itertuples()]
    lines = [', '.join(versions), f'device: {name}', *rows, settings_note()]
    return '\n'.join(filter(None, lines))


def main(argv: Sequence[str] | None = None) -> int: # The exit status: 0 if all checks passed, else 1
    "The console script `fastxtend_amp_check`."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_check', description=(
        'Test mixed precision on this device: train a small network in fp32 and in each precision, and compare. Takes '
        'up to a minute. The output can be pasted into an issue.'))
    add_device(parser)
    args = parser.parse_args(argv)
    device = usable_device(parser, args.device)
    torch.set_num_threads(1)                                     # more threads than free cores wait for each other
    print(head(device), end='\n\n', flush=True)
    results = list[Result]()
    for result in check(device):
        print(result, flush=True)
        results.append(result)
    print()
    if fastest_native(device) is Precision:
        print('This device accelerates no 16-bit precision: train in fp32, as `learn.to_amp()` does.')
    failed = [f'{r.precision}: {r.what}' for r in results if not r.passed]
    if failed:
        print(f"{len(failed)} of {len(results)} checks FAILED on {device} ({', '.join(failed)}). Please paste all "
              'of this output into an issue.')
    else: print(f'All {len(results)} checks passed on {device}.')
    return int(bool(failed))


if __name__ == '__main__': raise SystemExit(main())
