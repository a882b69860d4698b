"Costs of work on a device: time and memory."
import torch


def wait_for(device: torch.device) -> None:
    "Synchronize with the device, before reading the clock."
    if device.type == 'xla':
        import torch_xla
        torch_xla.sync(wait=True)
    elif device.type != 'cpu': torch.accelerator.synchronize(device)


def allocated(device: torch.device, peak: bool = False) -> float: # nan if PyTorch does not count
    "Return the bytes allocated on an accelerator now, and reset the peak; or return that peak."
    if device.type not in ('cuda', 'xpu'): return float('nan')
    if peak: return torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)
