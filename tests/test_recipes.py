"The recipes of the manual, run as they are written there."

import re
from pathlib import Path

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import fit_one_cycle, lr_find  # noqa: F401  for the recipes
from fastai.data.core import DataLoaders
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.load import DataLoader
from fastai.data.transforms import IndexSplitter
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import Adam
from fastai.vision.core import PILImageBW
from fastai.vision.data import ImageBlock
from sklearn.datasets import load_diabetes, load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fastxtend_amp import fused, loss_scale, skipped_steps
from helpers import At, learner, loaders, params, same, spoil_at

NBS = Path(__file__).parent.parent / 'nbs'


def code(word, file='recipes.md'):
    "The block of code with this word."
    blocks = re.findall(r'```python\n(.*?)```', (NBS / file).read_text(), re.S)
    return next(block for block in blocks if word in block)


def classes(word):
    "What the classes of a recipe need and define; what comes after them is left out."
    text = re.split(r'\n\n(?!class)', code(word))
    names = {'Callback': Callback, 'nn': nn, 'torch': torch}
    exec('\n\n'.join(part for part in text if part.startswith(('class', 'from'))), names)
    return names


def tokens(n=32):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (n, 6), generator=g)
    data = TensorDataset(ids, torch.ones_like(ids), (ids[:, 0] > 25).long())
    make = lambda: DataLoader(data, bs=8, num_workers=0, device='cpu')
    return DataLoaders(make(), make(), device='cpu')


class Output(dict):
    logits = property(lambda self: self['logits'])


class WithLogits(nn.Module):
    "Gives its logits in a mapping with attributes, as Hugging Face's models do."

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return Output(logits=self.head((self.emb(input_ids) * attention_mask[..., None]).mean(1)))


def hugging_face():
    transformers = pytest.importorskip('transformers')
    size = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, num_labels=2, **size))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('make', [WithLogits, hugging_face])
def test_a_model_whose_output_has_logits_trains_and_is_reported_on(make):
    torch.manual_seed(0)
    learn = learner(make(), tokens(), CrossEntropyLossFlat(), cbs=classes('class Logits')['Logits']())
    for to_low in (learn.to_bf16, learn.to_fp16):
        to_low().fit(1)
        predictions, _ = learn.get_preds()
        assert predictions.dtype is torch.float32 and predictions.shape == (32, 2)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe so far'


@pytest.mark.parametrize('opt_func', [Adam, fused('AdamW')], ids=['Adam', 'fused'])
def test_an_ema_leaves_out_skipped_steps(opt_func):
    ema = classes('class EMA')['EMA']()
    learn = learner(cbs=[ema, spoil_at(1, 3)], opt_func=opt_func).to_fp16(init_scale=256.0)
    learn.fit(2)
    assert ema.average.n_averaged == 10 and (learn.precision.n_skipped, len(learn.precision.scales)) == (2, 12)
    learn.validate()
    assert ema.average.n_averaged == 10
    learn.model.load_state_dict(ema.average.module.state_dict())
    comparison = learn.compare_precision('bf16', n_steps=4, n_seeds=0)  # which runs it in fp32, too
    assert 'failed' not in [*comparison.table['support']]


def test_swa_averages_epochs_and_has_batch_norm_of_its_own():
    swa, weights = classes('class SWA')['SWA'](2), []
    learn = learner(cbs=[swa, At('after_epoch', lambda l: weights.append(params(l)))]).to_bf16()
    learn.fit(4, 0.1)
    assert all(map(torch.allclose, swa.average.module.parameters(), [(a + b) / 2 for a, b in zip(*weights[2:])]))
    learn.validate()
    assert swa.average.n_averaged == 2
    assert not torch.equal(swa.average.module[1].running_mean, learn.model[1].running_mean)


@pytest.mark.parametrize('mode,kwargs', [('bf16', {}), ('fp16', {'init_scale': 256.0})])
def test_activation_checkpointing_gives_the_same_weights_with_kept_modules(mode, kwargs):
    def trained(wrap):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        learn = learner(nn.Sequential(*map(wrap, blocks), nn.Linear(6, 1)))
        getattr(learn, f'to_{mode}')(fp32_modules=nn.GELU, **kwargs)
        torch.manual_seed(1)
        learn.fit(1)
        assert len(learn.precision.fp32_module_names) == 2
        return params(learn)

    assert same(trained(lambda block: block), trained(classes('class Checkpointed')['Checkpointed']))


def test_norms_of_gradients_are_true_from_order_11_on(capsys):
    LogNorm = classes('class LogNorm')['LogNorm']
    for scale in (256.0, 1024.0):
        learner(cbs=LogNorm()).to_fp16(init_scale=scale).fit(1)
    norms = [float(x) for x in re.findall(r'tensor\(([\d.e+-]+)', capsys.readouterr().out)]
    assert len(norms) == 12 and norms[:6] == pytest.approx(norms[6:], rel=0.01)
    scaled = type('Early', (LogNorm,), {'order': 9})
    learner(cbs=scaled()).to_fp16(init_scale=1024.0).fit(1)
    first = float(re.search(r'tensor\(([\d.e+-]+)', capsys.readouterr().out)[1])
    assert first == pytest.approx(norms[0] * 1024, rel=0.01)


