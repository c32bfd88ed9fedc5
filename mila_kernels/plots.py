"""The charts: ladder, roofline, scaling, errors. Each takes tables and returns a matplotlib Figure.

Colours are the Okabe-Ito set, which colour-blind readers tell apart; every series also has its own marker, line style
or hatch, so the charts read in grey. Whiskers and bands go from the 10th to the 90th percentile of the samples.
``save`` writes SVG and PNG that depend on nothing but the figure: no dates, no random ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
INK, MUTED, FAINT = "#222222", "#666666", "#DDDDDD"
COLOURS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, YELLOW)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "mila_kernels",
}


def _require(table: pd.DataFrame, columns: Iterable[str], argument: str) -> None:
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise ValueError(f"{argument}: columns {', '.join(missing)} are missing; it has {', '.join(table.columns)}")
    if table.empty:
        raise ValueError(f"{argument}: no rows to draw")


def number(value: float, significant: int = 3) -> str:
    """At least three significant digits, without exponent: 0.0563, 1.27, 127, 4 535."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _plain_log(axis: matplotlib.axis.Axis) -> None:
    """1, 10, 100 on a logarithmic axis in place of powers; 2 and 5 between them where there is room."""
    low, high = sorted(axis.get_view_interval())
    subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.2 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 10_000 else f"{value / 1000:g}k"))
    axis.set_minor_formatter(NullFormatter())


def _binary_log(axis: matplotlib.axis.Axis, values: Sequence[float]) -> None:
    """Ticks at the measured sizes themselves, 8K for 8192."""
    names = {value: f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}" for value in values}
    axis.set_ticks(sorted(names), [names[value] for value in sorted(names)])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def _whiskers(table: pd.DataFrame, scale: float) -> list[list[float]]:
    """Distances from the median down to p10 and up to p90, as errorbar wants them."""
    low = (table["median_us"] - table["p10_us"]).clip(lower=0) * scale
    high = (table["p90_us"] - table["median_us"]).clip(lower=0) * scale
    return [low.tolist(), high.tolist()]


def _mark_stale(labels: Iterable[str], stale: Iterable[object]) -> list[str]:
    return [f"{label} (stale)" if old else label for label, old in zip(labels, stale, strict=True)]


def _stale(table: pd.DataFrame) -> list[bool]:
    return table["stale"].fillna(False).astype(bool).tolist() if "stale" in table.columns else [False] * len(table)


# --- ladder ---


