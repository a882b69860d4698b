"Running a model inside `run_undone` changes nothing that outlives it, and nothing else is touched."
import random, sys
from dataclasses import dataclass, field

import numpy as np
import pytest, torch
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

from fastxtend_amp import compat
from fastxtend_amp.insight import choice, watch
from fastxtend_amp.insight.diagnosis import diagnose
from fastxtend_amp.insight.restore import ModuleState, modules_in, run_undone
from helpers import Attentive, autocast_state, learner, mlp


def state_of(model):
    "Everything about the modules that running them can change, values and identities."
    values = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    places = {n: (id(t), t.data_ptr(), t.requires_grad) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    modules = [(m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return values, places, grads, modules


def assert_unchanged(before, after):
    assert before[1] == after[1] and before[3] == after[3] and before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][n], after[0][n]) for n in before[0])
    for a, b in zip(before[2], after[2]): assert a is b is None or (a[0] == b[0] and torch.equal(a[1], b[1]))


def test_buffers_flags_hooks_gradients_and_random_states_are_put_back():
    model = mlp()
    model(torch.randn(4, 6)).sum().backward()
    model[1].eval()
    before, generators = state_of(model), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    with run_undone(model):
        assert all(p.grad is None for p in model.parameters())
        model.train()
        model[0].register_forward_hook(lambda *a: None)
        model[0].weight.requires_grad_(False)
        model[0].extra = 3
        model(torch.randn(4, 6)).sum().backward()
        random.random(); np.random.rand()
    assert_unchanged(before, state_of(model))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_parameters_that_a_forward_changes_in_place():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=.1), nn.Linear(3, 1))
    before = state_of(model)
    with run_undone(model):
        model(torch.arange(5))
        assert not torch.equal(before[0]['0.weight'], model[0].weight)
    assert_unchanged(before, state_of(model))


def test_hidden_states_caches_counters_and_own_generators():
    @dataclass
    class Cache: keys: list = field(default_factory=list); n: int = 0
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.calls, self.cache, self.names = [torch.zeros(2)], 0, Cache(), {'a'}
            self.by_name = {'x': [1]}
            self.generator, self.draw = torch.Generator().manual_seed(3), np.random.default_rng(1)
        def forward(self, x):
            self.hidden[0] += 1
            self.hidden.append(x)
            self.calls += 1
            self.cache.keys.append(x)
            self.cache.n += 1
            self.names.add('b')
            self.by_name['x'].append(2)
            return x + torch.rand(2, generator=self.generator) + self.draw.random()
    m = Remembers()
    hidden, first = m.hidden[0], None
    for _ in range(2):
        with run_undone(m):
            out = m(torch.ones(2))
            first = out if first is None else first
        assert torch.equal(out, first) and m.hidden == [hidden] and torch.equal(hidden, torch.zeros(2))
        assert (m.calls, m.cache.keys, m.cache.n, m.names, m.by_name) == (0, [], 0, {'a'}, {'x': [1]})


def test_the_state_of_a_loss_functions_modules():
    class Weighted(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('seen', torch.zeros(())); self.n = 0
        def forward(self, p, y):
            self.seen += 1
            self.n += 1
            return (p - y).square().mean()
    loss, model = Weighted(), mlp()
    for f in (loss, loss.forward):
        with run_undone(model, f): f(model(torch.randn(4, 6)), torch.zeros(4, 1))
        assert loss.seen == 0 and loss.n == 0
    assert type(modules_in(CrossEntropyLossFlat())[0]) is nn.CrossEntropyLoss
    assert modules_in(nn.functional.mse_loss) == []


def test_spectral_norm_and_expanded_buffers():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4)))
    model.register_buffer('wide', torch.ones(1).expand(5))
    before = state_of(model)
    with run_undone(model):
        model(torch.randn(3, 4)).sum().backward()
        model.wide[:1] = 7
    assert_unchanged(before, state_of(model))


