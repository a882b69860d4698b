"A search for a few of many modules that together help in fp32."
from collections.abc import Callable

_TRIALS = 16            # enough to find 1 of 100 modules, 2 of 16, or 4 of 8; each may take seconds


def few_that_help(
    names: list[str], # Those that are preferred come first
    helps: Callable[[list[str]], bool], # Whether it helps to keep these modules in fp32
) -> list[str]: # All of `names` if 16 trials do not find a few; [] if all do not help
    """Return names that help together, none of which can be left out.

    Source: Junker, QuickXplain: Preferred Explanations and Relaxations for Over-Constrained Problems, AAAI 2004.
    """
    needed, trials = list[str](), iter(range(_TRIALS))

    def help_together(some):
        next(trials)
        return helps([*some, *needed])

    def search(some, beside): # What is needed of `some`, which help beside these, while these alone do not
        if len(some) == 1: return needed.extend(some)
        first, last, found = some[:len(some) // 2], some[len(some) // 2:], len(needed)
        if not help_together([*beside, *first]): search(last, [*beside, *first])
        if len(needed) == found or not help_together(beside): search(first, beside)

    if not names or not helps(names): return []
    try: search(names, [])
    except StopIteration: return names
    return [name for name in names if name in needed]
