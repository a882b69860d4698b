"Each function of compat.py that half-precision weights stand on."
import torch
from torch import nn

from fastxtend_amp import compat


def test_copy_all():
    into, values = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    compat.copy_all(into, values)
    assert [t.sum().item() for t in into] == [2, 3]


def test_held_elsewhere():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3)
    assert not compat.held_elsewhere(w)
    y = (x @ w.detach()).sum()
    assert compat.held_elsewhere(w)
    y.backward()
    assert not compat.held_elsewhere(w)


def test_in_function_transform():
    seen = []
    torch.vmap(lambda x: seen.append(compat.in_function_transform()) or x)(torch.ones(2))
    assert seen == [True] and not compat.in_function_transform()


def test_is_compiled():
    model = nn.Linear(1, 1)
    assert not compat.is_compiled(model) and compat.is_compiled(torch.compile(model, backend='eager'))
    model.compile(backend='eager')
    assert compat.is_compiled(model)


def test_CastWatch():
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with compat.CastWatch([a]) as casts:
        kept, _, _ = a.bfloat16(), b.bfloat16(), a.half().sum()
        assert casts.alive() == kept.nbytes == 8
