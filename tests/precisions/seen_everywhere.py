"""The precision of bf16_again.py in each place that lists or uses precisions.

Run by test_a_new_precision.py in its own process, because a registered precision stays.
"""

import inspect

import pytest, torch
from fastai.learner import Learner
from fastcore.docments import docments
from torch import nn

from bf16_again import BF16Again
from fastxtend_amp import MixedPrecision, precision_support
from fastxtend_amp.precisions import Precision, Support
from fastxtend_amp.tools import check, demo
from helpers import Attentive, is_outside_a_fit, learner, loaders, output_dtypes, params, same, told

CPU, NAME = torch.device('cpu'), 'bf16again'


def all_precisions(cls=Precision):
    return [c for sub in cls.__subclasses__() for c in (sub, *all_precisions(sub))]


@pytest.fixture
def alone(monkeypatch):
    "Pose as a device that supports nothing else: tools measure only this precision, and fp32."
    for cls in all_precisions():
        if cls is not BF16Again:
            monkeypatch.setattr(cls, 'support', classmethod(lambda cls, device: Support('unsupported', 'left out')))


# -- methods of Learner


def test_a_method_with_its_own_signature_and_arguments():
    method = Learner.to_bf16again
    parameters, described = inspect.signature(method).parameters, docments(method)
    assert [*parameters] == ['self', 'fp32_modules', 'first', 'on_overflow', 'max_skips'] and method.__name__[
        3:
    ] == NAME
    assert parameters['first'].default == 0 and 'under another name' in method.__doc__
    assert described['first'] == 'The number to count from' and 'fp32' in described['fp32_modules']


def test_it_trains_as_bf16_does():
    a, b = learner().to_bf16(), learner().to_bf16again()
    dtypes = output_dtypes(b)
    for l in (a, b):
        l.fit(2, 0.01)
    assert same(params(a), params(b)) and set(dtypes) == {torch.bfloat16} and is_outside_a_fit(b)


def test_by_name_in_precision_as_and_in_the_table():
    learn = learner(cbs=MixedPrecision(NAME, fp32_modules='3'))
    with learn.precision_as(NAME), learn.amp_context():
        assert learn.model(torch.ones(2, 6)).dtype is torch.bfloat16
    assert learn.mixed_precision.fp32_module_names == ['3'] and NAME in repr(learn.mixed_precision)
    assert precision_support('cpu').set_index('precision').why[NAME] == 'it is bf16 again'


# -- insight


def test_a_report():
    report, bf16 = (learner(Attentive(gain=1.0)).precision_report([precision]) for precision in (NAME, 'bf16'))
    assert {*report.table['precision']} == {*report.verdicts} == {NAME} and NAME in str(report)
    assert report.verdicts[NAME].verdict == 'safe so far'
    assert report.table['error'].tolist() == bf16.table['error'].tolist()
    report.plot()


def test_a_comparison_and_its_call():
    learn = learner(dls=loaders(64))
    found = learn.compare_precision([NAME], 4, n_seeds=0)
    assert [*found.table.index] == ['fp32', NAME] and found.table.support[NAME] == 'native'
    assert found.calls[NAME] == 'learn.to_bf16again()'
    found.plot()
    found.apply(learn, NAME)
    assert NAME in repr(learn.mixed_precision)


def test_a_watch_over_its_fits():
    learn = learner(loss_func=lambda pred, y: (pred * float('nan')).mean()).to_bf16again()
    assert told(lambda: learn.fit(1), NAME)


# -- files


def test_a_checkpoint_and_an_export(tmp_path):
    learn = learner(path=tmp_path).to_bf16again(first=10)
    for _ in range(2):
        learn.fit(1)
    file = learn.save('model')
    assert torch.load(file, weights_only=False)['opt'][NAME] == learn.mixed_precision.state_dict() == {'fits': 12}
    other = learner(path=tmp_path).to_bf16again().load('model')
    assert other.mixed_precision.state_dict() == {'fits': 12} and same(params(learn), params(other))
    told(lambda: learn.export('model.pkl'))
    assert b'bf16_again' not in (tmp_path / 'model.pkl').read_bytes()


# -- tools


def test_the_check(alone, monkeypatch):
    monkeypatch.setattr(check, 'EPOCHS', 1)
    mine = [r for r in check.check(CPU) if r.precision == NAME]
    assert len(mine) >= 3 and all(r.passed for r in mine), mine
    assert 'bf16again: native (it is bf16 again)' in check.head(CPU)


def test_the_demo(alone, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, 'learner', lambda device: learner(nn.Linear(6, 1), lr=0.01))
    monkeypatch.setattr(demo, 'SECONDS', 5)
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png')])
    out = capsys.readouterr().out
    assert 'bf16again is native on this device (it is bf16 again).' in out and '\nbf16again  native ' in out
