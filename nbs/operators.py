"Makes the lists of autocast's operators from PyTorch's dispatcher and from what the package simulates CUDA with."
import re

import torch

from fastxtend_amp.devices.cuda_rules import BANNED, LOW, WIDEST, registered

VERSION = '.'.join(torch.__version__.split('.')[:2])
# The dispatcher names the CPU's operators, not their groups: `aten/src/ATen/autocast_mode.h` does.
CPU_LOW = LOW | {'mkldnn_rnn_layer'}
CPU_WIDEST = {'cat', 'stack', 'index_copy'}
DTYPES = '16 bits', 'fp32', 'the widest dtype of their inputs'


def groups():
    "Return the operators by the dtype that they run in: sets for CUDA and for CPUs."
    found = {dtype: [] for dtype in DTYPES}
    for device, low, widest in (('CUDA', LOW, WIDEST), ('CPU', CPU_LOW, CPU_WIDEST)):
        names = {name.removeprefix('aten::').partition('.')[0] for name in registered(f'Autocast{device}')
                 if re.match('aten::[^_]', name)}               # not internal names, and not those of torchvision
        if device == 'CUDA': names -= {BANNED}
        for dtype, those in zip(DTYPES, (names & low, names - low - widest, names & widest)): found[dtype].append(those)
    return found


def part():
    "Return the lists of each dtype."
    lines = [f'From PyTorch {VERSION}.']
    for dtype, (cuda, cpu) in groups().items():
        lines.append(f'## In {dtype}')
        for where, names in (('Both', cuda & cpu), ('CUDA only', cuda - cpu), ('CPU only', cpu - cuda)):
            if names: lines.append(f'**{where}:** `{"`, `".join(sorted(names))}`')
    return '\n\n'.join(lines)
