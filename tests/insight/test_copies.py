"A copied learner trains without a trace in the learner, and errors name what cannot be copied."

import gc, random, threading, warnings, weakref
from functools import partial
from types import MethodType

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.data import WeightedDL
from fastai.callback.hook import hook_output
from fastai.callback.mixup import MixUp
from fastai.optimizer import OptimWrapper
from fastai.vision.gan import FixedGANSwitcher, GANLearner
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

from fastxtend_amp.insight.choices import Choice
from fastxtend_amp.insight.copies import copied_learner
from fastxtend_amp.insight.requirements import check_learner
from fastxtend_amp.insight.batches import begin_fit, loader_like
from fastxtend_amp.precisions import FP16, Precision
from helpers import OPTIMIZERS, At, dataset, learner, loaders, mlp, opt_state, params, same, set_support
from models import InStep
from states import ASK, bits, language_model, rich, shuffled

FP32 = Choice(Precision())


def train(learn, n=4, lr=None):
    "Train some batches of a loader like the learner's, in a custom loop."
    begin_fit(learn, n, lr)
    for i, b in zip(range(n), loader_like(learn.dls.train)):
        learn.one_batch(i, b)
    learn('after_fit')


def compiled_with_norms():
    torch.manual_seed(0)
    norms = nn.utils.parametrizations
    model = nn.Sequential(norms.weight_norm(nn.Linear(6, 8)), norms.spectral_norm(nn.Linear(8, 1)))
    learn = learner(torch.compile(model, backend='eager'), shuffled())
    learn.fit(1)
    return learn


def gan():
    "Before its first fit."
    generator, critic = (nn.Sequential(nn.Linear(i, 8), nn.Linear(8, 1)) for i in (6, 1))
    return GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), show_img=False)


def with_own_optimizer():
    "An optimizer in the place of `opt_func`."
    model = mlp()
    learn = learner(model, opt_func=OptimWrapper(opt=torch.optim.AdamW(model.parameters())))
    learn.fit(1, 0.01)
    return learn


def data_parallel():
    "Whose SyncBatchNorm raises an error for main memory."
    return learner(nn.DataParallel(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))))


def with_loss_of_own_weights():
    model = mlp()
    loss = lambda p, y: nn.functional.mse_loss(p, y) + sum(p.square().sum() for p in model.parameters())
    return learner(model, loss_func=loss)


def closure(m):
    "With a lock, which cannot be copied, and a cell that is empty as long as nobody else has patched it."
    forward, lock = m.forward, threading.Lock()
    patched = lambda x: forward(x) if lock else patched_again(x)
    if not lock:
        patched_again = patched
    return patched


def method(m):
    return MethodType(lambda self, x: type(self).forward(self, x), m)


def compiled(f):
    return torch.compile(f, backend='eager')


PATCHES = [closure, method, lambda m: partial(type(m).forward, m), lambda m: compiled(m.forward)]
PATCHES += [lambda m: compiled(closure(m)), lambda m: compiled(method(m))]


def with_patched_methods():
    "BatchNorm's statistics show who runs."
    model = nn.Sequential(nn.Linear(6, 4), *(nn.BatchNorm1d(4) for _ in PATCHES), nn.Linear(4, 1))
    learn = learner(model, dls=shuffled())
    learn.fit(1)
    for m, patch in zip(model[1:], PATCHES):
        m.forward = patch(m)
    step = learn._step
    learn._step = lambda: step()
    model.train()
    return learn


def test_a_patched_forward_computes_with_the_weights_of_the_copy():
    learn = with_patched_methods()
    before = params(learn)
    with copied_learner(learn, FP32) as copy:
        train(copy)
        assert not any(torch.equal(a, b) for a, b in zip(params(copy), before))
        assert all(m.num_batches_tracked == 10 for m in copy.model if isinstance(m, nn.BatchNorm1d))


def test_what_a_loss_function_shares_with_a_hook_is_shared_by_the_copies():
    features = {}
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: features.update(h=out))
    loss = lambda p, y: (p - y).square().mean() + features['h'].float().square().mean()
    report = learner(model, loss_func=loss).precision_report('bf16')
    assert report.verdicts['bf16'].verdict == 'safe so far' and report.table['grad'].max() > 0


LEARNERS = [rich, lambda: rich('adam', fit=False), language_model, compiled_with_norms]
LEARNERS += [gan, with_own_optimizer, data_parallel, with_loss_of_own_weights, with_patched_methods]


@pytest.mark.parametrize('make', LEARNERS)
def test_the_learner_is_not_modified(make):
    learn = make()
    before = bits(learn)
    around = torch.autocast('cpu', dtype=torch.bfloat16)  # does not reach the copy, nor does `no_grad`
    with torch.inference_mode(), around, copied_learner(learn, FP32, optimizer=learn.opt is not None) as copy:
        assert not torch.is_autocast_enabled('cpu')
        assert same(params(copy), params(learn))
        train(copy)
        assert not same(params(copy), params(learn))
    assert bits(learn) == before


@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'sgd'])
def test_the_copy_trains_as_the_learner_would(opt):
    learn = learner(opt_func=OPTIMIZERS[opt]).to_fp16(init_scale=256.0)
    learn.fit(1, 0.01)
    with copied_learner(learn, Choice(FP16(init_scale=256.0)), optimizer=True) as copy:
        flags = [vars(getattr(o, 'opt', o)).keys() for o in (copy.opt, learn.opt)]
        assert flags[0] == flags[1]  # such as that of fused optimizers, which skip on the device
        train(copy, 6, 0.01)
        found, state = params(copy), opt_state(copy.opt)
    learn.fit(1, 0.01)
    assert same(found, params(learn)) and same(state, opt_state(learn.opt))


