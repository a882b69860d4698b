"Learners with state in every place, a snapshot of that state, and ways to ask for copies."

import random, re

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.callback.rnn import rnn_cbs
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import AvgMetric, Metric
from fastai.optimizer import Adam, _BaseOptimizer
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder, SequentialRNN
from fastcore.foundation import L
from torch import nn
from torch.utils.data import TensorDataset

from fastxtend_amp.precisions import Precision
from helpers import OPTIMIZERS, Data, autocast_state, dataset, learner


class Memory(nn.Module):
    "Keeps tensors outside its buffers, in every kind of container."

    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(3))
        self.plain, self.kept = torch.ones(2), {'a': [torch.zeros(1), (torch.ones(1), {'b': torch.ones(2)})]}

    def forward(self, x):
        self.seen += 1
        self.plain = self.plain * 2
        self.kept['a'][0] += 1
        self.kept['a'][1][1]['b'].mul_(3)
        self.kept['c'] = self.new = x
        return x


def shuffled(seed=0):
    make = lambda ds, shuffle: DataLoader(ds, bs=4, shuffle=shuffle, num_workers=0, device=torch.device('cpu'))
    return DataLoaders(make(dataset(24), True), make(dataset(8, seed=1), False), device=torch.device('cpu'))


def rich(opt='fused adamw', fit=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Memory(), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
    learn = learner(model, shuffled(), opt_func=OPTIMIZERS[opt], metrics=AvgMetric(nn.functional.l1_loss)).to_fp16(
        init_scale=2.0**14, growth_interval=3
    )
    if fit:
        learn.fit(1, 0.01)
        list(model.parameters())[0].grad = torch.full((8, 6), 0.25)
        list(model.parameters())[1].grad = None
        model[1].eval()
        list(model.parameters())[-1].requires_grad_(False)
    return learn


def language_model():
    torch.manual_seed(0)
    rnn = AWD_LSTM(20, 6, 8, 2, hidden_p=0.1, input_p=0.1, embed_p=0.1, weight_p=0.2)
    model = SequentialRNN(rnn, LinearDecoder(20, 6, 0.1, tie_encoder=rnn.encoder))
    make = lambda: DataLoader(
        Data(torch.randint(0, 20, (16, 5)), torch.randint(0, 20, (16, 5))),
        bs=4,
        num_workers=0,
        device=torch.device('cpu'),
    )
    loss = lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten())
    learn = learner(model, DataLoaders(make(), make(), device=torch.device('cpu')), loss, cbs=rnn_cbs(), opt_func=Adam)
    learn.fit(1, 0.01)
    model.train()
    model(torch.randint(0, 20, (4, 5)))  # something in `hidden`
    return learn


KINDS = (nn.Module, Callback, Metric, DataLoaders, DataLoader, _BaseOptimizer)
KINDS += (torch.optim.Optimizer, torch.amp.GradScaler, Precision, TensorDataset)


def bits(learn):
    "Return the whole state as text, by attribute of the learner, with the identity and memory of each tensor."

    def plain(o, seen):
        inside = lambda *parts: [plain(part, seen) for part in parts]
        if isinstance(o, torch.Tensor):
            grad = plain(o.grad, seen) if o.is_leaf else 'a graph'
            return id(o), o.data_ptr(), o.dtype, o.requires_grad, o.detach().tolist(), grad
        if isinstance(o, dict):
            return id(o), [inside(*item) for item in o.items()]
        if isinstance(o, (list, tuple, L)):
            return isinstance(o, tuple) or id(o), inside(*o)
        if isinstance(o, random.Random):
            return id(o), o.getstate()
        if isinstance(o, (int, float, str, bytes, type(None), np.ndarray)):
            return o
        if id(o) in seen or not isinstance(o, KINDS):
            return id(o)
        return id(o), plain(vars(o), seen | {id(o)})

    rng = repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))
    state = {**vars(learn), 'rng': rng, 'autocast': (*autocast_state(), torch.is_grad_enabled())}
    return {name: repr(plain(part, frozenset())) for name, part in state.items()}


def blurred(text):
    "Without what differs by machine: decimals, percentages, and lines of files."
    return re.sub(
        r"(?<!')\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+|\d+(?=%|-fold)", '#', re.sub(r'\w+\.py:\d+', 'file.py:1', text)
    )


EVALUATIONS = {
    'validate': lambda l: l.validate(),
    'get_preds': lambda l: l.get_preds()[0],
    'get_preds without targets': lambda l: l.get_preds(dl=[b[:1] for b in l.dls.valid], with_loss=False)[0],
    'of the training set': lambda l: l.validate(0),
}
ASK = {
    'report': lambda l: l.precision_report('bf16', max_seconds=20),
    'comparison': lambda l: l.compare_precision('bf16', n_steps=4, n_seeds=1, max_seconds=5),
    'choice': lambda l: l.to_amp(measure=True, max_seconds=9),
}
