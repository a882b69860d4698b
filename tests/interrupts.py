"""Ctrl-C before each line of the package that an fp16 fit runs: `python tests/interrupts.py` prints what stays open.

The manual's page on guarantees quotes its last line.
"""

import os, sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

import torch

import fastxtend_amp
from tests.helpers import autocast_state, is_outside_a_fit, learner

PACKAGE = os.path.dirname(fastxtend_amp.__file__)


def run_lines(f, before_line):
    "Run `f`, and call `before_line((file, number))` before each of the package's lines."

    def trace(frame, event, arg):
        code = frame.f_code.co_filename
        if not code.startswith(PACKAGE):
            return None
        if event == 'line':
            before_line((os.path.relpath(code, PACKAGE), frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        f()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


def left_after(line):
    "Return what a fit leaves that is interrupted before the first run of `line`."

    def interrupt(at):
        if at == line:
            sys.settrace(None)
            raise KeyboardInterrupt

    before, learn = autocast_state(), learner().to_fp16()
    run_lines(lambda: learn.fit(1), interrupt)
    grads = [p.grad.abs().max() for p in learn.model.parameters() if p.grad is not None]
    found = {
        'autocast': autocast_state() != before,
        'grad mode': not torch.is_grad_enabled(),
        'a fit': not is_outside_a_fit(learn),
        'scaled gradients': any(g > 64 for g in grads),
    }
    return [name for name, is_left in found.items() if is_left]


def main():
    lines, learn = {}, learner().to_fp16()
    run_lines(lambda: learn.fit(1), lambda at: lines.setdefault(at))
    n_left = 0
    for file, number in lines:
        if left := left_after((file, number)):
            n_left += 1
            print(f'{file}:{number} leaves {", ".join(left)}')
    print(f'{n_left} of {len(lines)} lines leave something')


if __name__ == '__main__':
    main()
