"Names of precisions: fastai's, Lightning's and those of torch's dtypes as well."
from collections.abc import Iterable
from enum import Enum
from typing import Any


class AMPMode(str, Enum):
    """Names of precisions; 'fp16' and 'bf16' as in fastai's own `AMPMode`.

    Accepted wherever a precision is named, as are the names of your own precisions.
    """
    FP16 = 'fp16'
    BF16 = 'bf16'
    TF32 = 'tf32'
    FP8 = 'fp8'


OTHER_NAMES = {'float16': 'fp16', 'half': 'fp16', '16-mixed': 'fp16', 'bfloat16': 'bf16', 'bf16-mixed': 'bf16',
               'float32': 'fp32', 'float': 'fp32', '32-true': 'fp32', '32': 'fp32', 'no': 'fp32'}
# Names in other libraries that are ambiguous here, and the nearest call. 'fp16' has fp32 master weights.
_NEAREST = {'16': '`learn.to_fp16()`', '16-true': '`learn.to_fp16()`',
            'bf16-true': "`learn.to_bf16(master_weights=False)` with `opt_func=kahan('AdamW')`",
            'transformer-engine': '`learn.to_fp8()`', 'half_weights': '`learn.to_half_weights()`'}


def own_name(
    name: Any, # In any letter case; torch dtypes, and members of an `AMPMode` as well
) -> str:
    "Return the name of a precision in this package, such as 'bf16' for 'bf16-mixed'; another name in lower case."
    word = str(getattr(name, 'value', name)).lower().removeprefix('torch.')     # a dtype, or fastai's own AMPMode
    return OTHER_NAMES.get(word, word)


def unknown_name(name: Any, known: Iterable[str]) -> ValueError:
    "Return the error for a name that is not among those of the precisions."
    nearest = _NEAREST.get(own_name(name))
    advice = f'With a learner, call {nearest}; otherwise use' if nearest else 'Use'
    return ValueError(f"{name!r} is not a precision. {advice} one of {', '.join(map(repr, known))}.")
