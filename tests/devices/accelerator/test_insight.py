"Report, comparison and diagnosis on an accelerator say what they say on the CPU."
import pytest, torch
from fastai.callback.training import GradientAccumulation

from devices.simulated import is_installed
from helpers import *

CPU = torch.device('cpu')


def attentive(device=None, **kwargs): return learner(Attentive(), loaders(n=48, device=device), **kwargs)


@pytest.mark.parametrize('model', [mlp, Attentive], ids=['fine', 'overflows'])
def test_the_report(model, device):
    there, here = (learner(model(), loaders(n=48, device=d)).precision_report() for d in (device, CPU))
    assert there.fp32_modules == here.fp32_modules
    assert {m: v.verdict for m, v in there.verdicts.items()} == {m: v.verdict for m, v in here.verdicts.items()}
    assert list(there.table.index) == list(here.table.index)


def test_the_report_leaves_the_learner_and_the_random_state(device):
    learn = attentive().to_fp16(fp32_modules=['attn'])
    learn.fit(1, .01)
    module = torch.get_device_module(device)
    before = (
        params(learn),
        opt_state(learn.opt),
        learn.precision.scales,
        module.get_rng_state(device),
        torch.get_rng_state(),
    )
    learn.precision_report()
    assert (
        same(params(learn), before[0])
        and same_state(opt_state(learn.opt), before[1])
        and learn.precision.scales == before[2]
    )
    assert torch.equal(module.get_rng_state(device), before[3]) and torch.equal(torch.get_rng_state(), before[4])


@pytest.mark.parametrize('opt', ['adam', 'adamw', 'fused adamw', 'fused sgd'])
def test_the_diagnosis_names_the_module(opt, device):
    learn = attentive(opt_func=OPTIMIZERS[opt]).to_fp16()
    with pytest.warns(UserWarning, match="(?s)the loss is nan.*module 'attn'.*fp32_modules"): learn.fit(1, .01)
    assert not torch.is_autocast_enabled(device.type)


def test_the_diagnosis_raises_where_it_is_asked_to(device):
    learn = attentive().to_fp16(on_overflow='raise')
    with pytest.raises(FloatingPointError, match="module 'attn'"): learn.fit(1, .01)
    learn = attentive(opt_func=OPTIMIZERS['fused adamw']).to_fp16(on_overflow='raise', fp32_modules=['attn'])
    learn.fit(1, .01)


def test_the_diagnosis_of_a_batch_that_is_not_finite(device):
    train = dataset(48)
    train.tensors[0][9, 2] = float('nan')
    learn = learner(mlp(), loaders(train=train)).to_bf16()
    with pytest.warns(UserWarning, match='The batch itself is not finite: 1 of 24 values of an input'):
        learn.fit(1, 0.01)


def test_the_comparison(device):
    losses = {}
    for d in (device, CPU):
        learn = learner(mlp(), loaders(n=48, device=d))
        before = params(learn)
        found = learn.compare_precision(n_steps=8, n_seeds=1)
        assert same(params(learn), before) and learn.precision is None and learn.opt is None
        losses[d.type] = found.losses
    assert found.table.index.tolist() == ['fp32', 'bf16', 'fp16']
    if is_installed(): assert losses[device.type] == losses['cpu']


def test_the_comparison_waits_for_the_device_before_it_looks_at_the_clock(sim):
    "The clock starts and stops when the device has finished: one `synchronize` at each end of a turn."
    from devices.simulated import waits
    with waits() as found: learner(mlp(), loaders(n=48)).compare_precision(n_steps=8, n_seeds=0)
    assert sum(w.kind == 'sync' for w in found) >= 2 * 3


def test_kept_modules_train_as_the_report_promises(device):
    learn = attentive()
    learn.to_fp16(fp32_modules=learn.precision_report('fp16').fp32_modules, init_scale=256.).fit(1, .01)
    assert learn.precision.n_skipped == 0 and all(float(l) == float(l) for l in learn.recorder.losses)


@pytest.mark.parametrize('known,chosen', [({'bf16': 200.}, 'bf16'), ({'half weights': 300.}, 'half weights'),
                                          ({'bf16': 50., 'fp16': 50., 'half weights': 50., 'half weights fp16': 50.}, 'fp32')])
def test_the_measured_choice(known, chosen, device, monkeypatch, capsys):
    "The speeds are replaced; the copies are trained on the device, and the learner comes out as it was."
    from fastxtend_amp import mode
    from fastxtend_amp.insight import choice, compare, precisions, trainings
    train = trainings.Run.train
    def replaced(self, *args):
        train(self, *args)
        self.speeds[-1] = known.get(self.name, 100.) + len(self.speeds) % 3
    monkeypatch.setattr(trainings.Run, 'train', replaced)
    for module in (precisions, compare): monkeypatch.setattr(module, 'mode_support', lambda m, d: mode.Support('native', ''))
    halves = any(name.startswith('half') for name in known)      # which are tried where the learner has them
    learn = learner(Attentive(1., drop=.2), loaders(n=48), cbs=GradientAccumulation(8))
    if halves: learn.to_half_weights(cast_once=True)
    learn.fit(1, .01)
    rng = torch.get_device_module(device).get_rng_state(device)
    before = params(learn), opt_state(learn.opt)
    choice.measure_and_choose(learn, n_steps=16)
    decision = learn.precision_decision
    assert decision.mode == chosen and list(decision.table['steps']) == [16] * (5 if halves else 3)
    assert same(params(learn), before[0]) and same_state(opt_state(learn.opt), before[1])
    assert torch.equal(torch.get_device_module(device).get_rng_state(device), rng)
    assert capsys.readouterr().out.startswith(f'{chosen}: ')
    learn.fit(1, .01)
    assert {p.device for p in learn.model.parameters()} == {device}
