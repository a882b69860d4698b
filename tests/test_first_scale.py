"`init_scale='auto'`: the loss scale that the first training batch settles."
import fastai.callback.schedule  # noqa: F401  patches fit_one_cycle and lr_find
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastxtend_amp import MixedPrecision
from helpers import At, learner, loaders, mlp, params, same


class Deep(nn.Module):
    "Its gradients in fp16 are `gain` times larger inside than at its weights; dropout and a norm in a checkpoint."
    def __init__(self, gain=1., reentrant=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Linear(8, 1)
        self.gain, self.reentrant = gain, reentrant
    def inner(self, x): return self.drop(self.norm(x)).relu()
    def forward(self, x):
        x = self.first(x)
        x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(x).half() / self.gain * self.gain


def fit_fp16(model, steps=6, cbs=None, **kwargs):
    learn = learner(model, loaders(n=4 * steps), cbs=cbs).to_fp16(**kwargs)
    torch.manual_seed(1)
    learn.fit(1, .01)
    return learn


def gradients_at(scale, gain):
    "Are all gradients of the first batch finite if the loss is multiplied by `scale`?"
    learn = learner(Deep(gain), loaders(n=4)).to_fp16(loss_scale=scale, on_overflow='ignore')
    torch.manual_seed(1)
    learn.fit(1, .01)
    return learn.precision.n_skipped == 0


@pytest.mark.parametrize('gain', [1., 64., 4096.])
def test_it_is_the_largest_that_leaves_room_for_8_times_larger_gradients(gain):
    scale = fit_fp16(Deep(gain), 1, init_scale='auto').precision.scales[0]
    assert 1 <= scale < 2 ** 24 and gradients_at(scale * 8, gain) and not gradients_at(scale * 16, gain)


def test_between_1_and_2_to_the_24():
    assert fit_fp16(mlp(), 1, init_scale='auto', fp32_modules='*').precision.scales == [2. ** 24]
    assert fit_fp16(Deep(2.**18), 1, init_scale='auto', on_overflow='ignore').precision.scales == [1.]


@pytest.mark.parametrize('reentrant', [None, False])
@pytest.mark.parametrize('cbs', [None, GradientAccumulation(8)], ids=['each batch', 'accumulating'])
def test_training_is_as_if_nothing_had_been_tried(reentrant, cbs):
    auto = fit_fp16(Deep(64., reentrant), init_scale='auto', cbs=cbs)
    plain = fit_fp16(Deep(64., reentrant), init_scale=auto.precision.scales[0], cbs=cbs)
    assert same(params(auto), params(plain)) and auto.precision.scales == plain.precision.scales
    assert same(list(auto.model.buffers()), list(plain.model.buffers())) and auto.precision.n_skipped == 0


def test_no_step_of_a_one_cycle_start_is_thrown_away():
    skipped = {}
    for scale in (2.**20, 'auto'):
        learn = learner(Deep(64.), loaders(n=80)).to_fp16(init_scale=scale)
        learn.fit_one_cycle(1, .01)
        skipped[scale] = learn.precision.n_skipped
    assert skipped['auto'] == 0 < skipped[2.**20]


def test_it_is_settled_once_and_by_what_a_file_holds(tmp_path):
    found, seen = fit_fp16(Deep(64.), init_scale='auto'), []
    found.fit(1, .01, cbs=At('before_backward', lambda l: seen.append(l.precision.scaling.undecided), order=-5))
    assert not any(seen)
    found.precision.load_state_dict({**found.precision.state_dict(), 'scale': 32.})
    found.path = found.model_dir = tmp_path
    file = found.save('model')
    learn = learner(Deep(64.), loaders(n=4)).to_fp16(init_scale='auto')
    learn.load(file.with_suffix(''))
    learn.fit(1, .01)
    assert learn.precision.scales == [32.]


def test_lr_find_leaves_it_open_for_the_fit():
    learn = learner(Deep(64.), loaders(n=24)).to_fp16(init_scale='auto')
    learn.lr_find(num_it=5, show_plot=False, suggest_funcs=None)
    assert learn.precision.scaling.undecided
    torch.manual_seed(1)
    learn.fit(1, .01)
    assert learn.precision.scales[0] == fit_fp16(Deep(64.), init_scale='auto').precision.scales[0]


def test_a_loss_that_is_not_finite_leaves_it_to_the_next_batch():
    class Spoil(Callback):
        def before_batch(self):
            if self.train_iter == 0 and self.training: self.learn.xb = (self.xb[0] * float('inf'),)
    scales = fit_fp16(Deep(64.), 3, cbs=Spoil(), init_scale='auto', on_overflow='ignore').precision.scales
    assert scales[0] == 65536. and scales[1] not in (65536., 32768.) and scales[1] == scales[2]


def test_where_the_graph_cannot_be_walked_twice_training_starts_at_the_default():
    with pytest.warns(UserWarning, match="first batch cannot be tried on this model .*\n.*starts at 65536") as caught:
        learn = fit_fp16(Deep(1., reentrant=True), init_scale='auto')
    assert sum('cannot be tried' in str(w.message) for w in caught) == 1
    assert same(params(learn), params(fit_fp16(Deep(1., reentrant=True))))


class Once(torch.autograd.Function):
    "Raises what is not a RuntimeError where its backward pass would overflow."
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if not grad.isfinite().all(): raise FloatingPointError('a gradient of a gradient')
        return grad.clone()


def test_any_error_of_the_trial_is_told_and_training_goes_on():
    class Raises(Deep):
        def forward(self, x): return super().forward(Once.apply(self.first(x))[:, :6])
    learn = learner(Raises(64.), loaders(n=4)).to_fp16(init_scale='auto')
    with pytest.warns(UserWarning, match='first batch cannot be tried on this model .*a gradient of a gradient'), \
            pytest.raises(FloatingPointError): learn.fit(1)      # as it does with init_scale=65536
    assert not learn.precision.scaling.undecided


def test_anomaly_detection_does_not_see_the_trial():
    with torch.autograd.set_detect_anomaly(True): found = fit_fp16(Deep(64.), init_scale='auto')
    assert found.precision.scales == fit_fp16(Deep(64.), init_scale='auto').precision.scales


def test_with_a_compiled_model():
    found = fit_fp16(torch.compile(mlp(), backend='aot_eager'), init_scale='auto').precision.scales
    torch._dynamo.reset()
    assert found == fit_fp16(mlp(), init_scale='auto').precision.scales


@pytest.mark.parametrize('how', [dict(enabled=False), dict(loss_scale=8.), dict(scaler=torch.amp.GradScaler('cpu'))], ids=lambda how: next(iter(how)))
def test_it_is_refused_with_another_rule_for_the_scale(how):
    with pytest.raises(ValueError, match="init_scale='auto'"): MixedPrecision('fp16', init_scale='auto', **how)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="init_scale='best' cannot be used.*65536.0, or 'auto'"): learner().to_fp16(init_scale='best')


