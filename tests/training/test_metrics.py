"The loss scale and skipped steps in the table and in loggers; steps skipped in bf16; a temporary precision."

import copy, csv, pickle
from contextlib import nullcontext

import pytest, torch
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation, GradientClip
from torch.profiler import ProfilerActivity, profile

from fastxtend_amp import gradient_norm, loss_scale, skipped_steps
from fastxtend_amp.training import loop, scaling
from helpers import *

METRICS = [nn.functional.l1_loss, loss_scale, skipped_steps]


def logged(learn, column):
    "The last columns of the Recorder's table."
    return [row[learn.recorder.metric_names[1:].index(column)] for row in learn.recorder.values]


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_table_has_the_scale_and_the_skips_of_each_epoch(opt):
    learn = learner(metrics=METRICS, opt_func=OPTIMIZERS[opt], cbs=spoil_at(2, 7, 8)).to_fp16(init_scale=256.0)
    learn.fit(2, 0.01)
    assert logged(learn, 'skipped_steps') == [1, 2] and logged(learn, 'loss_scale') == [128.0, 32.0]
    learn.remove_cb(learn.at).fit(1, 0.01)
    assert logged(learn, 'skipped_steps') == [0] and logged(learn, 'loss_scale') == [32.0]
    learn.validate()
    assert learn.final_record[-2:] == [32.0, 0]


def test_after_load_they_are_the_files_scale_and_the_skips_of_the_epoch(tmp_path):
    def made(*steps):
        return learner(metrics=METRICS, path=tmp_path, cbs=spoil_at(*steps)).to_fp16(init_scale=256.0)

    first = made(1, 2)
    first.fit(1, 0.01)
    first.save('model')
    second = made(3, 8).load('model')
    second.add_cb(At('before_epoch', lambda l: l.epoch and l.load('model'), 20))  # at the second epoch again
    second.fit(2, 0.01)
    assert logged(first, 'loss_scale') == [64.0] and logged(first, 'skipped_steps') == [2]
    assert logged(second, 'loss_scale') == [32.0, 32.0] and logged(second, 'skipped_steps') == [1, 1]


def test_they_read_from_the_device_at_the_end_of_an_epoch_alone(monkeypatch):
    learn, in_batch = learner(metrics=METRICS, opt_func=OPTIMIZERS['fused adamw']).to_fp16(init_scale=256.0), []

    def noting(name, owner):
        plain = getattr(owner, name)

        def read(self):
            in_batch.append(loop.in_batch(learn))
            return plain(self)

        monkeypatch.setattr(owner, name, read)

    noting('get_scale', torch.amp.GradScaler)
    noting('read', scaling.StepHistory)
    learn.fit(2, 0.01)
    assert in_batch and not any(in_batch) and logged(learn, 'loss_scale') == [256.0, 256.0]


@pytest.mark.parametrize('to', ['to_bf16', 'to_fp32'])
def test_without_a_loss_scale_both_are_0(to):
    learn = getattr(learner(metrics=METRICS), to)()
    learn.fit(1)
    assert logged(learn, 'loss_scale') == logged(learn, 'skipped_steps') == [0]


def test_in_files_of_loggers(tmp_path):
    learn = learner(metrics=METRICS, path=tmp_path, cbs=[CSVLogger(), spoil_at(1)]).to_fp16(init_scale=256.0)
    learn.fit(2, 0.01)
    rows = list(csv.DictReader((tmp_path / 'history.csv').open()))
    assert [float(r['loss_scale']) for r in rows] == [128.0, 128.0] and [int(r['skipped_steps']) for r in rows] == [
        1,
        0,
    ]


def test_in_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learner(metrics=METRICS, cbs=[board, spoil_at(1)]).to_fp16(init_scale=256.0).fit(2, 0.01)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in events.Scalars('loss_scale')] == [128.0, 128.0]
    assert [e.value for e in events.Scalars('skipped_steps')] == [1, 0]


