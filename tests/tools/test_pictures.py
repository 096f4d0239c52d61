import matplotlib.image
import pytest
import torch

from experiments.class_styles import marker
from experiments.papers import curves
from fairseq_lowrank.attention import PRESETS
from fairseq_lowrank.cli import _composition, compare
from fairseq_lowrank.tools import inspection, pictures, spectrum
from fairseq_lowrank.tools.fairseq import parameters
from fairseq_lowrank.tools.measuring.figure import plot_cuts


@pytest.mark.parametrize(
    ("preset", "axes", "kind"),
    [
        (None, {}, "stock"),
        ("mha", {}, "mha"),
        ("mha", {"mixing": "static"}, "mixhead-a"),
        ("mha", {"value_dim": 64}, "mha"),
        ("fixedhead", {"head_dim": 32}, "fixedhead"),
        ("gqa", {"key_value_heads": 2, "score": None}, "gqa"),
        ("mha", {"activation": "sigsoftmax"}, "sigsoftmax"),
        ("mixhead-b", {"activation": "sigsoftmax"}, "mixhead-b, activation sigsoftmax"),
        ("mha", {"mixing": "column-sums"}, "mha, mixing column-sums"),
    ],
)
def test_attention_kind_is_the_preset_that_the_axes_amount_to(preset, axes, kind):
    assert pictures.attention_kind(preset, axes) == kind


def test_a_kind_keeps_its_colour_and_is_told_apart_by_its_line():
    alone = pictures.styles(["mixhead-a"])[0]
    first, second, other = pictures.styles(["mixhead-a", "mixhead-a", "mha"])
    assert first == alone and second["color"] == first["color"] != other["color"]
    assert first["linestyle"] != second["linestyle"]
    assert marker(first) != marker(second)
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
    attention = {"mixhead-b": {"preset": "mha"}, "$small$": {"preset": "mha", "mixing": "static"}}
    results = [{"label": name, "attention": flags, "sites": spectra.summary()} for name, flags in attention.items()]
    for figure in (spectrum.plot_layers(results, "decoder"), spectrum.plot_mean(results, "decoder")):
        title = next(text for text in texts(figure) if "n = 20" in text)
        assert "d_k = 8" in title and "(thin)" in title and "(bold)" in title
        figure.canvas.draw()  # a name is no formula
    colours = [line.get_color() for line in spectrum.plot_mean(results, "decoder").axes[0].lines]
    # by the attention, not by the label
    assert set(colours) == {pictures.colour_of("mha"), pictures.colour_of("mixhead-a")}


def test_heat_maps_have_labelled_colour_bars_and_the_head_size():
    state = {"decoder.layers.0.self_attn.mixing.weight": torch.eye(2) - 0.001}
    state["decoder.layers.0.self_attn.out_proj.weight"] = torch.rand(6, 6)
    found = texts(inspection.plot_mixing(inspection.inspect(state)))
    assert "(M − I)[j, i] / 1e-3" in found and "Mixing of 2 heads of size d_k = 3" in found and "-0.00" not in found
    state = {
        f"encoder.layers.0.self_attn.head_embeddings.{part}": torch.rand(2, 5) for part in ("query", "key", "value")
    }
    found = texts(inspection.plot_embeddings(inspection.inspect(state)))
    assert "ℓ2 norm" in found and any("2 heads of size d_k = 5" in text for text in found)


def curve(row, *losses, seed=1, preset="mha", settings=()):
    points = [
        {"updates": 10 * step, "train_loss": 9.0, "valid_loss": loss} for step, loss in enumerate(losses, start=1)
    ]
    about = {"attention": preset and {"preset": preset}, "settings": dict(settings)}
    return {"row": row, "label": row, "seed": seed, "points": points, **about}


