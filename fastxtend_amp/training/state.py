"`PrecisionState`: what users and files read of a precision callback."
from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from ..common import training_device
from ..precisions import AMPMode, Auto, Precision
from .fit import Fit
from .loop import LoopCallback
from .scaling import Scaling, StepHistory


class PrecisionState(LoopCallback):
    "The part of a precision callback that users and files read: its precision, loss scale and history."
    precision: Precision                                         # as it was asked for
    current: Precision | None                                    # in use; None for 'auto' before the first fit
    history: StepHistory
    fit: Fit | None = None                                       # what is open
    all_fixes: list[Any]
    on_overflow: str
    max_skips: int

    def __repr__(self) -> str:
        name = repr(self.precision)
        if isinstance(self.precision, Auto) and self.current is not None: name += f': {self.current.name}'
        return f"{type(self).__name__}({name}{'' if self.scale is None else f', scale={self.scale:g}'})"

    @property
    def amp_mode(self) -> Any: # An `AMPMode`, or 'auto'
        "The selected precision, which may be 'auto'."
        return 'auto' if isinstance(self.precision, Auto) else self.precision.mode
    @property
    def mode(self) -> AMPMode | None:
        "The precision in use; None for fp32, and for 'auto' before the first fit."
        return None if self.current is None else self.current.mode
    @property
    def arguments(self) -> dict[str, Any]:
        "The arguments by name: the precision's, defaults included, and the callback's own."
        return {'amp_mode': self.amp_mode, **self.precision.arguments, 'on_overflow': self.on_overflow,
                'max_skips': self.max_skips}
    @property
    def scale(self) -> float | None:
        "The current loss scale; None without loss scaling. Reading it may synchronize with the GPU."
        return self.state_dict().get('scale')
    @property
    def scales(self) -> list[float]:
        "The loss scale at each attempted optimizer step since the callback was added, without those of `lr_find`."
        return [*map(abs, self.history.read())]
    @property
    def skips(self) -> list[bool]:
        "For each entry of `scales`, True if that step was skipped because a gradient was not finite."
        return [*self.history.skips()]
    @property
    def n_skipped(self) -> int:
        "The number of skipped steps."
        return sum(self.history.skips())
    @property
    def skipped(self) -> bool:
        "True if the most recent step was skipped. Available from `before_step` (order > 10). May synchronize."
        return self._scaling is not None and bool(self._scaling.found_inf)
    @property
    def fixes(self) -> list[Any]: # `Fix(step, precision, call)`
        "The changes that `on_overflow='fix'` has made, in all fits; `call` starts a training with the change."
        return self.all_fixes
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules kept in fp32, as `fp32_modules` matches them in the learner's model."
        return [] if self.learn is None else list(self.precision.kept_in_fp32(self.learn.model))

    def plot_scales(self,
        ax = None, # The matplotlib axes to draw on; new ones if None
    ): # The matplotlib axes
        "Plot the loss scale by optimizer step, with skipped steps marked. Raises `ValueError` if there was none."
        if not self.scales:
            raise ValueError('plot_scales has nothing to plot: no optimizer step was made with a loss scale.\n'
                             'Train in fp16 first; bf16 and fp32 need no loss scaling.')
        scales = pd.Series(self.scales)
        columns = {'loss scale': scales, f'skipped steps ({self.n_skipped:,})': scales.where(self.skips)}
        ax = pd.DataFrame(columns).plot(ax=ax, style=['-', 'rx'], drawstyle='steps-post', xlabel='optimizer step',
                                        ylabel='loss scale', title='Loss scale in training')
        ax.set_yscale('log', base=2)
        return ax

    @property
    def _scaling(self) -> Scaling | None: return None if self.fit is None else self.fit.scaling

    # -- what a checkpoint holds

    @property
    def _resolved(self) -> Precision:
        if self.current is not None or self.learn is None: return self.current or self.precision
        return self.precision.on(training_device(self.learn))

    @property
    def state_key(self) -> str:
        "The key of the precision's state in a file."
        return self._resolved.state_key

    def state_dict(self) -> dict[str, Any]: # In fp16 scale, its rules and its growth tracker
        "Return the precision's state as plain numbers, at any time; empty in bf16 and fp32."
        return self._resolved.state_dict()

    def load_state_dict(self,
        state: dict[str, Any] | None, # What `state_dict` returned; None to start from the arguments again
    ) -> None:
        """Restore the precision's state, before, during or after a fit. Ignored with a fixed loss scale.

        Raises `ValueError` for a state that cannot be used, and then changes nothing.
        """
        before, scaling = self.scale, self._scaling
        self.precision.load_state_dict(state)
        if scaling and scaling.is_scaled and before: scaling.multiply_grads(torch.tensor((self.scale or 0) / before))
