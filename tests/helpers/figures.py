"""A check that a figure can be read."""

from matplotlib.figure import Figure
from matplotlib.legend import Legend


def assert_readable(figure: Figure) -> None:
    """Assert that nothing leaves the figure, that no legend takes more than a third of it, and that plots have room."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    drawn = figure.get_tightbbox()
    slack = 0.02
    assert drawn.x0 >= -slack and drawn.x1 <= width + slack, f"{drawn} leaves the width of {width} inches"
    assert drawn.y0 >= -slack and drawn.y1 <= height + slack, f"{drawn} leaves the height of {height} inches"
    area = figure.bbox.width * figure.bbox.height
    for legend in figure.findobj(Legend):
        box = legend.get_window_extent()
        assert box.width * box.height <= area / 3, [text.get_text() for text in legend.get_texts()]
    # a layout that found no room leaves plots of almost no size
    assert all(axes.get_window_extent().width > 20 for axes in figure.axes if not hasattr(axes, "_colorbar"))
    assert all(axes.get_window_extent().height > 20 for axes in figure.axes)
