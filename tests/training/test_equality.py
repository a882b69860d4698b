"Bit for bit the numbers of a hand-written PyTorch loop: each loop, model, precision and optimizer of rows.py."

import runpy

import pytest, torch
from fastai.callback import core
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fastxtend_amp.training.current import precision_callback
from helpers import ROOT, At, dataset, finite, is_outside_a_fit, learner, loaders, mlp, params, plain_grads, same
from rows import EXTRA, LOOPS, MODELS, OPTS, TO, Loop, backward_and_step, by_hand, differences, end_state
from rows import extra_backward, find, largest, make, outcome, seen_in_steps, third_batch, trained


def cases():
    "Each loop, model and optimizer in precisions with and without skipped steps; each precision."
    for name, loop in LOOPS.items():
        yield from ((to, 'mlp', name, None) for to in ('fp16' if loop.calm else 'overflowing', 'bf16', 'skipping'))
    for model in MODELS:
        yield from ((to, model, 'fit', 'adam') for to in ('overflowing', 'bf16'))
    for opt in OPTS:
        yield from ((to, 'mlp', loop, opt) for to, loop in (('overflowing', 'fit'), ('skipping', 'accumulation')))
    for to in TO:
        if to not in ('no masters', 'fp8'):
            yield from ((to, model, loop, None) for model, loop in (('mlp', 'both'), ('attention', 'one_batch')))
    yield pytest.param('fp8', 'wide', 'fit', 'adam', marks=pytest.mark.torchao)
    yield pytest.param('fp8', 'wide', 'one_batch', 'fused adamw', marks=pytest.mark.torchao)


@pytest.mark.parametrize('to, model, loop, opt', cases())
def test_same_as_by_hand(to, model, loop, opt, with_tf32):
    "Losses, weights, buffers, optimizer, scale of each step, state of the scaler."
    learn, found = trained(to, model, loop, opt)
    expected = by_hand(to, model, opt, **LOOPS[loop].by_hand)
    assert differences(found, expected) == [] and is_outside_a_fit(learn.to_bf16())
    if to == 'overflowing' and loop == 'fit':
        assert 0 < sum(a > b for a, b in zip(found['scales'], found['scales'][1:])) < 17


@pytest.mark.parametrize('loop', ['fit', 'both'])
@pytest.mark.parametrize('to', ['fp32', 'bf16', 'fp16'])
def test_the_loop_of_the_manual_computes_the_same(to, loop, capsys):
    "In fp16 it skips steps with the second batch, whose values are too large, and repairs buffers."
    data = dataset()
    data.tensors[0][4:8] *= 1e6
    learn, plain = (make(p, loop=l, opt='adamw', dls=loaders(train=data)) for p, l in ((to, loop), ('fp32', 'fit')))
    learn.fit(3, 0.01)
    plain.create_opt()
    plain.opt.set_hypers(lr=0.01)
    trainer = runpy.run_path(str(ROOT / 'nbs' / 'pytorch_loop.py'))['Trainer']
    manual = trainer(plain.model, plain.opt, nn.MSELoss(), to, init_scale=4096.0, **LOOPS[loop].by_hand)
    manual.fit(3, plain.dls.train, plain.dls.valid)
    expected = outcome(plain.model, plain.opt, [], [], manual.scaler.state_dict())
    assert differences({**end_state(learn), 'scales': []}, expected) == []
    assert manual.skipped_steps == 3 * (to == 'fp16') and capsys.readouterr().out.count('validation loss') == 3


def test_weights_that_are_wrappers_around_tensors():
    plain, model = trained('bf16')[0], mlp()
    for m in model.modules():  # all of them: an operator that gets one runs twice
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone())))
    learn = TO['bf16'](learner(model, opt_func=OPTS['sgd']))
    learn.fit(3, 0.01)
    assert same(params(plain), [p.a for p in learn.model.parameters()])


# -- true gradients: those of fp32, in each step and where a fit leaves them


class StepsTwice(Learner):
    "Two steps in each batch; the second one has the gradients of the first as well."

    def _do_grad_opt(self):
        backward_and_step(self)
        with self.amp_context():
            self.loss_grad = self.loss_func(self.model(*self.xb).float(), *self.yb)
        backward_and_step(self)
        self.opt.zero_grad()


EXTRA['two steps'] = Loop(cls=StepsTwice)


def norm(learn):
    return nn.utils.get_total_norm(plain_grads(learn))


def in_steps(loop='fit', opt=None, f=norm, **kwargs):
    "Gradients as a callback of order 11 sees them."

    def run(to):
        learn = make(to, 'conv', loop, opt, **kwargs)
        found = seen_in_steps(learn, f, 11)
        find(LOOPS, loop).train(learn)
        return found

    return run


def unfinished(then=noop):
    "Gradients of an unfinished accumulation."

    def run(to):
        learn = make(to, 'conv', cbs=[GradientAccumulation(1000)])
        learn.fit(1, 0.01)
        then(learn)
        return plain_grads(learn)

    return run


