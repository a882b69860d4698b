"""On an XLA device: a learner trains as on the CPU, one graph a batch, and its files work.

On XLA's CPU device: `python tests/matrix.py FOLDER xla`.
"""
import importlib.util, inspect, os, pickle, subprocess, sys, warnings
from types import SimpleNamespace

import pytest, torch
from fastai.callback.core import TrainEvalCallback
from fastai.callback import schedule  # noqa: F401  fit_one_cycle, lr_find
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import load_learner
from fastai.optimizer import ranger
from fastai.text.models.awdlstm import WeightDropout

from fastxtend_amp import MixedPrecision, precision_support
from fastxtend_amp.callback import PRECISION_CALLBACKS
from fastxtend_amp.scaling import LossScaling, skips_on_device
from fastxtend_amp.devices.xla import XLADevice, XLAGradients
from helpers import *

XLA = bool(importlib.util.find_spec('torch_xla') and os.environ.get('PJRT_DEVICE'))
MODES = ['fp32', 'bf16', 'fp16']
EAGER = {k: v for k, v in OPTIMIZERS.items() if 'fused' not in k}     # PyTorch's fused optimizers refuse XLA parameters
TOLERANCE = {'fp32': 1e-4, 'bf16': .03, 'fp16': .003}


@pytest.fixture
def device():
    if not XLA: pytest.skip('needs torch_xla, and PJRT_DEVICE=CPU in the environment: see tests/matrix.py')
    import torch_xla
    return torch_xla.device()


@pytest.fixture
def counted(device):
    "Counts what a function makes torch_xla do: compilations, scalar reads, transfers to the host, graphs run."
    import torch_xla.debug.metrics as met
    names = dict(compiled='UncachedCompile', read='aten::_local_scalar_dense', synced='MarkStep')
    def now():
        counts = {k: met.counter_value(n) or 0 for k, n in names.items()}
        return {**counts, 'fetched': (met.metric_data('TransferFromDeviceTime') or [0])[0]}
    def count(f):
        before = now(); f()
        return SimpleNamespace(**{k: v - before[k] for k, v in now().items()})
    return count


def syncfree(name, **kwargs):
    import torch_xla.amp.syncfree as sf
    return partial(OptimWrapper, opt=partial(getattr(sf, name), **kwargs))


def build(device, mode='fp32', **kwargs):
    learn = learner(**{'dls': loaders(n=32), **kwargs})
    learn.dls.to(device)
    return getattr(learn, f'to_{mode}')(**({'init_scale': 256.} if mode == 'fp16' else {}))


def smooth(seed=0):
    "A model on which rounding stays small: no bias has a gradient of zero, as before batch norm, for Adam to blow up."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def host(tensors): return [t.detach().cpu() for t in tensors]
def curve(learn): return torch.stack([t.cpu() for t in learn.recorder.losses])
def close(a, b, tol):
    return all(torch.allclose(x.cpu(), y.cpu(), atol=tol, rtol=tol) for x, y in zip(a, b, strict=True))
def device_cbs(learn): return [type(cb) for cb in learn.cbs if isinstance(cb, (XLADevice, XLAGradients))]
def python(code, **env):
    return subprocess.run([sys.executable, '-W', 'default', '-c', code], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), **env})
FIT = "import sys; from helpers import *; learn = learner(); "


# -- torch_xla is optional

def test_torch_xla_is_not_imported_for_other_devices():
    out = python(FIT + """
for mode in ('fp32', 'bf16', 'fp16', 'amp'): getattr(learn, f'to_{mode}')().fit(1)
learn.get_preds()
print('torch_xla' in sys.modules, [type(cb).__name__ for cb in learn.cbs if 'XLA' in type(cb).__name__])
""")
    assert out.stdout.split('\n')[-2] == 'False []', out.stderr


def test_without_torch_xla_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch_xla', None)
    learn = build('xla')
    with pytest.raises(RuntimeError, match=r"(?s)needs the package torch_xla.*learn.dls.to\('cpu'\)"): learn.fit(1)


# -- what is replaced in fastai, and when

OURS = """
import sys, fastai.learner
from fastai.callback.core import TrainEvalCallback
from fastai.learner import Learner
NAMES = [(Learner, n) for n in ('fit', 'one_batch', 'export', '__enter__')] + [(TrainEvalCallback, 'before_fit')]
fastais = [getattr(c, n) for c, n in NAMES]
def replaced(): return [n for (c, n), f in zip(NAMES, fastais) if getattr(c, n) is not f]
"""


