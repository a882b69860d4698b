"The report's figure: markers that agree with the table, and words that do not collide."

import matplotlib.pyplot as plt
import pytest, torch
from torch import nn

from helpers import Attentive, learner
from states import Act, fills

RED, GREY = '#c0392b', '#8a929c'


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


def line(ax, label):
    return next(l for l in ax.get_lines() if l.get_label() == label)


def label_of(ax, name):
    return next(t for t in ax.get_xticklabels() if t.get_text() == name)


def test_modules_in_trouble_are_red_at_the_value_in_the_table(drawn):
    report, ax = drawn(learner(Attentive()))
    red, place = line(ax, 'module in trouble'), list(dict.fromkeys(report.table['module'])).index('attn')
    row = report.table.query("mode == 'fp16' and module == 'attn'").iloc[0]
    assert list(red.get_xdata()) == [place] and list(red.get_ydata()) == [row['largest']] and red.get_color() == RED
    assert label_of(ax, 'attn').get_color() == RED


def test_modules_that_do_not_run_are_grey(drawn):
    _, ax = drawn(learner(nn.Sequential(Attentive(), nn.Linear(1, 8), Act(fills), nn.Linear(8, 1))), modes='fp16')
    grey, red = line(ax, 'module that does not run'), line(ax, 'module in trouble')
    assert grey.get_color() == GREY == label_of(ax, '2').get_color() and len(grey.get_xdata()) == 1
    assert red.get_color() == RED == label_of(ax, '0.attn').get_color() and len(red.get_xdata()) == 1


def test_ceiling_and_floor_have_labels_outside_the_data(drawn):
    _, ax = drawn(learner())
    assert {t.get_text().split('\n')[0] for t in ax.texts} == {"fp16's ceiling", "fp16's floor"}
    for text in ax.texts:
        assert text.get_window_extent().x0 >= ax.get_window_extent().x1
    assert not drawn(learner(), modes='bf16')[1].texts  # bf16 has fp32's range


@pytest.mark.parametrize('make', [learner, lambda: learner(Attentive()), many])
def test_no_words_lie_over_others_or_leave_the_figure(drawn, make):
    _, ax = drawn(make(), modes='fp16' if make is not many else 'bf16')
    figure, (low, high) = ax.figure, ax.get_ylim()
    texts = [*ax.texts, *ax.get_xticklabels(), ax.yaxis.label]
    texts += [t for y, t in zip(ax.get_yticks(), ax.get_yticklabels()) if low <= y <= high]
    texts += [figure._suptitle, *figure.legends[0].get_texts()]
    found = [(t, t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]
    assert len([t for t in ax.get_xticklabels() if t.get_text()]) <= 31
    width, height = figure.canvas.get_width_height()
    for i, (text, box) in enumerate(found):
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, text
        for other, other_box in found[:i]:
            assert not box.padded(-1.5).overlaps(other_box.padded(-1.5)), (text, other)
