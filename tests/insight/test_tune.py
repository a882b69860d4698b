"`tune=True`: kinds of modules that low precision makes slower stay in fp32 if that pays, on a clock that tests move."

import copy, pickle, random, re, time

import pytest, torch
from fastai.learner import load_learner
from torch import nn

from fastxtend_amp import MixedPrecision, is_depthwise
from fastxtend_amp.precisions import BF16
from fastxtend_amp.precisions.kinds import is_grouped, is_ungrouped, kind_of
from helpers import learner, set_support
from states import Act, bits, rich

pytestmark = pytest.mark.usefixtures('sleeps')
draws = random.Random()


@pytest.fixture(autouse=True)
def native(monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name in ('bf16', 'fp16') else 'unsupported')
    draws.seed(0)


class Takes:
    "Needs so many seconds in fp32 and under autocast, with noise of this standard deviation under autocast off."

    def __init__(self, *args, fp32, low, noise=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp32, self.low, self.noise = fp32, low, noise

    def forward(self, x):
        seconds = self.low if torch.is_autocast_enabled('cpu') else self.fp32
        time.sleep(seconds * (1 + self.noise * draws.uniform(-1, 1)))
        return super().forward(x)


class Conv(Takes, nn.Conv1d):
    pass


class Norm(Takes, nn.GroupNorm):
    pass


class Head(Takes, nn.Linear):
    pass


def net(depthwise=(0.02, 0.06), grouped=(0.01, 0.01), norm=(0.01, 0.01), noise=0.0, slow=1.0):
    "Each kind with its seconds in fp32 and in low precision; convolutions without groups gain."

    def times(seconds):
        return dict(fp32=slow * seconds[0], low=slow * seconds[1], noise=noise)

    torch.manual_seed(0)
    return nn.Sequential(
        Act(lambda x: x[..., None]),
        Conv(6, 6, 1, **times((0.1, 0.04))),
        Conv(6, 6, 1, groups=6, **times(depthwise)),
        Conv(6, 6, 1, groups=3, **times(grouped)),
        Norm(2, 6, **times(norm)),
        nn.Flatten(),
        Head(6, 1, **times((0.06, 0.03))),
    )


def tried(comparison):
    "What the notes say of each kind, in the order in which they were tried."
    note = next((n for n in comparison.notes if n.startswith('Kinds of modules tried')), '')
    parts = note.partition(': ')[2].partition('. ')[0].rstrip('.').split('; ')
    return dict(part.split(' ', 1) for part in parts if part)


@pytest.mark.parametrize('method', ['compare_precision', 'to_amp'])
def test_a_kind_that_pays_is_kept_and_one_that_does_not_is_not(method):
    learn = learner(net())
    if method == 'to_amp':
        found = learn.to_amp(measure=True, max_seconds=1000).precision_decision
    else:
        found = learn.compare_precision(tune=True, max_seconds=1000)
        found.apply(learn)
    name = 'bf16, depthwise in fp32'
    assert list(found.table.index) == ['fp32', 'bf16', 'fp16', name] and found.recommended == name
    # In fp32 .2 seconds, in bf16 .15, and with depthwise convolutions in fp32 .11.
    assert found.table['speed-up'][['bf16', name]].tolist() == pytest.approx([0.2 / 0.15, 0.2 / 0.11], rel=1e-3)
    n = len(found.losses['fp32'])
    assert len(found.losses[name]) == n and abs(found.table['loss difference'][name]) < 0.01
    assert found.calls[name] == 'learn.to_bf16(fp32_modules=is_depthwise)' in repr(found) or method == 'to_amp'
    of_kinds = tried(found)
    assert list(of_kinds)[0] == 'depthwise' and of_kinds['depthwise'] == '1.36 (1.36 to 1.36), kept'
    assert of_kinds['grouped'] == of_kinds['Norm'] == '1.00 (1.00 to 1.00)' and of_kinds['ungrouped'].startswith('0.6')
    assert 'Not tried' not in ' '.join(found.notes)
    assert learn.precision.precision == BF16(fp32_modules=is_depthwise) == found.precisions[name]
    assert learn.precision.fp32_module_names == ['2'] and found.plot() is not None
    learn.fit(1)


def test_a_second_kind_is_tried_with_the_first():
    found = learner(net(grouped=(0.02, 0.04))).compare_precision('bf16', tune=True, max_seconds=1000)
    both = 'bf16, depthwise and grouped in fp32'
    assert list(found.table.index) == ['fp32', 'bf16', 'bf16, depthwise in fp32', both] and found.recommended == both
    assert found.calls[both] == 'learn.to_bf16(fp32_modules=[is_depthwise, is_grouped])'
    assert tried(found)['grouped'] == f'{0.14 / 0.12:.2f} ({0.14 / 0.12:.2f} to {0.14 / 0.12:.2f}), kept'


def test_kinds_are_added_to_the_modules_that_the_learner_keeps():
    learn = learner(net()).to_bf16(fp32_modules=['6', '4'], on_overflow='raise')
    found = learn.compare_precision('bf16', tune=True, max_seconds=1000)
    assert found.calls[found.recommended] == (
        "learn.to_bf16(fp32_modules=['4', '6', is_depthwise], on_overflow='raise')"
    )
    assert 'Norm' not in tried(found) and 'Head' not in tried(found)  # which are in fp32 anyway
    found.apply(learn)
    assert learn.precision.fp32_module_names == ['2', '4', '6'] and learn.precision.on_overflow == 'raise'


def test_a_class_is_printed_as_code():
    found = learner(net((0.01, 0.01), norm=(0.01, 0.05))).compare_precision('bf16', tune=True, max_seconds=1000)
    assert found.calls['bf16, Norm in fp32'] == 'learn.to_bf16(fp32_modules=Norm)'
    assert repr(BF16(fp32_modules=[nn.LayerNorm, 'a'])) == "learn.to_bf16(fp32_modules=[nn.LayerNorm, 'a'])"


def test_what_is_not_certain_is_not_kept(sleeps):
    "A gain of 3%, with noise of 90%."
    learn = learner(net((0.055, 0.06), noise=0.9))
    found = learn.compare_precision('bf16', 9, tune=True, n_seeds=0, max_seconds=300)
    assert list(found.table.index) == ['fp32', 'bf16'] and sleeps.now < 301
    low, high = map(float, re.search(r'\((.*) to (.*)\)', tried(found)['depthwise']).groups())
    assert low <= 1.02 < high


@pytest.mark.parametrize('max_seconds', [10.0, 20.0, 40.0, 80.0])
@pytest.mark.parametrize('call', ['compare_precision', 'to_amp'])
def test_the_time_limit_holds_and_slow_models_get_fewer_kinds_not_fewer_rounds(sleeps, max_seconds, call):
    learn = learner(net(grouped=(0.01, 0.012), slow=2.5))
    if call == 'to_amp':
        found = learn.to_amp(measure=True, max_seconds=max_seconds).precision_decision
    else:
        found = learn.compare_precision('bf16', tune=True, max_seconds=max_seconds)
    assert sleeps.now < max_seconds + 1
    kinds, said = tried(found), ' '.join(found.notes)
    assert all('nan' not in text and '-' not in text for text in kinds.values())  # each had its six rounds
    if max_seconds == 40:
        assert 'depthwise' in kinds and re.search(r'Not tried, as the time was over: .*ungrouped\.', said)
        assert found.recommended == 'bf16, depthwise in fp32'


def test_what_cannot_be_tuned_costs_nothing(monkeypatch, sleeps):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'bf16' else 'unsupported')
    plain, tuned = (learner(net()).compare_precision('bf16', tune=tune, n_seeds=0) for tune in (False, True))
    assert tuned.losses == plain.losses and list(tuned.table.index) == ['fp32', 'bf16'] and tried(tuned) == {}


