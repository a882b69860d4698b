"What reaches the loss: half tensors in fp32, all else as it was."
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch
from fastai.torch_core import TensorImage
from fastcore.foundation import L

from fastxtend_amp.convert import to_fp32

Point = namedtuple('Point', 'x y')
H = torch.ones(2, dtype=torch.float16)


@dataclass(frozen=True)
class Data:
    logits: torch.Tensor
    name: str = 'n'


class Plain:
    def __init__(self, t): self.t, self.kept = t, [t, 'x']


class Tagged(dict): tag = None


def test_every_half_tensor_becomes_fp32():
    f = to_fp32([H, H.bfloat16(), (H, None), {'a': H}])
    assert all(t.dtype == torch.float32 for t in (f[0], f[1], f[2][0], f[3]['a'])) and f[2][1] is None


def test_types_are_kept():
    tagged = Tagged(a=H); tagged.tag = 'kept'
    for x, get in ((Point(H, 1), lambda o: o.x), (OrderedDict(a=H), lambda o: o['a']), (tagged, lambda o: o['a']), (L(H, 2), lambda o: o[0]),
                   (Data(H), lambda o: o.logits), (Plain(H), lambda o: o.kept[0]), (defaultdict(list, a=H), lambda o: o['a']), (TensorImage(H), lambda o: o)):
        new = to_fp32(x)
        assert type(new) is type(x) and get(new).dtype == torch.float32 and get(x).dtype == torch.float16
    assert to_fp32(tagged).tag == 'kept' and to_fp32(Data(H)).name == 'n'


def test_nothing_to_do_returns_the_same_object():
    for x in (None, 'text', 3, 2.5, True, torch.ones(1), torch.ones(1).double(), torch.tensor([1]), [torch.ones(1), {'a': (1, None)}], Point(1, 2),
              Data(torch.ones(1)), Plain(torch.ones(1)), {1, 2}, print, dict):
        assert to_fp32(x) is x


def test_gradients_flow_through():
    x = torch.ones(2, requires_grad=True)
    to_fp32({'a': [x.half()]})['a'][0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))