def test_memory_that_model_to_replaced():
    model = mlp()
    before = state_of(model)
    with run_undone(model): model.double()
    assert_unchanged(before, state_of(model))


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_after_an_exception_and_after_one_in_the_middle_of_restoring(error, monkeypatch):
    model, calls = mlp(), []
    before, restore = state_of(model), ModuleState.restore
    def interrupted(self):
        calls.append(1)
        if len(calls) == 1: raise error('while restoring')
        restore(self)
    monkeypatch.setattr(ModuleState, 'restore', interrupted)
    with pytest.raises(error), run_undone(model):
        model(torch.randn(4, 6))
        raise error('inside')
    assert len(calls) == 2 and autocast_state()[0] is False
    assert_unchanged(before, state_of(model))


def test_what_others_write_meanwhile_stays():
    "A logger's list, a callback's attribute and the optimizer are not the model's."
    learn = learner(Attentive())
    learn.create_opt()
    learn.log, learn.model.logger = [], type('Logger', (), {})()
    learn.model.logger.lines = []
    with run_undone(learn.model, learn.loss_func):
        learn.log.append('a')
        learn.model.logger.lines.append('b')
        learn.opt.set_hyper('lr', .5)
    assert learn.log == ['a'] and learn.model.logger.lines == ['b'] and learn.opt.hypers[0]['lr'] == .5


def test_a_lazy_module_is_built_by_running_it():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with run_undone(model): model(torch.randn(2, 5))
    assert type(model[0]) is nn.Linear and model(torch.randn(2, 5)).shape == (2, 1)


def test_a_graph_made_before_can_still_be_run_backward():
    "The diagnosis runs the model again between a batch's forward pass and its backward pass."
    model = mlp()
    x = torch.randn(4, 6)
    loss, twin = model(x).square().sum(), mlp()
    twin(x).square().sum().backward()
    with run_undone(model): model(x).sum().backward()
    loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters()))


CONTEXTS = 'autocast_mode.py', 'contextlib.py', 'grad_mode.py', '_python_dispatch.py', 'overrides.py', 'decorators.py', 'compat.py'


def interrupted(f, at):
    "Run `f`; at the `at`-th line in the files of `CONTEXTS` comes an interrupt. Gives the number of those lines."
    n = 0
    def line(frame, event, arg):
        nonlocal n
        n += event in ('line', 'return')
        if n != at: return line
        sys.settrace(None)
        raise KeyboardInterrupt
    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename.endswith(CONTEXTS) else None)
    try: f()
    finally: sys.settrace(None)
    return n


def modes():
    "What an interrupt may leave changed."
    entered = [len(stack()) for stack in compat.EnteredModes._stacks()]
    return autocast_state(), torch.is_grad_enabled(), entered, compat.EnteredModes._stance(), vars(checkpoint.CheckpointFunction).get('apply')


@pytest.mark.parametrize('call', [
    lambda l: l.precision_report('bf16'), lambda l: l.compare_precision('bf16', n_steps=2, n_seeds=0),
    lambda l: l.to_amp(measure=True)], ids=['report', 'comparison', 'choice'])
def test_an_interrupt_wherever_contexts_are_entered_and_left(call, monkeypatch):
    "Autocast, grad mode and what the process is set to are as before; an interrupt is never taken for something else."
    monkeypatch.setattr(choice.measured_choice.__wrapped__, '__kwdefaults__', {'modes': ('fp32', 'bf16'), 'n_steps': 2})
    before, draw = modes(), random.Random(0)
    call(learner())                                              # what is looked up once
    learn = learner()
    lines = interrupted(lambda: call(learn), 0)
    for at in draw.sample(range(1, lines * 4 // 5), 40):
        learn = learner()
        with pytest.raises(KeyboardInterrupt): interrupted(lambda: call(learn), at)
        assert modes() == before, at


@pytest.mark.filterwarnings('ignore:.*goes wrong.*', 'ignore:.*emulated.*')
def test_an_interrupt_in_the_diagnosis_of_a_fit(monkeypatch):
    def diagnosed(*args):
        found = []
        lines.append(interrupted(lambda: found.append(diagnose(*args)), at))
        return found[0]
    def fit():
        learn = learner()
        with torch.no_grad(): learn.model[0].weight.fill_(1e38)
        learn.to_bf16().fit(1, 0.)
    monkeypatch.setattr(watch, 'diagnose', diagnosed)
    lines, at, before = [], 0, modes()
    fit()
    for at in random.Random(0).sample(range(1, lines[0]), 40):
        with pytest.raises(KeyboardInterrupt): fit()
        assert modes() == before, at
