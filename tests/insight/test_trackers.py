"Which callbacks run on a copy: all that may change a training do, and those that track, record or save it do not."

import warnings

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.hook import ActivationStats, HookCallback
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.rnn import ModelResetter
from fastai.callback.schedule import ParamScheduler, SchedNo
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.learner import Recorder

from fastxtend_amp.insight.choices import Choice
from fastxtend_amp.insight.copies import copied_learner, note_of_left_out, runs_on_copy
from fastxtend_amp.precisions import Precision
from helpers import Attentive, learner, mlp, set_support
from models import Gives, Unpacks
from states import ASK

sent = []  # to a tracking service


class LikeWandb(Callback):
    "Starts a run, logs losses from inside the step, the state of the optimizer after it, and metrics of each epoch."

    order = 51

    def before_fit(self):
        sent.append(('init', self.n_epoch, self.opt_func.__name__))

    def after_loss(self):
        sent.append(('loss', self.train_iter, self.loss.item()))

    def after_batch(self):
        sent.append(('batch', len(self.xb[0]), [dict(h) for h in self.opt.hypers]))

    def after_epoch(self):
        sent.append(('epoch', self.recorder.metric_names))

    def after_fit(self):
        sent.append(('finish',))


@pytest.mark.parametrize('ask', ASK)
def test_a_tracker_is_not_called(ask, sleeps):
    sent.clear()
    ASK[ask](learner(cbs=LikeWandb()))
    assert sent == []


def test_a_diagnosis_in_mid_training_calls_no_tracker():
    found = []
    for on_overflow in ('ignore', 'warn'):
        learn = learner(Attentive(), cbs=LikeWandb()).to_fp16(on_overflow=on_overflow)
        sent.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1)
        assert any('Re-running that batch' in str(w.message) for w in caught) == (on_overflow == 'warn')
        found.append([s for s in map(repr, sent) if 'nan' not in s])
    assert found[0] == found[1] and len(found[0]) > 6


def kind(name, base=Callback, **attributes):
    return type(name, (base,), attributes)


class Mixes(Callback):
    "Mixes the activations of a layer, as a forward hook does that is registered for each batch; fails in bf16."

    def before_batch(self):
        other = torch.zeros(4, 8)
        self.hook = self.learn.model[0].register_forward_hook(lambda m, i, out: torch.lerp(out, other, 0.3))

    def after_pred(self):
        self.hook.remove()


RUN = [
    *(kind(name)() for name in 'Mix CutOut Penalty LogitPenalty Noise Accumulate Programs'.split()),
    *(GradientClip(1.0), kind('MyClip', GradientClip)(1.0), kind('Hooks', HookCallback)(), ModelResetter(), Mixes()),
    *(kind('MyLogger', run_on_copy=True)(), kind('GradientCheckpointing')()),
]
LEFT_OUT = [
    *(kind(name)() for name in 'OwnProgress SavesBest GradientLogger MyWandb PlotLoss Recorder2'.split()),
    *(kind('Best', SaveModelCallback)(), kind('Norms', ActivationStats)(), CSVLogger(), Recorder()),
    *(ShowGraphCallback(), ParamScheduler({'lr': SchedNo(1, 1)}), kind('Mine', LikeWandb)()),
    kind('Callback2', __module__='wandb.integration.fastai')(),
    kind('Quiet', run_on_copy=False)(),
]


@pytest.mark.parametrize('cb', [*RUN, *LEFT_OUT], ids=lambda cb: type(cb).__name__)
def test_who_runs_on_copy(cb):
    learn, own = learner(cbs=cb), type(cb).__module__.startswith('fastai.')
    with copied_learner(learn, Choice(Precision())) as copy:
        assert runs_on_copy(cb) == (cb.name in [c.name for c in copy.cbs]) == (cb in RUN)
    assert cb.name in ' '.join(note_of_left_out(learn)) or cb in RUN or own


@pytest.mark.filterwarnings('ignore')
def test_a_forward_hook_of_a_callback_runs_in_the_report_as_in_a_fit():
    "`lerp` of bf16 and fp32 fails in a fit, and the report says so."
    learn = learner(cbs=Mixes())
    assert 'does not run in bf16' in learn.precision_report('bf16').verdicts['bf16'].reason
    assert learn.compare_precision('bf16', n_steps=2, n_seeds=0).table['support']['bf16'] == 'failed'
    assert not learn.model[0]._forward_hooks
    with pytest.raises(RuntimeError, match='expected dtype'):
        learn.to_bf16().fit(1)


@pytest.mark.parametrize('ask', ASK)
def test_a_learner_whose_loss_needs_a_callback_runs_with_it_or_its_name_is_in_the_error(ask, sleeps, monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')
    assert ASK[ask](learner(Gives(mlp()), cbs=Unpacks())) is not None
    with pytest.raises(AttributeError) as error:
        ASK[ask](learner(Gives(mlp()), cbs=kind('Quiet', Unpacks, run_on_copy=False)()))
    notes = getattr(error.value, '__notes__', ['quiet, run_on_copy = True'])  # Python 3.11
    assert 'quiet' in notes[0] and 'run_on_copy = True' in notes[0]
