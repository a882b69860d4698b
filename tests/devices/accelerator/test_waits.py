"""How often the host waits for the device beyond plain fp32: the README's GPU synchronizations come from here.

And that no decision depends on what has not arrived yet: the simulated device is 100 operators behind.
"""
from collections import Counter
from functools import lru_cache

import pytest, torch

from devices.simulated import clock, is_installed, waits
from helpers import *

pytestmark = pytest.mark.skipif(not is_installed(), reason='counts what only a simulated device sees')

MODES = {
    'fp32': lambda learn: learn,
    'bf16': lambda learn: learn.to_bf16(),
    'fp16': lambda learn: learn.to_fp16(init_scale=256.0),
    'fp16 static': lambda learn: learn.to_fp16(loss_scale=512.0),
    'half weights': lambda learn: learn.to_half_weights(),
    'half fp16': lambda learn: learn.to_half_weights('fp16', loss_scale=512.0),
    'flat masters': lambda learn: learn.to_half_weights(flat_master=True),
    'flat fp16': lambda learn: learn.to_half_weights('fp16', loss_scale=512.0, flat_master=True),
    'no masters': lambda learn: learn.to_half_weights(master_weights=False),
}
SPOILED = (3, 4, 9)


def spoil(learn):
    "One gradient that is not finite, in these steps of the epoch."
    if learn.iter in SPOILED: next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))


def count(mode, opt, n_fits=2):
    """The host's waits in `n_fits` fits of one epoch with 12 steps, in lists.

    By phase: ('start', fit), ('step', fit, number), ('end', fit).
    """
    learn = MODES[mode](learner(mlp(), loaders(n=48), opt_func=OPTIMIZERS[opt]))
    if 'fp16' in mode: learn.add_cb(At('after_backward', spoil, 100))
    now, found, fit = 'start', {}, 0
    def at(name):
        def enter(learn):
            nonlocal now
            if learn.training or name == 'end': now = ('step', fit, learn.iter) if name == 'step' else (name, fit)
        return enter
    learn.add_cbs([At('before_batch', at('step'), -1000), At('after_train', at('end'), -1000)])
    class Phases(list):
        def append(self, wait): found.setdefault(now, []).append(wait)
    phases = Phases()
    clock.recorders.append(phases)
    try:
        for fit in range(n_fits):
            now = ('start', fit)
            learn.fit(1, .01)
    finally: clock.recorders.remove(phases)
    return found


@lru_cache
def asked_once(mode, opt): count(mode, opt, 1)               # what a process asks but once


@lru_cache
def plain_fp32(opt): return count('fp32', opt)


def beyond_fp32(mode, opt):
    "What `count` finds more than in fp32: numbers by phase, those of 0 left out, and the stacks of all."
    asked_once(mode, opt)
    found, plain = count(mode, opt), plain_fp32(opt)
    more = {k: len(found.get(k, ())) - len(plain.get(k, ())) for k in found.keys() | plain.keys()}
    stacks = Counter(str(w) for ws in found.values() for w in ws if any('fastxtend_amp' in f for f, _, _ in w.stack))
    return {k: n for k, n in sorted(more.items()) if n}, '\n'.join(f'{n} x {s}' for s, n in stacks.items())


STEPS = [('step', fit, i) for fit in (0, 1) for i in range(12)]
FUSED = ['fused adamw', 'fused sgd']
@pytest.mark.filterwarnings('ignore:master_weights=False with')
@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize(
    'mode', ['bf16', 'half weights', 'flat masters', 'no masters']
)
def test_bf16_waits_as_often_as_fp32(mode, opt):
    "Without masters once more: when the share of weights that did not move is told."
    more, stacks = beyond_fp32(mode, opt)
    once = {k: n for k, n in more.items() if mode in ('flat masters', 'no masters')}
    assert more == once and sum(once.values()) <= 2, stacks      # once a fit, whatever the number of parameters


