"The user's files and the user's fit, where copies of a learner are trained."
import pytest
from fastai.callback.schedule import *

from helpers import *

WAYS = {'compare_precision': lambda learn, **kwargs: learn.compare_precision('bf16', n_steps=3, n_seeds=1, **kwargs),
        'to_amp(measure=True)': lambda learn: learn.to_amp(measure=True)}


def contents(folder): return {f.relative_to(folder): f.read_bytes() for f in folder.rglob('*') if f.is_file()}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('place', ['best', 'of the day/best', '../best', 'absolute', 'absolute model_dir'])
def test_a_copy_does_not_overwrite_what_a_callback_saves(tmp_path, place, way):
    "A callback that keeps the best weights in a file, and goes back to them."
    file, folders = str(tmp_path / 'elsewhere' / 'best') if place == 'absolute' else place, []
    def keep_and_go_back(l):
        saved = l.save(file)
        l.load(file)
        folders.append(saved.parent)
    learn = learner(path=tmp_path, cbs=At('after_step', keep_and_go_back, 20))
    if place == 'absolute model_dir': learn.model_dir = tmp_path / 'models of the user'
    for folder in ('elsewhere', 'models/of the day', 'models of the user/of the day'): (tmp_path / folder).mkdir(parents=True)
    learn.fit(1, .01)
    before, in_fit = contents(tmp_path), len(folders)
    WAYS[way](learn)
    assert contents(tmp_path) == before and len(before) == 1
    assert len(folders) > in_fit and not any(f.exists() for f in folders[in_fit:])
    learn.fit(1, .01)
    assert contents(tmp_path) != before


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
@pytest.mark.filterwarnings('ignore:The exported file needs fastxtend_amp')
def test_a_copy_does_not_overwrite_an_exported_model(tmp_path, precision):
    "A callback that exports when a fit starts, to an absolute path; it has an event in the step, and so takes part."
    exports = At('before_fit', lambda l: l.export(fname=tmp_path / 'model.pkl'), 20)
    exports.before_step = noop
    learn = PRECISIONS[precision](learner(path=tmp_path, cbs=exports))
    learn.fit(1, .01)
    before = contents(tmp_path)
    comparison = WAYS['compare_precision'](learn)
    assert list(comparison.table['steps']) == [3, 3] and contents(tmp_path) == before and len(before) == 1


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('precision,event', [('fp32', 'before_fit'), ('fp32', 'after_step'), ('bf16', 'before_validate'), ('fp16', 'after_epoch'), ('half weights', 'after_fit')])
def test_refused_inside_a_fit_of_any_precision(precision, event, way):
    learn = PRECISIONS[precision](learner())
    learn.add_cb(At(event, WAYS[way], 20))
    callbacks = [*learn.cbs]
    with pytest.raises(RuntimeError) as e: learn.fit(1, .01)
    assert f'{way} cannot run inside a fit' in str(e.value) and [*learn.cbs] == callbacks and learn.precision_decision is None


@pytest.mark.parametrize('stop', [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_allowed_after_a_fit_that_an_exception_ended(precision, stop):
    def fail(l): raise stop('now')
    learn = PRECISIONS[precision](learner(cbs=(cb := At('after_step', fail))))
    with pytest.raises(stop): learn.fit_one_cycle(1, .01)
    learn.remove_cb(cb)
    for end in (lambda: None, learn.validate, learn.get_preds):
        end()
        assert list(WAYS['compare_precision'](learn).table['steps']) == [3, 3]