def test_compiled_models_are_tuned_only_if_they_are_compared_compiled(monkeypatch):
    learn = learner(torch.compile(net(), backend='eager'))
    assert tried(learn.compare_precision('bf16', tune=True, n_steps=8, n_seeds=0)) == {}
    compiling = []
    monkeypatch.setattr(nn.Module, 'compile', lambda self: compiling.append(self))
    found = learner(net()).compare_precision('bf16', tune=True, n_seeds=0, compile=True, max_seconds=1000)
    assert found.recommended in ('bf16, depthwise in fp32', 'bf16 compiled, depthwise in fp32')
    assert ('; learn.model.compile()' in found.calls[found.recommended]) == ('compiled' in found.recommended)
    assert len(compiling) > 2 or 'compiled' not in found.recommended


def test_an_error_of_a_kind_in_fp32_is_a_result():
    class Refuses(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float32 and torch.is_autocast_enabled('cpu'):
                raise RuntimeError('expected bf16')
            return x

    model = net()
    model.insert(3, Refuses())
    found = learner(model).compare_precision('bf16', tune=True, max_seconds=1000)
    assert tried(found)['depthwise'] == 'RuntimeError: expected bf16' and 'bf16' in found.recommended


def test_nothing_of_the_learner_changes():
    learn = rich()
    learn.model[4] = Takes_relu()
    before = bits(learn)
    found = learn.compare_precision('bf16', tune=True, n_seeds=1)
    assert bits(learn) == before and 'Takes_relu' in tried(found)
    learn.to_amp(measure=True)
    after = bits(learn)
    for key in ('grads', 'metrics', 'dls', 'rng', 'autocast', 'opt', 'lists'):
        assert after[key] == before[key], key


class Takes_relu(Takes, nn.ReLU):
    def __init__(self):
        super().__init__(fp32=0.01, low=0.02)


def test_more_memory_is_said():
    "Activations of the depthwise convolution and of what follows are fp32 instead of 16-bit."
    found = learner(net()).compare_precision('bf16', tune=True, n_seeds=0, max_seconds=1000)
    used = found.table['activations MB']
    assert used[found.recommended] > used['bf16'] > 0
    assert re.search(r'bf16, depthwise in fp32 keeps .* MB of activations, bf16 .* MB\.', ' '.join(found.notes))


# -- the predicates


@pytest.mark.parametrize(
    'module, kind',
    [
        (nn.Conv2d(8, 16, 3, groups=8), is_depthwise),
        (nn.ConvTranspose1d(8, 8, 3, groups=8), is_depthwise),
        (nn.Conv2d(8, 8, 3, groups=2), is_grouped),
        (nn.Conv2d(1, 8, 3), is_ungrouped),
        (nn.LayerNorm(8), nn.LayerNorm),
    ],
)
def test_kinds(module, kind):
    assert kind_of(module) is kind and is_depthwise(module) == (kind is is_depthwise)


def test_predicates_print_as_their_name_and_can_be_copied_pickled_and_exported(tmp_path):
    assert repr(is_depthwise) == 'is_depthwise' and is_depthwise.__doc__
    assert pickle.loads(pickle.dumps(is_depthwise)) is copy.deepcopy(is_depthwise) is is_depthwise
    assert repr(BF16(fp32_modules=is_depthwise)) == 'learn.to_bf16(fp32_modules=is_depthwise)'
    learn = learner(net(), cbs=MixedPrecision('bf16', fp32_modules=is_depthwise), path=tmp_path)
    learn.fit(1)
    assert learn.precision.fp32_module_names == ['2']
    learn.model[0] = nn.Unflatten(1, (6, 1))  # a lambda cannot be pickled
    learn.export()
    assert load_learner(tmp_path / 'export.pkl').model[2].groups == 6