def cancel(l):
    if l.iter % 3 != 2:
        raise core.CancelBatchException


def load(l):
    if precision_callback(l) and third_batch(l):
        l.mixed_precision.load_state_dict({**l.mixed_precision.state_dict(), 'scale': 32.0})


def another_epoch(*cbs):
    return lambda l: l.fit(1, 0.01, cbs=[*cbs])


def failing(l):
    with pytest.raises(ZeroDivisionError):
        l.validate(cbs=At('after_pred', lambda l: 1 / 0))


def in_the_step(l):
    with l.amp_context():
        loss = l.loss_func(l.model(*l.xb).float(), *l.yb)
    (l.mixed_precision.scale_loss(loss) if precision_callback(l) else loss).backward()


TRUE = {
    **{
        f'{loop}, {opt}': in_steps(loop, opt)
        for loop in ('fit', 'accumulation', 'one_batch', 'own one_batch')
        for opt in ('adamw', 'fused adamw', 'sgd')
    },
    'two steps in a batch': in_steps('two steps'),
    'a batch cancelled after unscaling': in_steps(cbs=[At('before_step', cancel, 20)]),
    'a parameter in two groups': in_steps(
        f=lambda l: l.model[3].bias.grad.clone(), splitter=lambda m: [[*m.parameters()], [m[3].bias]]
    ),
    'left at the end': unfinished(),
    'left by another fit': unfinished(another_epoch()),
    'left before a validation': unfinished(lambda l: l.validate()),
    'left before a validation that fails': unfinished(failing),
    'left to fp32': unfinished(lambda l: l.to_fp32().fit(1, 0.01)),
    'left to bf16': unfinished(lambda l: l.to_bf16()),
    'a loss of ones own': unfinished(
        another_epoch(*extra_backward(lambda l: l.mixed_precision.scale_loss if precision_callback(l) else noop)())
    ),
    'a loss of ones own in the step': in_steps(cbs=[At('before_step', in_the_step, 10.5)]),
    'a scale that is loaded': unfinished(another_epoch(At('after_batch', load, 70))),
}


@pytest.mark.parametrize('what', TRUE)
def test_gradients_are_those_of_fp32(what):
    for a, b in zip(*(TRUE[what](to) for to in ('fp32', 'fp16')), strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05 * a.abs().max().item())


def failing_backward(l, loss):
    "A backward pass that ends at the first layer."

    def stop(g):
        raise MemoryError

    hook = next(l.model.parameters()).register_hook(stop)
    with pytest.raises(MemoryError):
        scaled_loss(l, loss).backward()
    hook.remove()


def scaled_loss(l, loss):
    return l.mixed_precision.scale_loss(loss) if precision_callback(l) else loss


PASSES = {
    'one loss': lambda l, loss: scaled_loss(l, loss).backward(),
    'two losses': lambda l, loss: (scaled_loss(l, loss / 4) + scaled_loss(l, loss * 3 / 4)).backward(),
}


def second_pass(factor, way='one loss'):
    "A callback whose step has the gradients of a second backward pass, as sharpness-aware minimization does."

    def run(l):
        if way != 'two losses':  # they add to the gradients that are there
            l.opt.zero_grad()
        with l.amp_context():
            loss = l.loss_func(l.model(*l.xb).float(), *l.yb) * factor
        (failing_backward if way == 'it fails' else PASSES[way])(l, loss)

    return At('before_step', run, 10.5)


@pytest.mark.parametrize('way', PASSES)
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_second_backward_pass_in_a_step_is_scaled(opt, way):
    "Its small gradients do not underflow, and the step is skipped if one is not finite."
    cbs, runs = [second_pass(1e-7, way)], []
    for to in ('fp32', 'fp16'):
        runs.append(in_steps(opt=opt, f=plain_grads, cbs=cbs)(to)[0])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(b, a, rtol=0.02, atol=0.01 if way == 'two losses' else 1e-10)
    bad = At('before_step', lambda l: third_batch(l) and second_pass(float('inf')).f(l), 10.5)
    learn = make('fp16', opt=opt, cbs=[bad])
    learn.fit(1, 0.01)
    assert learn.mixed_precision.skips == [i == 2 for i in range(6)] and finite(learn)


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_gradients_are_true_after_a_failed_second_pass(opt):
    found = {}
    for to in ('fp32', 'fp16'):
        seen = found[to] = []
        cbs = [second_pass(1.0, 'it fails'), At('after_step', lambda l: seen.append(largest(l)), 5)]
        make(to, opt=opt, cbs=cbs).fit(1, 0.01)
    torch.testing.assert_close(*map(torch.tensor, found.values()), rtol=0.05, atol=0.01)


def test_an_unfinished_accumulation_that_is_not_finite_is_zeroed():
    learn = learner(mlp(), cbs=GradientAccumulation(1000)).to_fp16(init_scale=1e30)
    learn.fit(1, 0.01)
    assert largest(learn) == 0
