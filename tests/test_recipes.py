"The recipes of the manual, run as written."

import linecache, re
from functools import partial
from pathlib import Path

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.callback.schedule import lr_find  # noqa: F401  for the recipes
from fastai.data.core import DataLoaders
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.load import DataLoader
from fastai.data.transforms import IndexSplitter
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper
from fastai.vision.core import PILImageBW
from fastai.vision.data import ImageBlock
from sklearn.datasets import load_diabetes, load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fastxtend_amp import fused, loss_scale, skipped_steps
from helpers import learner, loaders, mlp, opt_state, params, same, same_state, spoil_at

NBS = Path(__file__).parent.parent / 'nbs'


def code(word, file='recipes.md'):
    "Return the block of code that contains this word."
    blocks = re.findall(r'```python\n(.*?)```', (NBS / file).read_text(), re.S)
    return next(block for block in blocks if word in block)


def classes(word):
    "Return the imports and classes of a recipe, without the code after them."
    text = re.split(r'\n\n(?!class)', re.sub(r'^from transformers.*\n+', '', code(word)))
    names = {'Callback': Callback, 'nn': nn, 'torch': torch}
    run('\n\n'.join(part for part in text if part.startswith(('class', 'from'))), names)
    return names


def run(text, names):
    "Run a recipe as a notebook does, where `inspect` finds the source of what a cell defines."
    file = f'/recipe/{len(linecache.cache)}.py'
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, 'exec'), names)


def tokens(n=32):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (n, 6), generator=g)
    data = TensorDataset(ids, torch.ones_like(ids), (ids[:, 0] > 25).long())
    make = lambda: DataLoader(data, bs=8, num_workers=0, device='cpu')
    return DataLoaders(make(), make(), device='cpu')


class Output(dict):
    logits = property(lambda self: self['logits'])


class WithLogits(nn.Module):
    "Returns its logits in a mapping with attributes, as Hugging Face's models do."

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
    dls = tokens()
    exec(re.search(r'^dls.n_inp = .*', code('class Logits'), re.M)[0], {'dls': dls})
    learn = learner(make(), dls, CrossEntropyLossFlat(), cbs=classes('class Logits')['Logits']())
    for to_low in (learn.to_bf16, learn.to_fp16):
        to_low().fit(1)
        predictions, _ = learn.get_preds()
        assert predictions.dtype is torch.float32 and predictions.shape == (32, 2)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe so far'


class Dicts(torch.utils.data.Dataset):
    "Samples as tokenizers return them."

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {'input_ids': torch.full((6,), 10 + i % 2), 'attention_mask': torch.ones(6)}, torch.tensor(i % 2)


def test_batches_with_a_dict():
    make = lambda: DataLoader(Dicts(), bs=8, num_workers=0, device='cpu')
    names = {'Learner': Learner, 'CrossEntropyLossFlat': CrossEntropyLossFlat, 'nn': nn, 'model': WithLogits()}
    names['dls'] = DataLoaders(make(), make(), device='cpu')
    exec(code('class FromDict'), names)
    learn = names['learn'].to_bf16()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert learn.get_preds()[0].shape == (16, 2)
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
    comparison = learn.compare_precision('bf16', n_steps=4, n_seeds=0)  # which also runs it in fp32
    assert 'failed' not in [*comparison.table['support']]


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])
def test_averages_leave_out_lr_find(mode, tmp_path):
    "Which trains until the loss diverges, and restores the weights."
    ema = classes('class EMA')['EMA']()
    learn = learner(cbs=ema)
    learn.path = tmp_path
    if mode != 'fp32':
        getattr(learn, f'to_{mode}')()
    learn.lr_find(num_it=40, suggest_funcs=(), show_plot=False)
    assert ema.average is None
    learn.fit(1)
    skipped = learn.precision.n_skipped if learn.precision else 0
    assert ema.average.n_averaged == len(learn.dls.train) - skipped


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
    low, none = r2(lambda learn: learn.to_fp16(init_scale=8))
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
    fixed, unscaled, own = code('learn.to_fp16(scaler=').splitlines()
    for call, scale in ((fixed, 512.0), (unscaled, None), (own, 1024.0)):
        exec(call.replace('cuda', 'cpu'), {'learn': learn, 'torch': torch})
        learn.fit(1)
        assert learn.precision.scale == scale and learn.precision.n_skipped == 0


def precise(learn, mode):
    "Train `learn` for an epoch in `mode`, without a progress bar."
    getattr(learn, f'to_{mode}')(**({'init_scale': 256.0} if mode == 'fp16' else {}))
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    return learn


def test_batchnorm_in_fp32():
    learn, dtypes = learner(), []
    learn.model[1].register_forward_hook(lambda m, x, y: dtypes.append(y.dtype))
    learn.to_fp16(init_scale=256.0).fit(1)
    exec(code('_BatchNorm'), {'learn': learn, 'nn': nn})
    n = len(dtypes)
    learn.fit(1)
    assert {*dtypes[:n]} == {torch.float16} and {*dtypes[n:]} == {torch.float32}
    assert learn.precision.fp32_module_names == ['1']


