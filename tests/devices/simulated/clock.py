"""The simulated devices' time: what the host waits for, and what arrives late.

The host counts the operators that it gives to devices, and each device is `options.lag` of them behind; when the host
waits for a device, all that it was given is done. A `non_blocking` copy into pinned memory arrives as late, and until
then the host finds garbage there.
"""
from __future__ import annotations

import collections, contextlib, os, sys, threading, types, warnings

import torch

options = types.SimpleNamespace(
    lag=100,  # the devices are so many operators behind
    n_devices=1,  # of the simulated type; settled by `install`
    float64=True,  # False: as on MPS; with name='arc' as on Intel's Arc A
    name='mps',  # on 'mps' GradScaler does without float64, on others it needs it
    missing=set(),  # names of operators that the device lacks, such as 'frexp'
    ignores_found_inf=False,  # fused optimizers step on gradients that are not finite, as those of MPS did
    capability=(8, 0),
    bf16=True,  # what it says of itself: CUDA
    amp_dtypes=[torch.bfloat16, torch.float16],  # and others
)

HERE = os.path.dirname(__file__)


class Wait(collections.namedtuple('Wait', 'kind op stack')):
    """One moment in which the host waits for a device.

    `kind`: 'read' (item, bool), 'd2h', 'h2d' (blocking copies), 'shape' (nonzero, boolean masks) or 'sync'.
    """
    def __str__(self):
        return f"{self.kind} {self.op}: " + ' < '.join(f'{os.path.basename(f)}:{n} {w}' for f, n, w in self.stack)


class Timeline:
    "One device's time, in operators that the host has issued to all devices."
    host = 0
    def __init__(self):
        self.last = self.done = 0  # the last operator that it was given, and up to which all were waited for
        self.late: collections.deque = collections.deque()   # (number of the operator, function that brings the copy)

    @property
    def reached(self): return max(self.done, Timeline.host - options.lag)

    def issue(self):
        "The host gives the device one more operator; all devices go on."
        Timeline.host += 1
        self.last = Timeline.host
        for t in [*timelines.values()]: t.arrive()

    def arrive(self):
        "Bring the copies that are done by now."
        if not self.late: return
        with _lock:
            while self.late and self.late[0][0] <= self.reached: self.late.popleft()[1]()

    def finish(self):
        "The host waits for the device."
        self.done = Timeline.host
        self.arrive()


timelines: collections.defaultdict = collections.defaultdict(Timeline)   # by the device's index
current = types.SimpleNamespace(index=lambda: 0, sync_mode='default')  # `install` puts the current device's index here
recorders: list = []
_lock = threading.RLock()


def wait(kind, op, index=None):
    "The host waits here for one device, or for all."
    for t in [*timelines.values()] if index is None else [timelines[index]]: t.finish()
    if recorders:
        found = Wait(kind, op, _stack())
        for r in recorders: r.append(found)
    if current.sync_mode == 'default' or kind == 'sync': return
    if current.sync_mode == 'error': raise RuntimeError('called a synchronizing CUDA operation')
    warnings.warn('called a synchronizing CUDA operation')


def _stack():
    "Where the host is: file, line and function, without torch's files and these."
    stack, f = [], sys._getframe(2)
    while f is not None and len(stack) < 14:
        name = f.f_code.co_filename
        if '/torch/' not in name and not name.startswith(HERE): stack.append((name, f.f_lineno, f.f_code.co_name))
        f = f.f_back
    return tuple(stack)


@contextlib.contextmanager
def waits():
    "A list that fills with each `Wait` inside."
    found: list = []
    recorders.append(found)
    try: yield found
    finally: recorders.remove(found)


def _index(device):
    if device is None: return current.index()
    if isinstance(device, int): return device
    index = torch.device(device).index
    return current.index() if index is None else index


class Event:
    "As `torch.cuda.Event`: recorded on a stream, by default the current device's."
    def __init__(self, enable_timing=False, blocking=False, **kwargs): self.ticket = self.index = None
    def record(self, stream=None):
        self.index = current.index() if stream is None else stream.index
        self.ticket = timelines[self.index].last
    def query(self):
        if self.ticket is None: return True
        t = timelines[self.index]
        done = self.ticket <= t.reached
        if done: t.arrive()
        return done
    def synchronize(self): wait('sync', 'Event.synchronize', self.index)
    def wait(self, stream=None): pass
    def elapsed_time(self, other): return float(other.ticket - self.ticket)


class Stream:
    "As `torch.cuda.Stream`; all streams of a device are one."
    def __init__(self, device=None, **kwargs): self.index = _index(device)
    def synchronize(self): wait('sync', 'Stream.synchronize', self.index)
    def wait_stream(self, other): pass
    def wait_event(self, event): pass
    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event
    def query(self): return timelines[self.index].reached >= timelines[self.index].last
    def __enter__(self): return self
    def __exit__(self, *args): pass