def test_a_learner_without_a_precision_callback_runs_none_of_our_code(tmp_path):
    out = python(OURS + f"""
from helpers import *
learn, files = learner(path=r'{tmp_path}').to_bf16().to_fp32(), set()
sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
learn.fit(1); learn.validate(); learn.get_preds(); learn.export()
sys.setprofile(None)
ours = sorted(f for f in files if 'fastxtend_amp' in f)
print(replaced(), fastai.learner.__file__ in files, ours, 'torch_xla' in sys.modules)
""")
    assert out.stdout.split('\n')[-2] == '[] True [] False', out.stderr[-2000:]


@pytest.mark.parametrize('before,call', [('import torch_xla', ''), ('', 'import torch_xla; learn.to_fp32()'),
                                         ('', 'import torch_xla; learn.to_bf16()'),
                                         ('', "learn.dls.to('xla'); learn.to_fp32()"),
                                         ('', 'import torch_xla; learn.add_cb(fastxtend_amp.devices.xla.XLADevice())')])
def test_what_xla_needs_is_installed_once_torch_xla_is_in_use(before, call, device):
    out = python(f"""{before}{OURS}
from helpers import *
learn = learner()
start, first = params(learn), replaced()
{call}
import torch_xla
learn.dls.to(torch_xla.device()); learn.fit(1, .1)
print(first, replaced(), same(start, [p.cpu() for p in params(learn)]))
""")
    both = "['export', 'before_fit']"
    assert out.stdout.split('\n')[-2] == f"{both if before else '[]'} {both} False", out.stderr[-2000:]


def test_replaced_methods_do_what_fastais_do_elsewhere(device, tmp_path):
    learn = learner(path=tmp_path)
    learn.fit(1, .01); learn.export()
    assert not device_cbs(learn) and params(learn)[0].device.type == 'cpu'
    assert same(params(load_learner(tmp_path/'export.pkl')), params(learn))


# -- training

@pytest.mark.parametrize('opt', EAGER)
@pytest.mark.parametrize('mode', MODES)
def test_loss_curves_follow_the_cpu(mode, opt, device):
    xla, cpu = (build(d, mode, model=smooth(), opt_func=EAGER[opt]) for d in (device, 'cpu'))
    start = params(xla)
    for learn in (xla, cpu): learn.fit_one_cycle(3, .02)
    assert {p.device.type for p in xla.model.parameters()} == {'xla'}
    assert not any(map(torch.equal, host(params(xla)), start))
    assert close([curve(xla)], [curve(cpu)], TOLERANCE[mode])
    ours, theirs = list(xla.recorder.values[-1]), list(cpu.recorder.values[-1])
    assert ours == pytest.approx(theirs, abs=TOLERANCE[mode], rel=TOLERANCE[mode])
    if mode == 'fp16': assert xla.precision.scales == cpu.precision.scales
    assert (xla.precision is not None) == (mode != 'fp32') and xla.validate()[0] == pytest.approx(ours[1], rel=1e-5)


@pytest.mark.parametrize('mode', MODES)
def test_batch_norm(mode, device):
    xla, cpu = (build(d, mode) for d in (device, 'cpu'))
    for learn in (xla, cpu): learn.fit_one_cycle(3, .02)
    assert close([curve(xla)], [curve(cpu)], TOLERANCE[mode])
    # XLA's running variance is the biased one, so that validation differs (torch_xla 2.9): 4 samples, a factor of 3/4
    xla, cpu = (build(d, model=nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))) for d in (device, 'cpu'))
    for learn in (xla, cpu): learn.fit(1)
    a, b = (l.model[0].running_var.cpu() - .9 ** 8 for l in (xla, cpu)); assert torch.allclose(a, b * .75, atol=1e-4)


@pytest.mark.parametrize('kwargs', [dict(), dict(dtype='fp16', loss_scale=256.), dict(flat_master=True)], ids=str)
def test_half_precision_weights_follow_the_cpu(kwargs, device):
    devices = device, torch.device('cpu')
    there, here = (build(d, model=smooth(), opt_func=Adam).to_half_weights(**kwargs) for d in devices)
    for learn in (there, here): learn.fit(2, .01)
    assert close([curve(there)], [curve(here)], TOLERANCE[kwargs.get('dtype', 'bf16')])
    assert {(p.device.type, p.dtype) for p in there.model.parameters()} == {('xla', torch.float32)}


