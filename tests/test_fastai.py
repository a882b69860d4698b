"fastai's applications and callbacks on real data: low precision reaches what fp32 reaches."

import numpy as np, pandas as pd, pytest, torch
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.vision.all import *
from sklearn.datasets import load_breast_cancer, load_digits

from helpers import mixed, output_dtypes, told

DTYPE = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}

# -- applications: learner, epochs, learning rate, the accuracy to reach, what stays in fp32; notebooks have vision


def language():
    "An AWD_LSTM that predicts the next word of two long chapters of Python's reference."
    from pydoc_data.topics import topics

    df = pd.DataFrame({'text': (topics['specialnames'] + topics['formatstrings']).split('\n\n')})
    df['is_valid'] = df.index % 5 == 0
    given = dict(valid_col='is_valid', tok_tfm=BaseTokenizer(), is_lm=True, seq_len=32)
    dls = TextDataLoaders.from_df(df, bs=16, num_workers=0, **given)
    config = {**awd_lstm_lm_config, 'emb_sz': 24, 'n_hid': 48, 'n_layers': 2}
    learn = language_model_learner(dls, AWD_LSTM, config, drop_mult=0.1, pretrained=False, metrics=accuracy)
    return learn, 8, 5e-2, 0.2, nn.LSTM


def tabular():
    "scikit-learn's breast cancer data, a column of it as categories."
    df, cat = load_breast_cancer(as_frame=True).frame, 'mean texture'
    df[cat] = pd.cut(df[cat], 5).astype(str)
    columns = dict(cat_names=[cat], cont_names=[*df.columns[2:30]], y_names='target', y_block=CategoryBlock())
    rows = dict(valid_idx=[*range(0, len(df), 4)], bs=32, num_workers=0)
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], **columns, **rows)
    return tabular_learner(dls, layers=[32, 16], metrics=accuracy), 5, 1e-2, 0.93, None


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('f', [tabular, pytest.param(language, marks=pytest.mark.slow)])
def test_accuracy_is_within_the_spread_of_fp32(f):
    "Three standard deviations of three seeds, and one of the 143 samples."

    def run(precision, seed=0):
        set_seed(seed, reproducible=True)
        learn, n, lr, least, kept = f()
        dtypes = output_dtypes(learn, *[m for m in learn.model.modules() if isinstance(m, nn.Linear)])
        if precision != 'fp32':
            getattr(learn, f'to_{precision}')(fp32_modules=kept)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(n, lr)
        found = learn.recorder.values[-1][-1]
        assert {*dtypes} == {DTYPE[precision]} and found >= least, (precision, found)
        return found

    fp32 = [run('fp32', seed) for seed in range(3)]
    for precision in ('bf16', 'fp16'):
        assert abs(run(precision) - np.mean(fp32)) <= 3 * np.std(fp32, ddof=1) + (f is tabular) / 143, precision


# -- callbacks, and the ways to train and predict


CALLBACKS = {
    'bf16': lambda: [CutMix(), EarlyStoppingCallback(patience=1), ReduceLROnPlateau(patience=1), CSVLogger()],
    'fp16': lambda: [MixUp(), GradientClip(), GradientAccumulation(20), SaveModelCallback(with_opt=True)],
}


@pytest.mark.parametrize('precision', CALLBACKS)
def test_callbacks_and_the_ways_to_train_and_predict(precision, tmp_path):
    set_seed(1, reproducible=True)
    digits = load_digits()
    items = [*zip((digits.images * 15).astype('uint8'), digits.target)][:120]
    blocks, getters = [ImageBlock(PILImageBW), CategoryBlock], [ItemGetter(0), ItemGetter(1)]
    block = DataBlock(blocks, getters=getters, batch_tfms=aug_transforms())
    dls = block.dataloaders(items, bs=16, num_workers=0, device=torch.device('cpu'))
    model = nn.Sequential(ConvLayer(1, 4), nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)))
    split = lambda m: [*map(params, m)]
    learn = Learner(dls, model, metrics=accuracy, splitter=split, cbs=CALLBACKS[precision](), path=tmp_path)
    learn.add_cb(mixed(precision))
    dtypes = output_dtypes(learn, model[0][0])

    def train():
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=())
        learn.fine_tune(1)
        learn.fit(2)
        learn.fit_flat_cos(1)

    assert not [t for t in told(train) if 'shadowing' in t or 'optimizer state' in t]
    assert {*dtypes} == {DTYPE[precision]} and np.isfinite(learn.recorder.values).all()
    for preds, _ in (learn.get_preds(), learn.tta(n=2)):
        assert preds.dtype == torch.float32 and torch.allclose(preds.sum(1), torch.ones(24), atol=1e-3)
    assert learn.predict(dls.valid_ds[0][0])[2].dtype == torch.float32
    learn.show_results()
    Interpretation.from_learner(learn).plot_top_losses(2)
    plt.close('all')
