"nn.DataParallel: refused where its replicas would compute in another precision."
import pytest, torch

from helpers import *


def parallel(device_ids):
    "A `DataParallel` that believes in two devices; nothing runs on them."
    model = nn.DataParallel(mlp())
    model.device_ids = device_ids
    return model


CASES = [(lambda l: l.to_bf16(), 'bf16'), (lambda l: l.to_bf16(fp32_modules=nn.BatchNorm1d), 'bf16'),
         (lambda l: l.to_fp16(fp32_modules=nn.BatchNorm1d), 'fp32_modules')]


@pytest.mark.parametrize('set_precision,what', CASES)
@pytest.mark.parametrize('inside', [False, True])
def test_what_replicas_would_not_do_is_refused_when_the_fit_starts(set_precision, what, inside):
    model = parallel([0, 1])
    learn, batches = learner(nn.Sequential(model) if inside else model), []
    set_precision(learn).add_cb(At('before_batch', batches.append, -100))
    message = f'(?s){what} cannot be used with nn.DataParallel.*DistributedDataParallel.*to_fp16'
    with pytest.raises(ValueError, match=message): learn.fit(1)
    assert not batches and not learn.precision.in_fit


def test_without_devices_it_is_the_model_itself():
    assert nn.DataParallel(mlp()).device_ids == [] or torch.cuda.is_available()
    a, b = learner(parallel([]), opt_func=SGD).to_bf16(fp32_modules=nn.BatchNorm1d), learner(opt_func=SGD)
    b.to_bf16(fp32_modules=nn.BatchNorm1d)
    for learn in (a, b): learn.fit(1, .01)
    assert same(params(a), params(b))
