"Train fastai's applications in each precision: real learners, on data that comes with Python and scikit-learn."

from __future__ import annotations

import platform, statistics, sys, tempfile, warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fastai.callback.mixup import MixUp
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.all import CategoryBlock, ColReader, ColSplitter, DataBlock, IndexSplitter
from fastai.metrics import accuracy, rmse
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import (
    AWD_LSTM,
    BaseTokenizer,
    TextBlock,
    awd_lstm_clas_config,
    awd_lstm_lm_config,
    language_model_learner,
    text_classifier_learner,
)
from fastai.torch_core import params, set_seed
from fastai.vision.all import ImageBlock, PILImageBW, aug_transforms, vision_learner
from fastai.callback.schedule import *  # noqa: F403  patches fit_one_cycle and fine_tune
from torch import nn

import fastxtend_amp  # noqa: F401  patches Learner

DTYPE = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


@dataclass
class Run:
    "One training run: the metric on the validation set, and evidence that it ran in the requested mode."

    metric: float
    n_valid: int
    dtypes: set  # of the outputs of the Linear and Conv layers


def prepare(learn, mode, fp32_modules=None):
    "Set `learn` to `mode`, without output, and record the output dtypes of its Linear and Conv layers."
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    learn.logger, learn.dtypes = (lambda *_: None), set()

    def note(m, i, o):
        learn.dtypes.add(o.dtype)

    for m in learn.model.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            m.register_forward_hook(note)
    return learn.to_fp32() if mode == 'fp32' else getattr(learn, f'to_{mode}')(fp32_modules=fp32_modules)


# -- vision


def digit_images(bs=64, batch_tfms=None, device=None, size=16, n=1797):
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
    return block.dataloaders(range(len(images)), bs=bs, val_bs=180, num_workers=0, device=device)


def tiny_convnet(pretrained=False):
    "An architecture in the form that `vision_learner` expects: body, pooling and head; `cut=-2` leaves the body."

    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    return nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10))


def vision(mode, seed):
    "`vision_learner` on the digits: `fine_tune` with augmentation and MixUp, accuracy of `tta`."
    set_seed(seed, reproducible=True)
    dls = digit_images(
        32, n=900, batch_tfms=aug_transforms(do_flip=False, max_rotate=8.0, max_zoom=1.05, max_warp=0.1, p_lighting=0.5)
    )
    learn = prepare(
        vision_learner(
            dls,
            tiny_convnet,
            pretrained=False,
            n_in=1,
            cut=-2,
            lin_ftrs=[32],
            ps=0.1,
            metrics=accuracy,
            cbs=MixUp(0.2),
            splitter=lambda m: [params(m[0]), params(m[1])],
        ),
        mode,
    )
    learn.fine_tune(8, base_lr=3e-2, freeze_epochs=1)
    preds, targs = learn.tta(n=2)
    return learn, accuracy(preds, targs)


# -- text

TOPICS = ('specialnames', 'formatstrings')  # two long chapters of `pydoc_data.topics` on different subjects


@cache
def windows(n_words=20):
    "Windows of words from two chapters of Python's reference, with the chapter's name; every fifth is for validation."
    from pydoc_data.topics import topics

    rows = [
        (' '.join(words[i : i + n_words]), name)
        for name in TOPICS
        for words in [topics[name].split()]
        for i in range(0, len(words), n_words)
    ]
    df = pd.DataFrame(rows, columns=['text', 'topic'])
    df['is_valid'] = df.index % 5 == 0
    return df


def text_block(**kwargs):
    return TextBlock.from_df('text', tok=BaseTokenizer(), n_workers=0, max_vocab=400, **kwargs)


CONFIG = dict(emb_sz=24, n_hid=48, n_layers=2)


@cache
def language_model(mode, seed):
    "An AWD_LSTM language model on the windows; accuracy of the next word."
    set_seed(seed, reproducible=True)
    block = DataBlock(text_block(is_lm=True, seq_len=32), get_x=ColReader('text'), splitter=ColSplitter())
    dls = block.dataloaders(windows(400), bs=16, num_workers=0)
    learn = language_model_learner(
        dls, AWD_LSTM, config={**awd_lstm_lm_config, **CONFIG}, drop_mult=0.1, pretrained=False, metrics=accuracy
    )
    prepare(learn, mode, nn.LSTM).fit_one_cycle(8, 5e-2)
    return learn, learn.validate()[1]