def test_learning_curves_are_shown_as_differences_to_the_row_without_the_method():
    plain, small, a, small_a, own = (
        curve("mha", 5.0, 4.0, 3.0),
        curve("mha-h32", 6.0, 5.0),
        curve("mixhead-a", 4.0, 3.5, 3.0, preset="mixhead-a"),
        curve("h32-mixhead-a", 6.5, 5.5, preset="mixhead-a"),
        curve("stock", 5.5, 4.5, 3.5, preset=None),
    )
    everything = [plain, small, a, small_a, own]
    assert [curves.baseline_of(each, everything) for each in everything] == [None, None, plain, small, plain]
    assert curves.difference_to_baseline(a, plain) == ([10, 20, 30], [-1.0, -0.5, 0.0])
    lines = [list(line.get_ydata()) for line in curves.plot_curves(everything, "any").axes[1].lines]
    assert [-1.0, -0.5, 0.0] in lines and [0.5, 0.5] in lines


def test_a_row_without_a_preset_is_compared_with_mha_of_its_settings():
    wide = curve("wide-mha", 5.0, settings={"lr": "1"})
    small, start = curve("h4-mha", 4.0), curve("h4-small-start", 3.0)
    assert curves.baseline_of(start, [wide, small, start]) is small


def test_seeds_of_a_row_are_one_line_and_a_band():
    rows = [curve(name, 4.0 + seed, 3.0, seed=seed) for name in ("mha", "mixhead-a") for seed in (0, 2)]
    losses, differences = curves.plot_curves(rows, "any").axes
    assert [list(line.get_ydata()) for line in losses.lines if line.get_marker() == "."] == [[5.0, 3.0]] * 2
    assert len(losses.collections) == 2
    low, high = (getattr(losses.collections[0].get_paths()[0].vertices[:, 1], end)() for end in ("min", "max"))
    assert (low, high) == (3.0, 6.0)
    assert [text.get_text() for text in differences.get_legend().get_texts()] == [
        "mha (2 seeds)",
        "mixhead-a (2 seeds)",
    ]


@pytest.mark.parametrize("count", [2, 24])
def test_legends_of_learning_curves_cover_no_plot(count):
    rows = [
        curve(f"s{number % 4}-{preset}-{number}", 5.0, 4.0, preset=preset, settings={"lr": str(number % 4)})
        for number, preset in enumerate(["mha", *["gain"] * (count - 1)])
    ]
    rows += [curve("mha", 5.0, 4.5)]
    figure = curves.plot_curves(rows, "any")
    figure.draw_without_rendering()
    plots = [axes.get_window_extent() for axes in figure.axes]
    legends = [legend.get_window_extent() for axes in figure.axes if (legend := axes.get_legend())]
    assert legends and not any(legend.overlaps(plot) for legend in legends for plot in plots)
    assert all(plot.height > 100 for plot in plots)
    assert all(legend.y0 >= 0 and legend.x1 <= figure.bbox.width for legend in legends)


def test_many_rows_are_drawn_by_setting():
    names = [f"{size}-{preset}" for size in ("h4", "h8", "h16", "h32") for preset in ("mha", "gain", "mixhead-a")]
    rows = [curve(name, 5.0, 4.0, settings={"heads": name.split("-")[0]}) for name in [*names, "odd-mha"]]
    figure = curves.plot_curves(rows, "any")
    assert len(figure.axes) == 2 * 4 + 1  # the row that is alone in its setting has no differences
    assert curves.by_settings({one["row"]: [one] for one in rows})[-1] == ["odd-mha"]


def test_a_difference_lies_between_the_baselines_points_alone():
    baseline = curve("mha", 4.0, 2.0)
    other = {"row": "mqa", "points": [{"updates": at, "valid_loss": 3.0} for at in (5, 15, 25)]}
    assert curves.difference_to_baseline(other, baseline) == ([15], [0.0])


LONG = (
    "a method with a long name, and with options such as --mixing-lr-scale 32 and --head-mixing-normalization columns"
)


def spectra_of(count):
    spectra = spectrum.Spectra()
    for layer in range(6):
        spectra.add("decoder", layer, 8, torch.rand(4, 1, 12, 16))
    preset = {"attention": {"preset": "mha"}, "sites": spectra.summary()}
    return [{"label": f"{LONG} {number}", **preset} for number in range(count)]


