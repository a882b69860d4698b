"""Rooms for sharded parameters (FSDP2) and for XLA devices; the latter is used only where torch_xla is installed.

Installed, and not imported: torch_xla may be imported after this package.
"""
from importlib.util import find_spec

from . import sharded

if find_spec('torch_xla') is not None: from . import xla
