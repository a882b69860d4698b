"The recipes of the manual, run as written."

import copy, re, runpy, sys
from pathlib import Path

import pytest, torch
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import lr_find  # noqa: F401
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from torch.nn import functional as F

from fastxtend_amp import LossScaleMetric, SkippedStepsMetric, fused, precision_report
from fastxtend_amp.precisions import PRECISIONS
from helpers import *
from test_fastai import digit_images

NBS = Path(__file__).parent.parent / 'nbs'
LOW = {'bf16': torch.bfloat16, 'fp16': torch.float16}
MODES = pytest.mark.parametrize('mode', LOW)


def recipe(word, file='recipes.md', only='', **names):
    "Run the block of code that contains this word, or the part of it that begins with `only`; return its names."
    block = next(b for b in re.findall(r'```python\n(.*?)```', (NBS / file).read_text(), re.S) if word in b)
    if only:
        block = '\n\n'.join(part for part in block.split('\n\n') if part.startswith(('from torch', only)))
    names = {
        **dict(Learner=lambda dls, model, **kwargs: learner(model, dls, **kwargs), dls=loaders(), model=linear()),
        **dict(nn=nn, torch=torch, Callback=Callback, CrossEntropyLossFlat=CrossEntropyLossFlat, accuracy=accuracy),
        **dict(LossScaleMetric=LossScaleMetric, SkippedStepsMetric=SkippedStepsMetric, CSVLogger=CSVLogger),
        **names,
    }
    exec(block.replace("'cuda'", "'cpu'"), names)
    return names


def trained(learn, mode, **kwargs):
    "Train for an epoch in this mode; return the learner."
    if mode in LOW:
        learn.add_cb(mixed(mode, **kwargs))
    learn.fit(1)
    return learn


# -- models and data


class Output(dict):
    logits = property(lambda self: self['logits'])


class WithLogits(nn.Module):
    "Returns its logits in a mapping with attributes, as Hugging Face's models do."

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return Output(logits=self.head((self.emb(input_ids) * attention_mask[..., None]).mean(1)))


class Tokens(torch.utils.data.Dataset):
    "Samples as tokenizers return them, or as tuples."

    def __init__(self, as_dict):
        self.as_dict = as_dict

    def __len__(self):
        return 16

    def __getitem__(self, i):
        sample = {'input_ids': torch.full((6,), 10 + i % 2), 'attention_mask': torch.ones(6).long()}
        return (sample, i % 2) if self.as_dict else (*sample.values(), i % 2)


@MODES
@pytest.mark.parametrize('word', ['class Logits', 'class FromDict'])
def test_models_whose_output_has_logits(word, mode):
    torch.manual_seed(0)
    data, model = Tokens(as_dict='Dict' in word), WithLogits()
    dls = loaders(train=data, valid=data)
    if 'Dict' in word:
        learn = recipe(word, dls=dls, name='', model=model)['learn'].to_fp32()
    else:  # without the download
        logits = recipe(word, only='class Logits')['Logits']()
        dls.n_inp, logits.run_on_copy = 2, True
        learn = learner(model, dls, CrossEntropyLossFlat(), cbs=logits)
    assert trained(learn, mode).get_preds()[0].shape == (16, 2)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe so far'


def test_a_frozen_base_in_16_bits():
    base = nn.Linear(6, 6)
    before = base.weight.detach().bfloat16()
    learn = recipe('base.to(torch.bfloat16)', base=base, head=linear())['learn']
    learn.fit(1)
    assert base.weight.dtype is torch.bfloat16 and torch.equal(base.weight, before) and finite(learn)


def test_batchnorm_in_fp32():
    learn = learner()
    dtypes = output_dtypes(learn, learn.model[1])
    trained(learn, 'fp16')
    recipe('_BatchNorm', learn=learn)
    learn.mixed_precision.on_overflow = 'ignore'  # no batch runs again
    learn.fit(1)
    assert dtypes == 6 * [torch.float16] + 6 * [torch.float32] and learn.mixed_precision.fp32_module_names == ['1']


# -- techniques


