"One file per precision. The order of the imports is the order of tables, and of `to_amp`'s choice."
from .bf16 import BF16
from .fp16 import FP16
from .tf32 import TF32
from .fp8 import FP8
from .base import PRECISIONS, Precision, fastest_native, find_precision, on_register, parameters_of
from .names import AMPMode
from .support import Support
