"""What only XLA needs: moves in place, one graph a batch, replicas. See also test_accelerator.py.

On XLA's CPU device: `pip install torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0`, and `PJRT_DEVICE=CPU`.
"""

from functools import partial

import numpy as np, pytest, torch
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.transforms import Normalize
from fastai.optimizer import ranger
from fastai.text.models.awdlstm import WeightDropout
from torch import nn

from devices.test_accelerator import CPU, build, places
from helpers import At, dataset, opt_state, params, python
from training.rows import net

assert_close = partial(torch.testing.assert_close, check_device=False)


@pytest.fixture(autouse=True)
def xla(device):
    if device.type != 'xla':
        pytest.skip('needs torch_xla, and PJRT_DEVICE=CPU in the environment')


def test_nothing_imports_torch_xla_before_it_is_needed():
    done = python(
        '-c',
        "import sys; from helpers import learner; learn = learner()\n"
        "for precision in ('fp32', 'bf16', 'fp16', 'amp'): getattr(learn, f'to_{precision}')().fit(1)\n"
        "print('torch_xla' in sys.modules, [cb for cb in learn.cbs if 'XLA' in type(cb).__name__])\n"
        "learn.dls.to('xla'); import torch_xla; learn.fit(1)",
    )
    assert done.stdout.split('\n')[-2] == 'False []', done.stderr
    assert 'RuntimeError' in done.stderr and 'torch_xla.device()' in done.stderr.strip().split('\n')[-1], done.stderr


# -- from the CPU to XLA and back


class Special(nn.Module):
    """Weight norm keeps a graph, and two layers share a weight.

    fastai's optimizers have a state for a recurrent layer's `bias`, which is True.
    """

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.rnn = WeightDropout(nn.LSTM(1, 4, batch_first=True), 1e-9)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 1)))
        self.head[1].weight = self.head[0].weight

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0][:, -1])


@pytest.mark.parametrize(
    'precision, opt, model',
    [('fp16', 'adam', net), ('fp32', 'adamw', net), ('fp32', ranger, net), ('fp32', 'adam', Special)],
)
def test_refits_keep_parameters_and_state(precision, opt, model, device, tmp_path):
    moving, staying = (build(precision, opt, CPU, model=model(), path=tmp_path) for _ in range(2))
    tol = 1e-4 if precision == 'fp32' else 0.01
    objects = list(moving.model.parameters())  # moved in place: the optimizer has them
    for where in (CPU, device, CPU, device):
        moving.dls.to(where)
        for learn in (moving, staying):
            learn.fit(1, 0.01)
        moving.export()  # from the CPU, and back
        runs_graphs = 'XLADevice' in [type(cb).__name__ for cb in moving.cbs]
        assert all(p.device == where for p in objects) and runs_graphs == (where.type == 'xla')
    assert_close(params(moving), params(staying), rtol=tol, atol=tol)
    assert_close(*(opt_state(learn.opt) for learn in (moving, staying)), rtol=10 * tol, atol=10 * tol)
    if precision == 'fp16':
        assert moving.mixed_precision.state_dict() == staying.mixed_precision.state_dict()


def test_what_refers_to_the_parameters_is_named(device):
    learn = build('bf16', device=CPU)
    kept = learn.model(torch.randn(4, 6)).sum()
    learn.dls.to(device)
    with pytest.raises(RuntimeError, match="(?s)cannot be moved to 'xla:0' in place.*graph of a kept loss"):
        learn.fit(1)
    del kept
    learn.fit(1)
    assert places(learn) == {'xla'} and not torch.__future__.get_swap_module_params_on_conversion()
    learn.model.to(CPU)  # which creates other parameters
    learn.model.to(device)
    with pytest.raises(RuntimeError, match="(?s)none of the model's parameters.*learn.create_opt"):
        learn.fit(1)


# -- one graph a batch


def counts():
    "Return how often torch_xla has compiled, read a scalar, run a batch's graph, and copied to the CPU."
    import torch_xla.debug.metrics as met

    names = 'UncachedCompile', 'aten::_local_scalar_dense', 'MarkStep'
    copied = (met.metric_data('TransferFromDeviceTime') or [0])[0]
    return np.array([*(met.counter_value(name) or 0 for name in names), copied])


def counts_of_fit(learn, n_epoch):
    "One learner at a time: a graph holds what is put off in all."
    before, graphs = counts(), []
    learn.fit(n_epoch, 0.01, cbs=At('after_batch', lambda l: graphs.append(counts()[2]), 12))
    assert graphs == [*range(before[2] + 1, before[2] + n_epoch * (6 + 2) + 1)]  # before the loss is read
    learn.get_preds()
    return counts() - before


@pytest.mark.parametrize('precision, reads', [('bf16', 0), ('fp16', 1)])
def test_a_batch_is_one_graph_and_only_fp16_reads(precision, reads):
    def of_two_epochs(precision):
        learn = build(precision)
        *_, a, b = (counts_of_fit(learn, n) for n in (2, 2, 4, 2))
        assert a[0] == b[0] == 0  # two fits have compiled all
        return a - b

    _, read, _, copied = of_two_epochs(precision) - of_two_epochs('fp32')
    assert (read, copied) == (reads * 12, reads * 12 + 2 * (precision == 'fp16'))  # the history, once an epoch


# -- files

LOAD = """
import sys; sys.modules['torch_xla'] = None
import helpers
from fastai.learner import load_learner
print(next(load_learner(sys.argv[1]).model.parameters()).device)
"""


def test_files_load_where_there_is_no_torch_xla(device, tmp_path):
    normalize = Normalize.from_stats([0.0], [1.0], cuda=False)  # its tensors move with the loaders
    dls = DataLoaders.from_dsets(dataset(8), dataset(8), bs=4, num_workers=0, after_batch=normalize)
    learn = build('bf16', path=tmp_path, dls=dls)
    learn.fit(1)
    assert normalize.mean.device == device
    learn.export()
    assert learn.dls.device == device
    states = torch.load(learn.save('a'), weights_only=False)['model']
    assert {t.device.type for t in states.values()} == {'cpu'} and states._metadata['0'] == {'version': 1}
    done = python('-c', LOAD, learn.path / 'export.pkl', TORCH_DEVICE_BACKEND_AUTOLOAD='0')
    assert done.stdout.strip() == 'cpu', done.stderr[-2000:]


# -- several replicas, as far as one device can show them


def test_gradients_are_reduced_before_they_are_unscaled(monkeypatch):
    import torch_xla.core.xla_model as xm, torch_xla.runtime as xr

    scaled, unscaled = [], []

    def reduce(kind, gradients, scale, **kwargs):
        scaled.append(gradients[0].cpu() / 256.0)
        for g in gradients:
            g.mul_(2 * scale)  # two replicas with equal gradients

    def weights():
        look = At('before_step', lambda l: unscaled.append(l.model[0].weight.grad.cpu()), 20)
        learn = build('fp16', model=net(), cbs=[look, GradientAccumulation(8)])
        learn.fit(1, 0.01)
        return params(learn)

    monkeypatch.setattr(xm, 'all_reduce', reduce)
    expected = weights()
    assert not scaled
    unscaled.clear()
    monkeypatch.setattr(xr, 'world_size', lambda: 2)
    assert_close(weights(), expected)
    assert_close(scaled, unscaled)
