"Low precision does in fastai's applications what fp32 does."
import pytest

from applications import APPLICATIONS, DTYPE, run, spread


@pytest.mark.parametrize('name', APPLICATIONS)
def test_bf16_learns(name):
    app, low = APPLICATIONS[name], run(name, 'bf16')
    assert low.dtypes == {DTYPE['bf16']}
    assert low.metric >= app.reach if app.higher else low.metric <= app.reach


@pytest.mark.slow                                                # three or five runs in fp32 for each application
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize('name', APPLICATIONS)
def test_within_the_spread_of_fp32(name, mode):
    "The seed-to-seed spread is stated in `applications.spread`."
    app, low = APPLICATIONS[name], run(name, mode)
    runs = [low, *(run(name, 'fp32', seed) for seed in range(app.seeds))]
    assert low.dtypes == {DTYPE[mode]} and runs[1].dtypes == {DTYPE['fp32']}
    assert all(r.metric >= app.reach if app.higher else r.metric <= app.reach for r in runs)
    mean, allowed = spread(name)
    assert abs(low.metric - mean) <= allowed
