"""Training on an accelerator: the numbers of the CPU, files resumed bit for bit, errors for what a device lacks.

Runs on a simulated device with `pytest --sim=sim tests/devices/test_accelerator.py`, as test_simulated.py does, and
otherwise on an NVIDIA GPU, with a tolerance of a few per cent; skipped without either.
"""

import copy, pickle
from functools import partial
from pathlib import Path

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import load_learner
from fastai.optimizer import Lookahead

from devices.simulated import is_installed, options, waits
from fastxtend_amp import precision_support
from helpers import *

CPU = torch.device('cpu')
OPTS = {**OPTIMIZERS, 'lookahead': lambda params, **kwargs: Lookahead(Adam(params, **kwargs), k=3)}
SCALING = dict(init_scale=2.0**20, growth_interval=3)  # overflows at the start and whenever it has grown
MODES = pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])


@pytest.fixture(autouse=True)
def device(monkeypatch):
    "The accelerator; learners of helpers.py train on it."
    import helpers

    if not is_installed():
        if not torch.cuda.is_available():
            pytest.skip('needs an accelerator, or --sim=sim')
        monkeypatch.setattr(helpers, 'DEVICE', torch.device('cuda', 0))
    return helpers.DEVICE


@pytest.fixture
def sim():
    "The options of the simulated device, restored after the test."
    if not is_installed():
        pytest.skip('needs a simulated device')
    before = {**vars(options)}
    yield options
    vars(options).update(before)


def build(mode, opt='adam', device=None, seed=0, scaling=SCALING, **kwargs):
    "A learner whose model is on the CPU, as a user's is before the first fit, on data for the device."
    learn = learner(mlp(seed), loaders(device=device), opt_func=OPTS[opt], **kwargs)
    return getattr(learn, f'to_{mode}')(**(scaling if mode == 'fp16' else {}))


def state(learn):
    return learn.precision and learn.precision.state_dict()


def places(learn):
    return {p.device.type for p in learn.model.parameters()}


def close(a, b, exact=False):
    "The same numbers, within a few per cent where a real device is compared with the CPU."
    if is_installed() or exact:
        return same(a, b)
    return all(torch.allclose(x, y, rtol=0.05, atol=0.05) for x, y in zip(a, b, strict=True))


def assert_alike(a, b):
    "Parameters, buffers, the optimizer's memory and the loss scale are the same."

    def moved(learn):
        return [t.detach().cpu() for t in (*learn.model.parameters(), *learn.model.buffers())]

    def on_cpu(x):
        return [{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in x]

    exact = is_installed() or places(a) == places(b)
    assert close(moved(a), moved(b), exact) and state(a) == state(b)
    if exact:
        assert same_state(on_cpu(opt_state(a.opt)), on_cpu(opt_state(b.opt)))


# -- training


@pytest.mark.parametrize(
    'mode,opt', [('fp32', 'adam'), ('bf16', 'sgd'), ('bf16', 'fused adamw'), *(('fp16', o) for o in OPTIMIZERS)]
)
def test_numbers_are_the_cpus(mode, opt, device):
    """In fp16 the scale overflows by itself, and a gradient is not finite in the first step, two in a row and the last.

    A second fit clips and accumulates.
    """
    there, here = (build(mode, opt, d, cbs=spoil_at(0, 7, 8, 11) if mode == 'fp16' else None) for d in (device, CPU))
    for learn in (there, here):
        learn.fit(2, 0.01)
    assert places(there) == {device.type} and places(here) == {'cpu'}
    assert close([torch.stack(there.recorder.losses).cpu()], [torch.stack(here.recorder.losses)])
    assert close([torch.tensor(there.validate())], [torch.tensor(here.validate())])
    assert_alike(there, here)
    if mode == 'fp16':
        assert there.precision.scales == here.precision.scales and len(there.precision.scales) == 12
        assert there.precision.n_skipped == here.precision.n_skipped >= 4
    for learn in (there, here):
        learn.fit(1, 0.01, cbs=[GradientAccumulation(8), GradientClip(0.1)])
    assert_alike(there, here)


def test_fp32_modules_and_predictions(device):
    learn, seen = learner(mlp(), loaders()).to_bf16(fp32_modules='3'), {}
    for name in '03':
        learn.model[int(name)].register_forward_hook(lambda m, i, o, n=name: seen.setdefault(n, set()).add(o.dtype))
    learn.fit(1, 0.01)
    assert seen == {'0': {torch.bfloat16}, '3': {torch.float32}} and learn.get_preds()[0].dtype is torch.float32
    with learn.amp_context():
        assert torch.is_autocast_enabled(device.type)
    assert not torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize(
    'event,mode,opt',
    [
        ('after_pred', 'bf16', 'adam'),
        ('after_loss', 'fp16', 'adam'),
        ('after_backward', 'fp16', 'fused adamw'),
        ('before_step', 'fp16', 'fused adamw'),
        ('after_step', 'fp16', 'adam'),
    ],
)
def test_after_an_exception_nothing_is_left(event, mode, opt, device):
    def stop(l):
        if l.train_iter == 1:
            raise KeyboardInterrupt

    learn, before = build(mode, opt, scaling=dict(init_scale=256.0)), autocast_state()
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 0.01, cbs=At(event, stop, 11))
    assert autocast_state() == before and learn.precision.fit is None
    weights = params(learn)
    learn.fit(1, 0.01)
    assert autocast_state() == before and not same(params(learn), weights)
    assert all(p.isfinite().all() for p in params(learn))


