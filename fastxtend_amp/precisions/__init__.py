"One file per precision. The order in the first import is the order of tables, and of `to_amp`'s choice."
from . import bf16, fp16, tf32, fp8, mxfp8, half_weights
from .base import (PRECISIONS, AMPMode, Precision, Support, automatic_precision, fastest_native, find_precision,
                   followers, parameters_of)


def __getattr__(name):
    "Return the class of a precision by its own name, such as `BF16`."
    for cls in PRECISIONS.values():
        if cls.__name__ == name: return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
