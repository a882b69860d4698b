"The report's figure: what it names, where its words are, and that nothing is drawn over them."
import matplotlib.pyplot as plt
import pytest, torch
from torch import nn

from insight.test_report import language_model
from helpers import Attentive, learner


def many(n=120):
    torch.manual_seed(0)
    layers = [m for _ in range(n) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]: nn.init.eye_(m.weight)
    return learner(nn.Sequential(*layers, nn.Linear(6, 1)))


@pytest.fixture
def drawn():
    def draw(learn, **kwargs):
        report = learn.precision_report(**kwargs)
        axs = report.plot()
        axs[0].figure.canvas.draw()
        return report, axs
    yield draw
    plt.close('all')


def words(ax): return [t.get_text().strip() for t in ax.texts]


def boxes(axs):
    "The places of all words on the figure."
    fig = axs[0].figure
    texts = [t for ax in axs for t in (*ax.texts, ax._left_title, *ax.get_xticklabels(), ax.xaxis.label, ax.yaxis.label)]
    texts += [t for ax in axs for y, t in zip(ax.get_yticks(), ax.get_yticklabels()) if ax.get_ylim()[0] <= y <= ax.get_ylim()[1]]
    texts += [fig._suptitle, *fig.legends[0].get_texts()]
    return [(t, t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]


def test_modules_in_trouble_are_red_and_named_and_the_lines_end_with_words(drawn):
    report, (sizes, errors) = drawn(learner(Attentive()))
    assert 'attn (fp16)' in words(sizes) and 'fp16: not finite from here' in words(errors)
    red = [l for l in sizes.get_lines() if l.get_label() == 'module in trouble']
    place = list(dict.fromkeys(report.table['module'])).index('attn')
    assert list(red[0].get_xdata()) == [place] and red[0].get_ydata()[0] > 65504 and red[0].get_color() == '#c0392b'
    fp16 = next(l for l in errors.get_lines() if l.get_label() == 'fp16: total error')
    assert max(fp16.get_xdata()) == place
    label = next(t for t in errors.get_xticklabels() if t.get_text() == 'attn')
    assert label.get_color() == '#c0392b'


def test_ceiling_floor_and_limit_have_labels_outside_the_data(drawn):
    _, (sizes, errors) = drawn(learner())
    assert {t.split('\n')[0] for t in words(sizes)} == {"fp16's ceiling", "fp16's floor"} and any(t.startswith('0.1') for t in words(errors))
    for ax in (sizes, errors):
        for text in ax.texts: assert text.get_window_extent().x0 >= ax.get_window_extent().x1
    legend = sizes.figure.legends[0].get_window_extent()
    assert legend.y1 <= errors.get_window_extent().y0 and not sizes.get_legend() and not errors.get_legend()
    assert not any('error so far' in t.get_text() for t in sizes.figure.legends[0].get_texts())
    _, (sizes, _) = drawn(learner(), modes='bf16')
    assert not words(sizes)                                      # bf16 has fp32's range


def test_at_most_thirty_names_however_many_modules(drawn):
    _, (_, errors) = drawn(many(), modes='bf16')
    assert 15 <= len([t for t in errors.get_xticklabels() if t.get_text()]) <= 30


@pytest.mark.parametrize('make', [lambda: learner(), lambda: learner(Attentive()), language_model, many])
def test_no_words_lie_over_others_or_leave_the_figure(drawn, make):
    _, axs = drawn(make())
    found = boxes(axs)
    width, height = axs[0].figure.canvas.get_width_height()
    for i, (text, box) in enumerate(found):
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, text
        for other, other_box in found[:i]:
            if text.get_rotation() == other.get_rotation() != 25: assert not box.padded(-1.5).overlaps(other_box.padded(-1.5)), (text, other)


def test_on_axes_of_ones_own():
    axs = plt.subplots(2, 1)[1]
    assert learner().precision_report('bf16').plot(axs) is axs and all(len(ax.get_lines()) for ax in axs)
    plt.close('all')


def test_a_report_without_rows_can_be_drawn():
    report = learner().precision_report(max_seconds=1e-9)
    assert len(report.table) == 0 and len(report.plot()) == 2
    plt.close('all')
