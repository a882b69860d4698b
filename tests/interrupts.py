"Interrupts at chosen lines of the package, each once: what a timer would hit by chance, but reproducible."

import sys
from pathlib import Path

import fastxtend_amp

PACKAGE = str(Path(fastxtend_amp.__file__).parent)


def watch_lines(f, at):
    "Run `f`, and call `at((file, number))` before each of the package's lines."

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == 'line':
            at((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f()
    finally:
        sys.settrace(before)


def lines_of(f):
    "The package's lines that `f` runs, in the order of their first run."
    found = {}
    watch_lines(f, found.setdefault)
    return list(found)


def interrupted_before(line, f):
    "Run `f` with a `KeyboardInterrupt` before the first run of `line`; returns whether it ended `f`."

    def interrupt(at):
        if at != line:
            return
        sys.settrace(None)
        raise KeyboardInterrupt

    try:
        watch_lines(f, interrupt)
    except KeyboardInterrupt:
        return True
    return False
