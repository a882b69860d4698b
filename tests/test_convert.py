"What reaches the loss: half tensors in fp32, all else as it was."
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest, torch
from fastai.torch_core import TensorImage
from fastcore.foundation import L

from fastxtend_amp.convert import to_fp32

Point = namedtuple('Point', 'x y')
H = torch.ones(2, dtype=torch.float16)


@dataclass(frozen=True)
class Data:
    logits: torch.Tensor
    name: str = 'n'


class Tagged(dict): tag = None


@pytest.mark.parametrize('x, get', [
    ([H, None], lambda o: o[0]), ((H.bfloat16(), 3), lambda o: o[0]), ({'a': [H]}, lambda o: o['a'][0]), (Point(H, 1), lambda o: o.x),
    (OrderedDict(a=H), lambda o: o['a']), (Tagged(a=H), lambda o: o['a']), (L(H, 2), lambda o: o[0]), (Data(H), lambda o: o.logits),
    (defaultdict(list, a=H), lambda o: o['a']), (TensorImage(H), lambda o: o), ([Data((H, Tagged(b=[H])))], lambda o: o[0].logits[1]['b'][0]),
    (torch.ones(2, 2).half().max(0), lambda o: o.values), (torch.nn.utils.rnn.pack_sequence([H, H]), lambda o: o.data)], ids=lambda x: type(x).__name__)
def test_half_tensors_become_fp32_and_types_stay(x, get):
    new = to_fp32(x)
    assert type(new) is type(x) and get(new).dtype == torch.float32 and get(x).dtype in (torch.float16, torch.bfloat16)


def test_the_rest_stays_with_attributes():
    tagged = Tagged(a=H, b='text')
    tagged.tag = 'kept'
    assert to_fp32(tagged).tag == 'kept' and to_fp32(tagged)['b'] == 'text' and to_fp32(Data(H)).name == 'n'
    for x in (None, 'text', 3, torch.ones(1), torch.ones(1).double(), torch.tensor([1]), print, dict, {1, 2}, object()): assert to_fp32(x) is x


def test_gradients_flow_through():
    x = torch.ones(2, requires_grad=True)
    to_fp32({'a': [x.half()]})['a'][0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
