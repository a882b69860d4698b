"In fastai's applications, low precision reaches what fp32 reaches."

import pytest

from applications import APPLICATIONS, DTYPE, run, spread


def reaches(app, r):
    return r.metric >= app.reach if app.higher else r.metric <= app.reach


@pytest.mark.parametrize('name', ['text classifier', 'tabular', 'collaborative filtering'])
def test_bf16_learns(name):
    low = run(name, 'bf16')
    assert low.dtypes == {DTYPE['bf16']} and reaches(APPLICATIONS[name], low)


@pytest.mark.slow  # three runs in fp32 for each application
@pytest.mark.parametrize('name', APPLICATIONS)
def test_within_the_spread_of_fp32(name):
    "The seed-to-seed spread is stated in `applications.spread`. fp16 convolutions take minutes on CPUs."
    app, (mean, allowed) = APPLICATIONS[name], spread(name)
    for mode in ('fp32', 'bf16') if name == 'vision_learner' else ('fp32', 'bf16', 'fp16'):
        r = run(name, mode)
        assert r.dtypes == {DTYPE[mode]} and reaches(app, r) and abs(r.metric - mean) <= allowed, mode
