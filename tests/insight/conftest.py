"A clock that only moves when a test moves it, in place of the machine's clock."

import sys, time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / 'nbs'))  # its models break in public threads


class Clock:
    "Seconds since the test began."

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        self.now += 1e-6  # no two readings are equal
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for name in ('perf_counter', 'monotonic', 'time'):
        monkeypatch.setattr(time, name, found.read)
    return found


@pytest.fixture
def sleeps(clock, monkeypatch):
    "The clock; `time.sleep` moves it."
    monkeypatch.setattr(time, 'sleep', clock.sleep)
    return clock
