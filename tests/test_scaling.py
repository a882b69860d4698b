"The history of scales against what a GradScaler really did."
import numpy as np, pytest, torch

from fastxtend_amp.scale_history import ScaleHistory as History, ScaleRule as _Rule


@pytest.mark.parametrize('growth,backoff,interval', [(2., .5, 3), (1.7, .3, 2), (1.001, .999, 1), (1e20, .5, 1)])
def test_history_replays_what_the_scaler_did(growth, backoff, interval):
    p = torch.nn.Parameter(torch.zeros(2))
    opt, rng = torch.optim.SGD([p], lr=.1), np.random.default_rng(0)
    scaler = torch.amp.GradScaler('cpu', init_scale=3., growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    history, expected, skips = History(), [], []
    history.mark(3., 0, _Rule(growth, backoff, interval))
    for _ in range(200):
        skip = bool(rng.random() < .2)
        p.grad = torch.full((2,), float('inf') if skip else 1.)
        scaler.scale(torch.zeros(1))
        expected.append(scaler.get_scale()); skips.append(skip)
        scaler.step(opt); scaler.update(); history.record(skip)
        assert history.current_scale == scaler.get_scale()       # known on the host
    assert history.scales == expected and history.skips.tolist() == skips


def test_memory_of_ten_million_steps():
    history = History()
    history.mark(65536., 0, _Rule(2., .5, 2000))
    for i in range(100_000): history.record(i % 2000 == 0)
    assert len(history._bits) * 100 == 1_250_000 and len(history._marks) == 1


def test_truncate():
    history = History(); history.mark(8., 0, _Rule(2., .5, 2))
    for skipped in (True, False, False, True, True): history.record(skipped)
    history.truncate(3)
    assert history.scales == [8., 4., 4.] and history.skips.tolist() == [True, False, False]
    history.record(False); assert history.scales == [8., 4., 4., 8.]
