"Third-party code: callbacks, patches of `Learner`, modules, metrics."

import copy, subprocess, sys, textwrap, tracemalloc
from pathlib import Path

import pytest, torch
from fastai.callback.core import CancelStepException
from fastai.learner import load_learner
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fastxtend_amp import loss_scale, skipped_steps
from helpers import *


# -- callbacks of the same order


class Norms(Callback):
    "Record the norm of the gradients in each step, as a callback that clips them sees it."

    order = 10

    def __init__(self):
        self.found = []

    def before_step(self):
        norms = [p.grad.norm() for p in self.model.parameters()]
        self.found.append(float(torch.stack(norms).norm()))


def with_norms():
    learn = learner().to_fp16(init_scale=4096.0)
    learn.add_cb(norms := Norms())
    return learn, norms


def as_fp32(learn):
    with learn.precision_as('fp32'):
        learn.validate()


CHANGES = {
    'nothing': lambda learn: None,
    'precision_as': as_fp32,
    'export': lambda learn: told(lambda: learn.export('model.pkl')),
    'a switch': lambda learn: learn.to_fp16(init_scale=4096.0),
    'a switch by way of bf16': lambda learn: learn.to_bf16().to_fp16(init_scale=4096.0),
    'lr_find': lambda learn: learn.lr_find(num_it=2, show_plot=False, suggest_funcs=None),
    'a report': lambda learn: learn.precision_report(['bf16']),
}


@pytest.mark.parametrize('change', CHANGES)
def test_a_callback_of_the_same_order_sees_true_gradients(change, tmp_path):
    import fastai.callback.schedule  # noqa: F401  patches Learner

    learn, norms = with_norms()
    learn.path = tmp_path
    CHANGES[change](learn)
    norms.found.clear()
    learn.fit(1, 1e-3)
    assert len(norms.found) == 6
    assert max(norms.found) < 64


def test_a_switch_in_mid_batch_leaves_the_order_of_callbacks():
    learn, norms = with_norms()
    learn.add_cb(At('after_pred', lambda l: l.training and l.iter == 2 and l.to_fp16(init_scale=2048.0), 20))
    learn.fit(1, 1e-3)
    assert max(norms.found) < 64


# -- patches of Learner by other libraries

PATCHED = """
    import fastai.learner as fl, fastai.text.learner as ft, tempfile, torch
    called = []
    def patch(cls, name):
        original = getattr(cls, name)
        def other(self, *args, **kwargs):
            called.append(name)
            result = original(self, *args, **kwargs)
            if name == 'save': assert args == ('model',) and result.stat().st_size  # the file is complete
            return result
        setattr(cls, name, other)
    for name in ('save', 'load', 'export'): patch(fl.Learner, name)
    from helpers import *
    learn = learner(path=tempfile.mkdtemp())
    if {mode!r} != 'fp32': getattr(learn, 'to_{mode}')()
    learn.fit(1)
    learn.save('model')
    learn.load('model')
    learn.export('model.pkl')
    print(*called)
"""


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])
def test_patches_that_were_there_before_are_called(mode):
    "Each patch is called once, in every precision."
    import helpers

    code = textwrap.dedent(PATCHED.format(mode=mode))
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, cwd=Path(helpers.__file__).parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ['save', 'load', 'export']


STEPS = {'sgd': OPTIMIZERS['sgd'], 'fused adamw': OPTIMIZERS['fused adamw'], 'fused sgd': OPTIMIZERS['fused sgd']}


@pytest.mark.parametrize('opt', STEPS)
@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])
def test_a_patch_of_the_step_is_called_in_each_batch(monkeypatch, opt, mode):
    calls, original = [], Learner._step

    def step(self):
        calls.append(1)
        original(self)

    monkeypatch.setattr(Learner, '_step', step)
    learn = learner(opt_func=STEPS[opt])
    if mode != 'fp32':
        learn.add_cb(mixed(mode))
    learn.fit(1)
    assert len(calls) == 6


@pytest.mark.parametrize('opt', STEPS)
def test_a_patch_of_the_step_does_not_change_what_is_learned(monkeypatch, opt):
    plain, original = learner(opt_func=STEPS[opt], cbs=[mixed('fp16'), spoil_at(3)]), Learner._step
    plain.fit(1)
    monkeypatch.setattr(Learner, '_step', lambda self: original(self))
    learn = learner(opt_func=STEPS[opt], cbs=[mixed('fp16'), spoil_at(3)])
    learn.fit(1)
    assert learn.precision.skips == [False, False, False, True, False, False]
    assert same(params(plain), params(learn))


@pytest.mark.parametrize('opt', STEPS)
def test_a_step_of_a_class_of_ones_own_is_called_in_each_batch(opt):
    calls = []

    class Own(Learner):
        def _step(self):
            calls.append(1)
            super()._step()

    plain = learner(opt_func=STEPS[opt], cbs=[mixed('fp16'), spoil_at(3)])
    learn = learner(opt_func=STEPS[opt], cbs=[mixed('fp16'), spoil_at(3)], cls=Own)
    for l in (plain, learn):
        l.fit(1)
    assert len(calls) in (5, 6)  # the CPU may skip the step
    assert same(params(plain), params(learn))