@pytest.mark.parametrize('call', ['learn', 'learn.to_bf16()', 'learn.to_fp16()'])
def test_logging(call, tmp_path, monkeypatch):
    pytest.importorskip('tensorboard')
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    image = lambda i: digits.images[i].astype('uint8') * 15
    blocks, split = (ImageBlock(PILImageBW), CategoryBlock), IndexSplitter(range(8))
    block = DataBlock(blocks, getters=[image, lambda i: digits.target[i]], splitter=split)
    dls = block.dataloaders(range(40), bs=8, num_workers=0, device='cpu')
    names = {'dls': dls, 'model': nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 'accuracy': accuracy}
    given = {'Learner': Learner, 'CSVLogger': CSVLogger}  # the recipe imports the other itself
    names |= given | {'loss_scale': loss_scale, 'skipped_steps': skipped_steps}
    exec(code('skipped_steps'), names)
    learn = names['learn']
    eval(call, {'learn': learn}).fit(1)
    assert (tmp_path / 'history.csv').read_text().count('skipped_steps') == 1
    assert any((tmp_path / 'runs').rglob('events*'))


def test_lr_find_then_a_fit(monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use('Agg')
    monkeypatch.chdir(tmp_path)
    data = load_digits()
    digits = TensorDataset(torch.tensor(data.data[:512], dtype=torch.float32) / 8 - 1, torch.tensor(data.target[:512]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    learn = learner(model, loaders(bs=64, train=digits, valid=digits), CrossEntropyLossFlat())
    exec(code('lr_find()'), {'learn': learn})
    assert len(learn.precision.scales) == 5 * 8  # those of `lr_find` are left out


def test_large_targets_in_fp16():
    def r2(prepare):
        torch.manual_seed(0)
        frame = load_diabetes(as_frame=True, scaled=False).frame.astype('float32')
        x = (frame - frame.mean()) / frame.std()
        x, y = torch.tensor(x.values[:, :-1]), torch.tensor(frame[['target']].values)
        model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.BatchNorm1d(50), nn.Linear(50, 1))
        dls = loaders(bs=64, train=TensorDataset(x[:350], y[:350]), valid=TensorDataset(x[350:], y[350:]))
        learn = learner(model, dls)
        prepare(learn)
        learn.fit(3, 0.3)
        predictions, targets = learn.get_preds()
        skipped = learn.precision.n_skipped if learn.precision else 0
        return 1 - float((predictions - targets).square().sum() / (targets - targets.mean()).square().sum()), skipped

    full, _ = r2(lambda learn: None)
    plain, skipped = r2(lambda learn: learn.to_fp16())
    low, none = r2(lambda learn: exec(code('init_scale=8'), {'learn': learn}))
    assert skipped >= 5 and plain < full - 0.3 and none == 0 and low > full - 0.1


def test_inference_of_code_that_calls_the_model_itself():
    learn, dtypes = learner().to_bf16(), []
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    exec(code('inference_mode'), {'learn': learn, 'torch': torch, 'x': torch.randn(4, 6)})
    assert dtypes == [torch.bfloat16]


def test_operators_that_the_recipes_name():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            q = self.emb(x)[:, None]
            out = nn.functional.scaled_dot_product_attention(q, q, q)
            self.dtype = out.dtype
            return self.head(out[:, 0])

    labels = TensorDataset(torch.randn(8, 6), torch.ones(8, 1))
    learn = learner(Attends(), loaders(train=labels, valid=labels), BCEWithLogitsLossFlat()).to_bf16()
    learn.fit(1)
    assert learn.model.dtype is torch.bfloat16 and learn.recorder.losses[-1].isfinite()


def test_fast_norm_of_timm():
    layers = pytest.importorskip('timm.layers')
    dtypes = {}
    try:
        for fast in (False, True):
            layers.set_fast_norm(fast)
            norm = layers.LayerNorm(6)
            norm.register_forward_hook(lambda m, i, o, fast=fast: dtypes.update({fast: o.dtype}))
            learner(nn.Sequential(norm, nn.Linear(6, 1))).to_bf16().fit(1)
    finally:
        layers.set_fast_norm(False)
    assert dtypes == {False: torch.float32, True: torch.bfloat16}


def test_a_scaler_of_ones_own():
    learn = learner()
    call = re.search(r'`(learn\.to_fp16\(scaler=.*?)`', (NBS / 'faq.md').read_text())[1]
    exec(call.replace('cuda', 'cpu'), {'learn': learn, 'torch': torch})
    learn.fit(1)
    assert learn.precision.scale == 1024.0 and learn.precision.n_skipped == 0


@pytest.mark.parametrize('mode,kwargs', [('bf16', {}), ('fp16', {'init_scale': 64.0})])
def test_the_recipe_for_a_second_forward_pass(mode, kwargs):
    dtypes = []
    learn = learner(cbs=classes('class SAM')['SAM']())
    getattr(learn, f'to_{mode}')(**kwargs)
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    before = params(learn)
    learn.fit(1)
    n = len(learn.dls.train)
    assert len(dtypes) == 2 * n + len(learn.dls.valid) and len(set(dtypes)) == 1 and dtypes[0] is not torch.float32
    assert not same(before, params(learn))
