"fastai's applications and callbacks on real data: low precision reaches what fp32 reaches."

import statistics

import numpy as np, pandas as pd, pytest, torch
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *
from sklearn.datasets import load_breast_cancer, load_digits

from helpers import mixed, output_dtypes, told

for name in [n for n in globals() if n.startswith('test')]:
    del globals()[name]  # fastai's star imports bring some

DTYPE = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}

# -- applications: each returns its learner, epochs, learning rate and the accuracy to reach; notebooks have vision


def language():
    "An AWD_LSTM that predicts the next word of two long chapters of Python's reference."
    from pydoc_data.topics import topics

    words = [w for name in ('specialnames', 'formatstrings') for w in topics[name].split()]
    df = pd.DataFrame({'text': [' '.join(words[i : i + 400]) for i in range(0, len(words), 400)]})
    df['is_valid'] = df.index % 5 == 0
    block = TextBlock.from_df('text', tok=BaseTokenizer(), n_workers=0, max_vocab=400, is_lm=True, seq_len=32)
    dls = DataBlock(block, get_x=ColReader('text'), splitter=ColSplitter()).dataloaders(df, bs=16, num_workers=0)
    config = {**awd_lstm_lm_config, 'emb_sz': 24, 'n_hid': 48, 'n_layers': 2}
    learn = language_model_learner(dls, AWD_LSTM, config, drop_mult=0.1, pretrained=False, metrics=accuracy)
    return learn, 8, 5e-2, 0.2


def tabular():
    "scikit-learn's breast cancer data, a column of it as categories."
    df, cat = load_breast_cancer(as_frame=True).frame, 'mean texture'
    df[cat] = pd.qcut(df[cat], 5, labels=[*'abcde']).astype(str)
    df['target'] = df.target.astype(str)
    columns = dict(cat_names=[cat], cont_names=[*df.columns[2:30]], y_names='target')
    rows = dict(valid_idx=[*range(0, len(df), 4)], bs=32, num_workers=0)
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], **columns, **rows)
    return tabular_learner(dls, layers=[32, 16], metrics=accuracy), 5, 1e-2, 0.93


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('f', [tabular, pytest.param(language, marks=pytest.mark.slow)])
def test_accuracy_is_within_the_spread_of_fp32(f):
    "Three standard deviations of three seeds and one sample."

    def run(mode, seed=0):
        set_seed(seed, reproducible=True)
        learn, n, lr, least = f()
        dtypes = output_dtypes(learn, *[m for m in learn.model.modules() if isinstance(m, nn.Linear)])
        if mode != 'fp32':
            getattr(learn, f'to_{mode}')(fp32_modules=nn.LSTM if f is language else None)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(n, lr)
            found = learn.validate()[1]
        assert {*dtypes} == {DTYPE[mode]} and found >= least, (mode, found)
        return found, len(learn.dls.valid_ds)

    fp32, (n, *_) = zip(*(run('fp32', seed) for seed in range(3)))
    allowed = 3 * statistics.stdev(fp32) + (f is tabular) / n
    for mode in ('bf16', 'fp16'):
        assert abs(run(mode)[0] - statistics.mean(fp32)) <= allowed, mode


# -- callbacks, and the ways to train and predict


@pytest.mark.parametrize(
    'mode, cbs',
    [
        ('bf16', lambda: [CutMix(), EarlyStoppingCallback(patience=1), ReduceLROnPlateau(patience=1), CSVLogger()]),
        ('fp16', lambda: [MixUp(), GradientClip(), GradientAccumulation(20), SaveModelCallback(with_opt=True)]),
    ],
)
def test_callbacks_and_the_ways_to_train_and_predict(mode, cbs, tmp_path):
    set_seed(1, reproducible=True)
    data = load_digits()
    images = np.kron(data.images[:120] * 15.9375, np.ones((2, 2))).astype(np.uint8)  # one channel, 16 pixels wide
    block = DataBlock(
        (ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda i: images[i],
        get_y=lambda i: str(data.target[i]),
        splitter=IndexSplitter(range(0, 120, 5)),
        batch_tfms=aug_transforms(size=8, do_flip=False),
    )
    dls = block.dataloaders(range(120), bs=16, num_workers=0, device=torch.device('cpu'))
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(body, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)))
    split = lambda m: [params(m[0]), params(m[1])]
    learn = Learner(dls, model, metrics=accuracy, splitter=split, cbs=cbs(), path=tmp_path).add_cb(mixed(mode))
    dtypes = output_dtypes(learn, body[0])

    def train():
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=())
        learn.fine_tune(1)
        learn.fit(2)
        learn.fit_flat_cos(1)

    assert not [t for t in told(train) if 'shadowing' in t or 'optimizer state' in t]
    assert len(learn.recorder.values) == 1 and np.isfinite(learn.recorder.values).all()
    assert not torch.is_autocast_enabled('cpu') and {*dtypes} == {DTYPE[mode]}
    assert mode == 'bf16' or len(learn.mixed_precision.scales) == 15
    for preds, _ in (learn.get_preds(), learn.tta(n=2)):
        assert preds.dtype == torch.float32 and torch.allclose(preds.sum(1), torch.ones(24), atol=1e-3)
    assert learn.predict(dls.valid_ds[0][0])[2].dtype == torch.float32
    learn.show_results()
    Interpretation.from_learner(learn).plot_top_losses(2)
    ClassificationInterpretation.from_learner(learn).confusion_matrix()
    plt.close('all')
