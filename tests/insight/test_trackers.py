"Which callbacks run on a copy: all that may change a training do, and those that track, record or save it do not."

import time, warnings

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.hook import ActivationStats, HookCallback
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.learner import Recorder
from torch import nn

from fastxtend_amp.insight.copies import copied_learner, left_out, takes_part
from helpers import Attentive, Data, dataset, learner, loaders, mlp
from states import Gives


class Service:
    "Replaces a tracking service: keeps what is sent to it."

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append(name)


service = Service()  # as `wandb` and `mlflow` are modules


class LikeWandb(Callback):
    "Starts a run and watches the model, times batches, logs scalars after each batch and metrics after each epoch."

    order = 51

    def __init__(self):
        self.loss, self.data = None, []

    def before_fit(self):
        service.init(project='p')
        service.watch(self.learn.model)
        self._step, self._epoch = 0, 0

    def before_batch(self):
        self.began = time.perf_counter()

    def after_batch(self):
        if self.training:
            self._step += 1
            self._epoch += 1 / self.n_iter
            hypers = {f'{k}_{i}': v for i, h in enumerate(self.opt.hypers) for k, v in h.items()}
            service.log(dict(train_loss=self.loss, **hypers), step=self._step)
            service.log({'samples_per_sec': len(self.xb[0]) / (time.perf_counter() - self.began)})

    def after_epoch(self):
        service.log(dict(zip(self.recorder.metric_names, self.recorder.log)))

    def after_fit(self):
        service.finish()


class LikeTensorBoard(Callback):
    "Opens a writer and draws the graph, keeps features of a hook, adds scalars."

    def before_fit(self):
        self.writer = service
        self.writer.add_graph(self.learn.model)

    def after_pred(self):
        self.feat = self.pred.detach()

    def after_batch(self):
        self.writer.add_scalar('train_loss', self.loss, self.train_iter)
        for h in self.opt.hypers:
            for k, v in h.items():
                self.writer.add_scalar(k, v, self.train_iter)

    def after_fit(self):
        self.writer.close()


class LikeMlflow(Callback):
    "Logs parameters when a fit begins, and losses and norms of gradients from inside the step."

    def before_fit(self):
        service.start_run()
        service.log_params({'epochs': self.n_epoch, 'opt': self.opt_func.__name__})

    def after_loss(self):
        self.loss = self.learn.loss.item()
        self.loss += 0
        service.log_metric('loss', self.loss, step=self.train_iter)

    def before_step(self):
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        for _ in norms[:1]:
            service.log_metric(key='norm', value=float(torch.stack(norms).norm()), loss=self.learn.loss)

    def after_step(self):
        service.log_metric('lr', self.opt.hypers[-1]['lr'])

    def after_epoch(self):
        service.log_metrics(dict(zip(self.recorder.metric_names, self.recorder.log)))


TRACKERS = LikeWandb, LikeTensorBoard, LikeMlflow


@pytest.mark.parametrize('tracker', TRACKERS)
@pytest.mark.parametrize(
    'ask',
    [
        lambda l: l.precision_report(),
        lambda l: l.compare_precision(('bf16', 'fp16'), n_steps=3, n_seeds=1),
        lambda l: l.to_amp(measure=True, max_seconds=2),
    ],
    ids=['report', 'comparison', 'choice'],
)
def test_a_tracker_is_not_called(tracker, ask):
    learn = learner(cbs=tracker())
    service.calls.clear()
    ask(learn)
    assert service.calls == []


@pytest.mark.parametrize('tracker', TRACKERS)
def test_a_diagnosis_in_mid_training_calls_no_tracker(tracker):
    "A tracker sends the same in a fit with a diagnosis as in a fit without one."
    sent = []
    for on_overflow in ('ignore', 'warn'):
        learn = learner(Attentive(), cbs=tracker()).to_fp16(on_overflow=on_overflow)
        service.calls.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1)
        assert any('Re-running that batch' in str(w.message) for w in caught) == (on_overflow == 'warn')
        sent.append([*service.calls])
    assert sent[0] == sent[1] and len(sent[0]) > 6


class Unpack(Callback):
    def after_pred(self):
        self.learn.pred = self.pred['logits']


class Mix(Callback):
    def before_batch(self):
        l = self.learn
        l.xb, l.yb = tuple(x.roll(1, 0) for x in l.xb), tuple(y.roll(1, 0) for y in l.yb)


class CutOut(Callback):
    def before_batch(self):
        self.x[:, 2:] = 0


class Penalty(Callback):
    def after_loss(self):
        self._add(0.1)

    def _add(self, weight):
        self.learn.loss_grad += weight * sum(p.square().sum() for p in self.model.parameters())


class Clip(Callback):
    @torch.no_grad()
    def before_step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class Noise(Callback):
    def after_backward(self):
        for p in self.model.parameters():
            p.grad.add_(0.1 * torch.randn_like(p.grad))


class Accumulate(Callback):
    def after_backward(self):
        if self.train_iter % 2:
            raise CancelBatchException()


class Auxiliary(Callback):
    def after_loss(self):
        loss = sum(p.square().sum() for p in self.model.parameters())
        self.learn.precision.scale_loss(loss).backward()


class MyClip(GradientClip):
    pass


