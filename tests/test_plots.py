"""The charts: what is drawn is what the table says, with units, and the same bytes every time."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mila_kernels import plots

TIMINGS = pd.DataFrame(
    {
        "step": ["01_scalar", "02_smem_tiles"],
        "median_us": [20_000.0, 10_000.0],
        "p10_us": [19_000.0, 9_900.0],
        "p90_us": [23_000.0, 10_500.0],
        "flops": [7e10, 7e10],
        "bytes": [3e7, 3e7],
        "limit_us": [100.0, 100.0],
        "stale": [False, True],
    }
)
PUBLISHED = pd.DataFrame({"step": ["01_scalar", "03_wmma"], "ms": [127.0, 47.5], "gpu": ["RTX 4070", "RTX 4070"]})
PARITY = pd.DataFrame(
    {
        "step": ["01_scalar"] * 4 + ["02_smem_tiles"] * 4,
        "backend": ["cuda", "emulation"] * 4,
        "n": [512, 512, 1024, 1024] * 2,
        "rel_l2": [1.6e-3, 1.7e-3, 1.5e-3, 1.6e-3, 1.6e-3, 8e-3, 1.7e-3, 1.8e-3],
        "bound": [3.9e-3] * 8,
        "passed": [True] * 5 + [False] + [True] * 2,
    }
)


def lengths() -> pd.DataFrame:
    rows = [
        {"step": step, "n": n, "median_us": n * factor, "p10_us": n * factor * 0.9, "p90_us": n * factor * 1.3}
        for step, factor in (("01_scalar", 2.0), ("02_smem_tiles", 1.0))
        for n in (512, 1024, 2048)
    ]
    return pd.DataFrame(rows).assign(flops=1e9, bytes=1e6)


def roofline() -> Figure:
    points = pd.DataFrame(
        {
            "op": ["prefill", "decode", "decode"],
            "flops": [1e12, 1e9, 4e9],
            "bytes": [1e9, 6e7, 2.6e8],
            "median_us": [3000.0, 25.0, float("nan")],
            "label": ["best", None, None],
        }
    )
    return plots.roofline(points, read_gbps=4535.0, peaks={"BF16 matmul": 687.0, "FP8 matmul": 1276.0}, gpu="H200")


STAGES = pd.DataFrame(
    {
        "step": ["06_qk_mma"] * 2 + ["07_softmax_spread"] * 2,
        "stage": ["softmax", "values"] * 2,
        "whole_us": [1600.0] * 2 + [900.0] * 2,
        "median_us": [800.0, 1500.0, 850.0, 700.0],
    }
)
GROWTH = pd.DataFrame(
    {
        "n": [4096, 65536] * 3,
        "series": ["three calls"] * 4 + ["none"] * 2,
        "value": [128.0, 2048.0, 128.0, 2048.0, 0.0, 0.0],
        "kind": ["computed"] * 2 + ["measured"] * 2 + ["computed"] * 2,
    }
)

CHARTS = {
    "ladder": lambda: plots.ladder(TIMINGS, PUBLISHED, gpu="H200", title="Prefill"),
    "roofline": roofline,
    "scaling": lambda: plots.scaling(lengths(), "n", xlabel="N (tokens)"),
    "errors": lambda: plots.errors(PARITY, xlabel="step"),
    "error-curve": lambda: plots.errors(PARITY, "n", xlabel="N (tokens)"),
    "stages": lambda: plots.stages(STAGES, gpu="H200", title="Stages"),
    "growth": lambda: plots.growth(GROWTH, "n", xlabel="context (tokens)", ylabel="workspace (MiB)"),
}


def bars(axes: Axes) -> dict[float, float]:
    """Place to length of the filled bars."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() < 0.8]
    return {round(bar.get_y() + bar.get_height() / 2, 3): bar.get_x() + bar.get_width() for bar in found}


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", CHARTS)
def test_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    first = [file.read_bytes() for file in plots.save(CHARTS[name](), tmp_path / "a" / name)]
    again = [file.read_bytes() for file in plots.save(CHARTS[name](), tmp_path / "b" / name)]
    assert first == again
    assert first[0].startswith(b"<?xml") and first[1].startswith(b"\x89PNG")
    assert b"<dc:date>" not in first[0] and str(tmp_path).encode() not in first[0]


