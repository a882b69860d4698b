"A copied learner trains without a trace in the learner, and errors name what cannot be copied."

import gc, math, random, re, threading, warnings, weakref

import numpy as np
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.data import WeightedDL
from fastai.callback.hook import hook_output
from fastai.callback.mixup import MixUp
from fastai.callback.rnn import ModelResetter
from fastai.callback.schedule import ParamScheduler, SchedNo
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.vision.gan import FixedGANSwitcher, GANLearner
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

from fastxtend_amp.insight.copies import begin_fit, check_learner, copied_learner, left_out, loader_like, takes_part
from helpers import (
    OPTIMIZERS,
    At,
    Attentive,
    dataset,
    learner,
    loaders,
    mlp,
    opt_state,
    params,
    same,
    same_state,
    set_support,
)
from states import InStep, bits, language_model, rich, shuffled


def train(learn, n=4):
    "Train some batches of a loader like the learner's, in a custom loop."
    if not learn.opt:
        learn.create_opt()
    begin_fit(learn, n)
    learn('before_train')
    for i, b in zip(range(n), loader_like(learn.dls.train)):
        learn.one_batch(i, b)
    for event in ('after_train', 'after_fit'):
        learn(event)


def compiled_with_norms():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.utils.spectral_norm(nn.Linear(8, 1))
    )
    learn = learner(torch.compile(model, backend='eager'), shuffled())
    learn.fit(1)
    return learn


@pytest.mark.parametrize(
    'make',
    [rich, lambda: rich('adam', fit=False), language_model, compiled_with_norms],
    ids=['after a fit', 'before any', 'awd_lstm', 'compiled, weight and spectral norm'],
)
def test_the_learner_is_as_it_was(make):
    learn = make()
    before = bits(learn)
    with copied_learner(learn, optimizer=True) as copy:
        copy.to_fp32()
        assert same(params(copy), params(learn))
        train(copy)
        assert not same(params(copy), params(learn))
    after = bits(learn)
    for key in before:
        assert after[key] == before[key], key


class Keeps(Callback):
    "Store what it sees on the learner, as users' callbacks do."

    def after_loss(self):
        self.learn.history['losses'].append(float(self.learn.loss))

    def after_step(self):
        self.learn.ema.update_parameters(self.learn.model)
        self.learn.seen += 1


@pytest.mark.parametrize('ask', [lambda l: l.precision_report(), lambda l: l.compare_precision('bf16', 2, n_seeds=1)])
def test_what_hangs_on_the_learner_is_copied_too(ask):
    learn = learner(cbs=Keeps())
    learn.history, learn.seen = {'losses': [], 'rows': learn.dls.train.dataset}, torch.zeros(1)
    learn.ema, learn.best = torch.optim.swa_utils.AveragedModel(learn.model), learn.model
    learn.watched, learn.test_dl = [learn.history, learn.model], TorchLoader(dataset(), batch_size=4)
    learn.fit(1)
    losses, seen, averaged = [*learn.history['losses']], float(learn.seen), [*learn.ema.state_dict().values()]
    averaged = [t.clone() for t in averaged]
    ask(learn)
    assert learn.history['losses'] == losses and float(learn.seen) == seen
    assert same([*learn.ema.state_dict().values()], averaged)
    with copied_learner(learn) as copy:
        assert copy.watched[0] is copy.history and copy.watched[1] is copy.best is copy.model
        assert copy.history['rows'] is learn.dls.train.dataset and copy.test_dl is learn.test_dl
        assert copy.dls is learn.dls and copy.ema is not learn.ema


def test_what_hangs_on_the_learner_and_cannot_be_copied_is_named():
    learn = learner()
    learn.log = {'lock': threading.Lock()}
    with pytest.raises(ValueError, match='(?s)copying `learn.log` failed.*outside of model'), copied_learner(learn):
        pass


@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'sgd'])
def test_the_copy_trains_as_the_learner_would(opt):
    learn = learner(opt_func=OPTIMIZERS[opt]).to_fp16(init_scale=256.0)
    learn.fit(1, 0.01)
    with copied_learner(learn, optimizer=True) as copy:
        copy.to_fp16(init_scale=256.0)
        train(copy, 6)
        found, state = params(copy), opt_state(copy.opt)
    learn.fit(1, 0.01)
    assert same(found, params(learn)) and same_state(state, opt_state(learn.opt))


def test_random_states_are_put_back_and_gradients_are_on():
    learn, draw = learner(), lambda: (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = draw()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16), copied_learner(learn):
        draw()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled('cpu')
    assert draw() == expected


def test_overlapping_reports_leave_the_process_as_it_was():
    learner().precision_report()  # what the core looks up once per process
    filters, errors = [*warnings.filters], []
    together = threading.Barrier(3, timeout=60)

    def ask():
        try:
            together.wait()
            for _ in range(3):
                learner().precision_report()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and warnings.filters == filters


