"Modules of a model, found by name, type, module or predicate, also in compiled and wrapped models."
import difflib, fnmatch
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any

from fastai.torch_core import get_model
from fastcore.foundation import L
from torch import nn

from ..compat import COMPILED_NAME, AnyConv

ROOT = '(model)'  # the name of the model itself among its modules


def unwrapped(model: nn.Module) -> nn.Module:
    "Return the model inside `torch.compile`, `DistributedDataParallel` and `DataParallel`."
    inner = get_model(getattr(model, COMPILED_NAME, model))
    return model if inner is model else unwrapped(inner)


def qualified_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    "Yield each place of the unwrapped model's tree and the module there, without what `torch.compile` puts into names."
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        if name.endswith(COMPILED_NAME): continue                  # the compiled wrapper around it has the name
        yield '.'.join(part for part in name.split('.') if part != COMPILED_NAME) or ROOT, unwrapped(module)


def match_modules(
    model: nn.Module, # The model, as it is or compiled or wrapped for data parallelism
    spec: Any, # Names with wildcards ('head.*'), module types, modules, predicates on a module, or a list of these
    argument: str = 'fp32_modules', # The argument that `spec` is, for errors
) -> dict[str, nn.Module]: # The matched modules by name, in the model's order; one inside a matched one is left out
    """Return the modules of `model` that `spec` means; `'(model)'` is the name of the whole.

    `nn.ModuleList` and `nn.ModuleDict`, which have no forward, mean the modules in them.

    Raises `ValueError`, with near names, for a part of `spec` that matches nothing, and `TypeError` for one of another
    kind.
    """
    places, found = list(qualified_names(model)), set[str]()
    matched: dict[str, nn.Module] = {}
    computing = [(name, m) for name, m in places if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    for part, matches in matchers_of(spec, argument):
        hits = [name for name, m in places if matches(name, m)]
        if not any(covers(hits, name) for name, _ in computing): # an empty `nn.ModuleList` means no module
            names = [name for name, _ in places]
            near = difflib.get_close_matches(str(part), names, 4, .5) or names[:4]
            hint = ' Pass a type as `nn.LayerNorm`, not as a string.' if isinstance(part, str) else ''
            part = getattr(part, '__name__', repr(part))
            raise ValueError(f"{argument}={part} matches no module of the model.\nModules: {', '.join(near)} ...\n"
                             f'`learn.model.named_modules()` gives all names.{hint}')
        found.update(hits)
    for name, m in computing:                                    # a module comes before those in it
        if covers(found, name) and not covers(matched, name): matched[name] = m
    return matched


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a depthwise convolution, with one group per input channel.

    A predicate for `fp32_modules`: on CPUs with native bf16 these are faster in fp32. `learn.to_amp(measure=True)`
    measures it.
    """
    return isinstance(module, AnyConv) and module.groups == module.in_channels > 1


def is_grouped(module: nn.Module) -> bool:
    "Return whether a module is a convolution with groups of several channels."
    return isinstance(module, AnyConv) and 1 < module.groups < module.in_channels


def covers(
    names: Collection[str], # Of modules
    name: str, # Of a module
) -> bool:
    "Return whether the module `name` is among `names`, itself or with one around it."
    around = accumulate(name.split('.'), '{}.{}'.format)         # 'a', 'a.b' and 'a.b.c' for 'a.b.c'
    return ROOT in names or any(outer in names for outer in around)


Matcher = Callable[[str, nn.Module], bool]


def matchers_of(spec: Any, argument: str) -> list[tuple[Any, Matcher]]:
    """Return the parts of `spec`, each with a function that matches a name and its module.

    Raises `TypeError` for a part of another kind.
    """
    if spec is None: return []
    parts = list(spec) if isinstance(spec, (list, tuple, set, frozenset, L)) else [spec]
    return [(part, _matcher_of(part, argument)) for part in parts]


def _matcher_of(part: Any, argument: str) -> Matcher:
    if isinstance(part, str): return lambda name, m: name == part or fnmatch.fnmatchcase(name, part)
    if isinstance(part, nn.Module): return lambda name, m: m is unwrapped(part)
    if isinstance(part, type) and issubclass(part, nn.Module): return lambda name, m: isinstance(m, part)
    if callable(part) and not isinstance(part, type): return lambda name, m: bool(part(m))
    raise TypeError(f"{argument}={part!r} cannot be used.\n"
                    "Pass names with wildcards such as 'head.*', module types such as nn.LayerNorm, modules of the "
                    "model, functions that take a module, or a list of these.")
