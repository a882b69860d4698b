"The recipes of the manual, run as written."

import re, runpy, sys
from collections import OrderedDict
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fastai.text.all import *
from fastai.vision.all import *
from torch.nn import functional as F

from fastxtend_amp import *
from fastxtend_amp.precisions import PRECISIONS
from fastxtend_amp.training.loop import precision_callback
from helpers import OPTIMIZERS, Attentive, dataset, finite, is_outside_a_fit, learner, linear, loaders, mixed, mlp
from helpers import opt_state, params, replaced, same, spoil_at

for name in [n for n in globals() if n.startswith('test')]:
    del globals()[name]  # fastai's star imports bring some

NBS = Path(__file__).parent.parent / 'nbs'
BLOCKS = re.findall(r'```python\n(.*?)```', (NBS / 'recipes.md').read_text(), re.S)
NEEDS = {'onnx': 'onnxscript', 'tensorboard': 'tensorboard', 'kahan': 'optimi'}


class WithLogits(nn.Module):
    "Called with the items of a batch; returns its logits as Hugging Face's models do."

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.head((self.emb(input_ids) * attention_mask[..., None]).mean(1)))


def tokens(make):
    "Loaders of batches as `make` puts them together, and the model for them."
    data = [make({'input_ids': torch.full((6,), i % 2), 'attention_mask': torch.ones(6)}, i % 2) for i in range(16)]
    return dict(dls=loaders(train=data, valid=data), model=WithLogits())


def run_recipe(word, **names):
    "Run the block of code that has this word, with these names and those of a reader; return all names."
    block = next(b for b in BLOCKS if word in b)
    for needed in (package for part, package in NEEDS.items() if part in block):
        pytest.importorskip(needed)
    torch.manual_seed(0)
    model, config = Attentive(1.0), {**awd_lstm_clas_config, 'emb_sz': 8, 'n_hid': 8}
    model.head.insert(1, nn.BatchNorm1d(8))
    of_reader = dict(
        Learner=lambda dls, model, **kwargs: learner(model, dls, **kwargs),
        vision_learner=lambda dls, arch, **kwargs: learner(dls=dls, **kwargs),
        text_classifier_learner=partial(text_classifier_learner, pretrained=False, config=config),
        df=pd.DataFrame({'text': ['A very good film', 'Bad'] * 50, 'label': ['yes', 'no'] * 50}),
        **dict(model=model, dls=loaders(), learn=learner(model), x=torch.randn(4, 6), name='', my_loss=F.mse_loss),
        **dict(base=nn.Linear(6, 6), head=linear(), blocks=[nn.Sequential(OrderedDict(norm=nn.LayerNorm(6)))]),
        **dict(self=SimpleNamespace(learn=learner()), loss=torch.ones(1, requires_grad=True)),
    )
    if 'n_inp' in block:
        of_reader |= tokens(lambda sample, y: (*sample.values(), y))
    if 'FromDict' in block:
        of_reader |= tokens(lambda sample, y: (sample, y))
    found = {**globals(), **of_reader, **names}
    exec(block.replace("'cuda'", "'cpu'").replace('256', '16'), found)
    return SimpleNamespace(**found)


# -- all recipes, and what some of them promise


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'block',
    [b for b in BLOCKS if not re.search(r'trainer|\blit\b|8bit|to_fp8', b)],
    ids=lambda b: b.splitlines()[-1][:40],
)
def test_a_recipe_runs_and_its_learner_trains(block, monkeypatch, tmp_path):
    "With its callbacks; in fp16 if it names no precision."
    monkeypatch.chdir(tmp_path)
    wandb, model = Mock(), Mock(from_pretrained=lambda name, dtype: WithLogits().to(dtype))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    monkeypatch.setitem(sys.modules, 'transformers', Mock(AutoModelForSequenceClassification=model))
    found = run_recipe(block)
    learn, before = found.learn, params(found.learn)
    own = [v() for v in vars(found).values() if isinstance(v, type) and issubclass(v, Callback) and v.__name__ in block]
    learn.add_cbs(cb for cb in own if 'cbs' not in block and type(cb).__module__ == __name__)
    if precision_callback(learn) is None:
        learn.add_cb(mixed('fp16'))
    learn.fit(1, 1e-3)
    assert finite(learn) and not same(params(learn), before) and wandb.log.called == ('wandb' in block)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict != 'not known'