class ManifoldMixup(Callback):
    "Mixes the activations of a layer, as a forward hook does that is registered for each batch."

    def before_batch(self):
        self.hook = self.learn.model[0].register_forward_hook(lambda m, i, out: torch.lerp(out, out.flip(0), 0.3))

    def after_pred(self):
        self.hook.remove()


class Hooks(HookCallback):
    "Derived from fastai's base class for hooks, which says nothing of what they do."

    def hook(self, m, i, o):
        return o


class LogitPenalty(Penalty):
    "Does not log."


RUN = Unpack, Mix, CutOut, Penalty, Clip, Noise, Accumulate, Auxiliary, lambda: MyClip(1.0), ManifoldMixup, LogitPenalty


@pytest.mark.parametrize('cb', RUN)
def test_what_changes_the_step_takes_part(cb):
    assert takes_part(cb()) and takes_part(Hooks()) and left_out(learner(cbs=cb())) == []
    with copied_learner(learner(cbs=cb())) as copy:
        assert copy.cbs[-1].name in vars(copy) and len(copy.cbs) == 3


class OwnProgress(Callback):
    pass


class SavesBest(Callback):
    pass


class Best(SaveModelCallback):
    pass


class Norms(ActivationStats):
    pass


@pytest.mark.parametrize('cb', [*TRACKERS, OwnProgress, SavesBest, Best, Norms, CSVLogger, Recorder, ShowGraphCallback])
def test_trackers_recorders_and_savers_do_not(cb):
    learn = learner(cbs=(cb := cb()))
    assert not takes_part(cb)
    own = type(cb).__module__.startswith('fastai.')
    assert left_out(learn) == [] if own else left_out(learn)[0].startswith(f'Callbacks left out: {cb.name}. If')


def test_a_callback_of_a_tracking_package_does_not():
    cls = type('Callback2', (Callback,), {'__module__': 'wandb.integration.fastai'})
    assert not takes_part(cls())


@pytest.mark.filterwarnings('ignore')
def test_a_forward_hook_of_a_callback_runs_in_the_report_as_in_a_fit():
    "`lerp` of bf16 and fp32 fails in a fit, and the report says so."

    class Mixes(ManifoldMixup):
        def before_batch(self):
            other = torch.zeros(4, 8)
            hook = lambda m, i, out: torch.lerp(out, other, 0.3)
            self.hook = self.learn.model[0].register_forward_hook(hook)

    learn = learner(cbs=Mixes())
    before = [*learn.model[0]._forward_hooks]
    verdict = learn.precision_report('bf16').verdicts['bf16']
    assert verdict.verdict == 'keep modules in fp32' and 'does not run in bf16' in verdict.reason
    assert learn.compare_precision('bf16', n_steps=2, n_seeds=0).table['support']['bf16'] == 'failed'
    assert [*learn.model[0]._forward_hooks] == before
    with pytest.raises(RuntimeError, match='expected dtype'):
        learn.to_bf16().fit(1)


def test_a_callback_says_it_for_itself():
    "Set by an attribute of the class, or of one callback."
    quiet, asked = Unpack(), LikeMlflow()
    quiet.run_on_copy, asked.run_on_copy = False, True
    assert takes_part(asked) and not takes_part(quiet) and takes_part(Unpack()) and not takes_part(LikeMlflow())
    clip = GradientClip(1.0)
    clip.run_on_copy = False
    assert not takes_part(clip)
    report = learner(cbs=LikeMlflow()).precision_report('bf16')
    assert 'Callbacks left out: like_mlflow.' in ' '.join(report.notes)


class Quiet(Unpack):
    run_on_copy = False


@pytest.mark.parametrize(
    'ask',
    [lambda l: l.precision_report('bf16'), lambda l: l.compare_precision('bf16'), lambda l: l.to_amp(measure=True)],
    ids=['report', 'comparison', 'choice'],
)
def test_a_learner_whose_loss_needs_a_callback_runs_with_it_or_is_refused_with_its_name(ask, sleeps):
    assert ask(learner(Gives(mlp()), cbs=Unpack())) is not None
    with pytest.raises(AttributeError) as error:
        ask(learner(Gives(mlp()), cbs=Quiet()))
    notes = getattr(error.value, '__notes__', ['quiet, run_on_copy = True'])  # Python 3.11
    assert 'quiet' in notes[0] and 'run_on_copy = True' in notes[0]


class Teacher(Callback):
    "Distills another learner."

    def __init__(self, teacher):
        self.teacher = teacher

    def after_loss(self):
        with torch.no_grad():
            wanted = self.teacher.model(*self.xb)
        self.learn.loss_grad += nn.functional.mse_loss(self.pred, wanted)


def test_the_data_of_a_teacher_is_shared():
    class Once(Data):
        copies = 0

        def __deepcopy__(self, memo):
            Once.copies += 1
            return self

    teacher = learner(mlp(1), loaders(train=Once(*dataset().tensors)))
    learn = learner(cbs=Teacher(teacher))
    learn.precision_report()
    learn.compare_precision('bf16', n_steps=2, n_seeds=1)
    with copied_learner(learn) as copy:
        assert copy.teacher.teacher.dls is teacher.dls and copy.teacher.teacher.model is not teacher.model
    assert Once.copies == 0