@pytest.mark.parametrize('kwargs', [dict(), dict(dtype='fp16', loss_scale=256.), dict(flat_master=True)], ids=str)
def test_half_precision_weights_on_two_devices(kwargs, device):
    class Two(nn.Module):
        def __init__(self):
            torch.manual_seed(0); super().__init__()
            self.here, self.there, self.device = nn.Linear(6, 8), nn.Linear(8, 1), torch.device('cpu')
        def to(self, *args, **kwargs): return self               # each layer stays where it is
        def forward(self, x): return self.there(torch.tanh(self.here(x)).to(self.device)).cpu()
    curves = []
    for there in (device, torch.device('cpu')):
        model = Two()
        nn.Module.to(model.there, there); model.device = there
        learn = learner(model, loaders(n=32), opt_func=Adam).to_half_weights(**kwargs)
        learn.fit(2, .01)
        curves.append(curve(learn))
        assert [p.device.type for p in model.parameters()] == ['cpu', 'cpu', there.type, there.type]
    assert close(curves[:1], curves[1:], TOLERANCE[kwargs.get('dtype', 'bf16')])


def test_plain_fastai_learns_nothing_there(device, monkeypatch):
    learn = build(device); start = params(learn)
    monkeypatch.setattr(TrainEvalCallback, 'before_fit', inspect.unwrap(TrainEvalCallback.before_fit))   # fastai's own
    learn.fit(2, .1)
    assert same(host(params(learn)), start)
    monkeypatch.undo()
    learn = build(device); learn.fit(2, .1)
    assert not any(map(torch.equal, host(params(learn)), start))


@pytest.mark.parametrize('mode', MODES[1:])
def test_forward_is_in_low_precision_and_predictions_are_fp32(mode, device):
    learn, seen = build(device, mode), set()
    def look(m, x, y): seen.add((y.dtype, y.device.type, torch.is_autocast_enabled('xla')))
    learn.model[0].register_forward_hook(look)
    learn.fit(1)
    assert seen == {(learn.precision.mode.dtype, 'xla', True)} and not torch.is_autocast_enabled('xla')
    assert learn.precision.scaling.scaler.is_enabled() == (mode == 'fp16')
    assert learn.get_preds()[0].dtype is torch.float32


@pytest.mark.parametrize('mode', MODES[1:])
def test_an_exception_in_a_batch_leaves_no_autocast_behind(mode, device):
    def state(): return torch.is_autocast_enabled('xla'), torch.get_autocast_dtype('xla'), autocast_state()
    learn, before = build(device, mode), state()
    def stop(l): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=At('after_pred', stop, 5))
    assert state() == before
    learn.fit(1); assert state() == before


def test_skipped_steps_and_accumulation(device):
    def spoil(l):
        if l.train_iter in (1, 5): next(l.model.parameters()).grad.view(-1)[0] = float('inf')
    def cbs(): return [GradientAccumulation(8), GradientClip(.5), At('after_backward', spoil, 5)]
    xla, cpu = (build(d, 'fp16', model=smooth(), cbs=cbs()) for d in (device, 'cpu'))
    for learn in (xla, cpu): learn.fit(2, .02)
    assert xla.precision.scaling.history.skips.tolist() == cpu.precision.scaling.history.skips.tolist()
    assert xla.precision.n_skipped == 2 and close(params(xla), params(cpu), .01)


def test_precision_support_and_warning(device):
    table = precision_support('xla').set_index('mode').support
    if os.environ['PJRT_DEVICE'] == 'CPU': assert dict(table) == {'bf16': 'emulated', 'fp16': 'emulated'}
    assert 'xla' in set(precision_support().device)
    with pytest.warns(UserWarning, match="bf16 is emulated on device 'xla:0'"): build(device, 'bf16').fit(1)


# -- how the callback gets there

