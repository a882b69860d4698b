"Notes on mistakes: modules kept in fp32 that are never called, and errors that mixed precision explains."
import re

import torch
from torch import nn

from ..messages import warn_user
from ..precisions.fp32_modules import forward_of
from ..precisions.matching import ROOT
from ..tensors import is_half
from ..training.callback import MixedPrecision

# Words of PyTorch's errors:
_LOW_WORDS = 'Half|BFloat16|dtype|scalar type|primitive'         # where only fp32 runs
_BOTH = 'floating ScalarType|mixed dtype'                        # where an operator gets both 16-bit dtypes
_ANOMALY = 'returned nan values'                                 # of anomaly detection

OTHER_HALF = 'some frozen weights have the other 16-bit dtype, which autocast does not always convert'


def other_half(
    model: nn.Module,
    dtype: torch.dtype | None, # autocast's
    error: str,
) -> str: # "learn.model.get_submodule('base').half()"
    "Return the code that converts frozen weights, if an operator met both 16-bit dtypes; '' if not."
    frozen = {p for p in model.parameters() if not p.requires_grad}
    others = {p for p in frozen if is_half(p) and p.dtype is not dtype}
    if not others or not re.search(_BOTH, error): return ''
    convert = 'half()' if dtype is torch.float16 else 'bfloat16()'
    for name, m in model.named_modules():
        if others <= {*m.parameters()} <= frozen: return f"learn.model.get_submodule('{name}').{convert}"
    return f'for p in learn.model.parameters(): p.data = p.data if p.requires_grad else p.data.{convert}'


class UnusedModules:
    "Warns, after the first training batch, of modules in `fp32_modules` whose forward did not run."
    def __init__(self, cb: MixedPrecision): self.cb = cb

    def after_batch(self) -> None:
        "Look at the modules, once: later batches do not pass here."
        cb, fit = self.cb, self.cb.fit
        if fit is None or fit.model is None or not cb.learn.training: return     # None: a cancelled batch
        cb.unwatch(self)
        for name, m in fit.precision.kept_in_fp32(fit.model).items():
            if getattr(forward_of(m), 'called', True): continue
            warn_user(f"fp32_modules: '{name}' was not called in the first batch. If it never is, naming it has "
                      'no effect: its parent module may use its weights directly, as MultiheadAttention does with '
                      f"out_proj.\nKeep '{name.rpartition('.')[0] or ROOT}' instead.")


class ErrorNote:
    "Adds to PyTorch's errors about dtypes, oneDNN's about an LSTM, and those of anomaly detection, what to do."
    def __init__(self, cb: MixedPrecision): self.cb = cb

    def after_failure(self, error: BaseException) -> None:
        "Add a note to `error`, with Python 3.11 or newer."
        fit = self.cb.fit
        dtype = fit and fit.precision.dtype
        if not dtype or not hasattr(error, 'add_note'): return
        if code := other_half(self.cb.learn.model, dtype, str(error)): error.add_note(f'Run `{code}`: {OTHER_HALF}.')
        elif re.search(_LOW_WORDS, str(error)):
            error.add_note('If the model trains in fp32: `learn.precision_report()` names the module that does not run '
                           'in 16 bits, and prints the call that keeps it in fp32.')
        elif fit.scaling and _ANOMALY in str(error):
            error.add_note('Switch off `torch.autograd.detect_anomaly`: it raises at the first overflow, but '
                           'loss scaling skips the step.')
