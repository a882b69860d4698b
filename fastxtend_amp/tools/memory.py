"`keep_freed_memory`: a process that keeps the memory it has freed, to avoid page faults on CPUs."
from __future__ import annotations

import ctypes, platform, sys

__all__ = ['keep_freed_memory']

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>, as mallopt's manual page names them


def keep_freed_memory(
    mmap_threshold: int = 1 << 30, # Bytes; larger blocks still go back to the system when they are freed
) -> str: # What was done, in one sentence
    "Let glibc keep freed memory for this process instead of handing it back to the system."
    if not sys.platform.startswith('linux') or platform.libc_ver()[0] != 'glibc':
        return 'Nothing to do: this is not Linux with glibc.'
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, mmap_threshold), mallopt(_TRIM_THRESHOLD, -1)
    return 'done'
