"The recipes of the manual, run as written."

import re
from collections import OrderedDict
from copy import deepcopy
from types import SimpleNamespace

import pytest
from fastai.text.all import *
from fastai.vision.all import *
from torch.nn import functional as F

from fastxtend_amp import *
from fastxtend_amp.precisions import PRECISIONS
from helpers import Attentive, dataset, finite, learner, linear, loaders, mixed, mlp, params
from helpers import python, same, spoil_at

NBS = Path(__file__).parent.parent / 'nbs'
PAGES = ''.join((NBS / f'{name}.md').read_text() for name in ('recipes', 'pytorch'))
BLOCKS = re.findall(r'```python\n(.*?)```', PAGES, re.S)
NEEDS = {'onnx': 'onnxscript', 'tensorboard': 'tensorboard', 'kahan': 'optimi'}


class WithLogits(nn.Linear):
    "Called with the items of a batch; returns its logits as Hugging Face's models do."

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=super().forward(input_ids * attention_mask))


def tokens():
    "Loaders of batches of a dict and a target, and the model for them."
    data = [({'input_ids': x, 'attention_mask': torch.ones(6)}, i % 2) for i, (x, _) in enumerate(dataset())]
    return dict(dls=loaders(train=data, valid=data), model=WithLogits(6, 2))


def run_recipe(word, **names):
    "Run the block of code that has this word, with these names and those of a reader; return all names."
    block = next(b for b in BLOCKS if word in b)
    for part, package in NEEDS.items():
        if part in block:
            pytest.importorskip(package)
    torch.manual_seed(0)
    model, config = Attentive(1.0), {**awd_lstm_clas_config, 'emb_sz': 8, 'n_hid': 8}
    of_reader = dict(
        Learner=lambda dls, model, **kwargs: learner(model, dls, **kwargs),
        vision_learner=lambda dls, arch, **kwargs: learner(dls=dls, **kwargs),
        text_classifier_learner=partial(text_classifier_learner, pretrained=False, config=config),
        model=model,
        dls=loaders(),
        learn=learner(model),
        x=torch.randn(4, 6),
        base=nn.Linear(6, 6),
        head=linear(),
    )
    if 'AWD_LSTM' in block:
        df = pd.DataFrame({'text': ['A very good film', 'Bad'] * 50, 'label': ['yes', 'no'] * 50})
        of_reader['dls'] = TextDataLoaders.from_df(df, text_col='text', label_col='label')
    if 'FromDict' in block:
        of_reader |= tokens()
    found = {**globals(), **of_reader, **names}
    exec(block.replace("'cuda'", "'cpu'").replace('256', '16'), found)
    return SimpleNamespace(**found)


# -- all recipes, and what some of them promise


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'block',
    [b for b in BLOCKS if not re.search(r'trainer|train_dataloader|\blit\b|failed\.pt|8bit|to_fp8|load_learner', b)],
    ids=lambda b: b.splitlines()[-1][:40],
)
def test_a_recipe_runs_and_its_learner_trains(block, monkeypatch, tmp_path):
    "In fp16 if it names no precision."
    monkeypatch.chdir(tmp_path)
    learn = run_recipe(block).learn
    before = params(learn)
    if not hasattr(learn, 'mixed_precision'):
        learn.add_cb(mixed('fp16'))
    learn.fit(1, 1e-3)
    assert finite(learn) and not same(params(learn), before)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict != 'not known'


def test_a_model_goes_from_a_report_on_a_laptop_to_a_gpu_and_back_without_the_package(tmp_path):
    "The steps as they stand, on a folder of pictures; the last one in a process that cannot import the package."
    for i in range(12):
        (tmp_path / 'ab'[i % 2]).mkdir(exist_ok=True)
        PILImage.create(np.full((8, 8, 3), 20 * i, np.uint8)).save(tmp_path / 'ab'[i % 2] / f'{i}.png')
    dls = ImageDataLoaders.from_folder(tmp_path, valid_pct=0.3, seed=0, bs=4, num_workers=0, device='cpu')
    attn = nn.Sequential(nn.Linear(192, 8), nn.Linear(8, 2))
    learn = learner(nn.Sequential(OrderedDict(flat=nn.Flatten(), attn=attn)), dls, CrossEntropyLossFlat())
    learn.path = tmp_path
    run_recipe("precision_report('fp16'", learn=learn)
    run_recipe("'model.pkl'", learn=learn)
    assert not learn.mixed_precision.skipped and learn.mixed_precision.fp32_module_names == ['attn']
    (tmp_path / 'a' / '0.png').rename(tmp_path / 'photo.png')
    at_home = next(b for b in BLOCKS if 'load_learner' in b)
    done = python('-c', f"import sys; sys.modules['fastxtend_amp'] = None\n{at_home}", cwd=tmp_path)
    assert done.stdout.startswith("('"), done.stderr


