"`Learner.compare_precision` and `to_amp(measure=True)`, and the rows that they compare."
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.foundation import L
from torch import nn

from ..learners import training_device
from ..messages import check_bool
from ..precisions import PRECISIONS, Precision, find_precision
from ..precisions.matching import is_depthwise, is_grouped, unwrapped
from .calls import Call, like_own
from .comparison import PrecisionComparison
from .copies import several_processes
from .rounds import FOR_REPORT, N_SEEDS, N_STEPS, Rounds

_NOTHING_NATIVE = ("This device runs nothing else natively. To compare what it emulates, name it: "
                   "`learn.compare_precision('bf16')`.")


@patch
def compare_precision(self: Learner,
    precisions: Any = None, # Names such as 'bf16', 'half_weights', one or several; None: bf16, fp16, TF32 where native
    n_steps: int = N_STEPS, # Training steps after which the losses are compared; timing may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = N_SEEDS, # Repetitions of fp32 with other seeds, to see how much its loss varies
    max_seconds: float = 60., # Time limit, approximate for slow models; compiling does not count
    compile: bool = False, # Also compare each precision compiled, by `Module.compile`
) -> PrecisionComparison: # A `PrecisionComparison`: `table`, `plot()`, `recommended`, `reason`, `apply()`
    """Train copies of the learner side by side, and recommend the fastest precision whose loss matches fp32.

    Models with 2-d convolutions are also compared in channels last. The first 16-bit precision that the device runs
    natively is also compared with depthwise or grouped convolutions in fp32, if the model has such layers.

    All are timed in alternating rounds on the same batches, so that background load affects all alike. After `n_steps`,
    rounds continue for those that may be more than 5% faster than fp32 and than the fastest one, until that is certain
    or `max_seconds` is over. What is clearly slower than fp32 is dropped, as is a format or a choice of layers that is
    clearly slower than the fastest row. The learner is not modified. A copy for each row, and batches of up to 512 MB,
    are in memory at once.

    Copies include fastai's callbacks that affect a training step (mixup, gradient accumulation, gradient clipping) and
    your own, and leave out trackers, recorders and savers, which they know by their classes' names. A callback's
    attribute `run_on_copy`, True or False, overrules this.

    Interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), widened for
    repeated looks.

    Raises:

    - `ValueError` if `precisions` has an unknown precision
    - `ValueError` if `n_steps`, `lr`, `n_seeds`, `max_seconds` or `compile` cannot be used
    - `ValueError` if a parameter is sharded (FSDP), NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there are no training batches
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    rounds = Rounds(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr)
    check_bool(compile=compile)
    classes = native_precisions(self) if precisions is None else [*map(find_precision, L(precisions))]
    found = rounds.compared(rows_of(self, [like_own(self, cls) for cls in classes], compile))
    if not classes: found.notes[:0] = [_NOTHING_NATIVE]
    return found


def measure_and_choose(
    learn: Learner, # Switched to the selected precision
    max_seconds: float = 60., # Time limit for report and comparison
) -> None:
    """Time what the device runs natively on real batches, and switch the learner to what is recommended.

    16-bit precisions keep those modules in fp32 that `precision_report` names. Only copies are trained. Prints the
    decision; details are in `learn.precision_decision`.

    Raises what `compare_precision` raises, and `RuntimeError` in distributed runs.
    """
    rounds = Rounds(learn, 'to_amp(measure=True)', max_seconds)
    if several_processes():
        raise RuntimeError('to_amp(measure=True) is not available in distributed runs, as each process could choose '
                           'another precision.\nRun it in one process, then use the call that it prints in every '
                           'process.')
    classes = native_precisions(learn)
    low = [cls.name for cls in classes if cls.dtype]
    verdicts = learn.precision_report(low, max_seconds=FOR_REPORT * max_seconds).verdicts if low else {}
    precisions, notes = [], [] if classes else [_NOTHING_NATIVE]
    for cls in classes:
        v = verdicts.get(cls.name)
        if v is None: precisions.append(like_own(learn, cls))
        elif v.call and v.verdict not in ('do not use', 'cannot run'):
            precisions.append(like_own(learn, cls, v.modules, v.init_scale))
        else: notes.append(f'{cls.name}: {v.reason}.')
    found = rounds.compared(rows_of(learn, precisions))
    found.notes[:0] = notes
    found.apply(learn)
    vars(learn)['precision_decision'] = found                    # which `export` leaves out
    print(f'Selected: {found.recommended}.', found.reason, *found.notes,
          f'Next time, call `{found.calls[found.recommended]}` instead of measuring.')


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison of the last `to_amp(measure=True)`: `recommended`, `reason`, `calls`; None without one."
    return vars(self).get('precision_decision')


# -- what is compared

def native_precisions(learn: Learner) -> list[type[Precision]]:
    """Return what the device runs natively without another package.

    16-bit weights are not in it: they compute as autocast does.
    """
    device = training_device(learn)
    return [cls for cls in PRECISIONS.values()
            if cls.in_tables and not cls.package and cls.support(device).status == 'native']


def rows_of(
    learn: Learner,
    precisions: Sequence[Precision], # Besides fp32
    compile: bool = False, # Whether each precision is also compared compiled
) -> dict[str, Call]: # fp32 first; then by name: 'bf16', 'bf16 compiled', 'bf16, channels last'
    """Return what to compare: each precision once, and variants of those that the device runs natively.

    The first 16-bit precision also keeps depthwise or grouped convolutions in fp32, where the model has some. Models
    with 2-d convolutions are compared in channels last as well, unless they are in that format already.

    Source: github.com/NVIDIA/apex/issues/712, github.com/tensorflow/tensorflow/issues/41715.
    """
    model, device = unwrapped(learn.model), training_device(learn)
    def is_native(p): return p.support(device).status == 'native'
    rows = {p.name: Call.of(learn, p) for p in (Precision(), *precisions)}
    compiled = {f'{name} compiled': replace(row, compiled=True) for name, row in rows.items() if compile}
    native = {name: row for name, row in rows.items() if is_native(row.precision)}
    for p in [p for p in precisions if p.dtype and is_native(p)][:1]:
        in_fp32 = {m for kept in p.kept_in_fp32(model).values() for m in kept.modules()}
        for kind in is_depthwise, is_grouped:
            if not any(map(kind, {*model.modules()} - in_fp32)): continue
            keep = [*L(p.fp32_modules), kind] if p.fp32_modules else kind
            name = f"{p.name}, {kind.__name__.removeprefix('is_')} in fp32"
            native[name] = Call.of(learn, p.like(fp32_modules=keep))
    rows |= native
    has_2d = any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())
    if has_2d and not _is_channels_last(learn):
        rows |= {f'{name}, channels last': replace(row, channels_last=True) for name, row in native.items()}
    return rows | compiled


def _is_channels_last(learn):
    weights = (p for p in learn.model.parameters() if p.dim() == 4)
    return hasattr(learn, 'channels_last') or not all(p.is_contiguous() for p in weights)
