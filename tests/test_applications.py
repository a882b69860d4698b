"Low precision comes within the seed-to-seed spread of fp32; the spread is stated in `applications.spread`."
import pytest

from applications import APPLICATIONS, DTYPE, run, spread


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize('name', APPLICATIONS)
def test_within_the_spread_of_fp32(name, mode):
    app, low = APPLICATIONS[name], run(name, mode)
    runs = [low, *(run(name, 'fp32', seed) for seed in range(app.seeds))]
    assert low.dtypes == {DTYPE[mode]} and runs[1].dtypes == {DTYPE['fp32']}
    assert all(r.metric >= app.reach if app.higher else r.metric <= app.reach for r in runs)
    mean, allowed = spread(name)
    assert abs(low.metric - mean) <= allowed