def test_one_device_callback_in_every_mode(device):
    learn = build(device, 'fp16'); assert not device_cbs(learn)
    learn.fit(1); assert sorted(map(str, device_cbs(learn))) == sorted(map(str, (XLADevice, XLAGradients)))
    for mode in ('bf16', 'fp32', 'amp', 'fp16', 'fp32'):
        getattr(learn, f'to_{mode}')(); learn.fit(1); learn.validate()
        assert len(device_cbs(learn)) == 2
    assert not any(isinstance(cb, PRECISION_CALLBACKS) for cb in learn.cbs)
    assert not issubclass(XLADevice, PRECISION_CALLBACKS)
    assert XLADevice.order < -10 and 6 < XLAGradients.order < MixedPrecision.order


@pytest.mark.parametrize('cbs', [lambda: MixedPrecision('bf16'), lambda: [XLADevice(), MixedPrecision('bf16')],
                                 lambda: XLADevice], ids=['precision', 'both', 'class'])
def test_callbacks_given_by_the_user(cbs, device):
    learn = build(device); start = params(learn)
    learn.add_cbs(cbs()); learn.fit(1, .1)
    assert device_cbs(learn).count(XLADevice) == 1 and not same(host(params(learn)), start)


def test_callbacks_of_a_fit_only(device):
    learn = build(device); start = params(learn)
    learn.fit(1, .1, cbs=[XLADevice(), MixedPrecision('fp16')]); assert not same(host(params(learn)), start)


def test_nothing_on_a_learner_elsewhere():
    learn = learner(); learn.fit(1); learn.validate(); learn.get_preds()
    assert not device_cbs(learn)
    learn.add_cb(XLADevice()); learn.fit(1)                          # harmless where it is not needed
    assert params(learn)[0].device.type == 'cpu'


def test_validation_before_training(device):
    learn = build(device, 'bf16'); learn.create_opt(); learn.validate(); learn.get_preds()
    start = params(learn); learn.fit(1, .1)
    assert not same(params(learn), start)


def test_model_moved_by_the_user_before_the_learner(device):
    learn = build(device, 'fp16', model=mlp().to(device)); start = params(learn)
    learn.fit(1, .1); assert not same(params(learn), start)


# -- moving with what the optimizer knows

REFITS = {**EAGER, 'ranger': ranger, 'amsgrad': partial(OptimWrapper, opt=partial(torch.optim.Adam, amsgrad=True))}


@pytest.mark.parametrize('opt', REFITS)
def test_refits_from_cpu_to_xla_and_back_keep_parameters_and_state(opt, device):
    moving, staying = (learner(smooth(), loaders(n=32), opt_func=REFITS[opt]) for _ in range(2))
    objects = list(moving.model.parameters())
    for where in ('cpu', device, 'cpu'):
        moving.dls.to(where)
        for learn in (moving, staying): learn.fit(1, .01)
        assert all(p.device == torch.device(where) for p in objects)
    assert all(a is b for a, b in zip(objects, moving.model.parameters()))
    assert all(a is b for a, b in zip(objects, (p for pl in moving.opt.param_lists for p in pl)))
    assert close(params(moving), params(staying), 1e-4)
    for a, b in zip(opt_state(moving.opt), opt_state(staying.opt)):
        assert a.keys() == b.keys()
        for k in a: assert close([a[k]], [b[k]], 1e-3) if isinstance(a[k], torch.Tensor) else a[k] == b[k]


def test_the_scale_moves_too(device):
    learn = build('cpu', 'fp16'); learn.fit(1)
    for d in (device, 'cpu'):
        learn.dls.to(d); learn.precision.scaling.scaler._growth_tracker.fill_(5); learn.fit(1)
        assert learn.precision.state_dict()['_growth_tracker'] == 13 and learn.precision.scales[-1] == 256.


def test_freezing(device):
    def halves(m): return [list(m[:2].parameters()), list(m[2:].parameters())]
    learn = build(device, 'bf16', splitter=halves, opt_func=EAGER['adamw'])
    learn.freeze(); learn.fit(1, .1); start = host(params(learn)); learn.fit(1, .1); frozen = host(params(learn))
    assert same(start[:2], frozen[:2]) and not torch.equal(start[4], frozen[4])
    learn.unfreeze(); learn.fit(1, slice(.01, .1)); assert not any(map(torch.equal, host(params(learn)), frozen))


