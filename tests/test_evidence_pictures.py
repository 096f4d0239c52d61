"""The pictures of the documents: what they show can be told apart, nothing is cut, and each has a page."""

import itertools
import re

import pytest

pytest.importorskip("scipy")

from colour_vision import distance
from matplotlib.colors import to_hex

from experiments.evidence import bottleneck, figures, patterns
from experiments.evidence.lines import ROOT

APART = 15  # CIE76


@pytest.fixture(scope="module", params=[name for name in figures.FIGURES if name != "bottleneck-seen"])
def figure(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bottleneck, "errors", lambda causal: [1 / size for size in range(1, bottleneck.LENGTH + 1)])
        drawn = figures.FIGURES[request.param]()
    return drawn


def test_a_fit_is_exact_at_the_rank_of_the_pattern_and_not_below():
    target = (2.5 * patterns.letters()).softmax(-1)[None]
    assert patterns.fit(target, 1, 16, tries=1)[0] < 1e-3 < 0.1 < patterns.fit(target, 1, 4, tries=1)[0]


def colours(figure) -> set[str]:
    """The colours of the lines and bars of a figure, without reference lines."""
    found = set()
    for axes in figure.axes:
        found |= {to_hex(line.get_color()) for line in axes.lines if not line.get_label().startswith("_child")}
        found |= {to_hex(line.get_color()) for line in axes.lines if line.get_marker() not in ("None", "", None)}
        found |= {to_hex(patch.get_facecolor()) for patch in axes.patches}
    return found


def close(found) -> list[tuple[str, str]]:
    return [pair for pair in itertools.combinations(sorted(found), 2) if distance(*pair) < APART]


def test_colours_of_a_picture_are_apart_with_each_colour_blindness(figure):
    found = colours(figure)
    assert len(found) > 1
    assert not close(found)


def test_no_text_of_a_picture_is_cut(figure):
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02
    for axes in figure.axes:
        for text in axes.texts:
            assert text.get_window_extent().x1 <= axes.bbox.x1 and text.get_window_extent().x0 >= axes.bbox.x0, text


def test_every_picture_has_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"pictures/([\w-]+\.png)\)", text))
    assert shown == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert {f"{name}.png" for name in figures.FIGURES} <= shown