def classifier(mode, seed):
    "An AWD_LSTM classifier with the encoder of a language model trained in the same mode; accuracy of the chapter."
    lm = language_model(mode, seed)[0]
    block = DataBlock(
        (text_block(vocab=lm.dls.vocab), CategoryBlock),
        get_x=ColReader('text'),
        get_y=ColReader('topic'),
        splitter=ColSplitter(),
    )
    set_seed(seed, reproducible=True)
    dls = block.dataloaders(windows(), bs=32, num_workers=0)
    learn = text_classifier_learner(
        dls, AWD_LSTM, config={**awd_lstm_clas_config, **CONFIG}, drop_mult=0.1, pretrained=False, metrics=accuracy
    )
    with tempfile.TemporaryDirectory() as folder:
        lm.path = learn.path = Path(folder)
        lm.save_encoder('encoder')
        learn.load_encoder('encoder')
    prepare(learn, mode, nn.LSTM).fit_one_cycle(10, 5e-2)
    return learn, learn.validate()[1]


# -- tables


def tabular(mode, seed):
    "`tabular_learner` on scikit-learn's breast cancer data, 28 columns as numbers and two as categories; accuracy."
    from sklearn.datasets import load_breast_cancer

    set_seed(seed, reproducible=True)
    df = load_breast_cancer(as_frame=True).frame
    cats = ['mean texture', 'mean symmetry']
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


def ratings(n_images=300):
    "The digits as ratings: an image is a user, a pixel an item, its intensity from 0 to 16 the rating."
    from sklearn.datasets import load_digits

    images = load_digits().data[:n_images]
    df = pd.DataFrame(
        {
            'user': np.repeat(np.arange(n_images), 64),
            'item': np.tile(np.arange(64), n_images),
            'rating': images.ravel().astype(np.float32),
        }
    )
    return df[df.groupby('item').rating.transform('std') > 0].reset_index(drop=True)


def collaborative(mode, seed):
    "`collab_learner` with a neural network on the ratings; root of the mean squared error."
    set_seed(seed, reproducible=True)
    dls = CollabDataLoaders.from_df(ratings(), seed=0, bs=256, num_workers=0)
    learn = prepare(
        collab_learner(dls, n_factors=16, use_nn=True, layers=[32], y_range=(-0.5, 16.5), metrics=rmse), mode
    )
    learn.fit_one_cycle(5, 1e-2)
    return learn, learn.validate()[1]


# -- runs and the table

SEEDS = 3  # of fp32, whose spread the other modes are compared with


@dataclass(frozen=True)
class Application:
    f: Callable
    metric: str
    reach: float  # what every run must reach
    higher: bool = True  # is a higher metric better?
    by_sample: bool = True  # is it a share of the validation set's samples?


APPLICATIONS = {
    'vision_learner': Application(vision, 'accuracy of tta', 0.8),
    'language model': Application(language_model, 'accuracy of the next word', 0.2, by_sample=False),
    'text classifier': Application(classifier, 'accuracy', 0.7),
    'tabular': Application(tabular, 'accuracy', 0.93),
    'collaborative filtering': Application(collaborative, 'RMSE of 0 to 16', 4.3, higher=False, by_sample=False),
}


@cache
def run(name: str, mode: str, seed: int = 0) -> Run:
    "Train application `name` in `mode` from `seed`; each run once in a process."
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*is emulated on device.*')
        learn, metric = APPLICATIONS[name].f(mode, seed)
    return Run(float(metric), len(learn.dls.valid_ds), learn.dtypes)


def spread(name: str) -> tuple[float, float]:
    """Return the mean of the fp32 runs, and how far another mode may be from it.

    Three standard deviations, and for an accuracy over samples one sample.
    """
    metrics = [run(name, 'fp32', seed).metric for seed in range(SEEDS)]
    return statistics.mean(metrics), 3 * statistics.stdev(metrics) + (
        1 / run(name, 'fp32').n_valid if APPLICATIONS[name].by_sample else 0
    )


def table(names: Sequence[str] = tuple(APPLICATIONS)) -> str:
    "Return all runs as a Markdown table."
    lines = ['| application, metric | fp32, by seed | may differ by | bf16 | fp16 |', '|---|---|---|---|---|']
    for name in names:
        app = APPLICATIONS[name]
        fp32 = ', '.join(f"{run(name, 'fp32', seed).metric:.3f}" for seed in range(SEEDS))
        low = ' | '.join(f'{run(name, mode).metric:.3f}' for mode in ('bf16', 'fp16'))
        lines.append(f"| {name}, {app.metric} | {fp32} | {spread(name)[1]:.3f} | {low} |")
    return '\n'.join(lines)


if __name__ == '__main__':
    torch.set_num_threads(1)
    print(table(sys.argv[1:] or tuple(APPLICATIONS)))
    print(f'\nPython {platform.python_version()}, torch {torch.__version__}, fastai {version("fastai")}, 1 thread.')
