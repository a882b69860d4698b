"The loss scale and skipped steps in fastai's table and loggers."

import csv

import pytest
from fastai.callback.progress import CSVLogger

from fastxtend_amp import LossScaleMetric, SkippedStepsMetric
from helpers import At, learner, spoil_at
from rows import OPTS, make

BOTH = [LossScaleMetric, SkippedStepsMetric]


def logged(learn):
    "The last two columns of the Recorder's table, by epoch."
    return [[*row[-2:]] for row in learn.recorder.values]


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_table_has_scale_and_skips(opt, tmp_path):
    learn = learner(metrics=BOTH, opt_func=OPTS[opt], path=tmp_path, cbs=[CSVLogger(), spoil_at(2, 7, 8)])
    learn.to_fp16(init_scale=256.0).fit(2, 0.01)
    assert logged(learn) == [[128.0, 1], [32.0, 2]]
    rows = list(csv.DictReader((tmp_path / 'history.csv').open()))
    assert [(float(r['loss_scale']), int(r['skipped_steps'])) for r in rows] == [(128.0, 1), (32.0, 2)]
    learn.remove_cb(learn.at).fit(1, 0.01)
    learn.validate()
    assert logged(learn) == [[32.0, 0]] == [learn.final_record[-2:]]


def test_scale_and_skips_after_load(tmp_path):
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
