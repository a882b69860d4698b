"fastai's applications and callbacks on real data: low precision reaches what fp32 reaches."

from __future__ import annotations

import statistics
from functools import cache

import numpy as np, pandas as pd, pytest, torch
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *

from helpers import mixed, output_dtypes, told

for name in [n for n in globals() if n.startswith('test')]:
    del globals()[name]  # fastai's star imports bring some

DTYPE = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def digit_images(bs=64, batch_tfms=None, size=16, n=1797):
    "scikit-learn's digits as images of one channel; every fifth is for validation."
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images[:n] * 15.9375, np.ones((size // 8, size // 8))).astype(np.uint8)
    block = DataBlock(
        (ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda i: images[i],
        get_y=lambda i: str(data.target[i]),
        splitter=IndexSplitter(range(0, len(images), 5)),
        batch_tfms=batch_tfms,
    )
    return block.dataloaders(range(len(images)), bs=bs, val_bs=180, num_workers=0, device=torch.device('cpu'))


# -- applications: each trains and returns its learner and a metric


def prepare(learn, mode, fp32_modules=None):
    "Set the mode, and record the output dtypes of linear and convolutional layers."
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    learn.logger = noop
    learn.dtypes = output_dtypes(learn, *(m for m in learn.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))))
    return learn.to_fp32() if mode == 'fp32' else getattr(learn, f'to_{mode}')(fp32_modules=fp32_modules)


def vision(mode, seed):
    "`fine_tune` with augmentation and MixUp; accuracy of `tta`."

    def arch(pretrained=False):  # body, pooling and head; `cut=-2` leaves the body
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        return nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10))

    tfms = aug_transforms(do_flip=False, max_rotate=8.0, max_zoom=1.05, max_warp=0.1, p_lighting=0.5)
    options = dict(
        pretrained=False, n_in=1, cut=-2, lin_ftrs=[32], ps=0.1, splitter=lambda m: L(m[0], m[1]).map(params)
    )
    learn = vision_learner(digit_images(32, n=900, batch_tfms=tfms), arch, cbs=MixUp(0.2), **options)
    prepare(learn, mode).fine_tune(8, base_lr=3e-2, freeze_epochs=1)
    return learn, accuracy(*learn.tta(n=2))


CONFIG = dict(emb_sz=24, n_hid=48, n_layers=2)


def text(make, config, n_words, mode, seed, *blocks, bs, epochs, encoder=None, **kwargs):
    "An AWD_LSTM on two long chapters of Python's reference, in windows of words."
    from pydoc_data.topics import topics

    rows = [
        (' '.join(words[i : i + n_words]), name)
        for name in ('specialnames', 'formatstrings')
        for words in [topics[name].split()]
        for i in range(0, len(words), n_words)
    ]
    df = pd.DataFrame(rows, columns=['text', 'topic'])
    df['is_valid'] = df.index % 5 == 0
    words = TextBlock.from_df('text', tok=BaseTokenizer(), n_workers=0, max_vocab=400, **kwargs)
    block = DataBlock(
        (words, *blocks), get_x=ColReader('text'), get_y=[ColReader('topic')] * len(blocks), splitter=ColSplitter()
    )
    learn = make(
        block.dataloaders(df, bs=bs, num_workers=0),
        AWD_LSTM,
        config={**config, **CONFIG},
        drop_mult=0.1,
        pretrained=False,
        metrics=accuracy,
    )
    if encoder:
        get_model(learn.model)[0].module.load_state_dict(encoder)
    prepare(learn, mode, nn.LSTM).fit_one_cycle(epochs, 5e-2)
    return learn, learn.validate()[1]


@cache
def language_model(mode, seed):
    "Accuracy of the next word."
    kwargs = dict(bs=16, epochs=8, is_lm=True, seq_len=32)
    return text(language_model_learner, awd_lstm_lm_config, 400, mode, seed, **kwargs)


def classifier(mode, seed):
    "With the encoder of a language model trained in the same mode; accuracy of the chapter."
    lm, _ = language_model(mode, seed)
    kwargs = dict(bs=32, epochs=10, encoder=lm.model[0].state_dict(), vocab=lm.dls.vocab)
    return text(text_classifier_learner, awd_lstm_clas_config, 20, mode, seed, CategoryBlock, **kwargs)


