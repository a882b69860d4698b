"MXFP8, a precision in one file: linear layers compute torchao's products, in fits, reports and comparisons."

import copy

import pytest, torch
from torch import nn
from torch.nn import functional as F

from helpers import is_outside_a_fit, learner, loaders, params, same

pytestmark = pytest.mark.torchao


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


@pytest.mark.parametrize('n', [32, 20, 4])
def test_a_layer_is_bit_for_bit_torchaos_conversion(n):
    "Which needs blocks of 32 rows, and leaves out the bias."
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization.quant_api import quantize_

    learn = learner(wide()).to_mxfp8()
    layer, x, weights = learn.model[2], torch.randn(n, 64, requires_grad=True), torch.randn(n, 32)
    with learn.amp_context():
        ours = layer(x)
    (ours.float() * weights).sum().backward()
    theirs, rows = copy.deepcopy(layer).bfloat16(), x.detach().bfloat16().requires_grad_()
    theirs.bias = None
    quantize_(theirs, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
    out = theirs(F.pad(rows, (0, 0, 0, -n % 32)))[:n] + layer.bias.bfloat16()
    (out.float() * weights).sum().backward()
    assert torch.equal(ours, out) and torch.equal(x.grad, rows.grad.float())
    assert torch.equal(layer.weight.grad, theirs.weight.grad.float())
    assert (ours - F.linear(x, layer.weight, layer.bias)).abs().max() > 0.01


def test_a_fit_computes_in_it():
    learn, plain = learner(wide(), loaders(24, bs=20)).to_mxfp8(), learner(wide(), loaders(24, bs=20)).to_bf16()
    learn.fit(2, 0.01)
    plain.fit(2, 0.01)
    assert is_outside_a_fit(learn) and learn.mixed_precision.amp_mode is None
    assert not same(params(learn), params(plain)) and abs(learn.recorder.losses[-1] - plain.recorder.losses[-1]) < 0.1


def test_files_reports_and_comparisons(tmp_path):
    learn = learner(wide(), path=tmp_path).to_mxfp8()
    learn.fit(1)
    assert {type(t) for t in torch.load(learn.save("a"), weights_only=False)["model"].values()} == {torch.Tensor}
    report = learn.precision_report('mxfp8')
    assert report.verdicts['mxfp8'].call == 'learn.to_mxfp8()', report
    rows = report.table.set_index('module').error
    assert rows['2'] > 4 * rows['0']  # 3 bits of mantissa instead of 7
    assert list(learn.compare_precision('mxfp8', 2, n_seeds=0).table.index) == ['fp32', 'mxfp8']


def test_models_without_such_layers():
    with pytest.raises(ValueError, match='divisible by 32'):
        learner(nn.Linear(6, 1)).to_mxfp8()