# -- files and copies


@pytest.mark.parametrize(
    'mode,opt',
    [
        ('bf16', 'adam'),
        ('bf16', 'fused adamw'),
        ('fp16', 'sgd'),
        ('fp16', 'adamw'),
        ('fp16', 'fused adamw'),
        ('fp16', 'lookahead'),
    ],
)
def test_exact_resume_in_a_new_process(mode, opt, tmp_path, device):
    "On the device, also from the CPU and back. When the file is loaded the model is still on the CPU."
    for first, then in [
        (device, device),
        *([(CPU, device), (device, CPU)] if is_installed() else []),
    ]:  # a real one rounds in other ways
        straight = build(mode, opt, first, path=tmp_path)
        straight.fit(1, 0.01)
        straight.save('half way')
        straight.fit(1, 0.01)
        second = build(mode, opt, then, seed=1, path=tmp_path).load('half way')
        assert places(second) == {'cpu'}
        second.fit(1, 0.01)
        assert places(second) == {then.type}
        assert_alike(straight, second)


def test_state_that_an_optimizer_keeps_elsewhere_stays_there(device):
    "PyTorch keeps counts and products of NAdam on the CPU; a second fit is no reason to move them."
    learn = learner(dls=loaders(n=48), opt_func=partial(OptimWrapper, opt=torch.optim.NAdam)).to_bf16()
    for _ in range(2):
        learn.fit(1, 0.01)
        kept = opt_state(learn.opt)
        assert {s['mu_product'].device.type for s in kept} == {'cpu'}
        assert {s['exp_avg'].device for s in kept} == {device}


@MODES
def test_export_and_copies(mode, tmp_path, device):
    learn = build(mode, path=tmp_path)
    learn.fit(1, 0.01)
    learn.export()
    assert places(load_learner(tmp_path / 'export.pkl', cpu=True)) == {'cpu'} and places(learn) == {device.type}
    for twin in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))):
        assert places(twin) == {device.type}
        before = params(learn)
        twin.fit(1, 0.01)
        assert same(params(learn), before)
    learn.fit(1, 0.01)
    assert_alike(learn, twin)


# -- synchronizations: the numbers in the documentation come from here


@pytest.mark.parametrize(
    'mode,opt,a_step,an_epoch',
    [
        ('bf16', 'adam', 0, 0),
        ('bf16', 'fused adamw', 0, 0),
        *(('fp16', o, 1, 1) for o in OPTIMIZERS if 'fused' not in o),
        ('fp16', 'fused adamw', 0, 1),
        ('fp16', 'fused sgd', 0, 1),
    ],
)
def test_waits_beyond_fp32(mode, opt, a_step, an_epoch, sim):
    "Also with skipped steps; in the second epoch of a second fit, because the first step creates the optimizer state."

    def count(mode):
        learn = build(mode, opt, cbs=spoil_at(8, 9) if mode == 'fp16' else None)
        learn.fit(1, 0.01)
        counts = []
        with waits() as found:
            learn.add_cb(At('after_epoch', lambda l: counts.append(len(found)), 100))
            learn.fit(2, 0.01)
        return counts[1] - counts[0]

    assert count(mode) - count('fp32') == 6 * a_step + an_epoch


# -- devices that lack something


@pytest.mark.parametrize('lacks,has,dtype', [('bf16', 'fp16', torch.float16), ('fp16', 'bf16', torch.bfloat16)])
def test_a_device_with_one_half_precision(lacks, has, dtype, device, sim):
    sim.amp_dtypes = [dtype]
    with pytest.raises(ValueError, match=f'(?s){lacks} .*does not run.*to_{has}'):
        build(lacks).fit(1)
    table = precision_support(device).set_index('mode').support
    assert (table[lacks], table[has]) == ('unsupported', 'native')
    learn = build('amp')
    learn.fit(1, 0.01)
    assert learn.precision.mode == has


def test_a_device_with_neither(sim):
    sim.amp_dtypes = []
    learn = build('amp')
    with pytest.warns(UserWarning, match='neither bf16 nor fp16'):
        learn.fit(1)
    assert learn.precision.mode is None  # fp32
    with pytest.raises(ValueError, match='to_fp32'):
        build('fp16').fit(1)