def ladder(
    timings: pd.DataFrame,
    published: pd.DataFrame | None = None,
    *,
    gpu: str,
    limit_us: float | None = None,
    title: str = "",
    limit_name: str = "limit",
) -> Figure:
    """A bar a step: time on the left, the share of the limit that it reaches on the right.

    ``timings``: one row a step, in the order to draw, with ``step``, ``median_us``, ``p10_us``, ``p90_us`` and, if
    rows may be stale, ``stale``. Rows with an empty ``source_sha`` are peers and have a colour of their own.
    ``published``: rows with ``step``, ``ms`` and ``gpu``: others' figures for the same work; a step without one gets
    none, a step that only they have is drawn too; where they have ``slower``, the time is worked out from a percentage
    and marked. ``limit_us``: the least time that the device's measured ceilings
    allow; without it, ``timings`` has it as a column, each row its own run's. ValueError names a missing column or a
    limit that is not positive.
    """
    _require(timings, ("step", "median_us", "p10_us", "p90_us"), "timings")
    if limit_us is not None:
        timings = timings.assign(limit_us=limit_us)
    _require(timings, ("limit_us",), "timings")
    if not (timings["limit_us"] > 0).all():
        raise ValueError(f"limit_us must be positive, not {timings['limit_us'].tolist()}")
    limit_ms = timings["limit_us"].min() / 1e3
    theirs = pd.DataFrame(columns=["step", "ms", "gpu"]) if published is None else published
    if len(theirs):
        _require(theirs, ("step", "ms", "gpu"), "published")
    ours = timings.set_index("step")
    steps = [*ours.index, *(name for name in theirs["step"] if name not in ours.index)]
    steps = sorted(dict.fromkeys(steps)) if len(steps) > len(ours) else steps
    rows = {name: row for row, name in enumerate(steps)}
    stale = dict(zip(ours.index, _stale(timings), strict=True))

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.35 + 0.42 * len(steps)))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1))
        height, shift = (0.36, 0.2) if len(theirs) else (0.6, 0.0)
        _ladder_times(left, ours, theirs, rows, gpu, height, shift)
        left.axvline(limit_ms, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
        left.set_xscale("log")
        slowest = max([ours["p90_us"].max() / 1e3, *theirs["ms"].tolist()])
        left.set_xlim(limit_ms / 1.6, slowest * 3.2)
        left.text(limit_ms * 1.1, -0.62, f"{limit_name} {number(limit_ms)} ms", va="center", fontsize=8)
        _plain_log(left.xaxis)
        left.set_ylim(len(steps) - 0.4, -0.9)
        left.set_yticks(range(len(steps)), _mark_stale(steps, [stale.get(name, False) for name in steps]))
        left.tick_params(axis="y", length=0)
        left.grid(axis="x")
        left.set_xlabel("time (ms, logarithmic)")
        if len(theirs) or any(_peers(ours)):
            left.legend(loc="lower center", bbox_to_anchor=(0.42, 1.0), ncols=3, fontsize=8, handlelength=1.6)
        _ladder_shares(right, ours, rows)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    return figure


def _ladder_times(
    axes: Axes, ours: pd.DataFrame, theirs: pd.DataFrame, rows: Mapping[str, int], gpu: str, height: float, shift: float
) -> None:
    ms = ours["median_us"] / 1e3
    paired = set(theirs["step"])
    places = [rows[name] - (shift if name in paired else 0) for name in ours.index]
    kinds = pd.Series(_peers(ours), index=ours.index)
    for peer, colour, label in ((False, BLUE, gpu), (True, SKY, f"called instead, {gpu}")):
        chosen = [place for place, kind in zip(places, kinds, strict=True) if kind == peer]
        if chosen:
            axes.barh(chosen, ms[kinds == peer], height=height, color=colour, label=label)
    axes.errorbar(ms, places, xerr=_whiskers(ours, 1e-3), fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    for place, value, high in zip(places, ms, ours["p90_us"] / 1e3, strict=True):
        axes.text(max(value, high) * 1.09, place, f"{number(value)} ms", va="center", fontsize=8.5, fontweight="bold")
    if not len(theirs):
        return
    places = [rows[name] + shift for name in theirs["step"]]
    label = f"published, {', '.join(dict.fromkeys(theirs['gpu']))}"
    axes.barh(places, theirs["ms"], height=height, color="#F2F2F2", edgecolor=MUTED, hatch="////", label=label)
    slower = theirs["slower"] if "slower" in theirs else pd.Series(float("nan"), index=theirs.index)
    for place, value, more in zip(places, theirs["ms"], slower, strict=True):
        text = f"{number(value)} ms" if pd.isna(more) else f"about {number(value, 2)} ms: {more:g} % slower"
        axes.text(value * 1.09, place, text, va="center", fontsize=8.5, color=MUTED)


def _peers(timings: pd.DataFrame) -> list[bool]:
    return (timings["source_sha"] == "").tolist() if "source_sha" in timings.columns else [False] * len(timings)


def _ladder_shares(axes: Axes, ours: pd.DataFrame, rows: Mapping[str, int]) -> None:
    shares = ours["limit_us"] / ours["median_us"]
    places = [rows[name] for name in ours.index]
    axes.barh(places, [1.0] * len(places), height=0.5, color="white", edgecolor=FAINT, linewidth=0.8)
    axes.barh(places, shares, height=0.5, color=GREEN)
    for place, share in zip(places, shares, strict=True):
        inside = share > 0.7
        axes.text(
            share - 0.03 if inside else share + 0.03, place, f"{number(100 * share, 2)} %", va="center", fontsize=8.5,
            ha="right" if inside else "left", color="white" if inside else INK, fontweight="bold",
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.set_xticks((0, 0.5, 1))
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("share of the limit")


# --- roofline ---


def roofline(
    points: pd.DataFrame,
    *,
    read_gbps: float,
    peaks: Mapping[str, float],
    gpu: str,
    title: str = "",
) -> Figure:
    """Throughput against arithmetic intensity, under the measured ceilings.

    ``points``: rows with ``op``, ``flops``, ``bytes`` and ``median_us``; where ``median_us`` is missing (NaN) the
    workload has not been run, and an open marker shows what the ceilings allow. An optional ``label`` is written beside
    its point. ``read_gbps``: GB/s. ``peaks``: name to TFLOP/s, such as ``{"BF16 matmul": 687}``, the lowest of which
    bounds the open markers. ValueError names a missing column or a ceiling that is not positive.
    """
    _require(points, ("op", "flops", "bytes", "median_us"), "points")
    for name, value in {"read_gbps": read_gbps, **peaks}.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}")
    if not peaks:
        raise ValueError("peaks must name at least one ceiling in TFLOP/s")
    intensity = points["flops"] / points["bytes"]
    roof = min(peaks.values())
    allowed = (intensity * read_gbps / 1e3).clip(upper=roof)
    reached = (points["flops"] / points["median_us"] / 1e6).where(points["median_us"].notna(), allowed)

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.subplots()
        low, high = min(intensity.min(), 1) / 2, max(intensity.max() * 2, 50 * max(peaks.values()) * 1e3 / read_gbps)
        _roofs(axes, read_gbps, peaks, low, high)
        for series, (op, rows) in enumerate(points.groupby("op", sort=True)):
            measured, colour = rows["median_us"].notna(), COLOURS[series % 7]
            style: dict[str, Any] = {
                "marker": MARKERS[series % 7],
                "s": 34,
                "edgecolors": colour,
                "linewidths": 1.2,
                "zorder": 4,
            }
            axes.scatter(intensity[rows.index[~measured]], reached[rows.index[~measured]], color="white", **style)
            axes.scatter(intensity[rows.index[measured]], reached[rows.index[measured]], color=colour, **style)
            axes.scatter([], [], color=colour, label=str(op), **style)
        if points["median_us"].isna().any():
            axes.scatter([], [], s=34, color="white", edgecolors=MUTED, label="open: not run,\nwhat the ceilings allow")
        _point_labels(axes, points, intensity, reached)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(min(reached.min(), low * read_gbps / 1e3) / 1.5, max(peaks.values()) * 2.2)
        _plain_log(axes.xaxis)
        _plain_log(axes.yaxis)
        axes.grid(which="major")
        axes.set_xlabel("arithmetic intensity (FLOP a byte of device memory, fewest bytes)")
        axes.set_ylabel("throughput (TFLOP/s)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
        axes.set_title(title or f"{gpu}: measured ceilings, and the workloads under them")
    return figure


def _roofs(axes: Axes, read_gbps: float, peaks: Mapping[str, float], low: float, high: float) -> None:
    for series, (name, peak) in enumerate(sorted(peaks.items(), key=lambda item: item[1])):
        ridge = peak * 1e3 / read_gbps
        axes.plot([ridge, high], [peak, peak], color=INK, linestyle=DASHES[series], linewidth=1.4, zorder=2)
        axes.text(high / 1.08, peak * 1.07, f"{name} {number(peak)} TFLOP/s", ha="right", va="bottom", fontsize=8.5)
        axes.plot([ridge, ridge], [peak / 30, peak], color=MUTED, linewidth=0.7, linestyle=":", zorder=1)
        side: dict[str, Any] = {"ha": "right"} if series == 0 else {"ha": "left"}
        nudge = 0.97 if series == 0 else 1.05
        axes.text(ridge * nudge, peak / 28, f"{number(ridge)} FLOP/B", fontsize=8, color=MUTED, rotation=90, **side)
    top = max(peaks.values())
    axes.plot([low, top * 1e3 / read_gbps], [low * read_gbps / 1e3, top], color=INK, linewidth=1.4, zorder=2)
    axes.annotate(
        f"read {number(read_gbps)} GB/s",
        (low * 2.2, low * 2.2 * read_gbps / 1e3), (-4, 8), textcoords="offset points", fontsize=8.5,
        rotation=45, rotation_mode="anchor", transform_rotates_text=True, va="bottom",
    )  # fmt: skip


def _point_labels(axes: Axes, points: pd.DataFrame, intensity: pd.Series, reached: pd.Series) -> None:
    if "label" not in points.columns:
        return
    for x, y, label in zip(intensity, reached, points["label"], strict=True):
        if pd.isna(label):
            continue
        axes.annotate(str(label), (x, y), (7, -3), textcoords="offset points", fontsize=7.5, color=INK, zorder=5)


# --- scaling ---


def scaling(
    timings: pd.DataFrame,
    x: str,
    *,
    xlabel: str,
    y: str = "ms",
    series: str = "step",
    reference: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """How time or throughput moves with a size, a line a series.

    ``timings``: rows with the columns ``x`` (a size, above 0), ``series``, ``median_us``, ``p10_us``, ``p90_us``, and
    ``flops`` (for ``y="tflops"``) or ``bytes`` (for ``y="gbps"``); ``y="ms"`` and ``y="us"`` draw times. ``reference``:
    name to a level in y's unit, drawn as a horizontal line. ValueError names a missing column or an unknown y.
    """
    units = {"ms": "time (ms)", "us": "time (\N{MICRO SIGN}s)", "tflops": "throughput (TFLOP/s)", "gbps": "rate (GB/s)"}
    if y not in units:
        raise ValueError(f"y must be one of {', '.join(units)}, not {y!r}")
    work = {"tflops": ("flops",), "gbps": ("bytes",)}.get(y, ())
    _require(timings, (x, series, "median_us", "p10_us", "p90_us", *work), "timings")

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.0))
        axes = figure.subplots()
        ends = []
        for index, (name, rows) in enumerate(timings.sort_values(x).groupby(series, sort=True)):
            centre, low, high = (_quantity(rows, column, y) for column in ("median_us", "p10_us", "p90_us"))
            if y in ("tflops", "gbps"):
                low, high = high, low  # the slow tail is the low rate
            colour, label = COLOURS[index % 7], _mark_stale([str(name)], [any(_stale(rows))])[0]
            spread = [(centre - low).clip(lower=0), (high - centre).clip(lower=0)]
            axes.errorbar(
                rows[x], centre, yerr=spread, color=colour, marker=MARKERS[index % 7],
                linestyle=DASHES[index % 7], capsize=2.5, elinewidth=1, label=label,
            )  # fmt: skip
            ends.append((float(centre.iloc[-1]), label, colour))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _binary_log(axes.xaxis, timings[x].unique().tolist())
        for name, level in (reference or {}).items():
            axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
            place = (0.01, level)
            axes.text(*place, f"{name} {number(level)}", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
        _plain_log(axes.yaxis)
        axes.grid()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(f"{units[y]}, median, whiskers p10 to p90")
        _legend_in_order(axes, ends)
        if title:
            axes.set_title(title)
    return figure


def _quantity(rows: pd.DataFrame, column: str, y: str) -> pd.Series:
    micros = rows[column]
    if y == "tflops":
        return rows["flops"] / micros / 1e6
    if y == "gbps":
        return rows["bytes"] / micros / 1e3
    return micros / 1e3 if y == "ms" else micros


def _legend_in_order(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """A legend whose entries stand as the lines end: the topmost first."""
    order = [label for _, label, _ in sorted(ends, reverse=True)]
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend([handles[label] for label in order], order, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)


# --- stages ---


def stages(rows: pd.DataFrame, *, gpu: str, title: str = "") -> Figure:
    """A panel a step: the time that is left when a stage is left out, under the time of the whole step.

    ``rows``: one row a step and stage, in the order to draw, with ``step``, ``stage``, ``whole_us`` and ``median_us``,
    the time without that stage. What a bar lacks to the whole is what the step waited for the stage. ValueError names
    a missing column.
    """
    _require(rows, ("step", "stage", "whole_us", "median_us"), "rows")
    groups = list(rows.groupby("step", sort=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 0.6 + sum(0.5 + 0.34 * (len(group) + 1) for _, group in groups)))
        ratios = [len(group) + 1.6 for _, group in groups]
        panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for axes, (name, group) in zip(panels, groups, strict=True):
            _stage_panel(axes, _mark_stale([str(name)], [any(_stale(group))])[0], group)
        panels[-1].set_xlabel(f"time (ms), {gpu}")
        panels[-1].set_xlim(0, rows["whole_us"].max() / 1e3 * 1.28)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    return figure


def _stage_panel(axes: Axes, name: str, group: pd.DataFrame) -> None:
    whole = group["whole_us"].iloc[0] / 1e3
    left_over = group["median_us"] / 1e3
    axes.barh([0], [whole], height=0.6, color=BLUE)
    axes.text(whole * 1.02, 0, f"{number(whole)} ms", va="center", fontsize=8.5, fontweight="bold")
    for place, rest in enumerate(left_over, start=1):
        axes.barh([place], [rest], height=0.6, color=SKY)
        axes.barh(
            [place], [max(0.0, whole - rest)], left=[rest], height=0.6, color="white", edgecolor=MUTED, hatch="////"
        )
        gone = f"{number(100 * (whole - rest) / whole, 2)} %"
        axes.text(max(whole, rest) * 1.02, place, f"{number(rest)} ms, {gone} gone", va="center", fontsize=8.5)
    axes.axvline(whole, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), zorder=3)
    axes.set_yticks(range(len(group) + 1), ["whole", *(f"without {stage}" for stage in group["stage"])])
    axes.set_ylim(len(group) + 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_title(name, fontsize=9, fontweight="bold")


# --- growth ---


def growth(table: pd.DataFrame, x: str, *, xlabel: str, ylabel: str, title: str = "") -> Figure:
    """How something grows with a size, on logarithmic axes: computed as lines, measured as markers on them.

    ``table``: rows with ``x``, ``series``, ``value`` and ``kind``, which is ``computed`` or ``measured``; values of 0
    have no place on such an axis and are left out. ValueError names a missing column, or says that nothing is above 0.
    """
    _require(table, (x, "series", "value", "kind"), "table")
    rows = table[table["value"] > 0]
    if rows.empty:
        raise ValueError("table: no value is above 0")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.0))
        axes = figure.subplots()
        ends = []
        for index, (name, series) in enumerate(rows.groupby("series", sort=False)):
            colour = COLOURS[index % 7]
            computed = series[series["kind"] == "computed"].sort_values(x)
            measured = series[series["kind"] == "measured"].sort_values(x)
            axes.plot(computed[x], computed["value"], color=colour, linestyle=DASHES[index % 7], label=str(name))
            axes.scatter(measured[x], measured["value"], color=colour, marker=MARKERS[index % 7], s=30, zorder=4)
            ends.append((float(series.sort_values(x)["value"].iloc[-1]), str(name), colour))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _binary_log(axes.xaxis, rows[x].unique().tolist())
        _plain_log(axes.yaxis)
        axes.grid()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if (rows["kind"] == "measured").any():
            axes.scatter([], [], color=MUTED, marker="o", s=30, label="markers: measured")
            ends.append((0.0, "markers: measured", MUTED))
        _legend_in_order(axes, ends)
        if title:
            axes.set_title(title)
    return figure


# --- errors ---


def errors(
    parity: pd.DataFrame,
    x: str = "step",
    *,
    xlabel: str = "",
    series: str = "backend",
    title: str = "",
) -> Figure:
    """Relative L2 error against the float64 truth, with the bound that each result had to keep.

    ``parity``: rows with ``x``, ``series``, ``rel_l2``, ``bound`` and ``passed``. Where x is text, every row is a point
    above its name; where it is a number, the median is a line and the band goes from p10 to p90 over the rows. A
    result that failed is ringed. ValueError names a missing column.
    """
    _require(parity, (x, series, "rel_l2", "bound", "passed"), "parity")
    numeric = pd.api.types.is_numeric_dtype(parity[x])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6))
        axes = figure.subplots()
        names = list(dict.fromkeys(parity[x]))
        places = (
            parity[x] if numeric else parity[x].map({name: place for place, name in enumerate(names)}).astype(float)
        )
        groups = list(parity.groupby(series, sort=True))
        shifted = places.copy()
        for index, (name, rows) in enumerate(groups):
            if numeric:
                _error_line(axes, rows, x, str(name), index)
                continue
            # Series side by side above a name, so that equal errors do not hide each other.
            shifted[rows.index] += (index - (len(groups) - 1) / 2) * 0.24
            style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 7]}
            axes.scatter(shifted[rows.index], rows["rel_l2"], s=24, label=str(name), **style)
        _bounds(axes, parity, places, numeric)
        failed = parity[~parity["passed"].astype(bool)]
        if len(failed):
            ring: dict[str, Any] = {"s": 130, "facecolors": "none", "edgecolors": VERMILION, "linewidths": 1.5}
            axes.scatter(shifted[failed.index], failed["rel_l2"], label="above its bound", **ring)
        axes.set_yscale("log")
        low, high = parity["rel_l2"][parity["rel_l2"] > 0].min(), max(parity["bound"].max(), parity["rel_l2"].max())
        axes.set_ylim(low / 3, high * 3)
        axes.grid(axis="y")
        axes.set_ylabel("relative L2 error against float64")
        axes.set_xlabel(xlabel)
        if numeric:
            axes.set_xscale("log", base=2)
            _binary_log(axes.xaxis, parity[x].unique().tolist())
        else:
            turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(names) > 5 else {}
            axes.set_xticks(range(len(names)), names, **turned)
            axes.set_xlim(-0.6, len(names) - 0.4)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
        if title:
            axes.set_title(title)
    return figure


