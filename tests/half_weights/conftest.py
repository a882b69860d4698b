"Tests are of small models, whose flat masters are to be joined, too."
import pytest

from fastxtend_amp.half_weights import flat_masters


@pytest.fixture(autouse=True)
def few_are_joined(monkeypatch): monkeypatch.setattr(flat_masters, 'FEWEST', 2)