def test_tied_weights_stay_tied(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
            self.b.weight = self.a.weight
        def forward(self, x): return self.c(self.b(self.a(x)))
    learn = build(device, model=Tied()); start = params(learn); learn.fit(1, .1)
    assert learn.model.a.weight is learn.model.b.weight and len(start) == 5
    assert not any(map(torch.equal, host(params(learn)), start))


def test_moving_after_an_interrupt_and_with_a_graph_that_is_kept(device):
    def stop(l): raise KeyboardInterrupt
    learn = build('cpu')
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=At('before_backward', stop))
    learn.dls.to(device); learn.fit(1); assert params(learn)[0].device.type == 'xla'
    learn = build('cpu'); kept = learn.model(torch.randn(4, 6)).sum()
    learn.dls.to(device)
    message = "(?s)cannot be moved to 'xla:0' in place.*Something else refers to them"
    with pytest.raises(RuntimeError, match=message): learn.fit(1)
    del kept; learn.fit(1)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert {p.device.type for p in learn.model.parameters()} == {'xla'}


class Recurrent(nn.Module):
    def __init__(self, wrap=lambda m: m):
        torch.manual_seed(0); super().__init__()
        self.rnn, self.head = wrap(nn.LSTM(1, 4, batch_first=True)), nn.Linear(4, 1)
    def forward(self, x): return self.head(self.rnn(x[..., None])[0][:, -1])


MODELS = {'lstm': Recurrent, 'weight dropout': lambda: Recurrent(lambda m: WeightDropout(m, 1e-9)),
          'weight norm': lambda: nn.Sequential(nn.utils.weight_norm(smooth()[0]), *smooth()[1:])}


@pytest.mark.parametrize('model', MODELS)
def test_models_whose_weights_are_more_than_parameters(model, device, tmp_path):
    "fastai's optimizers have a state for a recurrent layer's `bias`, which is True; weight norm keeps the last batch's graph."
    moving, staying = (learner(MODELS[model](), loaders(n=16), path=tmp_path).to_bf16() for _ in range(2))
    for where in ('cpu', device, 'cpu'):
        moving.dls.to(where)
        for learn in (moving, staying): learn.fit(1, .01)
        moving.export()                                          # from the CPU, and back
        assert {p.device for p in moving.model.parameters()} == {torch.device(where)}
    assert close(params(moving), params(staying), TOLERANCE['bf16'])


def test_an_optimizer_that_holds_other_parameters(device):
    learn = build(device); learn.create_opt(); learn.model.to(device)
    with pytest.raises(RuntimeError, match="(?s)none of the model's parameters.*learn.create_opt"): learn.fit(1)
    learn.create_opt(); start = params(learn); learn.fit(1, .1); assert not same(params(learn), start)


def test_a_device_that_came_too_late(device):
    out = python("import torch; torch.ones(1, requires_grad=True).sum().backward(); " + FIT +
                 "learn.dls.to('xla'); learn.to_fp32().fit(1)")
    assert 'RuntimeError' in out.stderr and 'torch_xla.device()' in out.stderr.strip().split('\n')[-1]


# -- one graph a batch

@pytest.mark.parametrize('mode', MODES)
def test_one_sync_per_batch_before_the_loss_is_read(mode, device, monkeypatch):
    import torch_xla
    calls, seen, sync = [], [], torch_xla.sync
    monkeypatch.setattr(torch_xla, 'sync', lambda *a, **k: (calls.append(1), sync(*a, **k)))
    learn = build(device, mode, cbs=At('after_batch', lambda l: seen.append(len(calls)), -15))
    learn.fit(2)
    more = 0 if mode == 'fp32' else 2                            # around the sizes of the weights, once a fit
    assert seen == [n + more for n in range(1, 2 * (8 + 2) + 1)] and len(calls) == seen[-1]   # 8 training and 2 validation batches


OPTS = {**EAGER, 'sync-free adam': 'Adam', 'sync-free adamw': 'AdamW', 'sync-free sgd': 'SGD'}
def opt_func(name):
    if 'sync-free' not in name: return OPTS[name]
    return syncfree(OPTS[name], **({'momentum': .9} if 'sgd' in name else {}))


@pytest.mark.parametrize('mode,opt', [(m, o) for m in MODES for o in ('adam', 'sgd', 'adamw')] +
                                     [('fp16', o) for o in OPTS if 'sync' in o])
