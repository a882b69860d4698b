"On an NVIDIA GPU."
import warnings

import pytest, torch

from fastxtend_amp import AMPMode, MixedPrecision, precision_support
from helpers import *

pytestmark = pytest.mark.cuda


def cuda_learner(cb, opt='adam'):
    dls = loaders(n=48).to(torch.device('cuda'))
    return learner(mlp().cuda(), dls=dls, cbs=cb, opt_func=OPTIMIZERS[opt])


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_forward_runs_in_low_precision(mode):
    learn, dtypes = cuda_learner(MixedPrecision(mode)), set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add((o.dtype, o.device.type)))
    learn.fit(2, .01)
    assert dtypes == {(AMPMode(mode).dtype, 'cuda')} and not torch.is_autocast_enabled('cuda')
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_support_is_what_the_card_says():
    table = precision_support('cuda').set_index('mode').support
    assert table['bf16'] == ('native' if torch.cuda.get_device_capability()[0] >= 8 else 'emulated')
    assert table['fp16'] == 'native' and MixedPrecision('auto')._decide(torch.device('cuda')) is not None


@pytest.mark.parametrize('opt,syncs', [('adam', 1), ('fused adamw', 0)])
def test_host_syncs_as_a_difference_to_fp32(opt, syncs):
    def count(cb):
        learn = cuda_learner(cb, opt); learn.fit(1, .01)
        counts = []
        def begin(l): torch.cuda.set_sync_debug_mode('warn'); counts.append(len(caught))
        def end(l): counts.append(len(caught)); torch.cuda.set_sync_debug_mode('default')
        learn.add_cbs([At('after_pred', lambda l: l.training and begin(l), -100), At('after_step', lambda l: end(l), 100)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1, .01)
        return counts[-1] - counts[-2]
    assert count(MixedPrecision('fp16', init_scale=256.)) - count(None) == syncs


def test_scale_goes_from_cpu_to_cuda():
    cb = MixedPrecision('fp16', init_scale=2.**20)
    learn = learner(cbs=cb); learn.fit(1, .01); state = cb.state_dict()
    learn.dls.to(torch.device('cuda')); learn.opt = None
    seen = []
    learn.add_cb(At('before_backward', lambda l: seen.append(l.scaler.state_dict()), 5)); learn.fit(1, .01)
    assert seen[0] == state and cb.scaling.scaler._scale.device.type == 'cuda'