def test_tensors_of_two_devices_do_not_come_together(device):
    "What a device must do for the tests above to be meaningful."
    with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
        torch.ones(2, device=device) + torch.ones(2, device='cpu')


def test_the_benchmark_counts_synchronizations_beyond_fp32(device, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from nbs.benchmarks import contestants, measure, models

    if is_installed():
        monkeypatch.setattr(torch.accelerator, 'synchronize', lambda device: None)
    monkeypatch.setitem(models.MODELS, 'tiny', partial(models._mlp, title='tiny', width=8, depth=1, n=4))
    taking_part = [c for c in contestants.CONTESTANTS if c.name in ('fastai loop', 'fastxtend_amp')]
    found = measure.bench(['tiny'], ['bf16', 'fp16'], device, 1, taking_part, ['Adam', 'fused AdamW'])['rows']
    counted = {(r['mode'], r['optimizer']): r['syncs'] for r in found if r['contestant'] == 'fastxtend_amp'}
    assert counted == {('bf16', 'Adam'): 0, ('bf16', 'fused AdamW'): 0, ('fp16', 'Adam'): 1, ('fp16', 'fused AdamW'): 0}


# -- a fit on the accelerator, then on the CPU


def move_to(learn, device):
    learn.dls = loaders(device=device)
    learn.model.to(device)
    learn.create_opt()


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('event', ['after_step', 'after_batch', 'after_epoch'])
def test_after_an_interrupt_training_goes_on_on_another_device(device, opt, event):
    "The history of both is read, in each epoch, by `scales`, and by a copy."

    def interrupt(l):
        if l.train_iter >= 3:
            raise KeyboardInterrupt

    learn = build('fp16', opt, scaling=dict(init_scale=256.0))
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=At(event, interrupt, 20))
    for there in (CPU, device, CPU):
        n = len(learn.precision.scales) if there is device else None
        move_to(learn, there)
        learn.fit(2)
        assert n is None or len(learn.precision.scales) == n + 12
    assert set(learn.precision.scales) == {256.0}
    assert learn.precision.n_skipped == 0
    assert copy.deepcopy(learn).precision.scales == learn.precision.scales


# -- a model on two devices


class OnTwo(nn.Module):
    "Its first layer is on the accelerator, the second on the CPU; `to` leaves them there."

    def __init__(self, there):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).to(there), nn.Linear(8, 1)

    def to(self, *args, **kwargs):
        return self

    def forward(self, x):
        return self.second(self.first(x).relu().float().cpu()).to(x.device)


@pytest.mark.parametrize('spoilt', [0, 2])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'fused sgd'])
def test_a_step_is_skipped_whole_in_a_model_on_two_devices(device, opt, spoilt):
    seen, known = [], {}

    def spoil(l):
        if l.train_iter == 3:
            [*l.model.parameters()][spoilt].grad.view(-1)[0] = float('inf')

    learn = learner(OnTwo(device), loaders(), opt_func=OPTS[opt]).to_fp16(init_scale=256.0)
    learn.add_cb(At('after_backward', spoil, 5))
    learn.add_cb(At('after_batch', lambda l: l.training and seen.append([p.cpu() for p in params(l)]), 20))
    # Before the step itself, unless the CPU has skipped it.
    learn.add_cb(At('before_step', lambda l: known.update({l.train_iter: bool(l.precision.skipped)}), 12))
    learn.fit(1, 0.01)
    assert learn.precision.skips == [i == 3 for i in range(6)]
    assert known.get(3, True) is True
    assert not any(skipped for i, skipped in known.items() if i != 3)
    assert same(seen[3], seen[2])
    assert not same(seen[4], seen[3])


# -- what a skipped step leaves in BatchNorm, where the device decides


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_skipped_step_leaves_finite_buffers_without_a_synchronization(device, sim, mode, opt):
    def bad(n):
        data = dataset(4 * n)
        x = data.tensors[0].clone()
        x[12:16, 2] = float('inf')
        return loaders(train=Data(x, data.tensors[1]))

    def trained(n):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
        learn = learner(model, bad(n), opt_func=OPTS[opt])
        scaling = dict(init_scale=256.0) if mode == 'fp16' else dict(skip_nonfinite=True)
        getattr(learn, f'to_{mode}')(**scaling, on_overflow='ignore')
        with waits() as w:
            learn.fit(1, 0.01)
        return learn, len(w)

    (learn, few), (_, many) = trained(8), trained(16)
    assert learn.precision.skips == [i == 3 for i in range(8)]
    assert all(b.isfinite().all() for b in learn.model.buffers())
    n = []
    for size in (32, 64):
        plain = learner(nn.Linear(6, 1), loaders(size), opt_func=OPTS[opt])
        with waits() as w:
            plain.fit(1, 0.01)
        n.append(len(w))
    per_step = (many - few - (n[1] - n[0])) / 8
    assert per_step <= (0 if opt == 'fused adamw' else 1)
