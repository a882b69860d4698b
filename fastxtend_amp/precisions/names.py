"Names of precisions: fastai's, Lightning's and those of torch's dtypes as well."
from enum import Enum


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
