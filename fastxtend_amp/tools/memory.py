"`keep_freed_memory`: reuse freed memory, to avoid page faults on CPUs."
import ctypes, os
from operator import index

from ..messages import check_argument

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4         # parameters of mallopt, from <malloc.h>
_NEVER = -1


def keep_freed_memory(
    threshold: int = 2**30, # Bytes; larger blocks are still returned to the system
) -> str: # A sentence on what was done
    """Make glibc keep the memory that this process frees, and reuse it for the next tensors.

    Call it in the first cell of a notebook. By default glibc returns freed blocks above 32 MB to the system at once,
    and smaller ones often. Allocating them again costs one page fault per 4 KB, on a CPU up to a third of a training
    step.

    The process keeps its freed memory until it ends, so other processes cannot use it. GPU memory is not affected.
    Does nothing without glibc, or if another allocator (tcmalloc, jemalloc) is preloaded.

    To get the same without a call, start Python with
    `MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296`.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html and
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """
    check_argument('threshold', threshold, lambda n: 0 < index(n) < 2**31, f'an integer from 1 to {2**31 - 1:,}')
    why = _nothing_to_do()
    if why is not None: return f'Nothing to do: {why}.'
    mallopt = ctypes.CDLL(None).mallopt
    # glibc before 2.35 does not accept a threshold above 32 MB. There mmap can be turned off.
    kept = mallopt(_MMAP_THRESHOLD, threshold) or mallopt(_MMAP_MAX, 0)
    if not (mallopt(_TRIM_THRESHOLD, _NEVER) and kept):
        return f'Nothing was done: glibc does not accept a threshold of {threshold:,} bytes.'
    return f'glibc keeps freed memory: blocks of up to {threshold / 2**20:,.0f} MB are reused.'


def _nothing_to_do() -> str | None:
    "Return why settings of glibc have no effect in this process; None if they have."
    try: is_glibc = (os.confstr('CS_GNU_LIBC_VERSION') or '').startswith('glibc')
    except (AttributeError, ValueError, OSError): is_glibc = False   # no confstr on Windows, no such name elsewhere
    if not is_glibc: return 'this system is not Linux with glibc'
    preloaded = os.environ.get('LD_PRELOAD', '')
    if 'malloc' in preloaded: return f'another allocator is preloaded ({preloaded})'
    return None
