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


class Node:
    "As in a parse tree: each knows its parent and its children."
    def __init__(self, parent=None):
        self.value, self.parent, self.children = H, parent, []
        if parent is not None: parent.children.append(self)


def test_cycles_end():
    root = Node(); child = Node(root)
    for _ in range(2000): child = Node(child)                    # far deeper than Python's stack
    new = to_fp32([root, child])
    assert new[0].value.dtype == new[1].value.dtype == torch.float32 and root.value.dtype == torch.float16
    assert new[1].parent is child.parent                         # pointers to other objects are not followed
    loop = [H]; loop.append(loop)
    assert to_fp32(loop)[0].dtype == torch.float32
    deep = H
    for _ in range(5000): deep = [deep]
    assert to_fp32(deep) is deep


def test_shared_objects_stay_shared():
    shared = [H]
    new = to_fp32({'a': shared, 'b': (shared, Data(H))})
    assert new['a'] is new['b'][0] and new['a'][0].dtype == torch.float32


class Strict(tuple):
    def __new__(cls, a, b): return tuple.__new__(cls, (a, b))


class Frozen(dict):
    def __setitem__(self, key, value): raise TypeError('frozen')


def test_containers_with_rules_of_their_own():
    from types import MappingProxyType
    strict = Strict(H, 1); strict.tag = 'kept'
    new = to_fp32(strict)
    assert type(new) is Strict and new[0].dtype == torch.float32 and new.tag == 'kept'
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]).to(torch.float16)
    assert type(to_fp32(packed)) is type(packed) and to_fp32(packed).data.dtype == torch.float32
    pair = torch.ones(2, 2).half().max(0)
    assert type(to_fp32(pair)) is type(pair) and to_fp32(pair).values.dtype == torch.float32
    for x in (MappingProxyType({'a': H}), Frozen(a=H)): assert to_fp32(x) is x


def test_a_tree_in_the_batch_trains():
    from helpers import At, learner
    from fastai.learner import Learner
    class Trees(Learner):
        def _split(self, b): root = Node(); Node(root); self.xb, self.yb, self.tree = (b[0],), (b[1],), root
    for mode in ('fp16', 'bf16'):
        learn = learner(cls=Trees); getattr(learn, f'to_{mode}')()
        learn.add_cb(At('after_pred', lambda l: setattr(l, 'xb', (*l.xb, l.tree)), 40))
        learn.fit(1, .01)
        assert learn.precision._fit is None


class Broken(dict):
    def items(self): raise RuntimeError('not yet')


class BrokenList(list):
    def __iter__(self): raise RuntimeError('not yet')


def test_containers_that_cannot_be_looked_into_pass():
    for x in (Broken(a=H), BrokenList([H]), [H, Broken(a=1)]):
        new = to_fp32(x)
        assert type(new) is type(x)
    assert to_fp32([H, Broken(a=1)])[0].dtype == torch.float32
