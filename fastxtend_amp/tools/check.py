"The console script `fastxtend_amp_check`: tests mixed precision on a device; the output can go into an issue."
import argparse, math, platform, tempfile, time, warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from fastai.torch_core import set_seed
from torch import nn

import fastxtend_amp  # noqa: F401  patches Learner
from ..precisions import PRECISIONS, Precision
from ..devices.fp32_settings import settings_note
from .demo import digits
from .device import add_device, usable_device
from .support import precision_support

EPOCHS, LR = 3, 5e-3
SLACK = .1            # how far the validation loss may lie above that of fp32: this share of it, plus .02


class Result(NamedTuple):
    "One check: its precision, what it checks, whether it passed (None if it was not run), and what was seen."
    precision: str
    what: str
    passed: bool | None
    seen: str


def _learner(device, precision, opt_func=Adam, path=None, **kwargs) -> Learner:
    "Return a small network, always from the same seed, in one of the precisions."
    set_seed(0, reproducible=False)
    hidden = nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU()
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))
    model.to(device)
    learn = Learner(digits(device, size=8), model, loss_func=CrossEntropyLossFlat(), opt_func=opt_func, path=path)
    return learn if precision == 'fp32' else getattr(learn, f'to_{precision}')(**kwargs)


def _fit(learn, n=1, cbs=None):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, LR, cbs=cbs)
    return learn


def _state(device):
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type), torch.is_grad_enabled()


def _are_equal(tensors, others): return all(map(torch.equal, tensors, others))


class _Watch(Callback):
    "Records the dtype in which the first linear layer computes."
    def before_fit(self): self.hook = self.model[1].register_forward_hook(self._note)
    def _note(self, module, args, out): self.dtype = out.dtype
    def after_fit(self): self.hook.remove()


class _Overflow(Callback):
    "Makes a gradient infinite in the tenth step, and records whether that step changed the weights."
    run_valid, step = False, 9
    def after_backward(self):
        if self.iter != self.step: return
        self.before = [p.detach().clone() for p in self.model.parameters()]
        next(self.model.parameters()).grad.view(-1)[0].fill_(float('inf'))
    def after_batch(self):
        if self.iter != self.step: return
        self.unchanged = _are_equal(self.model.parameters(), self.before)


class _Interrupt(Callback):
    "Raises an exception in a batch, after the model."
    run_valid = False
    def after_pred(self): raise InterruptedError('a check of fastxtend_amp')


# -- the checks: each returns whether it passed, and what was seen

def _trains(device, precision, before) -> tuple[bool, str]:
    learn, watch, start = _learner(device, precision), _Watch(), time.perf_counter()
    _fit(learn, EPOCHS, watch)
    loss = float(learn.recorder.values[-1][-1])
    seconds = time.perf_counter() - start
    if precision == 'fp32': before['loss'] = loss
    fp32 = before.get('loss', math.nan)                          # nan where training in fp32 failed
    computes = f'computes in {str(watch.dtype)[6:]}, {seconds:.1f} s'
    seen = f'validation loss {loss:.4f} ({loss - fp32:+.4f} from fp32), {computes}'
    if precision == 'fp16':
        skipped = f'{sum(learn.mixed_precision.skips)} of {len(learn.mixed_precision.scales)} steps skipped'
        seen += f', {skipped}, loss scale {learn.mixed_precision.scale:,g}'
    dtype = PRECISIONS.get(precision, Precision).dtype or torch.float32
    return watch.dtype is dtype and loss < fp32 * (1 + SLACK) + .02, seen


def _skips(device, precision, before, opt_func=Adam) -> tuple[bool, str]:
    learn, overflow = _learner(device, precision, opt_func), _Overflow()
    _fit(learn, 1, overflow)
    scale, after = learn.mixed_precision.scales[overflow.step:overflow.step + 2]
    kept = 'kept the weights' if overflow.unchanged else 'CHANGED THE WEIGHTS'
    seen = f'an infinite gradient {kept}; loss scale {scale:,g}, then {after:,g}'
    return overflow.unchanged and after == scale / 2, seen


def _resumes(device, precision, before) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        scaling = dict(init_scale=1024., growth_interval=6) if precision == 'fp16' else {}
        learn = _fit(_learner(device, precision, path=folder, **scaling))
        learn.save('check')
        other = _learner(device, precision, path=folder)
        with torch.no_grad():
            for p in other.model.parameters(): p.zero_()
        other.load('check')
    same = _are_equal(learn.model.parameters(), other.model.parameters())
    seen = 'weights as saved' if same else 'WEIGHTS DIFFER'
    if precision == 'fp16':
        loaded, saved = other.mixed_precision.scale, learn.mixed_precision.scale
        same &= loaded == saved
        seen += f', loss scale {loaded:,g} ' + ('as saved' if loaded == saved else f'INSTEAD OF {saved:,g}')
    _fit(other)
    return same, seen + ', training continued'


