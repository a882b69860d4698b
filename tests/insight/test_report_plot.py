"The report's figure: its markers agree with the table."

from collections import OrderedDict

import matplotlib.pyplot as plt
import pytest, torch
from matplotlib.colors import to_hex
from torch import nn

from helpers import Attentive, learner
from models import Act


def many():
    torch.manual_seed(0)
    layers = [m for _ in range(60) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]:
        nn.init.eye_(m.weight)
    return nn.Sequential(*layers, nn.Linear(6, 1))


def priced():
    "A name that matplotlib would read as mathematics."
    torch.manual_seed(0)
    loud = {'$^{$': Act(lambda h: h * 1e6 / 1e6)}
    return nn.Sequential(OrderedDict(first=nn.Linear(6, 6), **loud, last=nn.Linear(6, 1)))


@pytest.mark.parametrize(
    'make, kept, precisions, title, lines',
    [
        (Attentive, None, ('bf16', 'fp16'), 'bf16: safe so far\nfp16: keep attn in fp32', [65504, 2**-14]),
        (Attentive, 'attn', 'fp16', 'fp16: safe so far', [65504, 2**-14]),
        (many, None, 'bf16', 'bf16: safe so far', []),  # which has the range of fp32
        (priced, None, 'fp16', r'fp16: keep \$^{\$ in fp32', [65504, 2**-14]),
    ],
)
def test_what_is_drawn(make, kept, precisions, title, lines):
    report = learner(make()).to_fp16(fp32_modules=kept).precision_report(precisions)
    ax = report.plot()
    rows = report.table.drop_duplicates('module').set_index('module')
    flagged = {*report.table['module'][report.table['flagged']]}
    dots, names = ax.collections[0], [t.get_text() for t in ax.get_yticklabels()]
    assert names == [n for n in rows.index if n in names] and len(names) == min(len(rows), 30) and ax.yaxis_inverted()
    assert list(dots.get_offsets()[:, 0]) == list(rows['largest'][names])
    assert {n for n, color in zip(names, dots.get_facecolors()) if to_hex(color) == '#c0392b'} == flagged
    hollow = {n for n, color in zip(names, dots.get_facecolors()) if not color[3]}
    assert hollow == {*rows.index[rows['format'] == 'fp32']} & {*names} and ('attn' in hollow) == (kept == 'attn')
    assert ax.figure._suptitle.get_text() == title and [l.get_xdata()[0] for l in ax.get_lines()] == lines
    ax.figure.canvas.draw()
    plt.close('all')
