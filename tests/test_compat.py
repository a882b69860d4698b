"Each undocumented name that the package uses does what its docstring in compat.py says; a test fails with its name when it is gone."
import pytest, torch
from torch import nn

from fastxtend_amp import compat


# -- devices

def test_replace_replicate(monkeypatch):
    parallel, asked, x = nn.DataParallel(nn.Linear(2, 1)), [], torch.ones(3, 2)
    # Two replicas on the CPU, in one thread; `forward` is PyTorch's own.
    parallel.device_ids, parallel.output_device, parallel.src_device_obj = [0, 1], 0, torch.device('cpu')
    parallel.scatter = lambda inputs, kwargs, device_ids: ([inputs, inputs], [kwargs, kwargs])
    parallel.parallel_apply = lambda replicas, inputs, kwargs: [r(*i) for r, i in zip(replicas, inputs)]
    parallel.gather = lambda outputs, output_device: outputs
    def replicate(module, device_ids):
        asked.append((module, list(device_ids)))
        return [module, module]
    compat.replace_replicate(parallel, replicate)
    assert len(parallel(x)) == 2 and asked == [(parallel.module, [0, 1])]
    compat.replace_replicate(parallel, None)
    assert 'replicate' not in vars(parallel)
    monkeypatch.delattr(nn.DataParallel, 'replicate')
    with pytest.raises(RuntimeError, match='(?s)no method `replicate`.*DistributedDataParallel'): compat.replace_replicate(parallel, replicate)
