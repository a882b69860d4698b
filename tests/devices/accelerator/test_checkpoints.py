"Checkpoints of an accelerator: resumed bit for bit, from the CPU and back to it, exported, copied, pickled."
import copy, pickle

import pytest, torch
from fastai.learner import load_learner

from helpers import *

SCALING = dict(init_scale=2. ** 20, growth_interval=3)       # overflows at the start and whenever it has grown
MODES = {
    'fp32': lambda learn: learn, 'bf16': lambda learn: learn.to_bf16(), 'fp16': lambda learn: learn.to_fp16(**SCALING),
    'half weights': lambda learn: learn.to_half_weights(), 'half fp16': lambda learn: learn.to_half_weights('fp16'),
    'flat masters': lambda learn: learn.to_half_weights(flat_master=True),
}
every_mode, every_opt = (
    pytest.mark.parametrize('mode', MODES),
    pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw', 'fused adamw']),
)
CPU = torch.device('cpu')


def new(mode, opt, path, n=0, device=None, seed=0):
    dls, model = loaders(n=48, device=device), mlp(seed)
    if mode == 'fp32': model.to(dls.device)                      # plain fastai resumes an `OptimWrapper` in no other way
    learn = MODES[mode](learner(model, dls, opt_func=OPTIMIZERS[opt], path=path))
    if n: learn.fit(n, .01)
    return learn


def state(learn): return None if learn.precision is None else learn.precision.state_dict()
def on_cpu(x): return [{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in x]


def assert_alike(a, b):
    "Parameters, buffers, the optimizer's memory and the loss scale."
    of = lambda learn: [t.detach().cpu() for t in (*learn.model.parameters(), *learn.model.buffers())]
    assert same(of(a), of(b)) and state(a) == state(b)
    assert same_state(on_cpu(opt_state(a.opt)), on_cpu(opt_state(b.opt)))


@every_opt
@every_mode
def test_exact_resume(mode, opt, tmp_path, device):
    straight = new(mode, opt, tmp_path, 2)
    new(mode, opt, tmp_path, 1).save('half way')
    second = new(mode, opt, tmp_path, seed=1).load('half way')
    assert {p.device for p in second.model.parameters()} == {device if mode == 'fp32' else CPU}
    second.fit(1, .01)
    assert {p.device for p in second.model.parameters()} == {device}
    assert_alike(straight, second)


@every_opt
@every_mode
def test_from_the_cpu_to_the_device_and_back(mode, opt, tmp_path, device):
    "Trained an epoch on each in turn, through files; the same as on the CPU alone."
    alone = new(mode, opt, tmp_path, 3, CPU)
    new(mode, opt, tmp_path, 1, CPU).save('from the CPU')
    there = new(mode, opt, tmp_path, seed=1).load('from the CPU', device=device)
    there.fit(1, .01)
    there.save('from the device')
    back = new(mode, opt, tmp_path, seed=2, device=CPU).load('from the device', device=CPU)
    back.fit(1, .01)
    assert {p.device for p in back.model.parameters()} == {CPU}
    assert_alike(alone, back)


@every_mode
def test_export_and_load_on_the_cpu(mode, tmp_path, device):
    learn = new(mode, 'adam', tmp_path, 1)
    expected, x = learn.get_preds()[0].cpu(), learn.dls.valid.one_batch()[0]
    learn.export()
    loaded = load_learner(tmp_path / 'export.pkl', cpu=True)
    assert {p.device for p in loaded.model.parameters()} == {CPU} and loaded.model.training is False or mode == 'fp32'
    with torch.no_grad(): torch.testing.assert_close(loaded.model.eval()(x.cpu()), expected[:4], rtol=.05, atol=.05)
    assert {p.device for p in learn.model.parameters()} == {device}
    learn.fit(1, .01)


@pytest.mark.parametrize(
    'how', [copy.deepcopy, lambda learn: pickle.loads(pickle.dumps(learn))], ids=['deepcopy', 'pickle']
)
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@every_mode
def test_copies_train_on_alike_and_share_nothing(mode, opt, how, tmp_path, device):
    learn = new(mode, opt, tmp_path, 1)
    learn.zero_grad()
    twin = how(learn)
    assert {p.device for p in twin.model.parameters()} == {device}
    assert not {p.data_ptr() for p in twin.model.parameters()} & {p.data_ptr() for p in learn.model.parameters()}
    before = params(learn)
    twin.fit(1, .01)
    assert same(params(learn), before)
    learn.fit(1, .01)
    assert_alike(learn, twin)


def test_the_loss_scale_goes_along_to_another_device(device):
    "One learner, moved: the scaler's tensors are made anew, on the device of the next loss."
    learn = learner(mlp(), loaders(n=48, device=CPU)).to_fp16(**SCALING)
    learn.fit(1, .01)
    before, scales = state(learn), learn.precision.scales
    learn.dls.to(device)
    learn.model.to(device)
    learn.opt, seen = None, []
    learn.add_cb(At('before_backward', lambda l: seen.append(state(l)), 5))
    learn.fit(1, .01)
    assert seen[0] == before and learn.precision.scales[:12] == scales and len(learn.precision.scales) == 24
    assert learn.precision.scaling.scaler._scale.device.type == device.type


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_predict(mode, device):
    "One item, by fastai's own `predict`: as on the CPU."
    from fastai.data.core import Datasets
    x, y = dataset(24).tensors
    def predicted(device):
        data = Datasets(range(24), [[lambda i: x[i]], [lambda i: y[i]]], splits=[range(16), range(16, 24)])
        learn = learner(mlp(), data.dataloaders(bs=4, num_workers=0, device=torch.device(device), shuffle=False))
        getattr(learn, f'to_{mode}')()
        return learn.predict(3)[2]
    there, here = predicted(device), predicted('cpu')
    assert there.dtype is torch.float32
    torch.testing.assert_close(there.cpu(), here)
