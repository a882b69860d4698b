"Several fits at once, in threads: process-wide settings are restored when the last fit has ended."

import itertools, threading, warnings

import pytest, torch
from torch import backends

from fastxtend_amp.precisions.base import Precision, Support
from helpers import *

SECONDS = 20  # for a thread that waits for another; when it passes, that one has failed


def overlap(first, second):
    """Run two functions in threads: the second begins inside the first, and ends after it.

    Each gets a function to call somewhere in its middle, which may be called again.
    """
    first_is_in, second_is_in, first_is_done, errors = *(threading.Event() for _ in range(3)), []

    def middle_of_first(*args):
        first_is_in.set()
        assert second_is_in.wait(SECONDS)

    def middle_of_second(*args):
        second_is_in.set()
        assert first_is_done.wait(SECONDS)

    def run_first():
        try:
            first(middle_of_first)
        except BaseException as e:
            errors.append(e)
        first_is_in.set(), first_is_done.set()

    def run_second():
        try:
            assert first_is_in.wait(SECONDS)
            second(middle_of_second)
        except BaseException as e:
            errors.append(e)
        second_is_in.set()

    threads = [threading.Thread(target=f) for f in (run_first, run_second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def fit(learn):
    "Return a function for `overlap` that trains one epoch."

    def run(middle):
        def at_third(l):
            if l.training and l.iter == 2:
                middle()

        learn.fit(1, cbs=At('after_pred', at_third, 20))

    return run


# -- warnings


class InOrder(warnings.catch_warnings):
    "Two threads overlap and the first one leaves first, an order in which the filters would be lost."

    def __enter__(self):
        self.number = next(InOrder.numbers)
        result = super().__enter__()
        if self.number:
            InOrder.second_is_in.set()
        else:
            InOrder.second_is_in.wait(1)
        return result

    def __exit__(self, *args):
        if self.number:
            InOrder.first_is_out.wait(1)
        super().__exit__(*args)
        InOrder.first_is_out.set()


def in_order(monkeypatch):
    InOrder.numbers = itertools.count()
    InOrder.second_is_in, InOrder.first_is_out = threading.Event(), threading.Event()
    monkeypatch.setattr(warnings, 'catch_warnings', InOrder)


@pytest.mark.parametrize('call', ['validate', 'fit'])
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_the_process_keeps_its_warnings(monkeypatch, mode, call):
    learners = [getattr(learner(), f'to_{mode}')() for _ in range(2)]
    run = (lambda l: l.validate()) if call == 'validate' else (lambda l: l.fit(1))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = lambda message, *args, **kwargs: seen.append(str(message))
        in_order(monkeypatch)
        threads = [threading.Thread(target=run, args=(l,)) for l in learners]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        warnings.warn('shown afterwards')
    assert seen[-1:] == ['shown afterwards']


# -- TF32


def settings():
    "Return the precision in which PyTorch multiplies fp32 tensors."
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision


@pytest.fixture
def tf32(monkeypatch):
    "Pose as a device with TF32: PyTorch accepts the settings on any device."
    (precision,) = [cls for cls in Precision.__subclasses__() if cls.name == 'tf32']
    monkeypatch.setattr(precision, 'support', classmethod(lambda cls, device: Support('native', 'as if')))
    before = settings()
    yield
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision = before


def test_a_tf32_fit_that_overlaps_another(tf32):
    before, inside = settings(), []
    a, b = learner().to_tf32(), learner().to_tf32()
    b.add_cb(At('after_train', lambda l: inside.append(settings()), 20))  # the first has ended
    overlap(fit(a), fit(b))
    assert inside == [('tf32',) * 3]
    assert settings() == before


@pytest.mark.parametrize('first', ['fit', 'report'])
def test_a_tf32_fit_that_overlaps_a_report(tf32, first):
    before = settings()
    reported = learner(Meeting())
    pair = [fit(learner().to_tf32()), report(reported)]
    overlap(*(pair if first == 'fit' else reversed(pair)))
    assert settings() == before


def test_a_tf32_fit_that_fails_inside_another(tf32):
    before = settings()

    def failing(middle):
        def fail(l):
            middle()
            raise InterruptedError('stop')

        with pytest.raises(InterruptedError):
            learner().to_tf32().fit(1, cbs=At('after_pred', fail, 20))

    overlap(failing, fit(learner().to_tf32()))
    assert settings() == before


# -- reports


def at_once(f):
    "Run `f` in two threads; reports wait for one another."
    threads = [threading.Thread(target=f) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


class Meeting(nn.Module):
    "A model that waits for another thread in its forward pass; its copies do so as well."

    middle = staticmethod(lambda: None)  # by thread: see `report`
    here = threading.local()

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        if middle := vars(Meeting.here).pop('middle', None):
            middle()
        return self.body(x)


def report(learn):
    "Return a function for `overlap` that makes a report on `learn`."

    def run(middle):
        Meeting.here.middle = middle
        learn.precision_report(['bf16'])

    return run


def compiles():
    "Return whether `torch.compile` compiles in this process."
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(3))
    return bool(seen)


def test_reports_that_overlap_leave_the_compiler_as_it_was():
    assert compiles()
    at_once(lambda: learner().precision_report(['bf16']))
    assert compiles()


def test_reports_that_overlap_leave_the_warnings_as_they_were():
    before, show = list(warnings.filters), warnings.showwarning
    at_once(lambda: learner().precision_report(['bf16']))
    assert list(warnings.filters) == before
    assert warnings.showwarning == show


# -- two learners on one model


@pytest.mark.parametrize('second', ['bf16', 'fp16'])
def test_two_learners_on_one_model_leave_no_forward_on_it(second):
    model = mlp()
    a = learner(model).to_bf16(fp32_modules='0')
    b = getattr(learner(model), f'to_{second}')(fp32_modules='0')
    inside = []
    b.add_cb(At('after_pred', lambda l: inside.append(bool(replaced(model))), 21))
    overlap(fit(a), fit(b))
    assert all(inside)
    assert replaced(model) == []


def test_two_learners_on_one_model_keep_different_modules():
    model = mlp()
    a, b = learner(model).to_bf16(fp32_modules='0'), learner(model).to_bf16(fp32_modules='3')
    overlap(fit(a), fit(b))
    assert replaced(model) == []


def test_two_learners_on_one_model_leave_the_forward_of_the_user():
    model, calls = mlp(), []
    own = model[0].forward

    def forward(x):
        calls.append(1)
        return own(x)

    model[0].forward = forward
    overlap(*(fit(learner(model).to_bf16(fp32_modules='0')) for _ in range(2)))
    assert vars(model[0])['forward'] is forward
    assert calls
