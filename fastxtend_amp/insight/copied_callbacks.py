"The choice of callbacks that the copy of a learner runs, and a note of those that it leaves out."
import re

from fastai.callback.core import Callback
from fastai.callback.hook import HookCallback
from fastai.learner import Learner

from ..messages import is_users, package_of

# Callbacks of fastai that affect a training step, by name, as some are slow to import. MixHandler is MixUp and CutMix;
# MixedPrecision also ours. All others of fastai read, schedule, save or stop.
_OF_FASTAI = set("""TrainEvalCallback CastToTensor MixedPrecision MixHandler GradientAccumulation GradientClip BnFreeze
    ChannelsLast ModelResetter RNNCallback RNNRegularizer GANTrainer FixedGANSwitcher AdaptiveGANSwitcher
    GANDiscriminativeLR""".split())
# Words in the names of classes that track, record, save or show a training, and of the services that they send it to.
_WATCHES = re.compile('(Track|Record|Sav|(?<!Gradient)(?<!Activation)Checkpoint|Monitor|Progress|Plot|Print|Logg?)'
                      '(|s|e[drs]*|ing)(?![a-z])|'
                      '(?i:wandb|tensorboard|mlflow|neptune|comet|clearml|azureml|dvclive|swanlab)')


def runs_on_copy(cb: Callback) -> bool:
    """Return whether a copy runs `cb`: what changes a training does, and nothing is tracked, sent or saved.

    `cb.run_on_copy` decides if it is True or False. Of fastai's callbacks, and those derived from them, a copy runs
    those that affect a training step. It runs all others, except those whose class, or a class that it is derived from,
    has a name as trackers, recorders and savers have: `WandbTracker`, `GradientLogger`, `SaveEMA`.
    """
    if (own := getattr(cb, 'run_on_copy', None)) is not None: return own
    classes = [cls for cls in type(cb).__mro__ if cls not in HookCallback.__mro__]
    of_fastai = [cls.__name__ for cls in classes if package_of(cls) == 'fastai']
    if of_fastai: return not _OF_FASTAI.isdisjoint(of_fastai)
    return not any(_WATCHES.search(f'{package_of(cls)} {cls.__name__}') for cls in classes)


def note_of_left_out(learn: Learner) -> list[str]: # One sentence or none
    "Say which callbacks a copy does not run, except those of fastai and fastxtend_amp."
    names = [cb.name for cb in learn.cbs if is_users(type(cb)) and not runs_on_copy(cb)]
    return [f"Callbacks left out: {', '.join(names)}. If the training step needs one of them, set its "
            'attribute `run_on_copy = True`.'] if names else []
