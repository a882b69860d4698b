"Ctrl-C in the middle of a switch, and a process that is killed while it saves."

import linecache, os, time

import pytest, torch
from fastai.metrics import mse

from helpers import *
from interrupts import interrupted_before, lines_of

SWITCHES = {
    'fp32 to fp16': (lambda l: l, lambda l: l.to_fp16(init_scale=256.0)),
    'fp32 to bf16': (lambda l: l, lambda l: l.to_bf16(fp32_modules='0')),
    'fp16 to bf16': (lambda l: l.to_fp16(init_scale=256.0), lambda l: l.to_bf16()),
    'bf16 to fp16': (lambda l: l.to_bf16(), lambda l: l.to_fp16(init_scale=256.0)),
    'fp16 to fp32': (lambda l: l.to_fp16(init_scale=256.0), lambda l: l.to_fp32()),
    'bf16 to half weights': (lambda l: l.to_bf16(), lambda l: l.to_half_weights()),
}


def said_precision(learn):
    "Return the dtype in which the model computes according to `learn.precision`."
    cb = learn.precision
    return torch.float32 if cb is None else cb.mode.dtype


def trained(learn):
    "Return the dtypes in which a fit computes; the learner reports the same dtype throughout."
    found = []
    hook = learn.model[3].register_forward_hook(lambda m, i, o: found.append((o.dtype, said_precision(learn))))
    learn.fit(1)
    hook.remove()
    computed, named = map(set, zip(*found))
    assert computed == named == {said_precision(learn)}
    return computed


@pytest.mark.parametrize('name', SWITCHES)
def test_an_interrupted_switch(name):
    "The learner trains in the precision that it reports, and a later switch works as on a new learner."
    before, switch = SWITCHES[name]
    lines = lines_of(lambda: switch(before(learner())))
    assert len(lines) > 20
    for line in lines:
        learn = before(learner())
        if not interrupted_before(line, lambda: switch(learn)):
            continue
        assert len(trained(learn)) == 1, line
        switch(learn)
        assert sorted(cb.name for cb in learn.cbs) == sorted(cb.name for cb in switch(learner()).cbs), line
        assert trained(learn) == {said_precision(switch(learner()))}, line
        learn.to_fp32()
        assert left_on(learn) == [], line
        assert [cb.name for cb in learn.cbs] == [cb.name for cb in learner().cbs], line


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_step', 'after_epoch'])
def test_an_interrupted_switch_in_a_fit(event):
    def run(learn):
        learn.fit(1, cbs=At(event, lambda l: l.training and l.iter == 2 and l.to_bf16(), 20))

    for line in lines_of(lambda: learner().to_bf16())[::3]:
        learn = learner().to_fp16(init_scale=256.0)
        if not interrupted_before(line, lambda: run(learn)):
            continue
        assert autocast_state()[0] is False, line
        assert len(trained(learn)) == 1, line


def test_an_interrupted_precision_as():
    "Its own precision or the temporary one, but never one that is reported and not used."

    def use(learn):
        with learn.precision_as('fp16'):
            pass

    for line in lines_of(lambda: use(learner().to_bf16()))[::2]:
        learn = learner().to_bf16()
        if not interrupted_before(line, lambda: use(learn)):
            continue
        assert len(trained(learn)) == 1, line


CLEAN_UP = ('finally:', 'self.metrics, self.cbs =', 'attributes.update(kept)')  # which an interrupt may end by itself


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_an_interrupted_save_load_or_export_leaves_the_learner_whole(mode, tmp_path):
    learn = getattr(learner(path=tmp_path, metrics=[mse, fastxtend_amp.loss_scale]), f'to_{mode}')()
    learn.fit(1)
    learn.save('a')

    def held():
        return (learn.model, learn.precision, learn.mixed_precision, *learn.metrics, *learn.cbs)

    before, opt = held(), learn.opt
    for i, f in enumerate([lambda: learn.save('a'), lambda: learn.load('a'), lambda: learn.export('a.pkl')]):
        for line in lines_of(f):
            if linecache.getline(*line).strip().startswith(CLEAN_UP):
                continue
            interrupted_before(line, f)
            assert len(held()) == len(before) and all(a is b for a, b in zip(held(), before)), line
            assert i == 2 or learn.opt is opt, line  # fastai's export makes a new one


def test_an_interrupt_while_the_history_is_read_leaves_its_lists_equally_long():
    def run(learn):
        learn.fit(1)
        return learn.precision.scales

    for line in lines_of(lambda: run(learner().to_fp16(init_scale=256.0))):
        if 'scaling.py' not in line[0]:
            continue
        learn = learner().to_fp16(init_scale=256.0)
        interrupted_before(line, lambda: run(learn))
        assert len(learn.precision.scales) == len(learn.precision.skips) == len(learn.precision.history), line


# -- a killed process


def killed_while_it_saves(learn, file):
    "Save in a process that ends, as by `kill -9`, when a part of the file is written."
    pid = os.fork()
    if not pid:
        try:

            def save(obj, f, *args, **kwargs):
                (f if hasattr(f, 'write') else open(f, 'wb')).write(b'PK half of a file')
                os._exit(9)

            torch.save = save
            learn.save(file)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_a_save_removes_what_a_killed_process_left_an_hour_ago(mode, tmp_path):
    learn = getattr(learner(path=tmp_path, model_dir='.'), f'to_{mode}')()
    learn.save('other')
    learn.save('model')
    whole = (tmp_path / 'model.pth').read_bytes()
    for _ in range(3):
        killed_while_it_saves(learn, 'model')
    assert (tmp_path / 'model.pth').read_bytes() == whole
    left = [f for f in tmp_path.iterdir() if f.suffix == '.part']
    learn.save('model')
    assert len(left) == 3 and all(f.exists() for f in left)  # another process may still be writing them
    for f in left:
        os.utime(f, (time.time() - 3660,) * 2)
    learn.save('model')
    assert sorted(f.name for f in tmp_path.iterdir()) == ['model.pth', 'other.pth']
    learn.load('model')


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
def test_a_save_leaves_what_a_killed_process_left_of_another_file(tmp_path):
    "Another process may be writing that one."
    learn = learner(path=tmp_path, model_dir='.').to_bf16()
    killed_while_it_saves(learn, 'model')
    left = {f.name for f in tmp_path.iterdir()}
    learn.save('model_2')
    assert {f.name for f in tmp_path.iterdir()} == left | {'model_2.pth'}
