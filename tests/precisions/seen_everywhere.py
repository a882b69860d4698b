"""The precision of bf16_again.py in each place that lists or uses precisions.

Run by test_a_new_precision.py in its own process, because a registered precision stays.
"""

import inspect

import matplotlib.colors
import pytest, torch
from fastcore.docments import docments
from fastai.learner import load_learner

from bf16_again import BF16Again
from fastxtend_amp import precision_support
from fastxtend_amp.precisions.base import Precision, Support
from fastxtend_amp.tools import check, demo
from helpers import *

CPU = torch.device('cpu')


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
    parameters = inspect.signature(method).parameters
    assert 'fp32_modules' in parameters
    assert parameters['first'].default == 0
    assert 'on_overflow' in parameters  # what all precisions have
    assert 'loss_scale' not in parameters  # what only fp16 has
    assert 'under another name' in method.__doc__
    assert method.__name__ == 'to_bf16again'
    described = docments(method)
    assert described['first'] == 'The number to count from'
    assert 'fp32' in described['fp32_modules']


def test_it_trains_as_bf16_does():
    a, b = learner().to_bf16(), learner().to_bf16again()
    dtypes = output_dtypes(b)
    for l in (a, b):
        l.fit(2, 0.01)
    assert same(params(a), params(b))
    assert set(dtypes) == {torch.bfloat16}
    assert is_outside_a_fit(b)
    assert "'bf16again'" in repr(b.precision)


def test_its_arguments():
    learn = learner().to_bf16again(fp32_modules='0', on_overflow='ignore')
    dtypes = output_dtypes(learn)
    learn.fit(1)
    assert set(dtypes) == {torch.float32}
    assert learn.precision.fp32_module_names == ['0']


def test_an_argument_that_it_does_not_have():
    for wrong in (dict(fist=3), dict(loss_scale=512)):
        with pytest.raises(TypeError):
            learner().to_bf16again(**wrong)
    with pytest.raises(ValueError, match='bf16again'):
        MixedPrecision('bf16_agian')


def test_by_name_and_precision_as():
    learn = learner(cbs=MixedPrecision('bf16again', fp32_modules='3'))
    own = learn.precision
    with learn.precision_as('bf16again'):
        assert "'bf16again'" in repr(learn.precision)
        with learn.amp_context():
            assert learn.model(torch.ones(2, 6)).dtype is torch.bfloat16
    assert learn.precision is own


# -- tables


def test_a_row_of_the_table_of_devices():
    table = precision_support('cpu').set_index('mode')
    assert tuple(table.loc['bf16again', ['support', 'why']]) == ('native', 'it is bf16 again')
    assert list(table.index).count('bf16again') == 1


def test_a_device_that_does_not_run_it(monkeypatch):
    monkeypatch.setattr(BF16Again, 'support', classmethod(lambda cls, device: Support('unsupported', 'too old')))
    with pytest.raises(ValueError, match="(?s)bf16again.*'cpu'.*too old"):
        learner().to_bf16again().fit(1)
    assert precision_support('cpu').set_index('mode').support['bf16again'] == 'unsupported'


def test_a_device_that_emulates_it(monkeypatch):
    monkeypatch.setattr(BF16Again, 'support', classmethod(lambda cls, device: Support('emulated', 'slow here')))
    learn = learner().to_bf16again()
    assert len(told(lambda: learn.fit(1), 'bf16again is emulated')) == 1


# -- insight


def test_a_report():
    report = learner(Attentive(gain=1.0)).precision_report(['bf16again'])
    assert set(report.table['mode']) == {'bf16again'}
    assert list(report.verdicts) == ['bf16again']
    assert 'bf16again' in str(report)
    assert report.verdicts['bf16again'].verdict == 'safe so far'
    report.plot()
    assert (
        report.table['error'].tolist()
        == learner(Attentive(gain=1.0)).precision_report(['bf16']).table['error'].tolist()
    )


