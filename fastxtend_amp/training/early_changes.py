"A warning of callbacks of the user that change gradients while they are multiplied by the loss scale."
from fastai.learner import Learner

from ..learners import gradient_params
from ..messages import is_users, warn_user


class EarlyChanges:
    "Looks, in the first step of a fit, for callbacks of the user that change gradients while they are scaled."
    versions: list[tuple[int, int]] | None = None                # of the gradients, after a backward pass
    def __init__(self, learn: Learner): self.learn = learn

    def note(self) -> None:
        "Note the gradients, after a backward pass of fastai's loop."
        gradients = (p.grad for p in gradient_params(self.learn.opt))
        self.versions = [(id(g), g._version) for g in gradients]

    def warn(self) -> None:
        "Before gradients are unscaled, warn of the callbacks that may have changed them since."
        before = self.versions
        self.note()
        if before in (None, self.versions): return
        found = []
        for cb in self.learn.cbs:
            is_early = cb.order < 10 and {'after_backward', 'before_step'} & {*object.__dir__(cb)}
            if is_early and is_users(type(cb)): found.append(type(cb).__name__)      # ours for XLA averages them
        if found:
            warn_user(f"{', '.join(found)}: gradients are changed while they are multiplied by the loss scale, before "
                      'they are unscaled.\nGive the callback an `order` above 10, such as `order = 11`.')
