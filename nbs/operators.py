"Makes the lists of autocast's operators from PyTorch's dispatcher and from what the package simulates CUDA with."
import torch

from fastxtend_amp.devices.cuda_rules import BANNED, LOW, WIDEST, registered

VERSION = '.'.join(torch.__version__.split('.')[:2])
# The dispatcher names the CPU's operators, not their groups: `aten/src/ATen/autocast_mode.h` does.
CPU_LOW = LOW | {'_addmm_activation', '_native_multi_head_attention', 'mkldnn_rnn_layer'}
CPU_WIDEST = {'cat', 'stack', 'index_copy'}


def groups():
    "Return the operators by device, then by the dtype that they run in."
    found = {}
    for device, low, widest in (('CUDA', LOW, WIDEST), ('CPU', CPU_LOW, CPU_WIDEST)):
        names = {name.removeprefix('aten::').partition('.')[0] for name in registered(f'Autocast{device}')
                 if name.startswith('aten::')}                  # torchvision registers others if it is imported
        if device == 'CUDA': names -= {BANNED}
        found[device] = {'In 16 bits': names & low, 'In fp32': names - low - widest,
                         'In the widest dtype of their inputs': names & widest}
    return found


def part():
    "Return the lists of each device."
    found, lines = groups(), [f'Made with PyTorch {VERSION}.']
    for device, by_dtype in found.items():
        lines.append(f'## On {device}')
        for dtype, names in by_dtype.items(): lines.append(f'**{dtype}:** `{"`, `".join(sorted(names))}`')
    return '\n\n'.join(lines)