def tabular(mode, seed):
    "scikit-learn's breast cancer data, 28 columns as numbers and two as categories; accuracy."
    from sklearn.datasets import load_breast_cancer

    df, cats = load_breast_cancer(as_frame=True).frame, ['mean texture', 'mean symmetry']
    for c in cats:
        df[c] = pd.qcut(df[c], 5, labels=[*'abcde']).astype(str)
    df['target'] = np.where(df.target, 'benign', 'malignant')
    dls = TabularDataLoaders.from_df(
        df,
        procs=[Categorify, FillMissing, Normalize],
        cat_names=cats,
        cont_names=[c for c in df.columns[:30] if c not in cats],
        y_names='target',
        valid_idx=list(range(0, len(df), 4)),
        bs=32,
        num_workers=0,
    )
    learn = prepare(tabular_learner(dls, layers=[32, 16], metrics=accuracy), mode)
    learn.fit_one_cycle(5, 1e-2)
    return learn, learn.validate()[1]


def collaborative(mode, seed):
    "The digits as ratings: an image is a user, a pixel an item, its intensity from 0 to 16 the rating. RMSE."
    from sklearn.datasets import load_digits

    df = pd.DataFrame(load_digits().data[:300].astype(np.float32)).stack().reset_index()
    df.columns = ['user', 'item', 'rating']
    df = df[df.groupby('item').rating.transform('std') > 0].reset_index(drop=True)
    dls = CollabDataLoaders.from_df(df, seed=0, bs=256, num_workers=0)
    learn = collab_learner(dls, n_factors=16, use_nn=True, layers=[32], y_range=(-0.5, 16.5), metrics=rmse)
    prepare(learn, mode).fit_one_cycle(5, 1e-2)
    return learn, -learn.validate()[1]


REACH = {vision: 0.8, language_model: 0.2, classifier: 0.7, tabular: 0.93, collaborative: -4.3}


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('f', [tabular, *(pytest.param(f, marks=pytest.mark.slow) for f in REACH if f is not tabular)])
def test_applications_are_within_the_spread_of_fp32(f):
    "Three standard deviations of three seeds and, for an accuracy over samples, one sample; fp16 is slow on CPUs."

    def run(mode, seed=0):
        set_seed(seed, reproducible=True)
        learn, metric = f(mode, seed)
        assert {*learn.dtypes} == {DTYPE[mode]} and metric >= REACH[f], (mode, metric)
        return float(metric), len(learn.dls.valid_ds)

    fp32, n = zip(*(run('fp32', seed) for seed in range(3)))
    allowed = 3 * statistics.stdev(fp32) + (f not in (language_model, collaborative)) / n[0]
    for mode in ('bf16',) if f is vision else ('bf16', 'fp16'):
        assert abs(run(mode)[0] - statistics.mean(fp32)) <= allowed, mode


# -- callbacks, and the ways to train and predict


@pytest.fixture(scope='module')
def dls():
    set_seed(0, reproducible=True)
    return digit_images(bs=16, batch_tfms=aug_transforms(size=8, do_flip=False), size=8, n=120)


def make(dls, mode, tmp_path=None, cbs=None):
    set_seed(1, reproducible=True)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(body, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)))
    split = lambda m: [params(m[0]), params(m[1])]
    return Learner(dls, model, metrics=accuracy, splitter=split, cbs=cbs, path=tmp_path).add_cb(mixed(mode))


@pytest.mark.parametrize(
    'mode, cbs',
    [
        ('bf16', lambda: [CutMix(), EarlyStoppingCallback(patience=1), ReduceLROnPlateau(patience=1)]),
        ('fp16', lambda: [CSVLogger(), SaveModelCallback(every_epoch=True)]),
        ('fp16', lambda: [MixUp(), GradientClip(), GradientAccumulation(20), SaveModelCallback(with_opt=True)]),
    ],
)
def test_callbacks(dls, mode, cbs, tmp_path):
    learn = make(dls, mode, tmp_path, cbs())
    assert not [t for t in told(lambda: learn.fit(2, 1e-2)) if 'shadowing' in t or 'optimizer state' in t]
    assert len(learn.recorder.values) == 2 and np.isfinite(learn.recorder.values).all()
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_the_ways_to_train_and_predict(dls, mode, tmp_path):
    learn = make(dls, mode, tmp_path)
    dtypes = output_dtypes(learn, learn.model[0][0])
    learn.lr_find(num_it=10, show_plot=False, suggest_funcs=())
    learn.fine_tune(1)
    learn.fit_one_cycle(1)
    learn.fit_flat_cos(1)
    if mode == 'fp16':
        assert len(learn.mixed_precision.scales) == 4 * len(dls.train)
    assert np.isfinite(learn.validate()[0]) and {*dtypes} == {DTYPE[mode]}
    for preds, _ in (learn.get_preds(), learn.tta(n=2)):
        assert preds.dtype == torch.float32 and torch.allclose(preds.sum(1), torch.ones(24), atol=1e-3)
    assert learn.predict(dls.valid_ds[0][0])[2].dtype == torch.float32
    learn.show_results()
    Interpretation.from_learner(learn).plot_top_losses(2)
    ClassificationInterpretation.from_learner(learn).confusion_matrix()
    plt.close('all')
