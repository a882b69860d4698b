"`keep_freed_memory`: let this process keep the memory that it has freed, to avoid page faults on CPUs."
from __future__ import annotations

import ctypes, os

__all__ = ['keep_freed_memory']

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4         # parameters of mallopt, from <malloc.h>
_NEVER = -1


def keep_freed_memory(
    threshold: int = 2**30, # Bytes; larger blocks are still returned to the system when they are freed
) -> str: # What was done, in a sentence
    """Tell glibc to keep the memory that this process frees, for its next tensors. For the first cell of a notebook.

    By default glibc returns freed blocks of over 32 MB to the system at once and smaller ones often, and asks for them
    anew, with one page fault for each 4 KB. On a CPU this can take a large part of a training step.

    What the process has freed stays with it until it ends, out of reach of other processes. On a GPU nothing changes,
    as tensors do not come from glibc. Nothing is done where the system is not Linux with glibc, and where another
    allocator is preloaded, such as tcmalloc, which keeps freed memory by itself.

    Without a call: start Python with `MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296`.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html and
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """
    if not isinstance(threshold, int) or not 0 < threshold < 2**31:
        raise ValueError(f'threshold={threshold!r} cannot be used: give whole bytes, from 1 to {2**31 - 1:,}.')
    why = _nothing_to_do()
    if why is not None: return f'Nothing to do: {why}.'
    mallopt = ctypes.CDLL(None).mallopt
    # glibc before 2.35 takes no threshold over 32 MB. There mmap can be turned off altogether.
    kept = mallopt(_MMAP_THRESHOLD, threshold) or mallopt(_MMAP_MAX, 0)
    if not (mallopt(_TRIM_THRESHOLD, _NEVER) and kept):
        return f'Nothing was done: glibc refuses a threshold of {threshold:,} bytes.'
    return f'glibc keeps freed memory: blocks of up to {threshold / 2**20:,.0f} MB stay with this process.'


def _nothing_to_do() -> str | None:
    "Return why glibc's settings do not matter to this process; None if they do."
    try: is_glibc = (os.confstr('CS_GNU_LIBC_VERSION') or '').startswith('glibc')
    except (AttributeError, ValueError, OSError): is_glibc = False   # no confstr on Windows, no such name elsewhere
    if not is_glibc: return 'this system is not Linux with glibc'
    preloaded = os.environ.get('LD_PRELOAD', '')
    if 'malloc' in preloaded: return f'another allocator is preloaded ({preloaded})'
    return None
