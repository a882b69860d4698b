"Operators inside a Learner's forward under the callback: two of each of autocast's lists, and others."

import pytest, torch
import torch.nn.functional as F

from helpers import *

LOW, WIDE = {'fp16': torch.float16, 'bf16': torch.bfloat16}, torch.float32


class Ops(nn.Linear):
    "A model that calls operators in its forward and records their output dtypes."

    low = None

    def forward(self, x):
        low, wide = torch.randn(3, 3, device=x.device).to(self.low), torch.randn(3, 3, device=x.device)
        outputs = dict(
            linear=F.linear(wide, wide),
            matmul=wide @ wide,
            mse_loss=F.mse_loss(low, low),
            prod=torch.prod(low),
            relu=torch.relu(low),
            add=low + wide,
            in_place=wide.clone().addmm_(wide, wide),
            fp64=torch.mm(wide.double(), wide.double()),
        )
        if x.device.type == 'cpu':
            outputs['widest'] = torch.cat([low, wide])
        else:
            outputs['widest'] = torch.addcdiv(low, low, wide)
        self.seen = {name: out.dtype for name, out in outputs.items()}
        return super().forward(x)


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])
@pytest.mark.parametrize('mode', LOW)
def test_operators_of_each_list(mode, device):
    model, low = Ops(6, 1), LOW[mode]
    model.low = low
    learner(model, loaders(n=4, device=torch.device(device)), cbs=mixed(mode)).fit(1, 0.01)
    assert model.seen == dict(
        linear=low,
        matmul=low,
        relu=low,
        mse_loss=WIDE,
        prod=WIDE,
        add=WIDE,
        in_place=WIDE,
        widest=WIDE,
        fp64=torch.float64,
    )
