"The rest of fastai: its callbacks, fine_tune, tta, predict and show_results on real images."

from copy import deepcopy

import numpy as np, pytest, torch
from fastai.vision.all import *

from applications import digit_images
from helpers import mixed, output_dtypes, told

for name in [n for n in globals() if n.startswith('test')]:
    del globals()[name]  # fastai's star import brings some


@pytest.fixture(scope='module')
def dls():
    set_seed(0, reproducible=True)
    return digit_images(
        bs=16, batch_tfms=aug_transforms(size=8, do_flip=False), device=torch.device('cpu'), size=8, n=120
    )


def make(dls, mode, tmp_path=None, cbs=None):
    set_seed(1, reproducible=True)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(body, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)))
    learn = Learner(
        dls, model, metrics=accuracy, splitter=lambda m: [params(m[0]), params(m[1])], cbs=cbs, path=tmp_path
    )
    return learn.add_cb(mixed(mode))


@pytest.mark.parametrize(
    'mode, cbs',
    [
        ('bf16', lambda: CutMix()),
        ('fp16', lambda: [CSVLogger(), SaveModelCallback(every_epoch=True)]),
        ('bf16', lambda: [EarlyStoppingCallback(patience=1), ReduceLROnPlateau(patience=1)]),
        ('fp16', lambda: [MixUp(), GradientClip(), GradientAccumulation(20), SaveModelCallback(with_opt=True)]),
    ],
    ids=range(4),
)
def test_callbacks(dls, mode, cbs, tmp_path):
    learn = make(dls, mode, tmp_path, cbs())
    assert not [t for t in told(lambda: learn.fit(2, 1e-2)) if 'shadowing' in t or 'optimizer state' in t]
    assert (
        len(learn.recorder.values) == 2
        and np.isfinite(learn.recorder.values).all()
        and not torch.is_autocast_enabled('cpu')
    )


def test_terminate_on_nan_ends_the_fit_and_the_next_one_runs(dls):
    learn = make(dls, 'bf16', cbs=TerminateOnNaNCallback())
    state = deepcopy(learn.model.state_dict())
    learn.model[1][2].weight.data[:] = float('nan')
    learn.fit(1)
    assert len(learn.recorder.losses) <= 1 and learn.precision.fit is None
    learn.model.load_state_dict(state)
    learn.fit(1, reset_opt=True)
    assert len(learn.recorder.losses) > 1


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_the_ways_to_train_and_predict(dls, mode, tmp_path):
    learn = make(dls, mode, tmp_path)
    dtypes = output_dtypes(learn, learn.model[0][0])
    learn.lr_find(num_it=10, show_plot=False, suggest_funcs=())
    learn.fine_tune(1)
    learn.fit_one_cycle(1)
    learn.fit_flat_cos(1)
    if mode == 'fp16':
        assert len(learn.precision.scales) == 4 * len(dls.train)
    assert np.isfinite(learn.validate()[0]) and set(dtypes) == {learn.precision.mode.dtype}
    for preds, _ in (learn.get_preds(), learn.tta(n=2)):
        assert preds.dtype == torch.float32 and torch.allclose(preds.sum(1), torch.ones(24), atol=1e-3)
    assert learn.predict(dls.valid_ds[0][0])[2].dtype == torch.float32
    learn.show_results()
    Interpretation.from_learner(learn).plot_top_losses(2)
    ClassificationInterpretation.from_learner(learn).confusion_matrix()
    plt.close('all')
