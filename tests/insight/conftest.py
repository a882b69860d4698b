"A clock that only moves when a test moves it, and a device with native bf16 and fp16, in place of the machine's."

import sys, time
from pathlib import Path

import pytest, torch

from helpers import set_support

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


@pytest.fixture
def support(monkeypatch, sleeps):
    "bf16 and fp16 are native unless a test says more; nothing depends on the machine's speed."

    def set_to(**more):
        native = {'bf16': 'native', 'fp16': 'native', **more}
        set_support(monkeypatch, lambda name: native.get(name, 'unsupported'))

    set_to()
    torch.manual_seed(0)
    return set_to
