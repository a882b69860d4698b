"""What C++ asks a device for: its guard, and for 'cuda' its hooks. torch has no function to register CUDA's again.

C++'s tables of virtual functions are copied and changed by ctypes; their order is read from torch's own headers. The
guard's functions are a few bytes of machine code, because the autograd engine calls them while an exception unwinds it,
when no Python function can run.
"""
from __future__ import annotations

import atexit, ctypes, mmap, os, platform, re, struct

import torch

from . import clock
from .memory import address_is_pinned

_libc = ctypes.CDLL(None)
_key = ctypes.c_uint()                               # under which each thread keeps the index of its current device
_libc.pthread_key_create(ctypes.byref(_key), None)
_libc.pthread_getspecific.restype = ctypes.c_void_p
_libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]


def current_index(): return _libc.pthread_getspecific(_key) or 0
def exchange_index(index):
    before = current_index()
    if index >= 0: _libc.pthread_setspecific(_key, index)
    return before


def _address_of(function): return ctypes.cast(function, ctypes.c_void_p).value


def _code(device_type, n_devices):
    "Machine code of the guard's functions, by name; of several devices on x86-64 only."
    if platform.machine() in ('aarch64', 'arm64'):
        if n_devices > 1: raise RuntimeError('several simulated devices need x86-64')
        # returns a number and, in the second register, 0: a device type, a device of index 0, its stream 0
        same = lambda n: struct.pack('<III', 0x52800000 | n << 5, 0xd2800001, 0xd65f03c0)
        names = (
            'type',
            'exchangeDevice',
            'getDevice',
            'getStream',
            'getDefaultStream',
            'getNewStream',
            'exchangeStream',
        )
        return {**dict.fromkeys(names, same(device_type)), 'deviceCount': same(1)}
    call = lambda function: (
        b'\xbf' + struct.pack('<I', _key.value) + b'\x48\xb8' + struct.pack('<Q', _address_of(function)) + b'\xff\xd0'
    )
    get, put = call(_libc.pthread_getspecific), call(_libc.pthread_setspecific)
    as_device = b'\xc1\xe0\x08\x83\xc8' + bytes([device_type])           # the index in eax -> Device(type, index)
    constant = lambda n: b'\xb8' + struct.pack('<I', n) + b'\xc3'
    stream = b'\x0f\xb7\xc6\x31\xd2\xc3'  # the device that was given, its stream 0
    exchange = (
        b'\x53\x41\x54\x48\x83\xec\x08\x89\xf3'
        + get
        + b'\x41\x89\xc4\x0f\xb6\xf7\x40\x84\xf6\x78'
        + bytes([len(put)])
        + put
        + b'\x44\x89\xe0'
        + as_device
        + b'\x48\x83\xc4\x08\x41\x5c\x5b\xc3'
    )   # an index of -1 changes nothing
    return {'type': constant(device_type), 'deviceCount': constant(n_devices),
            'getDevice': b'\x48\x83\xec\x08' + get + b'\x48\x83\xc4\x08' + as_device + b'\x31\xd2\xc3',
            **dict.fromkeys(('exchangeDevice', 'setDevice', 'uncheckedSetDevice'), exchange),
            **dict.fromkeys(('getStream', 'getDefaultStream', 'getNewStream', 'exchangeStream'), stream)}


def guard(device_type, n_devices):
    "A device guard of this C++ device type."
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self): return device_type
    made, page = Guard(), mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start, order, entries = (
        ctypes.addressof(ctypes.c_char.from_buffer(page)),
        _virtual_functions('c10/core/impl/DeviceGuardImplInterface.h'),
        {},
    )
    for name, code in _code(int(device_type), n_devices).items():
        entries[order.index(name)] = start + page.tell()
        page.write(code)
        page.seek(-page.tell() % 16, os.SEEK_CUR)
    _replace(_address(made), entries, [made, page])
    return made


def _address(o):
    return ctypes.c_void_p.from_address(id(o) + object.__basicsize__).value  # pybind11's objects hold it there


def _virtual_functions(header):
    "Their names in the order in which they are in a class's table; a destructor takes two places."
    with open(os.path.join(os.path.dirname(torch.__file__), 'include', header)) as f:
        text = re.sub(r'//.*|/\*(.|\n)*?\*/', '', f.read())
    found = []
    for name in re.findall(r'\bvirtual\b[^;{(]*?(~?\w+)\s*\(', text): found += [name] * (2 if name[0] == '~' else 1)
    return found


def _replace(at, entries, keep, n=80):
    "Give the C++ object at this address a table of virtual functions with other `entries`; returns what undoes it."
    table = ctypes.c_void_p.from_address(at).value
    words = ctypes.c_void_p * (n + 2)                # two words of type information lie before the table
    copy = words(*words.from_address(table - 16))
    for i, f in entries.items(): copy[2 + i] = f
    pointer = ctypes.c_void_p.from_address(at)
    pointer.value = ctypes.addressof(copy) + 16
    for o in (*keep, copy):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(o))  # C++ may look after Python is gone

    def undo(): pointer.value = table
    return undo


def _hooks(n_devices):
    "What C++'s CUDAHooks answers instead."
    this, index = ctypes.c_void_p, ctypes.c_int8
    return {
        'isAvailable': ctypes.CFUNCTYPE(ctypes.c_bool, this)(lambda this: True),
        'hasPrimaryContext': ctypes.CFUNCTYPE(ctypes.c_bool, this, index)(lambda this, i: True),
        'init': ctypes.CFUNCTYPE(None, this)(lambda this: None),
        'deviceCount': ctypes.CFUNCTYPE(index, this)(lambda this: n_devices),
        'getCurrentDevice': ctypes.CFUNCTYPE(index, this)(lambda this: current_index()),
        'setCurrentDevice': ctypes.CFUNCTYPE(None, this, index)(lambda this, i: exchange_index(i) and None),
        'exchangeDevice': ctypes.CFUNCTYPE(index, this, index)(lambda this, i: exchange_index(i)),
        'maybeExchangeDevice': ctypes.CFUNCTYPE(index, this, index)(lambda this, i: exchange_index(i)),
        'isPinnedPtr': ctypes.CFUNCTYPE(ctypes.c_bool, this, ctypes.c_void_p)(lambda this, at: address_is_pinned(at)),
    }


def fake_cuda(n_devices):
    "Let C++ find a device guard and hooks for CUDA that need no driver."
    libs = os.path.join(os.path.dirname(torch.__file__), 'lib')
    guards = (ctypes.c_void_p * 24).in_dll(
        ctypes.CDLL(os.path.join(libs, 'libc10.so')), '_ZN3c104impl26device_guard_impl_registryE'
    )
    guards[1] = _address(guard(torch._C._autograd.DeviceType.CUDA, n_devices))
    get_hooks = ctypes.CDLL(os.path.join(libs, 'libtorch_cpu.so'))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    order, functions = _virtual_functions('ATen/detail/AcceleratorHooksInterface.h'), _hooks(n_devices)
    atexit.register(
        _replace(get_hooks(), {order.index(n): _address_of(f) for n, f in functions.items()}, functions.values())
    )


clock.current.index = current_index