@pytest.mark.parametrize('mode, opt', [('fp32', 'adam'), ('fp16', 'adam'), ('fp16', 'fused adamw')])
def test_an_ema_leaves_out_skipped_steps_and_lr_find(mode, opt, tmp_path):
    ema = run_recipe('class EMA').EMA()
    learn = learner(cbs=ema, opt_func=OPTIMIZERS[opt], path=tmp_path)
    learn.lr_find(num_it=20, suggest_funcs=(), show_plot=False)
    assert ema.average is None
    if mode == 'fp16':
        learn.add_cbs([mixed(mode), spoil_at(1, 3)])
    learn.fit(1)
    assert ema.average.n_averaged == (4 if mode == 'fp16' else 6)
    learn.model.load_state_dict(ema.average.module.state_dict())
    compared = learn.compare_precision('bf16', n_steps=4, n_seeds=0, max_seconds=1)  # which also runs it in fp32
    assert 'failed' not in [*compared.table['support']]


def test_a_loss_in_fp32_serves_what_looks_into_losses():
    "fastai sets `reduction`, or passes it."
    for loss_func in (MSELossFlat(), F.mse_loss):
        learn = run_recipe('class InFp32', my_loss=loss_func).learn.to_bf16()
        assert len(learn.get_preds(with_loss=True)[2]) == len(Interpretation.from_learner(learn).losses) == 8
    assert MSELossFlat().reduction == 'mean'


# -- without a learner


class OwnLoss(nn.Module):
    "As a model of Hugging Face: called with the items of a batch; its output has the loss. Also as one of Lightning."

    def __init__(self, in_dict=False):
        super().__init__()
        self.net, self.in_dict = Attentive(), in_dict

    def forward(self, x, labels=None):
        pred = self.net(x)
        loss = F.mse_loss(pred, labels) if labels is not None else None
        return type('Output', (dict,), {'loss': loss})(loss=loss, logits=pred)

    def training_step(self, batch, i):
        return self(*batch) if self.in_dict else self(*batch).loss


def test_the_report_on_a_loop_without_a_learner():
    loader = torch.utils.data.DataLoader(dataset(), batch_size=4, shuffle=True)
    named, lit, state = [{'x': x, 'labels': y} for x, y in loader], OwnLoss(), torch.get_rng_state()
    trainer = SimpleNamespace(model=OwnLoss(), get_train_dataloader=lambda: iter(named))
    found = run_recipe('get_train_dataloader', lit=lit, train_dataloader=loader, trainer=trainer)
    steps = [run_recipe('training_step', lit=OwnLoss(d), train_dataloader=loader).report for d in (False, True)]
    torch.set_rng_state(state)
    precision_report(lit.net, loader, F.mse_loss, precisions='bf16')
    assert torch.equal(state, torch.get_rng_state()) and not trainer.model._forward_pre_hooks
    assert same([*lit.net.parameters()], [*Attentive().parameters()]) and not replaced(lit.net)
    names = ['attn', 'net.attn', 'lit.net.attn', 'lit.net.attn']
    for report, name in zip([found.report, found.trainers, *steps], names, strict=True):
        calls = [v.call for v in report.verdicts.values()]
        assert calls[0] == 'bf16' and calls[1].startswith('fp16') and f"fp32_modules=['{name}']" in calls[1]
        assert 'learn.' not in repr(report)

    def is_finite():
        with torch.autocast('cpu', torch.float16):
            return lit.net(named[0]['x']).isfinite().all()

    assert not is_finite()
    run_recipe('def in_fp32', model=lit.net)
    assert is_finite()


WRONG_BATCHES = {
    'a learner': lambda: precision_report('a learner', [], F.mse_loss),
    'no batch': lambda: precision_report(linear(), [], F.mse_loss),
    'tuples, but no loss_func': lambda: precision_report(linear(), loaders().train),
    'dicts, and a loss_func': lambda: precision_report(linear(), [{}], F.mse_loss),
    'a tensor': lambda: precision_report(linear(), [torch.randn(4, 6)], F.mse_loss),
    'no target, in the second': lambda: precision_report(linear(), [*loaders().train][:1] + [(1,)], F.mse_loss),
    'a class': lambda: precision_report(linear(), loaders().train, nn.MSELoss),
    'no labels': lambda: precision_report(OwnLoss(), [{'x': torch.randn(4, 6)}]),
    'other arguments': lambda: precision_report(linear(), loaders().train, F.mse_loss, max_seconds=0),
}