def _error_line(axes: Axes, rows: pd.DataFrame, x: str, name: str, index: int) -> None:
    by_size = rows.groupby(x)["rel_l2"]
    middle, low, high = by_size.median(), by_size.quantile(0.1), by_size.quantile(0.9)
    style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 7], "linestyle": DASHES[index % 7]}
    axes.plot(middle.index, middle, label=name, **style)
    axes.fill_between(middle.index, low, high, color=COLOURS[index % 7], alpha=0.18, linewidth=0)


def _bounds(axes: Axes, parity: pd.DataFrame, places: pd.Series, numeric: bool) -> None:
    bounds = parity.assign(place=places).groupby("place")["bound"].max()
    if numeric:
        axes.plot(bounds.index, bounds, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="bound")
        return
    reach = [(place - 0.4, place + 0.4) for place in bounds.index]
    axes.hlines(bounds, *zip(*reach, strict=True), color=INK, linewidth=1.4, label="bound")


# --- files ---


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Writes ``stem.svg`` and ``stem.png``, making the folder; the same figure gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    with matplotlib.rc_context(STYLE):
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
        figure.savefig(png, dpi=200, metadata={"Software": None})
    return svg, png


def trade(rows: pd.DataFrame) -> Figure:
    """TFLOP/s against error, a line a step through its numbers of tokens, the largest with the largest marker.

    ``rows``: the columns of the timings, ``tokens`` and ``rel_l2``.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6))
        axes = figure.subplots()
        for i, (name, group) in enumerate(rows.sort_values("tokens").groupby("step")):
            rate = group["flops"] / group["median_us"] / 1e6
            colour, marker = COLOURS[i % 7], MARKERS[i // 7 % 7]
            axes.plot(group["rel_l2"], rate, color=colour, linewidth=0.6, alpha=0.6)
            axes.scatter(group["rel_l2"], rate, s=10 + 8 * group["tokens"].rank(), color=colour, marker=marker,
                         label=str(name))  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("relative error")
        axes.set_ylabel("TFLOP/s")
        axes.grid()
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title("Rate against error: larger markers, more tokens")
        figure.set_layout_engine("constrained")
    return figure