def test_copies_and_files_keep_the_metrics_and_exports_do_without(tmp_path):
    learn = learner(metrics=METRICS, path=tmp_path).to_fp16(init_scale=256.0)
    learn.fit(1)
    for twin in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))):
        assert [type(metric) for metric in twin.metrics[1:]] == [loss_scale, skipped_steps]
    learn.export('model.pkl')
    assert b'fastxtend_amp' not in (tmp_path / 'model.pkl').read_bytes() and len(learn.metrics) == 3
    assert learn.precision.scale == 256.0


# -- the norm of the gradients


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_norm_of_the_true_gradients_of_the_epochs_last_step(mode, opt):
    "Before clipping, and with an accumulation whose last step is not in the last batch."
    seen = []

    def note(l):
        grads = [p.grad.flatten() for p in l.model.parameters()]
        seen.append((l.epoch, torch.cat(grads).norm().item()))

    learn = learner(metrics=[gradient_norm], opt_func=OPTIMIZERS[opt], cbs=[mixed(mode), At('before_step', note, 10.5)])
    learn.add_cbs([GradientAccumulation(8), GradientClip(0.1)])
    learn.fit(2, 0.01)
    last = dict(seen)
    assert logged(learn, 'gradient_norm') == pytest.approx([last[0], last[1]], rel=1e-5) and last[1] > 0.1
    assert learn.validate()[-1] == pytest.approx(last[1], rel=1e-5)
    learn.remove_cb(learn.at)
    for twin in (copy.deepcopy(learn), pickle.loads(pickle.dumps(learn))):
        twin.fit(1, 0.01)
        assert logged(twin, 'gradient_norm')[0] > 0


def test_the_norm_leaves_out_steps_that_the_host_skips_and_is_nothing_without_a_precision():
    learn = learner(metrics=[gradient_norm], cbs=[mixed('fp16'), spoil_at(4, 5)])
    learn.fit(1, 0.01)
    assert 0 < logged(learn, 'gradient_norm')[0] < 100 and learn.precision.skips[-2:] == [True, True]
    learn.to_fp32().fit(1)
    assert logged(learn, 'gradient_norm') == [0]


def test_the_norm_reads_nothing_in_a_batch_and_without_the_metric_computes_nothing():
    def operators(metrics):
        learn = learner(metrics=metrics, opt_func=OPTIMIZERS['fused adamw']).to_bf16(on_overflow='ignore')
        learn.fit(1, 0.01)
        with profile(activities=[ProfilerActivity.CPU]) as p:
            learn.fit(1, 0.01)
        return [e.name for e in p.events()]

    without, with_norm = operators([]), operators([gradient_norm])
    reads = lambda names: names.count('aten::_local_scalar_dense')
    assert 'aten::_foreach_norm' not in without and with_norm.count('aten::_foreach_norm') == 6
    assert 1 <= reads(with_norm) - reads(without) <= 2  # at the end of the epoch


# -- skipping in bf16


@pytest.mark.parametrize('acc', [(), (8,)])
@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_no_finite_number_changes(opt, acc):
    kwargs = dict(opt_func=OPTIMIZERS[opt])
    plain, skipping = (
        learner(cbs=[*map(GradientAccumulation, acc), MixedPrecision('bf16', skip_nonfinite=skip)], **kwargs)
        for skip in (False, True)
    )
    for l in (plain, skipping):
        l.fit(2, 0.01)
    assert same(params(plain), params(skipping)) and same_state(opt_state(plain.opt), opt_state(skipping.opt))
    assert plain.precision.scales == [] and set(skipping.precision.scales) == {1.0}
    assert not any(skipping.precision.skips) and skipping.precision.scale is None


@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(opt):
    learn, states = learner(opt_func=OPTIMIZERS[opt], cbs=spoil_at(2)).to_bf16(skip_nonfinite=True), []
    learn.add_cb(At('after_batch', lambda l: l.training and states.append((params(l), opt_state(l.opt))), 70))
    learn.fit(1, 0.01)
    assert same(states[1][0], states[2][0]) and same_state(states[1][1], states[2][1]) and finite(learn)
    assert learn.precision.skips == [False, False, True, False, False, False] and learn.precision.n_skipped == 1
    assert learn.precision.state_dict() == {}
    lost = learner(opt_func=OPTIMIZERS[opt], cbs=spoil_at(2)).to_bf16()
    lost.fit(1, 0.01)
    assert not finite(lost)