def test_wrong_batches_and_losses(expected):
    lines = []
    for name, call in WRONG_BATCHES.items():
        with pytest.raises((TypeError, ValueError)) as e:
            call()
        lines += [f'# {name}: {e.type.__name__}', str(e.value), '']
    assert '\n'.join(lines) == expected('any_loop')


def test_models_of_transformers_and_lightning():
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    report = precision_report(
        transformers.GPT2LMHeadModel(config), [{'input_ids': ids, 'labels': ids}], precisions='bf16'
    )
    assert report.verdicts['bf16'].call == 'bf16'
    module = pytest.importorskip('lightning').LightningModule()
    module.net, module.forward = linear(), lambda x: module.net(x)
    assert precision_report(module, loaders().train, F.mse_loss).verdicts['bf16'].call == 'bf16'


def test_16_bit_weights_and_inputs_are_compared_as_fp32():
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in loaders().train]
    verdict = precision_report(mlp().bfloat16(), batches, F.mse_loss, precisions='bf16').verdicts['bf16']
    assert verdict.verdict == 'safe so far' and verdict.error > 0


# -- the files that the pages link to


@pytest.mark.torchao
def test_the_precision_mxfp8_of_the_manual():
    "A layer computes bit for bit as after torchao's own conversion, with any number of rows; then a fit and a report."
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization.quant_api import quantize_

    exec((NBS / 'mxfp8.py').read_text(), {})
    learn = learner(nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 32), nn.Linear(32, 1))).to_mxfp8()
    layer, before = learn.model[1], params(learn)
    theirs = deepcopy(layer).bfloat16()
    theirs.bias = None  # which it leaves out
    quantize_(theirs, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
    for n in (32, 20):  # it needs blocks of 32 rows
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
    assert is_outside_a_fit(learn) and not same(params(learn), before) and learn.mixed_precision.amp_mode is None
    assert learn.precision_report('mxfp8').verdicts['mxfp8'].call == 'learn.to_mxfp8()'
    with pytest.raises(ValueError, match='divisible by 32'):
        learner(linear()).to_mxfp8()
    PRECISIONS.pop('mxfp8')
    del Learner.to_mxfp8


@pytest.mark.parametrize('n_acc, clip', [(None, None), (8, 0.5)])
@pytest.mark.parametrize(
    'mode, init_scale, size', [('fp32', 1.0, 1), ('bf16', 1.0, 1), ('fp16', 256.0, 1), ('fp16', 2.0**24, 1e6)]
)
def test_the_loop_of_the_manual_equals_the_callback(mode, init_scale, size, n_acc, clip, capsys):
    "Bit for bit, with optimizer and loss scale; in the last row with skipped steps, and NaN in buffers."
    data, model = dataset(), mlp()
    data.tensors[0][4:8] *= size  # the second batch
    learn = learner(dls=loaders(train=data), opt_func=OPTIMIZERS['adamw'])
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = dict(init_scale=init_scale, n_acc=n_acc, clip=clip)
    loop = runpy.run_path(str(NBS / 'pytorch_loop.py'))['Trainer'](model, opt, nn.MSELoss(), mode, **options)
    getattr(learn, f'to_{mode}')(**(dict(init_scale=init_scale) if mode == 'fp16' else {}))
    for _ in range(2):
        learn.fit(2, 0.01, cbs=[GradientAccumulation(n_acc), GradientClip(clip)] if n_acc else [])
        loop.fit(2, learn.dls.train, learn.dls.valid)
    assert same([*learn.model.state_dict().values()], [*model.state_dict().values()])
    assert same(opt_state(learn.opt), [opt.state[p] for p in model.parameters()])
    if mode == 'fp16':
        cb = learn.mixed_precision
        assert (cb.scale, sum(cb.skips)) == (loop.scaler.get_scale(), loop.skipped_steps)
    assert (loop.skipped_steps > 2) == (size > 1) and capsys.readouterr().out.count('validation loss') == 4
