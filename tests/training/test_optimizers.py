"`fused`: torch's fused optimizers under fastai's schedules."

from functools import partial

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest, torch
from fastai.optimizer import OptimWrapper
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastxtend_amp import fused
from helpers import learner
from rows import TO, differences, end_state


@pytest.mark.parametrize(
    'cls, to', [(torch.optim.Adam, 'fp16'), (torch.optim.AdamW, 'fp32'), (torch.optim.SGD, 'fp16')]
)
def test_trains_bit_for_bit_as_the_wrapped_optimizer(cls, to):
    "One cycle, so that fastai's schedules find learning rate and momentum, under step hooks as loggers register them."

    def train(opt_func):
        learn, steps = TO[to](learner(opt_func=opt_func)), []
        learn.create_opt()
        note = lambda opt, args, kwargs: steps.append(opt is learn.opt.opt)
        handles = [learn.opt.opt.register_step_pre_hook(note), register_optimizer_step_pre_hook(note)]
        learn.fit_one_cycle(2, 0.01)
        for h in handles:
            h.remove()
        assert steps.count(True) == 2 * 12
        return learn

    given = dict(momentum=0.9) if cls is torch.optim.SGD else {}
    wrapped = train(partial(OptimWrapper, opt=partial(cls, fused=True, **given)))
    for ours in (train(fused(cls, **given)), train(fused(cls.__name__, **given))):
        assert differences(end_state(ours), end_state(wrapped)) == []
    hypers = ours.opt.hypers[0]
    assert hypers['mom'] > 0.94 and hypers['lr'] < 1e-3  # where one cycle ends
