"Beside fastai's own callback, on a CPU: what a batch costs the host, and what README says of it."

import math, sys

import pytest, torch
from fastai.callback import fp16

from fastxtend_amp.compat import autocast_restored
from helpers import ROOT, At, finite, learner

sys.path.insert(0, str(ROOT))
from nbs.benchmarks import calls  # noqa: E402


@pytest.mark.parametrize('precision, share', [('bf16', 0.5), ('fp16', 0.75)])
def test_a_batch_costs_less_than_with_fastais_callback(precision, share):
    "Calls of Python and C functions; an operator more to read the loss, and in fp16 one to keep the scale."
    fp32, fastais, ours = (
        calls.per_batch(way, name)
        for way, name in ((calls.fastais, 'fp32'), (calls.fastais, precision), (calls.ours, precision))
    )
    for a, b, c in [*zip(fp32, fastais, ours)][:2]:
        assert c - a < share * (b - a)
    assert ours[2] <= fastais[2] + (2 if precision == 'fp16' else 1)


@pytest.mark.filterwarnings('ignore')
def test_what_readme_says_of_fastais_callback(tmp_path, monkeypatch):
    own = lambda: fp16.MixedPrecision(init_scale=2.0)
    overflow = At('before_batch', lambda l: l.training and l.iter == 1 and l.xb[0].fill_(math.inf))
    scales, reads, item = [], [], torch.Tensor.item
    log = At('after_step', lambda l: scales.append(l.scaler.get_scale()), 11)
    with calls.fastais_on_cpu(), autocast_restored('cpu'):
        learn = learner(cbs=[own(), overflow, log], path=tmp_path)
        learn.fit(1)
        learn.load(learn.save('a').stem).fit(1)
        assert scales == [2.0, *[1.0] * 5] * 2  # each fit starts again, also from a file
        assert finite(learn) and learn.model[1].running_mean.isnan().all()  # the step was skipped, and NaN stays
        monkeypatch.setattr(torch.Tensor, 'item', lambda t: reads.append(t) or item(t))
        learner().fit(1)
        in_fp32 = len(reads)
        learner(cbs=own()).fit(1)
        assert len(reads) == 2 * (in_fp32 + 6)  # two more in each step
        with pytest.raises(ZeroDivisionError):
            learner(cbs=[own(), At('after_pred', lambda l: 1 / 0)]).fit(1)
        assert torch.is_autocast_enabled('cpu')  # stays on
        with pytest.raises(AssertionError, match='No inf checks were recorded'):
            learner(cbs=[own(), own()]).fit(1)