def _recovers(device, precision, before) -> tuple[bool, str]:
    learn = _learner(device, precision)
    try: _fit(learn, 1, _Interrupt())
    except InterruptedError: pass
    whole = {p.dtype for p in learn.model.parameters()} == {torch.float32}
    now, expected = _state(device), before['state']
    seen = 'restored' if now == expected else f'{now} INSTEAD OF {expected}'
    if not whole: seen += ', WEIGHTS ARE NOT fp32'
    _fit(learn)
    return now == expected and whole, f'autocast and gradient mode {seen}, training continued'


def _checks(device, precision) -> Iterator[tuple[str, Callable]]:
    yield 'fp32 reference' if precision == 'fp32' else 'trains as fp32', _trains
    if precision == 'fp16':
        yield 'skips a step, Adam', _skips
        fused = partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))
        if _has_fused(device): yield 'skips a step, fused AdamW', partial(_skips, opt_func=fused)
    yield 'save and load', _resumes
    if precision != 'fp32': yield 'after an exception', _recovers


def _has_fused(device):
    p = nn.Parameter(torch.zeros(1, device=device))
    p.grad = torch.zeros_like(p)
    try: torch.optim.AdamW([p], fused=True).step()               # some devices raise an error only here
    except RuntimeError: return False
    return True


def check(
    device: str | torch.device,
    progress: Callable[[Result], object] = lambda result: None, # Called with each result
) -> list[Result]: # An unsupported precision has one result, with `passed` None
    "Train a small network in each precision; check overflow, save and load, and exceptions."
    on, results = torch.device(device), []
    support = {r.precision: r for r in precision_support(on).itertuples()}
    before = {'state': _state(on)}                               # for comparison; fp32 adds its loss
    def add(*args):
        results.append(Result(*args))
        progress(results[-1])
    if find_spec('torchvision'):
        try: import_module('torchvision')                        # as `fastai.vision` does
        except Exception as e: add('any', 'import torchvision', False, f'{e}: reinstall it from where torch is from')
    tried = [cls.name for cls in PRECISIONS.values() if cls.in_tables and not cls.package]
    for precision in ['fp32', *tried]:
        if precision in support and support[precision].support == 'unsupported':
            add(precision, 'supported', None, support[precision].why)
            continue
        for what, run in _checks(on, precision):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                try: passed, seen = run(on, precision, before)
                except Exception as e: passed, seen = False, f'{type(e).__name__}: {" ".join(str(e).split())[:300]}'
            messages = [' '.join(str(w.message).split()) for w in caught]
            said = [m for m in messages if 'failed' in m]
            add(precision, what, bool(passed), ' '.join([seen, *said]))
    return results


def _versions() -> str:
    def of(package):
        try: return f'{package} {version(package)}'
        except PackageNotFoundError: return f'{package} (not installed)'
    packages = ', '.join([of('fastxtend_amp'), f'torch {torch.__version__}', of('fastai'), of('fastcore')])
    return f'{packages}, Python {platform.python_version()}, {platform.platform()}'


def _name(device) -> str:
    if device.type == 'cpu':
        return f'cpu ({platform.processor() or platform.machine()}, threads: {torch.get_num_threads()})'
    get_name = getattr(getattr(torch, device.type, None), 'get_device_name', None)   # there is no torch.xla
    runtime = f', CUDA {torch.version.cuda}' if device.type == 'cuda' and torch.version.cuda else ''
    return f'{device} ({get_name(device)}{runtime})' if get_name else str(device)


def _line(result: Result) -> str:
    mark = {True: 'ok', False: 'FAILED', None: 'left out'}[result.passed]
    return f'{mark:<9}{result.precision:<13}{result.what:<26}{result.seen}'


def head(device: torch.device) -> str:
    "Return versions, the device, its support for each precision, and fp32 settings that are not the default."
    rows = '\n'.join(f'  {r.precision}: {r.support} ({r.why})' for r in precision_support(device).itertuples())
    lines = [_versions(), f'device: {_name(device)}', rows, *filter(None, [settings_note()])]
    return '\n'.join(lines)


def verdict(results: Sequence[Result], device: torch.device) -> str:
    "Summarize the results in a sentence."
    run = [r for r in results if r.passed is not None]
    failed = [r for r in run if not r.passed]
    if not failed: return f'All {len(run)} checks passed on {device}.'
    names = ', '.join(f'{r.precision}: {r.what}' for r in failed)
    counts = f'{len(failed)} of {len(run)} checks FAILED on {device}'
    return f'{counts} ({names}). Please paste all of this output into an issue.'


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
    results = check(device, lambda result: print(_line(result), flush=True))
    print(f'\n{verdict(results, device)}')
    return int(any(r.passed is False for r in results))


if __name__ == '__main__': raise SystemExit(main())
