"Checkpoints hold fp32 masters, inside a fit too, and training goes on from them exactly."
import subprocess, sys
from pathlib import Path

import pytest, torch
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import Adam

from helpers import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')
TESTS = Path(__file__).resolve().parents[1]


def halves(learn): return [n for n, p in learn.model.named_parameters() if p.dtype is not torch.float32]


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_saved_and_loaded_inside_fit(tmp_path, flat, opt):
    seen = {}
    def save(l):
        if l.train_iter == 3: l.save('mid'); seen['saved'] = params(l), opt_state(l.opt)
    def back(l):
        if l.train_iter == 5: l.load('mid'); seen['loaded'] = params(l), opt_state(l.opt)
    learn = learner(opt_func=OPTIMIZERS[opt], path=tmp_path, cbs=[At('after_batch', save, order=20), At('after_batch', back, order=21)])
    learn.to_half_weights(flat_master=flat).fit(1, .01)
    assert same(seen['saved'][0], seen['loaded'][0]) and same_state(seen['saved'][1], seen['loaded'][1])
    state = torch.load(tmp_path / 'models' / 'mid.pth', weights_only=False)
    assert same([v for v in state['model'].values() if v.is_floating_point()][:2], seen['saved'][0][:2])
    assert {v.dtype for v in state['model'].values()} <= {torch.float32, torch.int64}
    assert all(v.dtype is torch.float32 for s in seen['loaded'][1] for v in s.values() if isinstance(v, torch.Tensor))
    others = [learner(opt_func=OPTIMIZERS[opt], path=tmp_path) for _ in range(2)]
    for other in others: other.create_opt(); other.load('mid')
    others[1].to_half_weights(flat_master=True).to_fp32()
    for other in others: other.fit(1, .01)
    assert same(*map(params, others)) and same_state(*(opt_state(o.opt) for o in others))


@pytest.mark.parametrize('flat', [False, True])
def test_save_model_callback_keeps_the_masters(tmp_path, flat):
    kept = []
    learn = learner(opt_func=Adam, path=tmp_path, cbs=At('after_epoch', lambda l: kept.append(params(l)), order=11)).to_half_weights(flat_master=flat)
    learn.fit(2, .01, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
    for i in (0, 1):
        other = learner(opt_func=Adam, path=tmp_path)
        other.create_opt(); other.load(f'model_{i}')
        assert same(params(other), kept[i]) and not halves(other)
        other.fit(1, .01)
    assert not same(*kept)


WAYS = [('bf16', 'adam', False), ('fp16', 'adam', True), ('fp16', 'fused adamw', False)]
RESUME = """
import sys; sys.path[:0] = [{tests!r}]
from helpers import *
torch.set_num_threads(1)
for i, (dtype, opt, flat) in enumerate({ways!r}):
    learn = learner(opt_func=OPTIMIZERS[opt], path={path!r}).to_half_weights(dtype, flat_master=flat)
    learn.create_opt(); learn.load(f'a{{i}}'); learn.fit(1, .01); learn.save(f'b{{i}}')
"""

def test_exact_resume_in_a_new_process(tmp_path):
    learns = [learner(opt_func=OPTIMIZERS[opt], path=tmp_path).to_half_weights(dtype, flat_master=flat) for dtype, opt, flat in WAYS]
    for i, learn in enumerate(learns): learn.fit(2, .01); learn.save(f'a{i}'); learn.fit(1, .01)
    code = RESUME.format(tests=str(TESTS), path=str(tmp_path), ways=WAYS)
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    for i, learn in enumerate(learns):
        expected = params(learn), opt_state(learn.opt), learn.precision.state_dict()
        learn.load(f'b{i}')
        assert same(params(learn), expected[0]) and same_state(opt_state(learn.opt), expected[1]) and learn.precision.state_dict() == expected[2]