@pytest.mark.parametrize("name", CHARTS)
def test_axes_have_units(name: str) -> None:
    units = ("(ms", "(TFLOP/s)", "FLOP a byte", "tokens", "share of the limit", "relative L2 error", "step", "(MiB)")
    figure = CHARTS[name]()
    for axes in figure.axes[-1:] if name == "stages" else figure.axes:  # panels share the last one's axis
        assert any(unit in axes.get_xlabel() for unit in units)
        if name not in ("ladder", "stages"):  # their rows are names
            assert any(unit in axes.get_ylabel() for unit in units)


def test_ladder_draws_what_was_measured() -> None:
    left, right = CHARTS["ladder"]().axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["01_scalar", "02_smem_tiles (stale)", "03_wmma"]
    lengths_ms = bars(left)
    assert lengths_ms == {-0.2: 20.0, 0.2: 127.0, 1.0: 10.0, 2.2: 47.5}
    assert {"20.0 ms", "10.0 ms", "127 ms", "47.5 ms", "limit 0.100 ms"} <= set(texts(left))
    assert texts(right) == ["0.50 %", "1.0 %"]
    whiskers = [segment[:, 0].tolist() for segment in left.collections[0].get_segments()]
    assert whiskers == [[19.0, 23.0], [9.9, 10.5]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["H200", "published, RTX 4070"]


def test_ladder_without_published_figures_has_no_second_bar() -> None:
    left, _ = plots.ladder(TIMINGS, gpu="H200", limit_us=50).axes
    assert bars(left) == {0.0: 20.0, 1.0: 10.0}
    assert "limit 0.0500 ms" in texts(left)


def test_ladder_tells_peers_from_steps() -> None:
    left, _ = plots.ladder(TIMINGS.assign(source_sha=["0" * 12, ""]), gpu="H200").axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["H200", "called instead, H200"]
    step, peer = (patch.get_facecolor() for patch in left.patches)
    assert step != peer and bars(left) == {0.0: 20.0, 1.0: 10.0}


def test_stages_show_what_is_left_and_what_went() -> None:
    first, second = CHARTS["stages"]().axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["whole", "without softmax", "without values"]
    assert {"1.60 ms", "0.800 ms, 50 % gone", "1.50 ms, 6.3 % gone"} == set(texts(first))
    assert {"0.900 ms", "0.850 ms, 5.6 % gone", "0.700 ms, 22 % gone"} == set(texts(second))
    with pytest.raises(ValueError, match="rows: columns whole_us are missing"):
        plots.stages(STAGES.drop(columns="whole_us"), gpu="H200")


def test_growth_draws_lines_for_what_is_computed_and_markers_for_what_is_measured() -> None:
    (axes,) = CHARTS["growth"]().axes
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[4096, 128], [65536, 2048]]
    assert axes.collections[0].get_offsets().tolist() == [[4096, 128], [65536, 2048]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4K", "64K"]
    with pytest.raises(ValueError, match="no value is above 0"):
        plots.growth(GROWTH[GROWTH["series"] == "none"], "n", xlabel="", ylabel="")


def test_ladder_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(ValueError, match="timings: columns p90_us are missing"):
        plots.ladder(TIMINGS.drop(columns="p90_us"), gpu="H200")
    with pytest.raises(ValueError, match="timings: columns limit_us are missing"):
        plots.ladder(TIMINGS.drop(columns="limit_us"), gpu="H200")
    with pytest.raises(ValueError, match="limit_us must be positive"):
        plots.ladder(TIMINGS, gpu="H200", limit_us=0.0)
    with pytest.raises(ValueError, match="timings: no rows"):
        plots.ladder(TIMINGS.iloc[:0], gpu="H200")
    with pytest.raises(ValueError, match="published: columns gpu are missing"):
        plots.ladder(TIMINGS, PUBLISHED.drop(columns="gpu"), gpu="H200")


def test_roofline_places_what_was_run_and_what_was_not() -> None:
    (axes,) = roofline().axes
    places = {tuple(np.round(point, 3)) for marks in axes.collections for point in marks.get_offsets()}
    assert (1000.0, 333.333) in places  # 1e12 operations in 3 ms
    assert (16.667, 40.0) in places
    assert (15.385, 69.769) in places  # not run: intensity times the read rate
    assert {"best", "read 4\N{NARROW NO-BREAK SPACE}535 GB/s", "BF16 matmul 687 TFLOP/s", "151 FLOP/B"} <= set(
        texts(axes)
    )
    assert any("not run" in text.get_text() for text in axes.get_legend().get_texts())


def test_roofline_refuses_ceilings_of_nothing() -> None:
    points = pd.DataFrame({"op": ["a"], "flops": [1.0], "bytes": [1.0], "median_us": [1.0]})
    with pytest.raises(ValueError, match="read_gbps must be positive, not 0"):
        plots.roofline(points, read_gbps=0, peaks={"BF16": 1.0}, gpu="x")
    with pytest.raises(ValueError, match="peaks must name"):
        plots.roofline(points, read_gbps=1, peaks={}, gpu="x")


@pytest.mark.parametrize(
    ("y", "last"), [("ms", 4.096), ("us", 4096.0), ("tflops", 1e9 / 4096e6), ("gbps", 1e6 / 4096e3)]
)
def test_scaling_converts_units(y: str, last: float) -> None:
    (axes,) = plots.scaling(lengths(), "n", xlabel="N (tokens)", y=y).axes
    line = axes.containers[0].lines[0]
    assert line.get_xdata().tolist() == [512, 1024, 2048]
    assert line.get_ydata()[-1] == pytest.approx(last)
    low, high = axes.containers[0].lines[2][0].get_segments()[-1][:, 1]
    assert low < last < high


def test_scaling_names_an_unknown_unit() -> None:
    with pytest.raises(ValueError, match="y must be one of ms, us, tflops, gbps, not 'hours'"):
        plots.scaling(lengths(), "n", xlabel="N", y="hours")


def test_errors_ring_what_failed() -> None:
    (axes,) = CHARTS["errors"]().axes
    rings = [marks for marks in axes.collections if marks.get_label() == "above its bound"]
    (place,) = rings[0].get_offsets()
    assert place.tolist() == pytest.approx([1.12, 8e-3])
    clean = plots.errors(PARITY[PARITY["passed"]]).axes[0]
    assert "above its bound" not in [text.get_text() for text in clean.get_legend().get_texts()]


def test_series_differ_without_colour() -> None:
    assert len(set(plots.MARKERS)) == len(set(plots.COLOURS)) == len(set(map(str, plots.DASHES))) == 7


def test_colours_differ_for_colour_blind_eyes() -> None:
    # Red-green blindness, Machado et al. 2009, severity 1, on linear light.
    deuteranopia = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    protanopia = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
    for matrix in (np.eye(3), deuteranopia, protanopia):
        seen = [np.clip(matrix @ np.power(to_rgb(colour), 2.2), 0, 1) ** (1 / 2.2) for colour in plots.COLOURS[:4]]
        assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 0.15


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05634, "0.0563"),
        (1.266, "1.27"),
        (127.4, "127"),
        (4535.2, "4\N{NARROW NO-BREAK SPACE}535"),
        (0, "0"),
        (9.999, "10.00"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert plots.number(value) == text
