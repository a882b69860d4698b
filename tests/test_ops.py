"Operators inside a Learner's forward under the callback: two of each of autocast's lists; functions and losses of a user's own."
import pytest, torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd

from helpers import *

LOW, WIDE = {'fp16': torch.float16, 'bf16': torch.bfloat16}, torch.float32
MODES = pytest.mark.parametrize('mode', LOW)


class Ops(nn.Linear):
    "A model that calls operators in its forward and notes the dtypes that they give."
    low = None
    def forward(self, x):
        low, wide = torch.randn(3, 3, device=x.device).to(self.low), torch.randn(3, 3, device=x.device)
        outputs = dict(linear=F.linear(wide, wide), matmul=wide @ wide, mse_loss=F.mse_loss(low, low), prod=torch.prod(low), relu=torch.relu(low),
                       add=low + wide, in_place=wide.clone().addmm_(wide, wide), fp64=torch.mm(wide.double(), wide.double()))
        if x.device.type == 'cpu': outputs['widest'] = torch.cat([low, wide])
        else: outputs['widest'] = torch.addcdiv(low, low, wide)
        self.seen = {name: out.dtype for name, out in outputs.items()}
        return super().forward(x)


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])
@MODES
def test_operators_of_each_list(mode, device):
    model, low = Ops(6, 1), LOW[mode]
    model.low = low
    learner(model, loaders(n=4, device=torch.device(device)), cbs=mixed(mode)).fit(1, .01)
    assert model.seen == dict(linear=low, matmul=low, relu=low, mse_loss=WIDE, prod=WIDE, add=WIDE, in_place=WIDE, widest=WIDE, fp64=torch.float64)


@MODES
def test_custom_fwd_and_bwd_run_under_the_same_autocast(mode):
    "An autograd function of a user's own, without and with `cast_inputs`."
    for cast, forward, backward in (({}, ({WIDE, LOW[mode]}, True), ({LOW[mode]}, True)),
                                    (dict(cast_inputs=torch.float32), ({WIDE}, False), ({WIDE}, False))):
        saw = {}
        def note(where, *ts): saw[where] = ({t.dtype for t in ts}, torch.is_autocast_enabled('cpu'))
        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type='cpu', **cast)
            def forward(ctx, x, w):
                note('forward', x, w)
                ctx.save_for_backward(x, w)
                return x.mm(w.t())
            @staticmethod
            @custom_bwd(device_type='cpu')
            def backward(ctx, g):
                x, w = ctx.saved_tensors
                out = g.mm(w), g.t().mm(x)
                note('backward', *out)
                return out
        class Model(nn.Linear):
            def forward(self, x): return Product.apply(super().forward(x), self.weight)
        learner(Model(6, 6), loss_func=lambda pred, y: pred.mean(), cbs=mixed(mode)).fit(1, .01)
        assert saw == dict(forward=forward, backward=backward)


# -- a loss that is not safe in low precision

def bce_learner(mode, loss, device):
    data = dataset(24)
    data = Data(data.tensors[0], (data.tensors[1] > 0).float())
    model = mlp() if isinstance(loss, nn.BCEWithLogitsLoss) else nn.Sequential(*mlp(), nn.Sigmoid())
    return learner(model, loaders(train=data, valid=data, device=torch.device(device)), loss, cbs=mixed(mode))


@pytest.mark.cuda
@MODES
def test_bce_loss_on_cuda_is_refused_with_pytorchs_hint(mode):
    with pytest.raises(RuntimeError, match='(?s)unsafe to autocast.*binary_cross_entropy_with_logits'): bce_learner(mode, nn.BCELoss(), 'cuda').fit(1)
    bce_learner(mode, nn.BCEWithLogitsLoss(), 'cuda').fit(1, .01)


@MODES
def test_bce_loss_on_the_cpu_is_in_fp32(mode):
    learn, dtypes = bce_learner(mode, nn.BCELoss(), 'cpu'), set()
    learn.add_cb(At('after_loss', lambda l: dtypes.add((l.pred.dtype, l.loss_grad.dtype)), 5))
    learn.fit(4, .05)
    assert dtypes == {(WIDE, WIDE)} and learn.recorder.losses[-1] < learn.recorder.losses[0]