def test_many_skips_in_bf16_are_warned_of():
    learn = learner(cbs=spoil_at(*range(6))).to_bf16(skip_nonfinite=True, max_skips=3)
    words = told(lambda: learn.fit(1, 0.01), '3 steps in a row were skipped')
    assert len(words) == 1 and 'loss scale' not in words[0].splitlines()[0]
    learn = learner(cbs=spoil_at(*range(6))).to_bf16(skip_nonfinite=True)
    words = told(lambda: learn.fit(1, 0.01), 'Nothing was learned')
    assert len(words) == 1 and 'loss scale' not in words[0]


def test_gradients_at_the_end_of_a_fit_are_those_of_plain_bf16():
    "Of parameters outside the optimizer, and after an exception."

    def stop(l):
        raise KeyboardInterrupt

    def left(skip, cbs):
        learn = learner(splitter=lambda m: [list(m[0].parameters())], cbs=cbs)
        try:
            learn.to_bf16(skip_nonfinite=skip).fit(1, 0.01)
        except KeyboardInterrupt:
            pass
        return plain_grads(learn)

    for cbs in ([], [At('before_step', stop, 20)]):
        assert same(left(False, cbs), left(True, cbs))


# -- a temporary precision


@pytest.mark.parametrize('to', ['fp32', 'bf16', torch.bfloat16, MixedPrecision('bf16', fp32_modules='0')])
def test_precision_as_leaves_the_training_as_it_was(to):
    learn, plain = (learner(cbs=mixed('fp16', fp32_modules='3', init_scale=2.0**18)) for _ in range(2))
    cb, dtypes = learn.precision, output_dtypes(learn, learn.model[3])
    for l in (learn, plain):
        l.fit(1, 0.01)
    before = cb.state_dict(), cb.scales
    with learn.precision_as(to) as inside:
        assert inside is learn and learn.precision is not cb
        learn.validate()
    assert learn.precision is cb and (cb.state_dict(), cb.scales) == before and cb.fp32_module_names == ['3']
    for l in (learn, plain):
        l.fit(1, 0.01)
    assert same(params(learn), params(plain)) and cb.scales == plain.precision.scales and set(dtypes) == {torch.float32}


def test_precision_as_inside_a_fit_goes_on_bit_for_bit():
    "With an unfinished accumulation, whose count fastai itself restarts after a validation inside a fit."

    def run(context):
        busy = []

        def evaluate(l):
            if not busy:
                busy.append(1)
                with context(l):
                    l.validate()
                busy.clear()

        learn = learner(
            cbs=[mixed('fp16', growth_interval=3), GradientAccumulation(16), At('after_train', evaluate, 40)]
        )
        learn.fit(3, 0.01)
        return params(learn), learn.precision.scales, learn.precision.state_dict()

    (weights, *rest), (other, *other_rest) = run(lambda l: nullcontext()), run(lambda l: l.precision_as('fp32'))
    assert same(weights, other) and rest == other_rest


def test_precision_as_nests_and_ends_after_an_exception_and_is_refused_in_a_batch():
    learn = learner().to_fp16(init_scale=256.0)
    cb = learn.precision
    with pytest.raises(KeyError), learn.precision_as('bf16'):
        with learn.precision_as('fp32'):
            assert learn.precision is None
        assert learn.precision.amp_mode == 'bf16'
        raise KeyError
    assert learn.precision is cb

    def inside(l):
        with l.precision_as('fp32'):
            pass

    with pytest.raises(RuntimeError, match='middle of a batch'):
        learn.fit(1, cbs=At('after_pred', inside))
    with pytest.raises(ValueError, match='amp_mode'), learn.precision_as('fp64'):
        pass
    assert learn.precision is cb and not left_on(learn.to_fp32())