class Keeps(Callback):
    "Stores what it sees on the learner, as users' callbacks do."

    def after_step(self):
        self.learn.history['losses'].append(float(self.learn.loss))
        self.learn.seen += 1


def test_what_hangs_on_the_learner_is_copied():
    seen = []
    twice = [InStep(event, lambda l, e=event: seen.append(e)) for event in ('before_batch', 'after_step')]
    learn = learner(cbs=[Keeps(), MixUp(), *twice])
    learn.history, learn.seen = {'losses': [], 'rows': learn.dls.train.dataset}, torch.zeros(1)
    learn.best, learn.watched, learn.loaded_precision = learn.model, [learn.history], {'grad_scaler': {}}
    learn.fit(1)
    seen.clear()
    with copied_learner(learn, FP32) as copy:
        train(copy)
        assert seen == ['before_batch', 'after_step'] * 4  # both callbacks of one name
        assert len(copy.history['losses']) == copy.seen == 10 and copy.watched[0] is copy.history
        assert (
            not copy.loaded_precision and copy.best is copy.model and copy.keeps.learn is copy and copy.dls is learn.dls
        )
        assert copy.history['rows'] is learn.dls.train.dataset
        assert copy.recorder.losses == learn.recorder.losses and copy.recorder.losses is not learn.recorder.losses
    assert len(learn.history['losses']) == learn.seen == 6


def test_the_data_of_an_earlier_prediction_is_not_copied():
    learn, data = learner(), dataset()
    data.lock = threading.Lock()
    learn.get_preds(dl=torch.utils.data.DataLoader(data, 4))
    with copied_learner(learn, FP32) as copy:
        assert copy.dl.dataset is data


def test_copies_of_two_threads_come_one_after_the_other():
    "Random states and warnings belong to the process, and must be restored in order."
    filters, order, begun, rng = [*warnings.filters], [], threading.Event(), []

    def second():
        begun.wait(60)
        with copied_learner(learn, FP32):
            order.append('second')

    learn, thread = learner(), threading.Thread(target=second)
    thread.start()
    rng = torch.get_rng_state()
    with copied_learner(learn, FP32):
        begun.set()
        thread.join(0.5)  # would end in this time if it did not wait
        torch.rand(1)
        order.append('first')
    thread.join(60)
    assert order == ['first', 'second'] and warnings.filters == filters and torch.equal(torch.get_rng_state(), rng)


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
    with copied_learner(learn, FP32) as copy:
        train(copy, 1)
        assert [p.name for p in copy.path.rglob('*')] == ['seen']
        folder = copy.path
    assert not folder.exists() and not list(tmp_path.rglob('*'))


@pytest.mark.parametrize('ask', ASK)
def test_copies_are_freed_at_once(ask, sleeps, monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')
    models, learn = [], learner(cbs=InStep('before_batch', lambda l: models.append(weakref.ref(l.model))))
    gc.disable()
    try:
        found = ASK[ask](learn)
        assert found is not None and models and not any(model() for model in models)
    finally:
        gc.enable()


def test_results_with_a_graph_are_copied_without_it_wherever_they_are_kept():
    "As fastai's U-Net keeps those of its encoder, in hooks."
    learn = learner()
    with hook_output(learn.model[0], detach=False) as hook:
        learn.model.hook = hook
        learn.model(learn.dls.one_batch()[0])
        with copied_learner(learn, FP32) as copy:
            kept = copy.model.hook.stored
            assert torch.equal(kept, hook.stored) and kept.grad_fn is None and hook.stored.grad_fn is not None


PLACES = [(lambda l: l.locked, 'locked'), (lambda l: l.model[1], 'model'), (lambda l: l, 'lock2')]


@pytest.mark.parametrize('place, name', PLACES)
def test_what_cannot_be_copied_is_named(place, name):
    learn = learner(cbs=type('Locked', (Callback,), {})())
    place(learn).lock2 = threading.Lock()
    words = f'(?s)copying `{name}` failed.*lock.*`run_on_copy = False`.*outside of model'
    with pytest.raises(ValueError, match=words), copied_learner(learn, FP32):
        pass
    learn.locked.run_on_copy = False
    if name == 'locked':
        with copied_learner(learn, FP32) as copy:
            assert 'locked' not in vars(copy)


@pytest.mark.parametrize('event', ['before_fit', 'after_loss', 'after_epoch'])
def test_inside_a_fit_only_other_learners_can_be_examined(event):
    learn, other = learner(), learner()
    learn.fit(1, cbs=At(event, lambda _: check_learner(other, 'compare_precision'), 99))
    with pytest.raises(RuntimeError, match='compare_precision cannot run inside a fit'):
        learn.fit(1, cbs=At(event, lambda _: check_learner(learn, 'compare_precision'), 99))
    check_learner(learn, 'compare_precision')


def test_sharded_parameters_are_an_error(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        learn = learner(fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,))))
        learn.fit(1)  # FSDP2 leaves whole parameters after the validation
        with pytest.raises(ValueError, match='(?s)compare_precision .*sharded.*before `fully_shard`'):
            learn.compare_precision()
    finally:
        torch.distributed.destroy_process_group()


def torch_loader():
    return TorchLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('make', [lambda: shuffled().train, torch_loader])
def test_batches_are_drawn_beside_the_order_of_the_loader(make):
    def batches(is_copied):
        random.seed(0)
        dl = make()
        if is_copied:
            list(loader_like(dl))
        return [b[0].tolist() for b in dl]

    assert batches(True) == batches(False)


def test_the_copy_of_a_loader_has_its_attributes():
    weighted = WeightedDL(torch.arange(4.0), bs=4, shuffle=True, wgts=[0.0, 1.0, 0.0, 0.0])
    assert {*map(float, next(iter(loader_like(weighted))))} == {1.0}
