"The report's figure: markers that agree with the table, and labels that do not overlap."

import matplotlib.pyplot as plt
import pytest, torch
from matplotlib.colors import to_hex
from torch import nn

from helpers import Attentive, learner

RED = '#c0392b'


def many(n=60):
    torch.manual_seed(0)
    layers = [m for _ in range(n) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]:
        nn.init.eye_(m.weight)
    return learner(nn.Sequential(*layers, nn.Linear(6, 1)))


@pytest.fixture
def drawn():
    def draw(learn, **kwargs):
        report = learn.precision_report(**kwargs)
        ax = report.plot()
        ax.figure.canvas.draw()
        return report, ax

    yield draw
    plt.close('all')


def test_each_module_is_drawn_in_its_order_and_is_red_and_in_the_title_if_flagged(drawn):
    report, ax = drawn(learner(Attentive()))
    rows = report.table[report.table['mode'] == 'fp16']
    dots = ax.collections[0]
    found = [t.get_text() for t in ax.get_yticklabels()]
    assert found == list(rows['module']) and ax.yaxis_inverted()
    assert list(dots.get_offsets()[:, 0]) == list(rows['largest'])
    red = [name for name, color in zip(found, dots.get_facecolors()) if to_hex(color) == RED]
    assert red == ['attn'] == list(rows['module'][rows['flagged']])
    assert ax.figure._suptitle.get_text() == "bf16: safe so far\nfp16: keep modules in fp32 ('attn')"


def test_the_range_of_fp16_is_drawn(drawn):
    _, ax = drawn(learner())
    lines = {l.get_label().split(',')[0].split(':')[0]: l.get_xdata()[0] for l in ax.get_lines()}
    tiny = pytest.approx(torch.finfo(torch.float16).tiny, rel=0.01)
    assert lines == {'largest fp16 number': 65504, 'smallest normal fp16 number': tiny}
    assert not drawn(learner(), modes='bf16')[1].get_lines()  # bf16 has fp32's range


@pytest.mark.parametrize('make', [learner, lambda: learner(Attentive()), many])
def test_no_words_lie_over_others_or_leave_the_figure(drawn, make):
    _, ax = drawn(make(), modes='fp16' if make is not many else 'bf16')
    figure, (low, high) = ax.figure, ax.get_xlim()
    texts = [*ax.get_yticklabels(), ax.xaxis.label, figure._suptitle]
    texts += [t for x, t in zip(ax.get_xticks(), ax.get_xticklabels()) if low <= x <= high]
    texts += [t for legend in figure.legends for t in legend.get_texts()]
    found = [(t, t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]
    assert len([t for t in ax.get_yticklabels() if t.get_text()]) <= 30
    width, height = figure.canvas.get_width_height()
    for i, (text, box) in enumerate(found):
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, text
        for other, other_box in found[:i]:
            assert not box.padded(-1.5).overlaps(other_box.padded(-1.5)), (text, other)
