"`keep_freed_memory` where it does nothing or raises an error; test_imports.py tests its effect, in a new process."

import os

import pytest

from fastxtend_amp import keep_freed_memory
from fastxtend_amp.tools import memory


def _fails(name):
    raise ValueError('unrecognized configuration name')


@pytest.mark.parametrize('confstr', [_fails, lambda name: None, lambda name: 'musl 1.2'])
def test_elsewhere_there_is_nothing_to_do(monkeypatch, confstr):
    monkeypatch.setattr(os, 'confstr', confstr)
    monkeypatch.setattr(memory, 'ctypes', None)  # nothing is called
    assert keep_freed_memory() == 'Nothing to do: this system is not Linux with glibc.'
    monkeypatch.delattr(os, 'confstr')  # as on Windows
    assert keep_freed_memory() == 'Nothing to do: this system is not Linux with glibc.'


def test_another_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv('LD_PRELOAD', '/usr/lib/libtcmalloc.so.4')
    monkeypatch.setattr(memory, 'ctypes', None)
    assert 'libtcmalloc' in keep_freed_memory() or 'not Linux' in keep_freed_memory()


class _Refuses:
    "glibc before 2.35: no threshold over 32 MB."

    def __init__(self):
        self.calls = {}

    def CDLL(self, name):
        return self

    def mallopt(self, name, value):
        if name == memory._MMAP_THRESHOLD and value > 2**25:
            return 0
        self.calls[name] = value
        return 1


def test_an_older_glibc_turns_mmap_off(monkeypatch):
    glibc = _Refuses()
    monkeypatch.setattr(memory, '_nothing_to_do', lambda: None)
    monkeypatch.setattr(memory, 'ctypes', glibc)
    assert 'keeps' in keep_freed_memory()
    assert glibc.calls == {memory._MMAP_MAX: 0, memory._TRIM_THRESHOLD: -1}


@pytest.mark.parametrize('threshold', [0, -1, 2**31, 1e9])
def test_impossible_thresholds(threshold):
    with pytest.raises(ValueError, match=f'threshold={threshold} cannot be used'):
        keep_freed_memory(threshold)