def test_nothing_is_compiled_after_the_warm_up(mode, opt, counted, device):
    from fastai.metrics import mse
    learn = build(device, mode, opt_func=opt_func(opt), metrics=mse)
    learn.fit_one_cycle(2, .01)
    assert counted(lambda: learn.fit_one_cycle(3, .01)).compiled == 0
    assert counted(lambda: (learn.validate(), learn.get_preds())).compiled == 0


@pytest.mark.parametrize('mode,opt,reads', [('bf16', 'adam', 0), ('bf16', 'adamw', 0),
                                            ('fp16', 'adam', 1), ('fp16', 'adamw', 1),
                                            *(('fp16', o, 0) for o in OPTS if 'sync' in o)])
def test_reads_per_step_beyond_fp32(mode, opt, reads, counted, device):
    ours, plain = (build(device, m, opt_func=opt_func(opt)) for m in (mode, 'fp32'))
    for learn in (ours, plain): learn.fit(1)
    a, b = counted(lambda: ours.fit(1)), counted(lambda: plain.fit(1))
    assert a.read - b.read == reads * 8
    assert a.fetched - b.fetched == reads * 8 + (mode == 'fp16' and not reads)   # the skips, once an epoch
    assert a.synced == b.synced + 2                              # around the sizes of the weights, once a fit


@pytest.mark.parametrize('opt', [OPTIMIZERS['adam'], None], ids=['adam', 'sync-free'])
def test_the_first_scale_is_the_cpus(opt, device):
    opt = opt or syncfree('AdamW')
    there, here = (learner(smooth(), loaders(n=32), opt_func=o) for o in (opt, OPTIMIZERS['adam']))
    there.dls.to(device)
    for learn in (there, here): learn.to_fp16(init_scale='auto').fit(1, .01)
    assert there.precision.scales == here.precision.scales and there.precision.n_skipped == 0
    assert here.precision.scales[0] not in (1., 2. ** 16, 2. ** 24)


def test_the_measured_choice(device, capsys):
    from fastxtend_amp.insight.choice import measure_and_choose
    learn = build(device, model=smooth())
    learn.fit(1, .01)
    before, state = host(params(learn)), opt_state(learn.opt)
    measure_and_choose(learn, n_steps=4, modes=('fp32', 'bf16', 'half weights'))
    decision = learn.precision_decision
    assert list(decision.table['steps']) == [4] * 3 and list(decision.table.index) == ['fp32', 'bf16', 'half weights']
    assert same(host(params(learn)), before) and capsys.readouterr().out.startswith(f'{decision.mode}: ')
    assert [s.keys() for s in opt_state(learn.opt)] == [s.keys() for s in state]
    learn.fit(1, .01)


# -- torch_xla's sync-free optimizers

@pytest.mark.parametrize('name,reference', [(n, getattr(torch.optim, n)) for n in ('SGD', 'Adam', 'AdamW')])
@pytest.mark.parametrize('skips', [{0, 1}, {3, 6}], ids=str)
def test_sync_free_optimizers_skip_as_the_host_would(name, reference, skips, device):
    def spoil(l):
        if l.train_iter in skips: next(l.model.parameters()).grad.view(-1)[0] = float('inf')
    kwargs = {'momentum': .9} if name == 'SGD' else {}
    told, seen = [], []
    def watch(l):
        step = l.opt.opt.step
        told.append(type(step).__name__ == 'partial' and step.keywords['found_inf'].device.type)
    cbs = lambda: [At('after_backward', spoil, 5), At('before_step', watch, 20),
                   At('after_batch', lambda l: l.training and seen.append((host(params(l)), l.precision.skipped)), 70)]
    ours = build(device, 'fp16', opt_func=syncfree(name, **kwargs), cbs=cbs()); ours.fit(1, .01); a, t = seen, told
    seen, told = [], []
    theirs = build(device, 'fp16', opt_func=partial(OptimWrapper, opt=partial(reference, **kwargs)), cbs=cbs())
    theirs.fit(1, .01)
    assert t == ['xla'] * 8 and not any(told)
    assert [s for _, s in a] == [s for _, s in seen] == [i in skips for i in range(8)]
    for (p, _), (q, _) in zip(a, seen): assert close(p, q, 1e-4)
    for i in skips - {0}: assert same(a[i][0][:2], a[i - 1][0][:2])
    assert ours.precision.scales == theirs.precision.scales and ours.precision.n_skipped == len(skips)
    assert 'step' not in ours.opt.opt.__dict__