def test_a_custom_loss_in_fp32():
    dtypes = []

    def loss(pred, target):
        dtypes.append((pred.dtype, (pred @ pred.T).dtype))
        return (pred - target).square().mean()

    names = {
        'Learner': learner_of,
        'dls': loaders(),
        'model': linear_model(),
        'nn': nn,
        'torch': torch,
        'my_loss': loss,
    }
    exec(code('class InFp32'), names)
    precise(names['learn'], 'bf16')
    assert {*dtypes} == {(torch.float32, torch.float32)}
    dtypes.clear()
    precise(learner(loss_func=loss), 'bf16')
    assert {*dtypes} == {(torch.float32, torch.bfloat16)}


def learner_of(dls, model, **kwargs):
    return learner(model, dls, **kwargs)


def linear_model():
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def test_a_frozen_base_in_16_bits():
    base = nn.Linear(6, 6)
    names = {'Learner': learner_of, 'dls': loaders(), 'base': base, 'head': linear_model(), 'nn': nn, 'torch': torch}
    before = base.weight.detach().clone().bfloat16()
    exec(code('base.to(torch.bfloat16)'), names)
    precise(names['learn'], 'bf16')
    assert base.weight.dtype is torch.bfloat16 and torch.equal(base.weight, before)


@pytest.mark.filterwarnings('ignore')
def test_a_text_classifier_with_its_lstm_in_fp32():
    from fastai.text.all import AWD_LSTM, TextDataLoaders, awd_lstm_clas_config, text_classifier_learner
    from pandas import DataFrame

    frame = DataFrame({'text': ['good film ' * 5, 'bad film ' * 6] * 8, 'label': ['p', 'n'] * 8})
    dls = TextDataLoaders.from_df(frame, text_col='text', label_col='label', bs=4, device='cpu')
    config = {**awd_lstm_clas_config, 'emb_sz': 8, 'n_hid': 8}
    learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=config)
    exec(code('text_classifier_learner').split('\n')[2], {'learn': learn, 'nn': nn})
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert len(learn.precision.fp32_module_names) == 3


def test_wandb_gets_the_table():
    logged = []
    wandb = type('wandb', (), {'log': staticmethod(logged.append), 'init': staticmethod(lambda project: None)})
    names = {'Callback': Callback, 'wandb': wandb, 'Learner': learner_of, 'dls': loaders(), 'model': linear_model()}
    names |= {'accuracy': skipped_steps, 'loss_scale': loss_scale}
    exec(code('class LogToWandb'), names)
    precise(names['learn'], 'fp16')
    assert len(logged) == 1 and logged[0]['loss_scale'] == 256.0 and logged[0]['valid_loss'] > 0


# -- the loop on the page `how_it_works`


@pytest.mark.parametrize('n_acc,clip', [(None, None), (8, 0.5)])
@pytest.mark.parametrize('mode,init_scale', [('fp32', 1.0), ('bf16', 1.0), ('fp16', 256.0), ('fp16', 2.0**24)])
def test_the_loop_of_the_manual_computes_what_the_callback_does(mode, init_scale, n_acc, clip, capsys):
    "Bit for bit: parameters, buffers, optimizer and loss scale after two fits, with skipped steps in the last case."
    names = {}
    exec(code('class Trainer', 'how_it_works.md'), names)
    learn, model = learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = names['Trainer'](model, opt, nn.MSELoss(), mode, init_scale=init_scale, n_acc=n_acc, clip=clip)
    if mode != 'fp32':
        getattr(learn, f'to_{mode}')(**({'init_scale': init_scale} if mode == 'fp16' else {}))
    cbs = [GradientAccumulation(n_acc), GradientClip(clip)] if n_acc else []
    for _ in range(2):
        learn.fit(2, 0.01, cbs=cbs)
        loop.fit(2, learn.dls.train, learn.dls.valid)
    assert same([*learn.model.state_dict().values()], [*model.state_dict().values()])
    assert same_state(opt_state(learn.opt), [{**dict(sorted(opt.state[p].items()))} for p in model.parameters()])
    if mode == 'fp16':
        assert learn.precision.scale == loop.scaler.get_scale() and learn.precision.n_skipped == loop.skipped_steps
    assert (loop.skipped_steps > 2) == (init_scale > 256)
    assert capsys.readouterr().out.count('validation loss') == 4


def test_the_loop_of_the_manual_restores_batchnorm_after_an_overflow():
    names = {}
    exec(code('class Trainer', 'how_it_works.md'), names)
    model = mlp()
    loop = names['Trainer'](model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), 'fp16', init_scale=2.0)
    model.train()
    loop.samples = 0
    x, y = torch.randn(4, 6), torch.randn(4, 1)
    loop.one_batch(x, y)
    before = model[1].running_var.clone()
    loop.one_batch(x * 1e6, y)
    assert loop.skipped_steps == 1 and torch.equal(model[1].running_var, before)
