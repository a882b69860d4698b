"Verdicts of the report compared with training by its advice, on some of the models of `held_out.py`."

import pytest

from held_out import holds


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize(
    'name', ['attention', 'norm, own', 'cancels, own', 'epsilon, module', 'near the limit, own', 'large loss']
)
def test_the_verdict_holds(name, mode):
    ok, verdict, fp32, low = holds(name, mode)
    assert ok, (verdict, fp32, low)