@pytest.mark.parametrize('opt', [o for o in OPTIMIZERS if o not in FUSED])
@pytest.mark.parametrize('mode', ['fp16', 'fp16 static', 'half fp16', 'flat fp16'])
def test_fp16_waits_once_a_step(mode, opt):
    "For `found_inf`, as GradScaler does; skipped steps too."
    more, stacks = beyond_fp32(mode, opt)
    assert more == dict.fromkeys(STEPS, 1), stacks


@pytest.mark.parametrize('opt', FUSED)
@pytest.mark.parametrize('mode', ['fp16', 'fp16 static', 'half fp16', 'flat fp16'])
def test_fp16_with_fused_optimizers_waits_in_no_step(mode, opt):
    "But in the very first, which makes the optimizer's state; and once an epoch, to read which steps were skipped."
    more, stacks = beyond_fp32(mode, opt)
    if mode == 'flat fp16' and opt == 'fused adamw': more.pop(('step', 1, 0), None)    # step counts, once a fit
    assert more == {('end', 0): 1, ('end', 1): 1, ('step', 0, 0): 1}, stacks


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_watching_for_overflow_waits_for_nothing(opt):
    def total(**kwargs):
        learn = learner(mlp(), loaders(n=48), opt_func=OPTIMIZERS[opt], cbs=At('after_backward', spoil, 100)).to_fp16(
            init_scale=256.0, **kwargs
        )
        with waits() as found: learn.fit(2, .01)
        return len(found)
    assert total(on_overflow='warn') == total(on_overflow='ignore') > 0


# -- lag

@pytest.mark.parametrize('lag', [0, 1, 10, 100, 10_000])
@pytest.mark.parametrize(
    'mode,opt', [('fp16', 'adam'), ('fp16', 'fused adamw'), ('half fp16', 'fused sgd'), ('bf16', 'adam')]
)
def test_decisions_do_not_depend_on_the_lag(mode, opt, lag, sim):
    "Losses, skips, scales and parameters of a device that is so many operators behind are those of the CPU."
    sim.lag = lag
    def run(device):
        learn = MODES[mode](learner(mlp(), loaders(n=48, device=device), opt_func=OPTIMIZERS[opt]))
        if 'fp16' in mode: learn.add_cb(At('after_backward', spoil, 100))
        learn.fit(2, .01)
        return (
            [float(l) for l in learn.recorder.losses],
            learn.precision.scales,
            learn.precision.scaling.history.skips.tolist(),
            [p.detach().cpu().tolist() for p in learn.model.parameters()],
        )
    there = run(None)
    assert there == run(torch.device('cpu')) and sum(there[2]) == (6 if 'fp16' in mode else 0)


@pytest.mark.parametrize('lag', [0, 100, 2000])
def test_the_warning_comes_however_late_the_flags_do(lag, sim, monkeypatch):
    "4,096 flags are joined before they go to the host; here 8, so that they are on their way during training."
    sim.lag = lag
    def always(learn): next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))
    learn = learner(mlp(), loaders(n=96), opt_func=OPTIMIZERS['fused sgd']).to_fp16(max_skips=8, loss_scale=64.)
    learn.fit(1, .01)
    monkeypatch.setattr(type(learn.precision.scaling.history), '_chunk', 8)
    learn.add_cb(At('after_backward', always, 100))
    with (
        pytest.warns(UserWarning, match='8 steps in a row were skipped|the last 8 steps were skipped'),
        waits() as found,
    ):
        learn.fit(1, 0.01)
    assert learn.precision.n_skipped == 24 and found


def test_pinned_memory_holds_garbage_until_the_event(device, sim):
    "What the simulation must show for the tests above to mean something."
    sim.lag = 100
    host, there = torch.empty(4, pin_memory=True), torch.arange(4.).to(device)
    host.copy_(there, non_blocking=True)
    module = torch.get_device_module(device)
    event = module.Event()
    event.record()
    assert not event.query() and not torch.equal(host, torch.arange(4.))
    for _ in range(101): there.add(1)
    assert event.query() and torch.equal(host, torch.arange(4.))
