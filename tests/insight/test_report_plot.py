"The report's figure: markers that agree with the table, and labels that do not overlap; that of the loss scale."

import matplotlib.pyplot as plt
import pytest, torch
from matplotlib.colors import to_hex
from torch import nn

from helpers import Attentive, learner


def many():
    torch.manual_seed(0)
    layers = [m for _ in range(60) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]:
        nn.init.eye_(m.weight)
    return nn.Sequential(*layers, nn.Linear(6, 1))


@pytest.mark.parametrize(
    'make, modes, title, lines',
    [
        (Attentive, ('bf16', 'fp16'), "bf16: safe so far\nfp16: keep modules in fp32 'attn'", [65504, 6.1e-5]),
        (many, 'bf16', 'bf16: safe so far', []),  # which has the range of fp32
    ],
)
def test_what_is_drawn(make, modes, title, lines):
    report = learner(make()).precision_report(modes)
    ax = report.plot()
    figure = ax.figure
    figure.canvas.draw()
    rows = report.table.drop_duplicates('module').set_index('module')
    flagged = {*report.table['module'][report.table['flagged']]}
    dots, names = ax.collections[0], [t.get_text() for t in ax.get_yticklabels()]
    assert names == [n for n in rows.index if n in names] and len(names) == min(len(rows), 30) and ax.yaxis_inverted()
    assert list(dots.get_offsets()[:, 0]) == list(rows['largest'][names])
    assert {n for n, color in zip(names, dots.get_facecolors()) if to_hex(color) == '#c0392b'} == flagged
    assert figure._suptitle.get_text() == title and [l.get_xdata()[0] for l in ax.get_lines()] == lines

    low, high = ax.get_xlim()
    texts = [*ax.get_yticklabels(), ax.xaxis.label, figure._suptitle]
    texts += [t for x, t in zip(ax.get_xticks(), ax.get_xticklabels()) if low <= x <= high]
    texts += [t for legend in figure.legends for t in legend.get_texts()]
    found = [(t, t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]
    width, height = figure.canvas.get_width_height()
    for i, (text, box) in enumerate(found):
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, text
        assert not any(box.padded(-1.5).overlaps(other.padded(-1.5)) for _, other in found[:i]), text
    plt.close('all')


@pytest.mark.parametrize('call', ['to_bf16', 'to_fp16'])
def test_a_plot_of_no_loss_scale_raises_an_error(call):
    learn = getattr(learner(), call)()
    if call == 'to_bf16':
        learn.fit(1)
    with pytest.raises(ValueError, match='(?s)nothing to plot.*bf16 and fp32 need no loss scaling'):
        learn.precision.plot_scales()