def test_a_custom_loss_in_fp32():
    dtypes = []

    def loss(pred, target):
        dtypes.append((pred.dtype, (pred @ pred.T).dtype))
        return (pred - target).square().mean()

    trained(recipe('class InFp32', my_loss=loss, noop=noop)['learn'], 'bf16')
    assert {*dtypes} == {(torch.float32, torch.float32)}
    trained(learner(loss_func=loss), 'bf16')
    assert dtypes[-1] == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize('opt_func', [Adam, fused('AdamW')], ids=['Adam', 'fused'])
@pytest.mark.parametrize('mode', ['fp32', 'fp16'])
def test_an_ema_leaves_out_skipped_steps_and_lr_find(opt_func, mode, tmp_path):
    ema = recipe('class EMA', only='class EMA')['EMA']()
    learn = learner(cbs=ema, opt_func=opt_func, path=tmp_path)
    learn.lr_find(num_it=20, suggest_funcs=(), show_plot=False)
    assert ema.average is None
    with learn.added_cbs(spoil_at(1, 3) if mode == 'fp16' else []):
        trained(learn, mode)
    learn.validate()
    assert ema.average.n_averaged == (4 if mode == 'fp16' else 6)
    learn.model.load_state_dict(ema.average.module.state_dict())
    compared = learn.compare_precision('bf16', n_steps=4, n_seeds=0, max_seconds=1)  # which also runs it in fp32
    assert 'failed' not in [*compared.table['support']]


@MODES
def test_activation_checkpointing_gives_the_same_weights_with_modules_in_fp32(mode):
    def weights(wrap):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        learn = trained(learner(nn.Sequential(*map(wrap, blocks), nn.Linear(6, 1))), mode, fp32_modules=nn.GELU)
        assert len(learn.mixed_precision.fp32_module_names) == 2
        return params(learn)

    assert same(weights(lambda block: block), weights(recipe('class Checkpointed', only='class Che')['Checkpointed']))


def test_loss_scaling_fixed_off_and_by_ones_own_scaler():
    learn, seen = learner(), []

    class Calls:
        def to_fp16(self, **kwargs):
            learn.to_fp16(**kwargs).fit(1)
            seen.append((learn.mixed_precision.scale, sum(learn.mixed_precision.skips)))

    recipe('learn.to_fp16(scaler=', learn=Calls())
    assert seen == [(512.0, 0), (None, 0), (1024.0, 0)]


def test_a_second_forward_pass_in_a_callback():
    "In `before_step`, where autocast is off; so in a recipe for inference."
    learn = learner().to_bf16()
    dtypes = output_dtypes(learn)

    def again(l):
        with l.amp_context():
            pred = l.model(*l.xb)
        F.mse_loss(pred.float(), *l.yb).backward()

    learn.add_cb(At('before_step', again, 12)).fit(1)
    learn.model.train()
    recipe('inference_mode', learn=learn, x=torch.randn(4, 6))
    assert dtypes == 13 * [torch.bfloat16] and finite(learn)


# -- without a learner


class OwnLoss(nn.Module):
    "As a model of Hugging Face: called with the items of a batch; its output has the loss."

    def __init__(self):
        super().__init__()
        self.net = Attentive()

    def forward(self, x, labels=None):
        pred = self.net(x)
        loss = F.mse_loss(pred, labels) if labels is not None else None
        return type('Output', (dict,), {'loss': loss})(loss=loss, logits=pred)


