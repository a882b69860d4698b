"`keep_freed_memory` where it does nothing or raises an error; test_package.py tests its effect, in a new process."

import ctypes, os

import pytest

from fastxtend_amp import keep_freed_memory

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # in <malloc.h>


def glibc(name):
    return 'glibc 2.31'


@pytest.fixture
def calls(monkeypatch):
    "The calls of `mallopt` that succeed, as in glibc before 2.35: it has no threshold over 32 MB."
    found = {}

    def mallopt(name, value):
        fails = name == MMAP_THRESHOLD and value > 2**25
        return 0 if fails else found.update({name: value}) or 1

    monkeypatch.setattr(ctypes, 'CDLL', lambda name: type('libc', (), {'mallopt': staticmethod(mallopt)}))
    monkeypatch.delenv('LD_PRELOAD', raising=False)
    return found


def test_an_older_glibc_turns_mmap_off(monkeypatch, calls):
    monkeypatch.setattr(os, 'confstr', glibc)
    assert 'keeps' in keep_freed_memory() and calls == {MMAP_MAX: 0, TRIM_THRESHOLD: -1}


def no_such_name(name):
    raise ValueError('unrecognized configuration name')


@pytest.mark.parametrize('confstr', [no_such_name, lambda name: None, lambda name: 'musl 1.2', None, glibc])
def test_elsewhere_there_is_nothing_to_do(monkeypatch, calls, confstr):
    why = 'this system is not Linux with glibc'
    if confstr is None:  # as on Windows
        monkeypatch.delattr(os, 'confstr')
    else:
        monkeypatch.setattr(os, 'confstr', confstr)
    if confstr is glibc:
        monkeypatch.setenv('LD_PRELOAD', '/usr/lib/libtcmalloc.so.4')
        why = 'another allocator is preloaded (/usr/lib/libtcmalloc.so.4)'
    assert keep_freed_memory() == f'Nothing to do: {why}.' and not calls


@pytest.mark.parametrize('threshold', [0, -1, 2**31, 1e9])
def test_impossible_thresholds(threshold):
    with pytest.raises(ValueError, match=f'threshold={threshold} cannot be used'):
        keep_freed_memory(threshold)