def test_bf16_takes_no_notice():
    learn = learner().to_amp(init_scale='auto')
    learn.fit(1, .01)
    assert learn.precision.mode.value == 'fp16' or learn.precision.scaling.undecided
    assert "init_scale='auto'" in learn.precision.as_call()


def test_a_buffer_that_repeats_its_memory():
    model = Deep()
    model.register_buffer('pos', torch.arange(2.).expand(8, 2))
    assert fit_fp16(model, init_scale='auto').precision.scales[0] == fit_fp16(Deep(), init_scale='auto').precision.scales[0]


def test_a_loss_that_reaches_no_parameter_in_the_trial_starts_at_the_default():
    class Hidden(Deep):
        def forward(self, x): return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
    with pytest.warns(UserWarning, match="reaches none of the optimizer's parameters"):
        learn = fit_fp16(Hidden(), init_scale='auto')
    assert learn.precision.scales[0] == 65536. and learn.precision.state_dict()['scale'] == learn.precision.scale


def test_the_scale_is_saved_though_the_first_losses_were_not_finite():
    learn = fit_fp16(Deep(), 2, cbs=At('before_batch', lambda l: setattr(l, 'xb', (l.xb[0] * float('nan'),))),
                     init_scale='auto', on_overflow='ignore')
    assert learn.precision.n_skipped == 2 and learn.precision.scale == 16384.
