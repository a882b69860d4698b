"""Ctrl-C before each line of the package that an fp16 fit runs: `python tests/interrupts.py` prints what stays open.

The manual's page on guarantees says what that may be.
"""

import os, sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

import torch

import fastxtend_amp
from tests.helpers import autocast_state, is_outside_a_fit, learner

PACKAGE = os.path.dirname(fastxtend_amp.__file__)


def fit(line=None):
    "Train, with Ctrl-C before the first run of `line`. Return the package's lines that ran, and what stays open."
    before, learn, lines = autocast_state(), learner().to_fp16(), {}

    def trace(frame, event, arg):
        at = os.path.relpath(frame.f_code.co_filename, PACKAGE), frame.f_lineno
        if at[0].startswith('..'):
            return None
        if event == 'line':
            lines[at] = True
        if event == 'line' and at == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        learn.fit(1)
    except KeyboardInterrupt:
        pass
    sys.settrace(None)
    grads = [p.grad.abs().max() for p in learn.model.parameters() if p.grad is not None]
    found = {
        'autocast': autocast_state() != before,
        'grad mode': not torch.is_grad_enabled(),
        'the fit': not is_outside_a_fit(learn),
        'a scaled gradient': not all(g < 64 for g in grads),
    }
    return lines, [name for name, stays in found.items() if stays]


def main():
    lines, _ = fit()
    left = {line: names for line in lines if (names := fit(line)[1])}
    for (file, number), names in left.items():
        print(f'{file}:{number} leaves {", ".join(names)}')
    print(f'{len(left)} of {len(lines)} lines leave something')


if __name__ == '__main__':
    main()