def test_the_report_on_a_loop_without_a_learner():
    loader = torch.utils.data.DataLoader(dataset(), batch_size=4, shuffle=True)
    named = [{'x': x, 'labels': y} for x, y in loader]
    trainer = type('Trainer', (), {'model': OwnLoss(), 'get_train_dataloader': lambda self: iter(named)})()
    lit = type('Lit', (), {'net': Attentive()})
    found = recipe('get_train_dataloader', lit=lit, train_dataloader=loader, trainer=trainer, F=F)
    state = torch.get_rng_state()
    precision_report(lit.net, loader, F.mse_loss, precisions='bf16')
    assert torch.equal(state, torch.get_rng_state()) and not trainer.model._forward_pre_hooks
    assert same([*lit.net.parameters()], [*Attentive().parameters()]) and not replaced(lit.net)
    for report, name in ((found['report'], 'attn'), (found['trainers'], 'net.attn')):
        calls = [v.call for v in report.verdicts.values()]
        assert calls[0] == 'bf16' and calls[1].startswith('fp16') and f"fp32_modules=['{name}']" in calls[1]
        assert 'learn.' not in repr(report)

    def loss():
        with torch.autocast('cpu', torch.float16):
            return F.mse_loss(model(named[0]['x']).float(), named[0]['labels'])

    model = Attentive()
    assert loss().isnan()
    recipe('def keep_in_fp32', model=model)
    assert loss().isfinite()


WRONG_BATCHES = {
    'no batch': lambda: precision_report(linear(), [], F.mse_loss),
    'tuples, but no loss_func': lambda: precision_report(linear(), loaders().train),
    'dicts, and a loss_func': lambda: precision_report(linear(), [{}], F.mse_loss),
    'no target': lambda: precision_report(linear(), [torch.randn(4, 6)], F.mse_loss),
    'no labels': lambda: precision_report(OwnLoss(), [{'x': torch.randn(4, 6)}]),
    'other arguments': lambda: precision_report(linear(), loaders().train, F.mse_loss, max_seconds=0),
}


def test_wrong_batches_and_losses(expected):
    lines = []
    for name, call in WRONG_BATCHES.items():
        with pytest.raises((TypeError, ValueError)) as e:
            call()
        lines += [f'# {name}: {e.type.__name__}', str(e.value), '']
    expected('any_loop', '\n'.join(lines))


def test_models_of_transformers_and_lightning():
    with_loss = pytest.importorskip('transformers')
    config = with_loss.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    report = precision_report(with_loss.GPT2LMHeadModel(config), [{'input_ids': ids, 'labels': ids}], precisions='bf16')
    assert [v.call for v in report.verdicts.values()] == ['bf16']
    lit = pytest.importorskip('lightning')
    module = lit.LightningModule()
    module.net, module.forward = linear(), lambda x: module.net(x)
    assert precision_report(module, loaders().train, F.mse_loss).verdicts['bf16'].call == 'bf16'


