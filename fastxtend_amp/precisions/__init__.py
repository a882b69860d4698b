"One file per precision. The order in the first import is the order of tables, and of `to_amp`'s choice."
from . import bf16, fp16, tf32, fp8, half_weights
from .base import (PRECISIONS, AMPMode, Auto, Precision, Support, each_precision, fastest_native, find_precision,
                   parameters_of, precision_support)
from .bf16 import BF16
from .fp16 import FP16
from .fp8 import FP8
from .half_weights import HalfWeights, kahan
from .tf32 import TF32
