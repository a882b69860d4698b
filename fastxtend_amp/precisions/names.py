"Names of precisions: fastai's, Lightning's and those of torch's dtypes as well."
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


def own_name(
    name: Any, # In any letter case; torch dtypes, and members of an `AMPMode` as well
) -> str:
    "Return the name of a precision in this package, such as 'bf16' for 'bf16-mixed'; another name in lower case."
    word = str(getattr(name, 'value', name)).lower().removeprefix('torch.')     # a dtype, or fastai's own AMPMode
    return OTHER_NAMES.get(word, word)
