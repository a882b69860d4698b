"The notes of a report: what was seen besides the verdicts, what was looked at, and what was not."
from collections.abc import Iterator, Mapping

from fastai.learner import Learner

from ..learners import training_device
from .copied_callbacks import note_of_left_out
from .display import named, some
from .evidence import not_fp32
from .judge import Judge
from .report_result import Verdict
from .requirements import note_of_frozen
from .sample import Sample
from .values import largest_value, n_items, readable, tensors_in

_LARGE_INPUT = 1e3     # larger ones are named if a module is flagged
_DETERMINISTIC = 1e-3  # relative difference of two losses; that of most models on a GPU is smaller


def notes(
    learn: Learner,
    sample: Sample, # The batches that were looked at
    judges: Mapping[str, Judge], # By precision, of those that can run
    verdicts: Mapping[str, Verdict], # By precision
    with_cuda_rules: bool, # Whether a CPU followed CUDA's autocast rules
) -> Iterator[str]:
    "Give the notes, one after the other."
    yield from _inputs(sample, verdicts)
    yield from _predictions(judges, verdicts)
    yield from _reference(sample)
    for name, judge in judges.items():
        if judge.first_run: yield from _precision(learn, judge, verdicts[name])
    yield from _looked_at(sample, judges)
    yield from _gradients(sample, judges)
    if with_cuda_rules:
        yield ("Computed on this CPU with CUDA's autocast rules, which a fit on it does not follow. GPU kernels were "
               'not run; they may round differently or be missing.')
    elif training_device(learn).type == 'cpu':
        yield "Computed with the autocast rules of a CPU; with those of a GPU, `device='cuda'`, verdicts may differ."
    if with_cuda_rules and 'bf16' in verdicts:
        yield 'A T4, V100 or RTX 20 emulates bf16: follow the verdict on fp16 there, or use fp32.'
    yield from note_of_frozen(learn) + note_of_left_out(learn)


def _inputs(sample, verdicts):
    inputs = (t for batch in sample.batches for t in readable(tensors_in(batch)[:-1]))
    largest = max(map(largest_value, inputs), default=0.)
    if largest > _LARGE_INPUT and any(v.flagged for v in verdicts.values()):
        yield f'The inputs reach {largest:,.3g}. Normalize them first.'


def _predictions(judges, verdicts):
    "Say how far predictions are from those in fp32. Those of a small sample say little."
    errors = {name: v.prediction_error for name, v in verdicts.items()
              if v.prediction_error >= 0 and not judges[name].sample.is_small}
    nearest = f'; {min(errors, key=errors.get)} is nearer' if len({*errors.values()}) > 1 else ''
    by = ', '.join(f'{100 * error:.2g}% in {name}' for name, error in errors.items())
    if errors: yield f'Predictions differ from those in fp32 by {by}{nearest}.'


def _reference(sample):
    own, unreadable = not_fp32(sample.reference), sample.reference.unreadable
    if own and not sample.fault: yield f'The reference is not fp32: {own}.'
    if unreadable:
        yield ('Inside a transform (vmap, forward-mode AD) values cannot be read. Not compared with fp32: '
               f'{some(map(named, unreadable))}.')


def _precision(learn, judge, verdict):
    name, last_run = verdict.precision, judge.runs[-1]           # with flagged modules in fp32
    modules = last_run.modules.values()
    equal = some(f'{m.merged} in {named(m.name)}' for m in modules if m.merged)
    if equal and verdict.is_safe:
        yield f'{name}: whole numbers become equal, {equal}. Neither loss nor gradient shows it.'
    if verdict.modules and not any(m.is_half and m.has_product for m in modules):
        yield f'{name}: no product of matrices is left in {name}, so fp32 is as fast.'
    if layers := judge.first_run.precision.simulated_forwards(learn.model):
        yield f'{name}: the rounding of {some(map(named, layers))} was simulated; no {name.upper()} kernel was run.'


def _looked_at(sample, judges):
    n = len(sample.batches)
    batches = '1 batch' if n == 1 else f'{n:,} batches'
    n_gradients = max((judge.distance.n for judge in judges.values() if judge.distance), default=0)
    gradients = f' for the modules and {n_gradients} for the gradient' if n_gradients else ''
    yield (f'Looked at {batches}{gradients}, of {n_items(sample.batches[0]):,} samples each. Other batches '
           '(`n_batches`) and later weights may flag other modules.')
    for name, judge in judges.items():
        if judge.sample.is_small:
            yield (f'{name}: looked at only {n_items(judge.sample.batches[0]):,} of these samples, and at neither '
                   'gradients nor loss scales, as this device emulates it.')


def _gradients(sample, judges):
    distances = {name: judge.distance for name, judge in judges.items() if judge.distance}
    for name, distance in distances.items():
        if n := len(distance.only_in_fp32):
            yield (f'{name}: in {n} of {distance.n + n} batches only fp32 gave finite gradients at first, so modules '
                   'were judged on one of these batches as well.')
        if distance.unknown: yield f'{name}: gradients were not compared with fp32: {distance.unknown}.'
    again = next((distance.losses[:1] for distance in distances.values()), [])
    for loss, other in zip(sample.reference.losses, again):
        if abs(loss - other) > _DETERMINISTIC * abs(loss):
            yield (f'The model is not deterministic: two runs of one batch in fp32 have losses of {loss:.4g} and '
                   f'{other:.4g}. All figures here include such differences.')