@pytest.mark.parametrize('name', ['SGD', 'Adam'])
def test_sync_free_optimizers_between_the_modes(name, device, tmp_path):
    learn = build(device, 'fp32', opt_func=syncfree(name, **({'momentum': .9} if name == 'SGD' else {})), path=tmp_path)
    learn.fit(1, .01); learn.to_fp16(); start = host(params(learn))
    learn.fit(1, .01)                                                # a state without found_inf: the host decides
    assert not skips_on_device(learn.opt, list(learn.model.parameters())) and not same(host(params(learn)), start)
    learn.fit(1, .01, reset_opt=True); assert skips_on_device(learn.opt, list(learn.model.parameters()))
    learn.save('a'); learn.fit(1, .01); after = host(params(learn))
    learn.load('a'); learn.fit(1, .01); assert same(host(params(learn)), after)
    learn.to_bf16(); learn.fit(1, .01); assert not same(host(params(learn)), after)


# -- files

@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('opt', ['adam', 'adamw', 'ranger'])
def test_save_and_load(mode, opt, device, tmp_path):
    make = lambda d: build(d, mode, model=smooth(), opt_func=REFITS[opt], path=tmp_path)
    learn = make(device); learn.fit(1, .01); learn.save('a'); saved = host(params(learn))
    state = torch.load(tmp_path/'models'/'a.pth', weights_only=False)
    assert all(t.device.type == 'cpu' for t in state['model'].values())
    learn.fit(1, .01); after = host(params(learn))
    learn.load('a'); assert same(host(params(learn)), saved)
    learn.fit(1, .01); assert same(host(params(learn)), after)
    fresh = make(device); fresh.load('a'); fresh.fit(1, .01)         # loaded before the model is on the device
    assert same(host(params(fresh)), after)
    cpu = make('cpu'); cpu.load('a'); assert same(params(cpu), saved)
    cpu.fit(1, .01); assert close(params(cpu), after, .03)
    if mode == 'fp16': assert fresh.precision.state_dict() == learn.precision.state_dict()


@pytest.mark.parametrize('mode', MODES)
def test_load_in_the_middle_of_a_fit(mode, device, tmp_path):
    learn = build(device, mode, path=tmp_path); learn.fit(1, .01); learn.save('a')
    learn.fit(2, .01, cbs=At('after_epoch', lambda l: l.load('a')))
    saved = torch.load(tmp_path/'models'/'a.pth', weights_only=False)['model']
    assert same(host(params(learn)), [saved[n] for n, _ in learn.model.named_parameters()])


@pytest.mark.parametrize('mode', MODES)
def test_lr_find(mode, device, tmp_path):
    xla, cpu = (build(d, mode, path=tmp_path) for d in (device, 'cpu'))
    found = []
    for learn in (xla, cpu):
        learn.fit(1, .01); start = host(params(learn))
        found.append(learn.lr_find(num_it=40, stop_div=False, show_plot=False).valley)
        assert same(host(params(learn)), start) and len(learn.recorder.losses) == 40
    assert close([curve(xla)[:20]], [curve(cpu)[:20]], TOLERANCE[mode]) and .1 < found[0] / found[1] < 10


def test_save_model_callback(device, tmp_path):
    learn = build(device, 'bf16', path=tmp_path); learn.fit(3, .01, cbs=SaveModelCallback(with_opt=True))
    best = min(v[1] for v in learn.recorder.values)
    assert learn.validate()[0] == pytest.approx(best, rel=1e-5) and params(learn)[0].device.type == 'xla'
    start = params(learn); learn.fit(1, .01); assert not same(params(learn), start)


@pytest.mark.parametrize('mode', MODES)
def test_export(mode, device, tmp_path):
    learn = build(device, mode, path=tmp_path); learn.fit(1, .01); learn.export()
    preds, start, state = learn.get_preds()[0], host(params(learn)), opt_state(learn.opt)
    assert params(learn)[0].device.type == 'xla' and learn.dls.device == device and len(device_cbs(learn)) == 2
    loaded = load_learner(tmp_path/'export.pkl')
    assert same(params(loaded), start) and not device_cbs(loaded) and loaded.dls.device.type == 'cpu'
    assert torch.allclose(loaded.model.eval()(learn.dls.valid_ds.tensors[0]), preds, atol=TOLERANCE[mode])
    learn.fit(1, .01); assert not same(host(params(learn)), start) and state[0]['sqr_avg'].device.type == 'xla'
    if mode == 'fp32': return
    learn.to_fp32().export()