def test_a_callback_of_the_users_named_precision_is_not_warned_of():
    class Mine(Callback):
        def before_fit(self):
            self.precision = 3  # digits to print

    assert not told(lambda: learner(cbs=Mine()).fit(1), 'shadowing')


# -- third-party modules


def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


@pytest.mark.parametrize('opt', ['sgd', 'adam'])
@pytest.mark.parametrize('mode', ['bf16', 'fp16', 'half_weights'])
def test_lazy_modules_train(mode, opt):
    plain = learner(lazy(), opt_func=OPTIMIZERS[opt])
    plain.fit(1)  # as without a precision
    learn = learner(lazy(), opt_func=OPTIMIZERS[opt])
    getattr(learn, f'to_{mode}')(**(dict(init_scale=256.0) if mode == 'fp16' else {}))
    learn.fit(2, 0.01)
    assert finite(learn)
    assert [p.shape for p in params(learn)] == [p.shape for p in params(plain)]


def test_lazy_modules_validate_first():
    learn = learner(lazy()).to_bf16()
    learn.validate()
    learn.fit(1)
    assert finite(learn)


def test_lazy_modules_are_kept_in_fp32():
    learn = learner(lazy()).to_bf16(fp32_modules='0')
    dtypes = output_dtypes(learn)
    learn.fit(1)
    assert set(dtypes) == {torch.float32}


class Checkpointed(nn.Module):
    "Computes its first part again in the backward pass."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


@pytest.mark.parametrize('kept', ['body.0', 'body.1', 'body', nn.Linear])
def test_activation_checkpointing_whose_backward_pass_is_outside_of_amp_context(kept):
    learn = learner(Checkpointed()).to_bf16(fp32_modules=kept)
    x = dataset().tensors[0][:4]

    def grads(model_of):
        learn.model.zero_grad()
        with learn.amp_context():
            loss = model_of(x).float().pow(2).mean()
        loss.backward()
        return [g.clone() for g in plain_grads(learn)]

    def not_checkpointed(x):
        return learn.model.head(learn.model.body(x))

    assert same(grads(learn.model), grads(not_checkpointed))


@pytest.mark.parametrize('outside', ['fit', 'amp_context'])
@pytest.mark.parametrize('wrap', [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_copy_of_a_kept_module_with_a_parametrization_has_its_own_forward(wrap, outside):
    model = mlp()
    wrap(model[0])
    learn, copies = learner(model).to_bf16(fp32_modules='0'), []
    if outside == 'fit':
        learn.fit(1, cbs=At('after_pred', lambda l: copies.append(copy.deepcopy(l.model)), 20))
    else:
        with learn.amp_context():
            copies.append(copy.deepcopy(learn.model))
    assert copies
    for c in copies:
        assert replaced(c) == []
    x = torch.ones(2, 6)
    with torch.autocast('cpu', torch.bfloat16):
        assert copies[-1][0](x).dtype is torch.bfloat16
    with torch.no_grad():
        before = copies[-1].eval()(x)
        for p in learn.model.parameters():
            p.zero_()
        assert torch.equal(copies[-1](x), before)  # and runs its own weights


# -- callbacks that a fit brings


class Mine(Callback):
    pass


def test_a_refused_fit_leaves_none_of_its_callbacks():
    learn = learner().to_bf16()
    own, names = learn.precision, [cb.name for cb in learn.cbs]
    with pytest.raises(ValueError, match='several precision callbacks'):
        learn.fit(1, cbs=[Mine(), MixedPrecision()])
    assert [cb.name for cb in learn.cbs] == names
    assert not hasattr(learn, 'mine')
    assert learn.precision is own
    dtypes = output_dtypes(learn)
    learn.fit(1)
    assert set(dtypes) == {torch.bfloat16}


def test_a_fit_that_brings_fp32_modules_that_match_nothing_leaves_none_of_its_callbacks():
    learn = learner()
    with pytest.raises(ValueError, match='matches no module'):
        learn.fit(1, cbs=[Mine(), MixedPrecision('bf16', fp32_modules='nothing')])
    assert learn.precision is None
    assert not any(isinstance(cb, Mine) for cb in learn.cbs)
    learn.fit(1)


def test_skipped_is_false_after_another_callback_cancelled_the_step():
    def cancel(l):
        if l.train_iter == 3:
            raise CancelStepException

    for opt in ('sgd', 'fused sgd'):
        learn, found = learner(opt_func=OPTIMIZERS[opt], cbs=[mixed('fp16'), spoil_at(2)]), []
        learn.add_cb(At('before_step', cancel, 5))
        learn.add_cb(At('after_batch', lambda l: l.training and found.append(bool(l.precision.skipped)), 70))
        learn.fit(1)
        assert found == [False, False, True, False, False, False]


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])
@pytest.mark.parametrize('event', ['after_batch', 'after_epoch'])
def test_an_export_in_the_middle_of_a_fit(mode, event, tmp_path):
    learn, plain = learner(path=tmp_path), learner()
    for l in (learn, plain):
        if mode != 'fp32':
            l.add_cb(mixed(mode))

    def export(l):
        if l.training and l.train_iter == 3 or event == 'after_epoch':
            opt = l.opt
            told(lambda: l.export('model.pkl'))
            assert l.opt is opt or opt is None or mode == 'fp32'  # where fastai makes a new one
            assert event == 'after_batch' or vars(l).get('scaler') is None  # the fit was closed

    learn.fit(1, cbs=At(event, export, 60))  # after the Recorder: fastai's export forgets the batch
    plain.fit(1)
    assert same(params(learn), params(plain))
    assert (learn.precision is None) is (mode == 'fp32')
    loaded = load_learner(tmp_path / 'model.pkl')
    assert loaded.precision is None
    assert replaced(loaded.model) == []
    assert loaded.validate(dl=learn.dls.valid)[0] > 0