@pytest.mark.torchao
def test_a_precision_of_ones_own(tmp_path):
    "A layer computes bit for bit as after torchao's own conversion, with any number of rows; then fits and insight."
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization.quant_api import quantize_

    exec((NBS / 'mxfp8.py').read_text(), {})
    wide = nn.Linear(6, 64), nn.Linear(64, 32), nn.Linear(32, 1)
    learn, plain = (learner(copy.deepcopy(nn.Sequential(*wide)), loaders(24, bs=20)) for _ in range(2))
    layer = learn.to_mxfp8().model[1]
    theirs = copy.deepcopy(layer).bfloat16()
    theirs.bias = None  # which it leaves out
    quantize_(theirs, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
    for n in (32, 20, 4):  # it needs blocks of 32 rows
        x, weights = torch.randn(n, 64, requires_grad=True), torch.randn(n, 32)
        rows = x.detach().bfloat16().requires_grad_()
        with learn.amp_context():
            ours = layer(x)
        out = theirs(F.pad(rows, (0, 0, 0, -n % 32)))[:n] + layer.bias.bfloat16()
        for found in (ours, out):
            (found.float() * weights).sum().backward()
        assert torch.equal(ours, out) and torch.equal(x.grad, rows.grad.float())
        assert torch.equal(layer.weight.grad, theirs.weight.grad.float())
        layer.weight.grad = theirs.weight.grad = None
    learn.fit(1, 0.01)
    plain.to_bf16().fit(1, 0.01)
    assert is_outside_a_fit(learn) and not same(params(learn), params(plain)) and learn.mixed_precision.amp_mode is None
    assert learn.precision_report('mxfp8').verdicts['mxfp8'].call == 'learn.to_mxfp8()'
    assert [*learn.compare_precision('mxfp8', 2, n_seeds=0).table.index] == ['fp32', 'mxfp8']
    with pytest.raises(ValueError, match='divisible by 32'):
        learner(linear()).to_mxfp8()
    PRECISIONS.pop('mxfp8')
    del Learner.to_mxfp8


# -- logging


def test_norms_of_gradients_are_true_from_order_11_on(capsys):
    LogNorm, norms = recipe('class LogNorm')['LogNorm'], []
    for order, scale in ((11, 256.0), (11, 1024.0), (9, 1024.0)):
        trained(learner(cbs=type('Log', (LogNorm,), {'order': order})()), 'fp16', init_scale=scale)
        norms.append([float(x) for x in re.findall(r'tensor\(([\d.e+-]+)', capsys.readouterr().out)])
    assert len(norms[0]) == 6 and norms[0] == pytest.approx(norms[1], rel=0.01)
    assert norms[2][0] == pytest.approx(norms[0][0] * 1024, rel=0.01)


@pytest.mark.parametrize('mode', ['fp32', *LOW])
def test_loggers_get_the_table(mode, tmp_path, monkeypatch):
    pytest.importorskip('tensorboard')
    monkeypatch.chdir(tmp_path)
    logged = []
    wandb = type('wandb', (), {'log': staticmethod(logged.append), 'init': staticmethod(lambda project: None)})
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    with_wandb = recipe('class LogToWandb', accuracy=SkippedStepsMetric)['learn']
    images = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with_files = recipe('TensorBoardCallback', dls=digit_images(8, size=8, n=40), model=images)['learn']
    with_files.loss_func = CrossEntropyLossFlat()
    for learn in (with_wandb, with_files):
        trained(learn, mode)
    assert (tmp_path / 'history.csv').read_text().count('skipped_steps') == 1
    assert any((tmp_path / 'runs').rglob('events*'))
    assert len(logged) == 1 and logged[0]['valid_loss'] > 0 and logged[0]['skipped_steps'] == 0
    assert mode != 'fp16' or logged[0]['loss_scale'] == 256.0


# -- the loop that the page `how_it_works` links to


@pytest.mark.parametrize('n_acc, clip', [(None, None), (8, 0.5)])
@pytest.mark.parametrize(
    'mode, init_scale, size',
    [('fp32', 1.0, 1), ('bf16', 1.0, 1), ('fp16', 256.0, 1), ('fp16', 2.0**24, 1), ('fp16', 2.0**24, 1e6)],
)
def test_the_loop_of_the_manual_computes_what_the_callback_does(mode, init_scale, size, n_acc, clip, capsys):
    "Bit for bit, with the optimizer and the loss scale; in the last cases with skipped steps, and with NaN in buffers."
    Trainer = runpy.run_path(str(NBS / 'pytorch_loop.py'))['Trainer']
    data, model = dataset(), mlp()
    data.tensors[0][4:8] *= size  # the second batch
    learn = learner(dls=loaders(train=data), opt_func=OPTIMIZERS['adamw'])
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = Trainer(model, opt, nn.MSELoss(), mode, init_scale=init_scale, n_acc=n_acc, clip=clip)
    if mode in LOW:
        learn.add_cb(mixed(mode, **({'init_scale': init_scale} if mode == 'fp16' else {})))
    for _ in range(2):
        learn.fit(2, 0.01, cbs=[GradientAccumulation(n_acc), GradientClip(clip)] if n_acc else [])
        loop.fit(2, learn.dls.train, learn.dls.valid)
    assert same([*learn.model.state_dict().values()], [*model.state_dict().values()])
    assert same_state(opt_state(learn.opt), [{**dict(sorted(opt.state[p].items()))} for p in model.parameters()])
    if mode == 'fp16':
        assert (
            learn.mixed_precision.scale == loop.scaler.get_scale()
            and sum(learn.mixed_precision.skips) == loop.skipped_steps
        )
    skipped = loop.skipped_steps
    assert (skipped > 2) == (init_scale > 256) and capsys.readouterr().out.count('validation loss') == 4