def test_overlapping_choices_leave_the_random_state_as_it_was(monkeypatch):
    "The second comparison begins while the first one trains."
    set_support(monkeypatch, lambda name: 'unsupported')  # only fp32 is trained, for one step

    def overlap(_):
        torch.rand(1)
        if thread.ident is None:
            thread.start()
            thread.join(0.3)  # it waits for the first

    first, second = learner(cbs=InStep('after_pred', overlap)), learner()
    thread = threading.Thread(target=lambda: second.to_amp(measure=True))
    before = torch.get_rng_state()
    first.to_amp(measure=True)
    thread.join(60)
    assert second.precision_decision is not None and torch.equal(torch.get_rng_state(), before)


def test_copies_of_two_threads_come_one_after_the_other():
    "Random states and warnings belong to the process, and must be restored in order."
    filters, order, begun = [*warnings.filters], [], threading.Event()

    def second():
        begun.wait(60)
        with copied_learner(learner()):
            order.append('second')

    thread = threading.Thread(target=second)
    thread.start()
    with copied_learner(learner()):
        begun.set()
        thread.join(0.5)  # would end in this time if it did not wait
        order.append('first')
    thread.join(60)
    assert order == ['first', 'second'] and warnings.filters == filters


def test_modules_kept_in_fp32_are_plain_in_the_copy():
    learn = learner(Attentive()).to_fp16(init_scale=1024.0, fp32_modules='attn')
    with copied_learner(learn) as copy:
        assert 'forward' not in vars(copy.model.attn) and copy.precision is not learn.precision
        copy.to_bf16(fp32_modules='head')
    assert learn.precision.fp32_module_names == ['attn'] and learn.precision.learn is learn


class Saves(Callback):
    "Writes files at each step."

    run_on_copy = True

    def __init__(self, folder):
        self.folder = folder

    def after_step(self):
        for file in ('best', '../best', self.folder / 'best'):
            self.learn.save(file)
        self.learn.export(self.folder / 'model.pkl')
        (self.learn.path / 'seen').write_text('')


def test_files_go_into_a_folder_that_is_removed(tmp_path):
    learn = learner(cbs=Saves(tmp_path), path=tmp_path / 'learner')
    with copied_learner(learn) as copy:
        train(copy, 1)
        assert [p.name for p in copy.path.rglob('*')] == ['seen']
        folder = copy.path
    assert not folder.exists() and not list(tmp_path.rglob('*'))


def test_a_copy_is_freed_at_once():
    learn = learner(cbs=At('before_step', lambda l: None)).to_bf16()
    learn.fit(1)
    gc.disable()
    try:
        with copied_learner(learn, optimizer=True) as copy:
            assert copy.recorder.losses == learn.recorder.losses and copy.recorder.losses is not learn.recorder.losses
            train(copy, 2)
            model = weakref.ref(copy.model)
        assert model() is None
    finally:
        gc.enable()


def test_results_with_a_graph_are_copied_without_it_wherever_they_are_kept():
    "As fastai's U-Net keeps those of its encoder, in hooks."
    learn = learner()
    with hook_output(learn.model[0], detach=False) as hook:
        learn.model.hook = hook
        learn.fit(1)
        learn.model(learn.dls.one_batch()[0])
        with copied_learner(learn) as copy:
            kept = copy.model.hook.stored
            assert torch.equal(kept, hook.stored) and kept.grad_fn is None and hook.stored.grad_fn is not None


class Counts(Callback):
    def __init__(self, layer):
        self.n, self.layer = 0, layer

    def after_loss(self):
        self.n += 1


def test_callbacks_that_take_part_are_copies_and_the_others_are_named():
    model, seen = mlp(), []
    cb = Counts(model[0])
    both = [
        InStep(event, lambda l, event=event: seen.append(event)) for event in ('before_batch', 'after_step')
    ]  # with the same name
    learn = learner(
        model, cbs=[cb, *both, At('after_epoch', print), SaveModelCallback(), GradientClip(1.0), MixUp()], progress=True
    ).to_bf16()
    assert left_out(learn)[0].startswith('Callbacks left out: at. If') and left_out(learner()) == []
    with copied_learner(learn) as copy:
        of_all = {'train_eval', 'cast_to_tensor', 'mixed_precision'}
        assert {c.name for c in copy.cbs} == {*of_all, 'counts', 'in_step', 'gradient_clip', 'mix_up'}
        assert copy.counts.layer is copy.model[0] and copy.counts.learn is copy and copy.recorder.learn is copy
        train(copy, 2)
        assert copy.counts.n == 2 and seen == ['before_batch', 'after_step'] * 2
    assert cb.n == 0 and cb.layer is model[0] and learn.counts is cb
    assert not takes_part(ParamScheduler({'lr': SchedNo(1, 1)})) and takes_part(ModelResetter())


def test_a_gan_before_its_first_fit():
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    learn = GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), show_img=False)
    before = params(learn)
    with copied_learner(learn) as copy:
        train(copy)
        assert copy.gan_trainer.generator is copy.model.generator and not same(params(copy), before)
    assert same(params(learn), before)