# -- metrics of two learners


def validated_inside(a, b):
    "The last two metrics of `a` in an epoch in which `b` validates just before fastai's Recorder reads those of `a`."
    a.fit(1, cbs=At('after_validate', lambda l: b.validate(), 49))
    return [*a.recorder.values[-1][-2:]]


BOTH = [loss_scale, skipped_steps]


def test_metrics_of_two_learners_whose_validations_overlap():
    a = learner(metrics=BOTH, cbs=spoil_at(1)).to_fp16(init_scale=256.0)
    b = learner(metrics=BOTH).to_fp16(init_scale=64.0)
    b.fit(1)
    assert validated_inside(a, b) == [128.0, 1]
    assert validated_inside(b, a) == [64.0, 0]


def test_metrics_of_a_learner_without_a_precision_beside_one_with():
    a, b = learner(metrics=BOTH), learner(metrics=BOTH).to_fp16(init_scale=64.0)
    assert validated_inside(a, b) == [0, 0]
    assert validated_inside(b, a) == [64.0, 0]


def test_metrics_of_a_learner_and_its_copy():
    a = learner(metrics=BOTH).to_fp16(init_scale=64.0)
    b = copy.deepcopy(a).to_fp16(init_scale=32.0)
    assert validated_inside(a, b) == [64.0, 0]
    assert validated_inside(b, a) == [32.0, 0]


# -- the cost of reading attributes


@pytest.fixture(scope='module')
def long_run():
    "A learner after 1,200 steps."
    learn = learner(linear(), loaders(n=1200, bs=1), metrics=[skipped_steps]).to_fp16(init_scale=2.0)
    learn.fit(1, 1e-4)
    return learn


def peak(f):
    "Return the peak memory of `f` in bytes, beyond what was in use before."
    f()
    tracemalloc.start()
    try:
        f()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_number_of_skipped_steps_copies_no_history(long_run):
    assert long_run.precision.n_skipped == 0
    assert peak(lambda: long_run.precision.n_skipped) < 1200  # a byte a step


def test_the_metric_of_skipped_steps_copies_no_history(long_run):
    assert peak(lambda: long_run.metrics[0].value) < 1200


def n_calls(f):
    "Count the Python functions that `f` calls: a measure of work that other processes cannot affect."
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == 'call'

    sys.setprofile(profile)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Linear(1, 1)

    def forward(self, x):
        return self.b(self.a(x))


def many(n):
    return nn.Sequential(nn.Linear(6, 1), *(Block() for _ in range(n)))


@pytest.mark.parametrize('spec', ['*.a', nn.Linear, Block, ['*.a', '*.b']])
def test_matching_modules_takes_time_in_proportion_to_their_number(spec):
    small, large = (learner(many(n)) for n in (60, 240))
    ratio = n_calls(lambda: large.to_bf16(fp32_modules=spec)) / n_calls(lambda: small.to_bf16(fp32_modules=spec))
    assert ratio < 6  # 16 if it is quadratic


def test_a_fit_matches_once_and_not_at_each_event():
    class Counting(nn.Sequential):
        n = 0

        def named_modules(self, *args, **kwargs):
            Counting.n += 1
            return super().named_modules(*args, **kwargs)

    learn = learner(Counting(*mlp())).to_bf16(fp32_modules='0')
    learn.fit(1)
    plain = learner(Counting(*mlp())).to_bf16()
    Counting.n = 0
    plain.fit(1)
    without, Counting.n = Counting.n, 0
    learn.fit(1)
    assert Counting.n - without <= 2


def test_many_amp_contexts_of_a_loop_of_ones_own_keep_one_forward_each():
    "A user's loop enters `amp_context` thousands of times before the next fit."
    learn = learner().to_bf16(fp32_modules='0')
    for _ in range(5):
        with learn.amp_context():
            learn.model(torch.ones(2, 6)).sum().backward()
    assert len(learn.model[0].forward.__self__.users) == 1
    learn.fit(1)
    assert not left_on(learn.to_fp32())
