"Errors and warnings that say what to write instead; what is printed."

import pickle, sys

import pandas as pd
import pytest, torch

from fastxtend_amp import precision_support
from helpers import *


@pytest.mark.parametrize('method', ['to_amp', 'to_fp16', 'to_bf16'])
@pytest.mark.parametrize('name', ['grad_clip', 'max_grad_norm', 'gradient_clip_val', 'clip', 'clip_grad'])
def test_arguments_of_others_for_clipping(method, name):
    with pytest.raises(TypeError, match=r'GradientClip\(') as e:
        getattr(learner(), method)(**{name: 1.0})
    assert f"'{name}'" in str(e.value)


@pytest.mark.parametrize('argument', [{'dtype': torch.bfloat16}, {'dtype': 'bf16'}, {'amp_mode': 'bf16'}])
def test_to_amp_sends_nobody_in_a_circle(argument):
    "What the error suggests does not raise another error."
    with pytest.raises(TypeError) as e:
        learner().to_amp(**argument)
    assert 'to_bf16()' in str(e.value)
    assert 'to_fp16()' in str(e.value)
    assert 'amp_mode=`' not in str(e.value)
    assert 'dtype=`' not in str(e.value)


class AsArray(nn.Module):
    "Converts to NumPy, which has no bf16."

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 1)

    def forward(self, x):
        out = self.lin(x)
        return out + float(out.detach().numpy().mean())


@pytest.mark.parametrize('call', ['fit', 'validate'])
def test_a_bf16_numpy_in_the_model_gets_the_note(call):
    learn = learner(AsArray()).to_bf16()
    with pytest.raises(TypeError) as e:
        learn.fit(1) if call == 'fit' else learn.validate()
    if sys.version_info >= (3, 11):  # which has notes
        assert 'precision_report()' in ''.join(getattr(e.value, '__notes__', []))
    assert is_outside_a_fit(learn)
    learn.to_fp32().fit(1)


def test_a_type_error_in_fp32_gets_no_note():
    with pytest.raises(TypeError) as e:
        learner(loss_func=lambda pred: pred.sum()).fit(1)
    assert not getattr(e.value, '__notes__', [])


@pytest.mark.parametrize('width', [40, 80])
def test_the_table_of_devices_is_printed_whole_in_a_terminal(width):
    table = precision_support('cpu')
    with pd.option_context('display.width', width, 'display.max_columns', 0):
        printed = str(table)
        assert repr(table) == printed
    for column in ('device', 'mode', 'support', 'why'):
        assert column in printed
    for row in table.itertuples():
        assert row.mode in printed
        assert row.support in printed
        assert row.why in printed
    assert '...' not in printed


def test_the_table_of_devices_is_a_data_frame():
    table = precision_support('cpu')
    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == ['device', 'mode', 'support', 'why']
    assert table.set_index('mode').support['bf16'] in ('native', 'emulated', 'unsupported')
    assert pickle.loads(pickle.dumps(table)).equals(table)


def test_an_export_says_once_that_it_is_in_fp32(tmp_path):
    learn = learner(path=tmp_path).to_bf16()
    said = told(lambda: [learn.export(f'{i}.pkl') for i in range(3)], 'fp32')
    assert len(said) == 1
    assert 'to_bf16' in said[0]


def test_an_export_in_plain_fp32_says_nothing(tmp_path):
    assert not told(lambda: learner(path=tmp_path).export('model.pkl'), 'fp32')


def test_a_precision_that_is_given_as_a_callback():
    "In 0.4.0 `HalfWeights` was a callback."
    with pytest.raises(TypeError, match=r'(?s)HalfWeights\(\) is a precision, not a callback.*MixedPrecision\(Half'):
        learner(cbs=fastxtend_amp.HalfWeights())
