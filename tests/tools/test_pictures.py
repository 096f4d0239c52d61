import pytest
import torch

from experiments.reporting import curves
from fairseq_lowrank.attention import PRESETS
from fairseq_lowrank.tools import inspection, pictures, spectrum


def test_every_preset_has_a_colour_of_its_own():
    assert set(PRESETS) <= set(pictures.COLOURS)
    assert len(set(pictures.COLOURS.values()) | set(pictures.OTHER_COLOURS)) == len(pictures.COLOURS) + len(
        pictures.OTHER_COLOURS
    )


@pytest.mark.parametrize(
    "name, method",
    [
        ("h32-mixhead-a", "mixhead-a"),
        ("Transformer + Mixhead A, seed 1", "mixhead-a"),
        ("runs/mha_h32/checkpoint_best", "mha"),
        ("mha-sigsoftmax", "mha"),
        ("sigsoftmax", "sigsoftmax"),
        ("label", None),
    ],
)
def test_names_tell_the_method(name, method):
    assert pictures.method(name) == method


def test_a_method_keeps_its_colour_and_is_told_apart_by_its_line():
    alone = pictures.styles(["mixhead-a"])[0]
    first, second, other = pictures.styles(["mixhead-a", "mixhead-a-h32", "mha"])
    assert first == alone and second["color"] == first["color"] != other["color"]
    assert first["linestyle"] != second["linestyle"]
    many = pictures.styles(["mixhead-a"] * 12)
    assert len({(style["color"], style["linestyle"]) for style in many}) == 12
    unknown = pictures.styles(["this", "that"])
    assert unknown[0]["color"] != unknown[1]["color"]


def test_file_names_are_safe_and_differ():
    names = ["a/b", "a:b", "../../etc", "x" * 300, "A_B", "mixhead-table4"]
    files = pictures.file_names("curves", names)
    assert files["mixhead-table4"] == "curves-mixhead-table4"
    assert len({file.lower() for file in files.values()}) == len(names)
    assert all("/" not in file and len(file) < 100 for file in files.values())


def test_numbers_have_no_minus_before_zero():
    assert [pictures.number(value) for value in (-0.001, -0.01, 0.0)] == ["0.00", "-0.01", "0.00"]


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_spectra_say_length_head_size_and_what_thin_lines_are():
    spectra = spectrum.Spectra()
    for layer in range(2):
        spectra.add("decoder", layer, 8, torch.rand(4, 1, 20, 30))
    results = [{"label": label, "sites": spectra.summary()} for label in ("mha", "$mixhead-a$")]
    for figure in (spectrum.draw_layers(results, "decoder"), spectrum.draw_mean(results, "decoder")):
        title = next(text for text in texts(figure) if "n = 20" in text)
        assert "d_k = 8" in title and "(thin)" in title and "(bold)" in title
        figure.canvas.draw()  # a name is no formula
    colours = [line.get_color() for line in spectrum.draw_mean(results, "decoder").axes[0].lines]
    assert set(colours) == {pictures.COLOURS["mha"], pictures.COLOURS["mixhead-a"]}


def test_heat_maps_have_labelled_colour_bars_and_the_head_size():
    state = {"decoder.layers.0.self_attn.mixing.weight": torch.eye(2) - 0.001}
    state["decoder.layers.0.self_attn.out_proj.weight"] = torch.rand(6, 6)
    found = texts(inspection.draw_mixing(inspection.inspect(state)))
    assert "M[j, i]" in found and "Mixing of 2 heads of size d_k = 3" in found and "-0.00" not in found
    state = {
        f"encoder.layers.0.self_attn.head_embeddings.{part}": torch.rand(2, 5) for part in ("query", "key", "value")
    }
    found = texts(inspection.draw_embeddings(inspection.inspect(state)))
    assert "ℓ2 norm" in found and any("2 heads of size d_k = 5" in text for text in found)


def curve(row, *losses, seed=1):
    points = [
        {"updates": 10 * step, "train_loss": 9.0, "valid_loss": loss} for step, loss in enumerate(losses, start=1)
    ]
    return {"row": row, "label": row, "seed": seed, "points": points}


def test_learning_curves_are_shown_as_differences_to_the_row_without_the_method():
    plain, small, a, small_a, own = (
        curve("mha", 5.0, 4.0, 3.0),
        curve("mha-h32", 6.0, 5.0),
        curve("mixhead-a", 4.0, 3.5, 3.0),
        curve("h32-mixhead-a", 6.5, 5.5),
        curve("stock", 5.5, 4.5, 3.5),
    )
    everything = [plain, small, a, small_a, own]
    assert [curves.baseline_of(each, everything) for each in everything] == [None, None, plain, small, plain]
    assert curves.difference(a, plain) == ([10, 20, 30], [-1.0, -0.5, 0.0])
    lines = [list(line.get_ydata()) for line in curves.draw(everything, "any").axes[1].lines]
    assert [-1.0, -0.5, 0.0] in lines and [0.5, 0.5] in lines


def test_a_difference_lies_between_the_baselines_points_alone():
    baseline = curve("mha", 4.0, 2.0)
    other = {"row": "mqa", "points": [{"updates": at, "valid_loss": 3.0} for at in (5, 15, 25)]}
    assert curves.difference(other, baseline) == ([15], [0.0])


def test_logs_without_a_baseline_have_one_plot():
    log = {"label": "run", "points": curve("x", 2.0, None)["points"]}
    assert len(curves.draw([log], "logs").axes) == 1