def colours(figure):
    "Return the colours of all bars and lines in a figure, as '#rrggbb'."
    faces = [a.get_facecolor() for ax in figure.axes for a in (*ax.patches, *ax.collections)]
    lines = [line.get_color() for ax in figure.axes for line in ax.lines]
    rows = [row for c in (*faces, *lines) for row in matplotlib.colors.to_rgba_array(c)]
    return {matplotlib.colors.to_hex(row) for row in rows}


def test_a_comparison_its_call_and_its_colour():
    import matplotlib.pyplot as plt

    learn = learner(dls=loaders(64))
    found = learn.compare_precision(['bf16again'], 4, n_seeds=0)
    assert list(found.table.index) == ['fp32', 'bf16again']
    assert found.table.support['bf16again'] == 'native'
    assert found.calls['bf16again'] == 'learn.to_bf16again()'
    found.plot()
    assert BF16Again.color in colours(plt.gcf())
    found.apply(learn, 'bf16again')
    assert "'bf16again'" in repr(learn.precision)


def test_a_watch_over_its_fits():
    learn = learner(loss_func=lambda pred, y: (pred * float('nan')).mean()).to_bf16again()
    said = ' '.join(told(lambda: learn.fit(1)))
    assert 'bf16again' in said


# -- files


def numbers(state, name):
    "The values of `name` anywhere in a state of nested dicts."
    if not isinstance(state, dict):
        return []
    here = [state[name]] if name in state else []
    return here + [x for value in state.values() for x in numbers(value, name)]


def test_a_checkpoint(tmp_path):
    learn = learner().to_bf16again(first=10)
    learn.fit(1)
    learn.fit(1)
    assert learn.precision.state_dict() == {'fits': 12}
    file = learn.save(tmp_path / 'model')
    assert numbers(torch.load(file, weights_only=False), 'fits') == [12]
    other = learner().to_bf16again()
    other.load(tmp_path / 'model')
    assert other.precision.state_dict() == {'fits': 12}
    assert same(params(learn), params(other))
    other.fit(1)
    assert other.precision.state_dict() == {'fits': 13}


def test_its_checkpoint_in_other_precisions(tmp_path):
    learn = learner().to_bf16again()
    learn.fit(1)
    learn.save(tmp_path / 'model')
    for call in ('to_fp32', 'to_bf16', 'to_fp16'):
        other = getattr(learner(), call)()
        told(lambda: other.load(tmp_path / 'model'))
        assert same(params(learn), params(other))
        other.fit(1)
    scaled = learner().to_fp16(init_scale=64.0)
    scaled.fit(1)
    scaled.save(tmp_path / 'scaled')
    told(lambda: learn.load(tmp_path / 'scaled'))
    assert same(params(learn), params(scaled))
    assert learn.precision.state_dict() == {'fits': 0}  # the file has none, so it starts again


def test_an_export(tmp_path):
    learn = learner(path=tmp_path).to_bf16again()
    learn.fit(1)
    told(lambda: learn.export('model.pkl'))
    assert b'bf16_again' not in (tmp_path / 'model.pkl').read_bytes()
    assert load_learner(tmp_path / 'model.pkl').precision is None
    assert "'bf16again'" in repr(learn.precision)


# -- tools


def test_the_check(alone, monkeypatch):
    monkeypatch.setattr(check, 'EPOCHS', 1)
    results = check.check('cpu')
    mine = [r for r in results if r.precision == 'bf16again']
    assert len(mine) >= 3
    assert all(r.passed for r in mine), mine
    assert 'bf16again: native (it is bf16 again)' in check.head(CPU)


def test_the_demo(alone, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, 'learner', lambda device: learner(nn.Linear(6, 1), lr=0.01))
    monkeypatch.setattr(demo, 'SECONDS', 5)
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png')])
    out = capsys.readouterr().out
    assert 'bf16again is native on this device (it is bf16 again).' in out
    assert '\nbf16again  native ' in out
