"What a batch costs the host above fp32: less than with fastai's own callback, on each version of Python and PyTorch."

from pathlib import Path

import pytest


@pytest.mark.parametrize('precision, share', [('bf16', 0.5), ('fp16', 0.75)])
def test_a_batch_costs_less_than_with_fastais_callback(precision, share, monkeypatch):
    "Calls of Python and C functions; an operator more, which the watch uses to read the loss."
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from nbs.benchmarks import calls

    fp32, fastais, ours = (
        calls.per_batch(way, name)
        for way, name in ((calls.fastais, 'fp32'), (calls.fastais, precision), (calls.ours, precision))
    )
    for a, b, c in [*zip(fp32, fastais, ours)][:2]:
        assert c - a < share * (b - a)
    assert ours[2] <= fastais[2] + 1
