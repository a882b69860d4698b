"Bit for bit the numbers of a hand-written PyTorch loop: each loop, model, precision and optimizer of rows.py."

import pytest
from torch.testing._internal.two_tensor import TwoTensor

from rows import *


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
    yield pytest.param('fp8', 'wide', 'fit', None, marks=pytest.mark.torchao)
    yield pytest.param('fp8', 'wide', 'one_batch', 'fused adamw', marks=pytest.mark.torchao)


@pytest.mark.parametrize('to, model, loop, opt', cases())
def test_same_as_by_hand(to, model, loop, opt, with_tf32):
    "Losses, weights, buffers, optimizer, scale of each step, state of the scaler."
    learn, found = trained(to, model, loop, opt)
    expected = by_hand(to, model, opt, **LOOPS[loop].by_hand)
    assert differences(found, expected) == [] and is_outside_a_fit(learn.to_bf16())
    if to == 'overflowing' and loop == 'fit':
        assert 0 < sum(a > b for a, b in zip(found['scales'], found['scales'][1:])) < 17


def test_weights_that_are_wrappers_around_tensors():
    plain, model = trained('bf16')[0], mlp()
    for m in model.modules():  # all of them: an operator that gets one runs twice
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone())))
    learn = TO['bf16'](learner(model, opt_func=OPTS['sgd']))
    learn.fit(3, 0.01)
    assert same(params(plain), [p.a for p in learn.model.parameters()])


# -- true gradients


@pytest.mark.parametrize('loop', ['fit', 'accumulation', 'one_batch', 'own one_batch'])
@pytest.mark.parametrize('opt', ['adamw', 'fused adamw', 'sgd'])
def test_callbacks_of_order_11_see_true_gradients_in_each_step(opt, loop):
    def seen(to):
        learn = make(to, 'conv', loop, opt)
        norms = seen_in_steps(learn, lambda l: nn.utils.get_total_norm(plain_grads(l)).item(), 11)
        LOOPS[loop].train(learn)
        return norms

    assert seen('fp16') == pytest.approx(seen('fp32'), rel=0.05, abs=0.05)


class StepsTwice(Learner):
    "Two steps in each batch; the second one has the gradients of the first as well."

    def _do_grad_opt(self):
        keeps(self)
        with self.amp_context():
            self.loss_grad = self.loss_func(self.model(*self.xb).float(), *self.yb)
        keeps(self)
        self.opt.zero_grad()


def test_two_steps_in_a_batch_with_gradients_that_are_kept():
    def seen(to):
        learn = TO[to](learner(conv(), cls=StepsTwice))
        norms = seen_in_steps(learn, lambda l: nn.utils.get_total_norm(plain_grads(l)).item(), 11)
        learn.fit(1, 0.01)
        return norms

    assert seen('fp16') == pytest.approx(seen('fp32'), rel=0.05, abs=0.05)


def grads_after(to, then=noop, **kwargs):
    "Gradients that an unfinished accumulation leaves."
    learn = make(to, 'conv', cbs=[GradientAccumulation(1000)], **kwargs)
    learn.fit(1, 0.01)
    then(learn)
    return plain_grads(learn)


ACCUMULATES = {
    'end': noop,
    'fit': lambda l: l.fit(1, 0.01),
    'validate': lambda l: l.validate(),
    'fp32 fit': lambda l: l.to_fp32().fit(1, 0.01),
    'bf16': lambda l: l.to_bf16(),
    'scale_loss': lambda l: l.fit(1, 0.01, cbs=l.precision and more(lambda l: l.precision.scale_loss)()),
}


@pytest.mark.parametrize('then', list(ACCUMULATES)[:5])
def test_an_accumulation_goes_on_after_the_fit(then):
    for a, b in zip(*(grads_after(to, ACCUMULATES[then]) for to in ('fp32', 'fp16'))):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_a_loss_of_ones_own_is_added_to_an_accumulation_that_goes_on():
    for a, b in zip(*(grads_after(to, ACCUMULATES['scale_loss']) for to in ('bf16', 'fp16'))):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_a_scale_loaded_in_an_accumulation():
    def load(l):
        if l.precision and third(l):
            l.precision.load_state_dict({**l.precision.state_dict(), 'scale': 32.0})

    a, b = (grads_after(to, lambda l: l.fit(1, 0.01, cbs=At('after_batch', load, 70))) for to in ('bf16', 'fp16'))
    for p, q in zip(a, b):
        torch.testing.assert_close(q, p, rtol=0.05, atol=0.05)


def test_an_unfinished_accumulation_that_is_not_finite_is_zeroed():
    learn = learner(mlp(), cbs=GradientAccumulation(1000)).to_fp16(init_scale=1e30)
    learn.fit(1, 0.01)
    assert largest(learn) == 0


def test_a_batch_cancelled_after_unscaling_accumulates_as_in_fp32():
    def run(to):
        def further(l):
            grads.extend(plain_grads(l))
            if l.iter % 3 != 2:
                raise core.CancelBatchException

        learn, grads = make(to, 'conv', cbs=[At('before_step', further, 20)]), []
        learn.fit(1, 0.01)
        return grads + params(learn)

    for a, b in zip(run('fp32'), run('fp16'), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_parameter_in_two_groups_is_unscaled_once():
    def seen(to):
        learn = make(to, 'conv', splitter=lambda m: [[*m.parameters()], [m[3].bias]])
        found = seen_in_steps(learn, lambda l: l.model[3].bias.grad.item())
        learn.fit(1, 0.01)
        return found

    assert seen('fp16') == pytest.approx(seen('fp32'), rel=0.05, abs=0.05)