@pytest.mark.parametrize('precision, args', [('fp16', {}), ('bf16', {'skip_nonfinite': True})])
def test_the_batch_that_failed_is_kept_and_the_weights_stay_good(precision, args, capsys):
    good = run_recipe('class BadBatch', learn=learner()).bad
    assert good.batch is None and not capsys.readouterr().out
    skipping = learner(cbs=[mixed(precision, **args), spoil_at(3)])
    bad = run_recipe('class BadBatch', learn=skipping).bad
    assert torch.equal(bad.batch[0], dataset()[12:16][0]) and finite(skipping)
    data = dataset()
    data.tensors[0][9] *= 1e30
    model = nn.Sequential(Attentive(), nn.BatchNorm1d(1))
    failing = learner(model, loaders(train=data), cbs=mixed(precision, **args))
    bad = run_recipe('class BadBatch', learn=failing).bad
    assert finite(failing) and all(b.isfinite().all() for b in model.buffers())
    assert torch.equal(bad.batch[0], data[8:12][0] if precision == 'bf16' else data[:4][0])


def test_pytorchs_dataloaders_are_enough_for_a_fit_but_not_for_an_export(tmp_path):
    train, valid = (torch.utils.data.DataLoader(dataset(n), batch_size=4) for n in (24, 8))
    learn = Learner(DataLoaders(train, valid), mlp(), F.mse_loss, opt_func=fused('AdamW'), path=tmp_path).to_fp16()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-3)
    assert finite(learn) and len(learn.get_preds(dl=valid)[0]) == 8
    for needs_new in (learn.get_preds, learn.export):
        with pytest.raises(AttributeError, match="no attribute 'new'"):
            needs_new()


# -- without a learner


class OwnLoss(nn.Module):
    "As a model of Hugging Face: called with the items of a batch; its output has the loss. Also as one of Lightning."

    def __init__(self):
        super().__init__()
        self.net = Attentive()

    def forward(self, x, labels=None):
        pred = self.net(x)
        return SimpleNamespace(logits=pred, loss=labels if labels is None else F.mse_loss(pred, labels))

    def training_step(self, batch, i):
        return self(*batch).loss


def test_the_report_on_a_loop_without_a_learner():
    loader = torch.utils.data.DataLoader(dataset(), batch_size=4, shuffle=True)
    named, lit = [{'x': x, 'labels': y} for x, y in loader], OwnLoss()
    trainer = SimpleNamespace(model=lit, get_train_dataloader=lambda: iter(named))
    names = dict(model=lit.net, lit=lit, train_dataloader=loader, trainer=trainer)
    words = {'attn': 'train_dataloader, F', 'net.attn': 'trainer', 'lit.net.attn': 'training_step'}
    reports = {name: run_recipe(word, **names).report for name, word in words.items()}
    for name, report in reports.items():
        bf16, fp16 = (v.call for v in report.verdicts.values())
        assert bf16 == 'bf16' and fp16.startswith('fp16') and f"fp32_modules=['{name}']" in fp16
        assert 'learn.' not in repr(report)
    assert not lit._forward_pre_hooks
    finite_in_fp16 = []
    for _ in range(2):
        with torch.autocast('cpu', torch.float16):
            finite_in_fp16.append(bool(lit.net(named[0]['x']).isfinite().all()))
        run_recipe('def in_fp32', model=lit.net)
    assert finite_in_fp16 == [False, True]


def test_a_batch_that_failed_in_a_loop_is_examined_in_another_process(monkeypatch, tmp_path, capsys):
    "Although its forward pass made BatchNorm's statistics infinite."
    monkeypatch.chdir(tmp_path)

    def model():
        return nn.Sequential(OrderedDict(net=Attentive(), norm=nn.BatchNorm1d(1)))

    (x, y), failing = dataset()[:4], model()
    with torch.autocast('cpu', torch.float16):
        loss = F.mse_loss(failing(x), y)
    assert not all(b.isfinite().all() for b in failing.buffers())
    with pytest.raises(FloatingPointError):
        run_recipe('not loss.isfinite', model=failing, loss=loss, x=x, y=y)
    run_recipe('torch.load', model=model())
    assert "fp32_modules=['net.attn']" in capsys.readouterr().out


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


# -- the files that the pages link to


@pytest.mark.torchao
def test_the_precision_mxfp8_of_the_manual():
    "A layer computes bit for bit as after torchao's own conversion, with any number of rows; then a fit and a report."
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization.quant_api import quantize_

    exec((NBS / 'mxfp8.py').read_text(), {})
    learn = learner(nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 32), nn.Linear(32, 1))).to_mxfp8()
    layer = learn.model[1]
    theirs = deepcopy(layer).bfloat16()
    theirs.bias = None  # which it leaves out
    quantize_(theirs, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
    for n in (32, 20):  # it needs blocks of 32 rows
        x, factors = torch.randn(n, 64, requires_grad=True), torch.randn(n, 32)
        with learn.amp_context():
            ours = layer(x)
        plain = theirs(F.pad(x.bfloat16(), (0, 0, 0, -n % 32)))[:n] + layer.bias.bfloat16()
        found, expected = (
            [out, *torch.autograd.grad((out.float() * factors).sum(), [x, weight])]
            for out, weight in ((ours, layer.weight), (plain, theirs.weight))
        )
        assert all(torch.equal(a, b.to(a)) for a, b in zip(found, expected))
    learn.fit(1, 0.01)
    assert finite(learn) and learn.precision_report('mxfp8').verdicts['mxfp8'].call == 'learn.to_mxfp8()'
    with pytest.raises(ValueError, match='divisible by 32'):
        learner(linear()).to_mxfp8()
    PRECISIONS.pop('mxfp8')
    del Learner.to_mxfp8