def test_an_exported_file_loads_where_there_is_no_torch_xla(device, tmp_path):
    learn = build(device, 'bf16', path=tmp_path); learn.fit(1); learn.to_fp32().export()
    out = python("import sys; sys.modules.update(torch_xla=None, fastxtend_amp=None); "
                 "import warnings; warnings.simplefilter('ignore'); "
                 "sys.modules['helpers'] = type(sys)('helpers'); from torch.utils.data import TensorDataset; "
                 "sys.modules['helpers'].Data = type('Data', (TensorDataset,), {}); from fastcore.basics import noop; "
                 f"from fastai.learner import load_learner; learn = load_learner(r'{tmp_path/'export.pkl'}'); "
                 "print(next(learn.model.parameters()).device)", TORCH_DEVICE_BACKEND_AUTOLOAD='0')
    assert out.stdout.strip() == 'cpu', out.stderr[-2000:]


def test_pickled_on_the_device(device):
    learn = build(device, 'fp16'); learn.fit(1); copy = pickle.loads(pickle.dumps(learn))
    copy.fit(1, .01); learn.fit(1, .01)
    assert same(host(params(copy)), host(params(learn))) and len(device_cbs(copy)) == 2


# -- several replicas, as far as one device can tell: the order of calls

@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('n_acc', [None, 8])
def test_gradients_are_reduced_before_they_are_unscaled(mode, n_acc, device, monkeypatch):
    import torch_xla.core.xla_model as xm, torch_xla.runtime as xr
    calls = []
    def reduce(kind, gradients, scale, **kwargs):
        calls.append('reduce'); seen.append((kind, scale, len(gradients)))
        for g in gradients: g.mul_(2 * scale)                        # two replicas with equal gradients
    seen, unscale = [], LossScaling.unscale
    monkeypatch.setattr(xr, '_WORLD_SIZE', 2); monkeypatch.setattr(xm, 'all_reduce', reduce)
    monkeypatch.setattr(LossScaling, 'unscale', lambda self, opt: (calls.append('unscale'), unscale(self, opt))[1])
    cbs = [At('after_backward', lambda l: calls.append('backward')),
           At('after_step', lambda l: calls.append('step'), -30), *([GradientAccumulation(n_acc)] if n_acc else [])]
    learn = build(device, mode, model=smooth(), cbs=cbs); learn.fit(1, .01)
    step = ['backward'] * (n_acc // 4 if n_acc else 1) + ['reduce'] + ['unscale'] * (mode != 'fp32') + ['step']
    assert calls == step * (4 if n_acc else 8) and set(seen) == {('sum', .5, 4)}
    monkeypatch.setattr(xr, '_WORLD_SIZE', 1); calls.clear()
    one = build(device, mode, model=smooth(), cbs=cbs); one.fit(1, .01)
    assert 'reduce' not in calls and close(params(one), params(learn), 1e-5)


# -- the environment

VARIABLES = {'XLA_USE_BF16': 'It overrides autocast', 'XLA_DOWNCAST_BF16': 'It overrides autocast',
             'XLA_USE_F16': 'It has no effect'}


@pytest.mark.parametrize('name', VARIABLES)
@pytest.mark.parametrize('mode', MODES)
def test_variables_that_override_autocast_are_named(mode, name, device, monkeypatch):
    monkeypatch.setenv(name, '1')
    with pytest.warns(UserWarning, match=f'{name} is set. {VARIABLES[name]}'): build(device, mode).fit(1)
    monkeypatch.setenv(name, '0')
    test_no_warning_without_them(device, mode)


@pytest.mark.parametrize('name', VARIABLES)
def test_what_the_warnings_say_is_so(name, device):
    code = "import torch, torch_xla; print((torch.ones(1, device=torch_xla.device()) * 2 / 3).item())"
    out = python(code, **{name: '1'})
    assert (abs(float(out.stdout.split()[-1]) - 2 / 3) < 1e-6) == (name == 'XLA_USE_F16'), out.stderr


@pytest.mark.parametrize('mode', MODES)
def test_no_warning_without_them(device, mode):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        build(device, mode).fit(1)
    assert not [w for w in caught if 'environment variable' in str(w.message)]
