"`tune=True`: kinds of modules that low precision makes slower stay in fp32 if that pays, on a clock that tests move."

import copy, pickle, random, time

import pytest, torch
from fastai.learner import load_learner
from torch import nn

from fastxtend_amp import MixedPrecision, is_depthwise, is_grouped
from fastxtend_amp.precisions import BF16
from helpers import learner, set_support
from states import Act

pytestmark = pytest.mark.usefixtures('sleeps')
draws = random.Random()


@pytest.fixture(autouse=True)
def native(monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name in ('bf16', 'fp16') else 'unsupported')
    draws.seed(1)


class Slow(torch.autograd.Function):
    "The identity, whose backward pass needs so many seconds."

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Timed:
    "Needs so many seconds in fp32 and under autocast, with noise; the backward pass has its own."

    def __init__(self, *args, seconds=(0.01, 0.02), noise=0.0, backward=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds, self.noise, self.backward = seconds, noise, backward

    def forward(self, x):
        seconds = self.seconds[torch.is_autocast_enabled('cpu')]
        time.sleep(seconds * (1 + self.noise * draws.uniform(-1, 1)))
        return Slow.apply(super().forward(x), self.backward)


class Conv(Timed, nn.Conv1d):
    pass


class Norm(Timed, nn.GroupNorm):
    pass


class Head(Timed, nn.Linear):
    pass


class Refuses(nn.Module):
    def forward(self, x):
        if x.dtype is torch.float32 and torch.is_autocast_enabled('cpu'):
            raise RuntimeError('expected bf16')
        return x


class WithoutHooks(nn.Module):
    def forward(self, x):
        assert not self._forward_hooks
        return x


def net(
    depthwise=(0.02, 0.06), grouped=(0.01, 0.01), norm=(0.01, 0.01), noise=0.0, slow=1.0, after=nn.Identity, **kwargs
):
    "Each kind with its seconds in fp32 and in low precision; convolutions without groups gain."
    times = lambda seconds: dict(seconds=[slow * s for s in seconds], noise=noise)
    torch.manual_seed(0)
    return nn.Sequential(
        Act(lambda x: x[..., None]),
        Conv(6, 6, 1, **times((0.1, 0.04))),
        Conv(6, 6, 1, groups=6, **times(depthwise)),
        after(),
        Conv(6, 6, 1, groups=3, **times(grouped), **kwargs),
        Norm(2, 6, **times(norm)),
        nn.Flatten(),
        Head(6, 1, **times((0.06, 0.03))),
    )


own = lambda l: l.to_bf16(fp32_modules=['7', '5'], on_overflow='raise')
to_amp = lambda l, **kw: l.to_amp(measure=True, **kw).precision_decision
TUNED = {  # the model; arguments; what is done before; the call
    'a kind that pays': (net(), {}, None, None),
    'fp16': (net(), dict(precisions='fp16'), None, None),
    'two kinds': (net(grouped=(0.02, 0.04)), {}, None, None),
    'a long backward pass is tried first': (net(backward=0.1), {}, None, None),
    'besides the modules of the learner': (net(), {}, own, None),
    'a class': (net((0.01, 0.01), norm=(0.01, 0.05)), {}, None, None),
    'bf16 is slower than fp32, fp16 far slower': (net((0.02, 0.3)), dict(precisions=['bf16', 'fp16']), None, None),
    'not certain': (net((0.055, 0.06), noise=0.3), dict(n_steps=9, max_seconds=60), None, None),
    'an error': (net(after=Refuses), {}, None, None),
    'hooks break it': (net(after=WithoutHooks), {}, None, None),
    'compiled': (torch.compile(net(), backend='eager'), dict(n_steps=8), None, None),
    **{
        f'{seconds} seconds{name}': (net(grouped=(0.01, 0.012), slow=2.5), dict(max_seconds=seconds), None, call)
        for seconds in (20, 40)
        for name, call in (('', None), (' by to_amp', to_amp))
    },
}


def test_what_is_tried_and_kept(expected, sleeps):
    texts = []
    for name, (model, kwargs, before, call) in TUNED.items():
        learn, start, max_seconds = learner(model), sleeps.now, kwargs.get('max_seconds', 1000)
        if before:
            before(learn)
        if call:
            found = call(learn, max_seconds=max_seconds)
        else:
            found = learn.compare_precision(
                **{'precisions': 'bf16', 'tune': True, 'max_seconds': max_seconds, **kwargs}
            )
        assert sleeps.now - start < max_seconds + 1
        speeds = (f'{row}: {speed:.2f}\n' for row, speed in found.table['speed-up'].items())
        notes = [n for n in found.notes if 'tried' in n.lower()]
        texts.append(f"# {name}\n{found.calls[found.recommended]}\n{''.join([*speeds, *notes])}\n")
    expected('tuned', '\n'.join(texts))


def test_the_row_of_a_kind_is_as_every_other():
    learn = learner(net())
    found = learn.compare_precision('bf16', tune=True, max_seconds=1000)
    name, n = 'bf16, depthwise in fp32', len(found.losses['fp32'])
    assert len(found.losses[name]) == n and abs(found.table['loss difference'][name]) < 0.01
    used = found.table['activations MB']
    assert used[name] > used['bf16'] > 0 and found.plot() is not None
    found.apply(learn).fit(1)
    assert learn.mixed_precision.precision == BF16(fp32_modules=is_depthwise) == found.precisions[name]
    assert learn.mixed_precision.fp32_module_names == ['2']


def test_what_cannot_be_tuned_costs_nothing(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'bf16' else 'unsupported')
    plain, tuned = (learner(net()).compare_precision('bf16', tune=tune, n_seeds=0) for tune in (False, True))
    assert tuned.losses == plain.losses and 'tried' not in repr(tuned)


# -- the predicates


def test_depthwise_and_grouped_convolutions():
    depthwise = [nn.Conv2d(8, 16, 3, groups=8), nn.ConvTranspose1d(8, 8, 3, groups=8)]
    grouped, others = [nn.Conv2d(8, 8, 3, groups=2)], [nn.Conv2d(1, 8, 3), nn.LayerNorm(8)]
    for kind, found in ((is_depthwise, depthwise), (is_grouped, grouped)):
        assert [*filter(kind, depthwise + grouped + others)] == found


def test_predicates_print_as_their_name_and_can_be_copied_pickled_and_exported(tmp_path):
    assert pickle.loads(pickle.dumps(is_depthwise)) is copy.deepcopy(is_depthwise) is is_depthwise
    own = type('Embedding', (nn.Module,), {})  # not that of nn
    call = "learn.to_bf16(fp32_modules=[is_depthwise, nn.LayerNorm, Embedding, 'a'])"
    assert repr(BF16(fp32_modules=[is_depthwise, nn.LayerNorm, own, 'a'])) == call
    learn = learner(net(), cbs=MixedPrecision('bf16', fp32_modules=is_depthwise), path=tmp_path)
    learn.fit(1)
    learn.model[0] = nn.Unflatten(1, (6, 1))  # a lambda cannot be pickled
    learn.export()
    assert load_learner(tmp_path / 'export.pkl').model[2].groups == 6
