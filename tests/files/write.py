"""Write the small files of a release, which every later version must read: one set for each release.

    PYTHONPATH=<a checkout of that version>:tests python -W ignore tests/files/write.py tests/files/<version>

In the folder: `saved_*.pth` by `learn.save`, `export_*.pkl` by `learn.export`.
`test_old_files.py` loads all of them. `helpers.Data` is part of these files: keep its name and its place.
"""

import sys, warnings
from pathlib import Path

import torch
from torch import nn

import fastxtend_amp
from fastai.optimizer import SGD
from helpers import learner, loaders


def net(name):
    "A model on the data of helpers.py; for FP8 with a layer that is large enough."
    torch.manual_seed(0)
    inner = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 1)]
    return nn.Sequential(*inner) if name == 'fp8' else nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))


SETTERS = {  # a method of `Learner`, and its arguments
    'fp32': ('to_fp32', {}),
    'fp16': ('to_fp16', dict(init_scale=128.0, fp32_modules='1')),
    'fp16_static': ('to_fp16', dict(loss_scale=64.0)),
    'fp16_scaler': ('to_fp16', dict(scaler=torch.amp.GradScaler('cpu', init_scale=32.0))),
    'bf16': ('to_bf16', dict(fp32_modules=nn.BatchNorm1d)),
    'amp': ('to_amp', {}),
    'tf32': ('to_tf32', {}),
    'fp8': ('to_fp8', dict(modules='2')),
    'half_weights': ('to_half_weights', dict(amp_mode='fp16', loss_scale=128.0)),
    'half_weights_flat': ('to_half_weights', dict(flat_master=True)),
    'half_weights_alone': ('to_half_weights', dict(master_weights=False)),
}
SAVED = 'fp32', 'fp16', 'fp16_static', 'bf16', 'half_weights_alone'


def trained(name):
    "A learner that has trained an epoch with this precision; not in TF32, which a CPU does not have."
    opt_func = fastxtend_amp.kahan('SGD') if name == 'half_weights_alone' else SGD
    learn = learner(
        net(name),
        loaders(8),
        metrics=[fastxtend_amp.LossScaleMetric, fastxtend_amp.SkippedStepsMetric],
        opt_func=opt_func,
    )
    if name == 'tf32':
        learn.fit(1, 0.01)
    method, arguments = SETTERS[name]
    getattr(learn, method)(**arguments)
    if name != 'tf32':
        learn.fit(1, 0.01)
    return learn


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in SETTERS:
        learn = trained(name)
        learn.path, learn.model_dir = folder.resolve(), '.'
        if name in SAVED:
            learn.save(f'saved_{name}')
        learn.export(f'export_{name}.pkl')


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    main(Path(sys.argv[1]))
