"Sharded parameters (FSDP2), and XLA devices where torch_xla is installed, which may be imported later."
from importlib.util import find_spec

from . import sharded

if find_spec('torch_xla') is not None: from . import xla