def mixing_of(layers, heads, size=0.1):
    state = {}
    for layer in range(layers):
        state[f"decoder.layers.{layer}.self_attn.mixing.weight"] = torch.eye(heads) + size * torch.randn(heads, heads)
        for part in ("query", "key", "value"):
            state[f"decoder.layers.{layer}.self_attn.head_embeddings.{part}"] = torch.rand(heads, 5)
    return inspection.inspect(state)


def contrast_row(name, low, high):
    row = {
        "contrast": name,
        "unit": "sacrebleu",
        "rows": ["a", "b"],
        "mean": (low + high) / 2,
        "low": low,
        "high": high,
    }
    row |= {"seed_means": [low, high], "seeds": 2, "outcome": None, "better": None, "margin": None}
    return row | {"sentences_low": low, "sentences_high": high, "lower_is_better": False}


def sweep_rows(methods):
    return [
        {"attention_kind": method, "heads": heads, "attention": 1e6 * heads * (1 + number / 10)}
        for number, method in enumerate(methods)
        for heads in (2, 8, 32)
    ]


def cuts_of(label):
    ranks = [{"rank": rank, "cost": 1 / rank, "added": 1 / rank} for rank in (1, 2, 4, 8, 16)]
    whole = {"size": 16, "ranks": ranks, "need": 8, "interval": (4, 16), "worth": 1.0}
    layers = [{"site": site, "layer": layer, **whole} for site in ("encoder", "decoder", "cross") for layer in range(3)]
    about = {"label": label, "metric": "bits per token", "less_is_better": True, "tolerance": 0.01, "value": 5.0}
    about["verdicts"] = [{"verdict": "few"}]
    return about | {
        "layers": [{"head_size": 16}],
        "cuts": {"scores": {"all": whole, "layers": layers}, "own": {"all": whole}},
    }


FIGURES = {
    "curves": lambda: curves.plot_curves([curve(f"{LONG} {number}", 5.0, 4.0) for number in range(9)], LONG),
    "contrasts": lambda: compare.plot_contrasts([contrast_row(f"{LONG} {number}", 0.1, 0.3) for number in range(12)]),
    "layers": lambda: spectrum.plot_layers(spectra_of(5), "decoder"),
    "mean": lambda: spectrum.plot_mean(spectra_of(5), "decoder"),
    "mixing": lambda: inspection.plot_mixing(mixing_of(6, 8)),
    "embeddings": lambda: inspection.plot_embeddings(mixing_of(12, 8)),
    "cuts": lambda: plot_cuts([cuts_of(f"{LONG} {number}") for number in range(3)]),
    "sweep": lambda: parameters.plot_sweep(sweep_rows(PRESETS), "heads", "lowrank_transformer_lm_wiki103", 8, 64),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_saved_picture_has_all_of_its_texts(name, tmp_path):
    torch.manual_seed(1)
    figure = FIGURES[name]()
    picture, document = pictures.save(figure, tmp_path, "a")
    box, least = figure.get_tightbbox(), figure.get_size_inches()
    high, wide, _ = matplotlib.image.imread(picture).shape
    assert wide / 150 > max(least[0], box.width) - 0.02 and high / 150 > max(least[1], box.height) - 0.02
    assert document.read_bytes().startswith(b"%PDF")


def test_a_heat_map_shows_what_was_learned_on_its_own_scale():
    figure = inspection.plot_mixing(mixing_of(2, 4, size=1e-3))
    shown = figure.axes[0].images[0]
    assert shown.get_clim()[1] == abs(shown.get_array()).max() or shown.get_clim()[1] < 10
    assert "(M − I)[j, i] / 1e-3" in texts(figure) and not any("nothing" in text for text in texts(figure))
    nothing = mixing_of(2, 4, size=0.0)
    assert any(text.endswith("nothing learned yet") for text in texts(inspection.plot_mixing(nothing)))
    assert "nothing learned yet: every M is the identity" in _composition.as_text(nothing)
