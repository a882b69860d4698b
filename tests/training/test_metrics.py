"The loss scale and skipped steps in fastai's table and loggers; and what the callback costs in a step."

import csv

import pytest
from fastai.callback import core
from fastai.callback.progress import CSVLogger
from torch.profiler import ProfilerActivity, profile

from fastxtend_amp import LossScaleMetric, SkippedStepsMetric
from fastxtend_amp.training.loop import precision_callback
from helpers import At, learner, loaders, spoil_at
from rows import EXTRA, OPTS, To, make

BOTH = [LossScaleMetric, SkippedStepsMetric]


def logged(learn):
    "The last two columns of the Recorder's table, by epoch."
    return [[*row[-2:]] for row in learn.recorder.values]


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_table_has_the_scale_and_the_skips_of_each_epoch(opt, tmp_path):
    learn = learner(metrics=BOTH, opt_func=OPTS[opt], path=tmp_path, cbs=[CSVLogger(), spoil_at(2, 7, 8)])
    learn.to_fp16(init_scale=256.0).fit(2, 0.01)
    assert logged(learn) == [[128.0, 1], [32.0, 2]]
    rows = list(csv.DictReader((tmp_path / 'history.csv').open()))
    assert [(float(r['loss_scale']), int(r['skipped_steps'])) for r in rows] == [(128.0, 1), (32.0, 2)]
    learn.remove_cb(learn.at).fit(1, 0.01)
    learn.validate()
    assert logged(learn) == [[32.0, 0]] == [learn.final_record[-2:]]


def test_after_load_they_are_the_files_scale_and_the_skips_of_the_epoch(tmp_path):
    first, second = (
        learner(metrics=BOTH, path=tmp_path, cbs=spoil_at(*at)).to_fp16(init_scale=256.0) for at in ((1, 2), (3, 8))
    )
    first.fit(1, 0.01)
    first.save('model')
    second.load('model').add_cb(At('before_epoch', lambda l: l.epoch and l.load('model'), 20))
    second.fit(2, 0.01)
    assert logged(first) == [[64.0, 2]] and logged(second) == [[32.0, 1]] * 2


@pytest.mark.parametrize('to', ['bf16', 'fp32'])
def test_without_a_loss_scale_both_are_0(to):
    learn = make(to, metrics=BOTH)
    learn.fit(1)
    assert logged(learn) == [[0, 0]]


# -- what a step costs

EXTRA['low'] = To('fp16', dict(loss_scale=0.25))
STEPS = 12


def n_reads(f):
    "Count how often `f()` reads a tensor's value on the CPU, which synchronizes with a device."
    with profile(activities=[ProfilerActivity.CPU]) as p:
        f()
    return sum(e.name == 'aten::_local_scalar_dense' for e in p.events())


@pytest.mark.parametrize(
    'to, opt, per_step', [('bf16', 'adamw', 0), ('fp16', 'adam', 1), ('skipping', 'adamw', 1), ('low', 'adam', 1)]
)
def test_values_that_are_read_in_a_step(to, opt, per_step):
    "Beyond those of fp32; as many as a hand-written loop reads, and a few in a fit."

    def read(to):
        learn = make(to, opt=opt, dls=loaders(n=4 * STEPS), cbs=[At('before_validate', no_validation)])
        if precision_callback(learn):
            learn.mixed_precision.on_overflow = 'ignore'
        learn.fit(1, 0.01)
        return n_reads(lambda: learn.fit(1, 0.01))

    def no_validation(l):
        raise core.CancelValidException

    assert 0 <= read(to) - read('fp32') - per_step * STEPS <= 5