class Locked(Callback):
    def __init__(self):
        self.guard = threading.Lock()

    def after_loss(self):
        pass


def test_what_cannot_be_copied_is_named():
    learn = learner(cbs=Locked())
    with pytest.raises(ValueError, match="(?s)copying `learn.locked` failed.*lock.*`run_on_copy = False`"):
        with copied_learner(learn):
            pass
    learn.locked.run_on_copy = False
    with copied_learner(learn):
        pass
    learn.remove_cb(learn.locked)
    learn.model[1].file = open(__file__)
    with pytest.raises(ValueError, match='copying `learn.model` failed'):
        with copied_learner(learn):
            pass
    learn.model[1].file.close()


def test_an_optimizer_in_the_place_of_opt_func_stays_the_learners():
    from fastai.optimizer import OptimWrapper

    model = mlp()
    learn = learner(model, opt_func=OptimWrapper(opt=torch.optim.AdamW(model.parameters())))
    learn.fit(1, 0.01)
    state = opt_state(learn.opt)
    with copied_learner(learn) as copy:
        train(copy, 2)
    assert same_state(state, opt_state(learn.opt)) and all(len(s) for s in state)


@pytest.mark.parametrize('precision', ['to_fp32', 'to_bf16'])
def test_refused_inside_a_fit(precision):
    learn = getattr(learner(), precision)()
    for event in ('before_fit', 'after_loss', 'after_epoch'):
        with pytest.raises(RuntimeError, match='compare_precision cannot run inside a fit'):
            learn.fit(1, cbs=At(event, lambda l: check_learner(l, 'compare_precision'), 99))
    check_learner(learn, 'compare_precision')  # after one that was interrupted
    other = learner()
    learn.fit(1, cbs=At('after_loss', lambda _: check_learner(other, 'compare_precision')))


def test_lazy_parameters_get_pytorchs_error():
    with pytest.raises(ValueError, match='uninitialized parameter'):
        learner(nn.Sequential(nn.LazyLinear(1))).precision_report()


def test_sharded_parameters_are_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        learn = learner(fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,))))
        learn.fit(1)  # FSDP2 leaves whole parameters after the validation
        for call in ('precision_report', 'compare_precision'):
            with pytest.raises(ValueError, match=f'(?s){call} .*sharded.*before `fully_shard`'):
                getattr(learn, call)()
    finally:
        torch.distributed.destroy_process_group()


def test_weights_that_are_not_finite_are_refused():
    model = mlp()
    model[3].weight.data[0, 0] = math.nan
    for call in ('precision_report()', 'compare_precision()', 'to_amp(measure=True)'):
        words = re.escape(
            f"{call.removesuffix('()')} cannot run this model: 1 of 6 weight tensors are NaN or inf; "
            "the first is '3.weight'.\nLoad other weights"
        )
        with pytest.raises(ValueError, match=words):
            eval(f'learn.{call}', {'learn': learner(model)})


def test_batches_are_drawn_beside_the_order_of_the_loader():
    def batches(drawn):
        random.seed(0)
        dls = shuffled()
        if drawn:
            list(loader_like(dls.train))
        return [b[0].tolist() for b in dls.train]

    assert batches(True) == batches(False)

    def own_order(drawn):
        dl = TorchLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
        if drawn:
            list(loader_like(dl))
        return [b[0].tolist() for b in dl]

    assert own_order(True) == own_order(False)
    weighted = WeightedDL(torch.arange(4.0), bs=4, shuffle=True, wgts=[0.0, 1.0, 0.0, 0.0])
    assert {*map(float, next(iter(loader_like(weighted))))} == {1.0}


def test_wrappers_for_data_parallelism_are_left_out():
    model = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))
    learn = learner(nn.DataParallel(model))
    with copied_learner(learn) as copy:
        assert type(copy.model) is nn.Sequential
        train(copy, 2)  # otherwise SyncBatchNorm raises an error for main memory
    assert type(learn.model) is nn.DataParallel


def test_a_loss_function_that_reaches_the_learners_own_model():
    "Weight decay in the loss, by a closure: the gradients of the learner's own weights do not change."
    model = mlp()
    learn = learner(
        model,
        loss_func=lambda pred, y: nn.functional.mse_loss(pred, y) + sum(p.square().sum() for p in model.parameters()),
    )
    learn.precision_report('bf16')
    learn.compare_precision('bf16', n_steps=2, n_seeds=0)
    assert all(p.grad is None for p in model.parameters())


def test_copies_that_cannot_be_trained_are_refused():
    with pytest.raises(ValueError, match='cannot be copied(.|\n)*torch.jit.script'):
        learner(torch.jit.script(mlp())).precision_report()
    model = mlp()
    learn = learner(model, splitter=lambda _: list(model.parameters()))
    r = learn.compare_precision('bf16', n_steps=2)
    assert r.recommended == 'fp32' and 'The weights did not move in fp32' in r.reason and '`splitter`' in r.reason
