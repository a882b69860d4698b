"The callbacks that a copy of a learner runs: those that change what training does."
import re

from fastai.callback.core import Callback
from fastai.callback.hook import HookCallback
from fastai.learner import Learner

# Callbacks of fastai that affect a training step, by name, as some are slow to import. MixHandler is MixUp and CutMix;
# MixedPrecision also ours. All others of fastai read, schedule, save or stop.
_OF_FASTAI = set("""TrainEvalCallback CastToTensor MixedPrecision MixHandler GradientAccumulation GradientClip BnFreeze
    ChannelsLast ModelResetter RNNCallback RNNRegularizer GANTrainer FixedGANSwitcher AdaptiveGANSwitcher
    GANDiscriminativeLR""".split())
# Words in the names of classes that track, record, save or show a training, and of the services that they send it to.
_WATCHES = re.compile('(Track|Record|Sav|Checkpoint|Monitor|Progress|Plot|Print|Logg?)(|s|e[drs]*|ing)(?![a-z])|'
                      '(?i:wandb|tensorboard|mlflow|neptune|comet|clearml|azureml|dvclive|swanlab)')


def takes_part(cb: Callback) -> bool:
    """Return whether a copy runs `cb`: what changes a training does, and nothing is tracked, sent or saved.

    `cb.run_on_copy` decides if it is True or False. Of fastai's callbacks, and those derived from them, a copy runs
    those that affect a training step. It runs all others, except those whose class, or a class that it is derived from,
    has a name as trackers, recorders and savers have: `WandbTracker`, `GradientLogger`, `SaveEMA`.
    """
    if (said := getattr(cb, 'run_on_copy', None)) is not None: return said
    kinds = [kind for kind in type(cb).__mro__ if kind not in HookCallback.__mro__]
    of_fastai = [kind.__name__ for kind in kinds if kind.__module__.startswith('fastai.')]
    if of_fastai: return not _OF_FASTAI.isdisjoint(of_fastai)
    return not any(_WATCHES.search(f"{kind.__module__.partition('.')[0]} {kind.__name__}") for kind in kinds)


def left_out(learn: Learner) -> list[str]:
    "Return the names of callbacks that a copy of `learn` does not run, except those of fastai and fastxtend_amp."
    return [cb.name for cb in learn.cbs
            if not (takes_part(cb) or type(cb).__module__.startswith(('fastai.', 'fastxtend_amp.')))]


def note_of_left_out(learn: Learner) -> list[str]: # One sentence or none
    "Say which callbacks a copy does not run."
    names = left_out(learn)
    return [f"Callbacks left out: {', '.join(names)}. If the training step needs one of them, set its "
            'attribute `run_on_copy = True`.'] if names else []
