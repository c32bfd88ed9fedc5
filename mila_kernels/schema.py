"""The tables' schema: a dataclass a row, what each column may hold, and a row as one line of CSV.

A number is written the same whatever the locale, and reads back as it was written.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, TypeVar

from mila_kernels.peaks import ImpossibleRate, peak


class ResultsError(ValueError):
    """A row or table that does not fit its schema; the text names the file, line and column."""


# ---- the schema ------------------------------------------------------------------------------------------------------


def _text(*choices: str, optional: bool = False) -> Any:
    return field(default="", metadata={"choices": choices, "optional": optional})


def _number(low: float | None = 0.0, *, optional: bool = False, unit: str = "") -> Any:
    return field(default=None, metadata={"low": low, "optional": optional, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table. ``TABLE`` names it, ``KEY`` are the columns of which the latest run counts."""

    TABLE: ClassVar[str] = ""
    KEY: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raise ResultsError where columns contradict each other."""

    def check_new(self) -> None:
        """Raise ResultsError for what must not be written any more, though older rows have it."""


@dataclass(frozen=True, kw_only=True)
class RunRow(Row):
    """Where and with what a run was made. Values that a machine without a GPU lacks are empty. Rates are measured."""

    TABLE: ClassVar[str] = "runs"
    KEY: ClassVar[tuple[str, ...]] = ("run_id",)
    run_id: str = _text()
    utc: str = _text()
    gpu: str = _text(optional=True)
    sm: str = _text(optional=True)
    driver: str = _text(optional=True)
    cuda: str = _text(optional=True)
    nvcc: str = _text(optional=True)
    torch: str = _text(optional=True)
    triton: str = _text(optional=True)
    git_sha: str = _text(optional=True)
    dirty: bool | None = _number(optional=True)
    power_w: float | None = _number(optional=True, unit="W")
    temp_c: float | None = _number(None, optional=True, unit="degC")
    sm_mhz: float | None = _number(optional=True, unit="MHz")
    read_gbps: float | None = _number(optional=True, unit="GB/s")
    bf16_tflops: float | None = _number(optional=True, unit="TFLOP/s")
    fp8_tflops: float | None = _number(optional=True, unit="TFLOP/s")

    def check(self) -> None:
        try:
            datetime.strptime(self.utc, "%Y-%m-%dT%H:%M:%SZ")
        except ValueError:
            raise ResultsError(f"runs: utc must read like 2026-11-29T18:15:00Z, not {self.utc!r}") from None
        known = peak(self.gpu)
        if known is None:
            return
        limits = (("read_gbps", known.dram_gbps), ("bf16_tflops", known.most_tflops()))
        for name, most in (*limits, ("fp8_tflops", known.most_tflops())):
            value = getattr(self, name)
            if value is not None and most is not None and value > most:
                raise ImpossibleRate(f"runs: {name} {value:g} is above the {most:g} that {self.gpu} can do")


@dataclass(frozen=True, kw_only=True)
class TimingRow(Row):
    """One timed case: microseconds over n samples. A failed case has no figures, and its error."""

    TABLE: ClassVar[str] = "timings"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "workload", "shape", "dtype", "cache")
    run_id: str = _text()
    op: str = _text()
    step: str = _text()
    source_sha: str = _text(optional=True)
    workload: str = _text(optional=True)
    shape: str = _text()
    dtype: str = _text()
    cache: str = _text("cold", "hot")
    warmup: int | None = _number(optional=True)
    n: int | None = _number(1, optional=True)
    median_us: float | None = _number(optional=True, unit="us")
    p10_us: float | None = _number(optional=True, unit="us")
    p90_us: float | None = _number(optional=True, unit="us")
    min_us: float | None = _number(optional=True, unit="us")
    flops: float | None = _number(optional=True)
    bytes: float | None = _number(optional=True)
    status: str = _text("ok", "failed")
    error: str = _text(optional=True)

    def check(self) -> None:
        figures = {name: getattr(self, name) for name in ("median_us", "p10_us", "p90_us", "min_us")}
        if self.status == "failed":
            given = [name for name, value in figures.items() if value is not None]
            if given or not self.error:
                raise ResultsError("timings: a failed row has an error and no figures" + f", not {given}" * bool(given))
            return
        required = {**figures, "n": self.n, "warmup": self.warmup, "flops": self.flops, "bytes": self.bytes}
        missing = [name for name, value in required.items() if value is None]
        if missing or self.error:
            raise ResultsError(f"timings: an ok row has all figures and no error; missing: {missing}")
        low, p10, median, p90 = (float(figures[name]) for name in ("min_us", "p10_us", "median_us", "p90_us"))  # type: ignore[arg-type]
        if not 0 < low <= p10 <= median <= p90:
            raise ResultsError(f"timings: 0 < min <= p10 <= median <= p90 does not hold: {low}, {p10}, {median}, {p90}")


@dataclass(frozen=True, kw_only=True)
class AblationRow(TimingRow):
    """One timed case of a step with a stage left out: its result is wrong, so it never counts as a step's timing."""

    TABLE: ClassVar[str] = "ablations"


@dataclass(frozen=True, kw_only=True)
class SampleRow(Row):
    """Every sample of a timed part of a case, microseconds in order, separated by spaces."""

    TABLE: ClassVar[str] = "samples"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "workload", "shape", "cache", "method")
    run_id: str = _text()
    op: str = _text()
    step: str = _text()
    source_sha: str = _text(optional=True)
    workload: str = _text(optional=True)
    shape: str = _text()
    cache: str = _text("cold", "hot")
    method: str = _text()
    samples_us: str = _text()

    def check(self) -> None:
        try:
            values = [float(word) for word in self.samples_us.split()]
        except ValueError:
            raise ResultsError(f"samples: samples_us must be numbers, not {self.samples_us!r}") from None
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ResultsError("samples: every sample must be finite and positive")


@dataclass(frozen=True, kw_only=True)
class ParityRow(Row):
    """One comparison with float64. ``rel_l2`` is over the finite elements; ``nonfinite`` counts those that differ."""

    TABLE: ClassVar[str] = "parity"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "backend", "shape", "seed")
    run_id: str = _text()
    op: str = _text()
    step: str = _text()
    source_sha: str = _text(optional=True)
    backend: str = _text("cuda", "emulation")
    shape: str = _text()
    seed: int | None = _number()
    rel_l2: float | None = _number()
    max_abs: float | None = _number()
    nonfinite: int | None = _number()
    bound: float | None = _number()
    passed: bool | None = _number()

    def check(self) -> None:
        assert self.rel_l2 is not None and self.bound is not None and self.nonfinite is not None
        if self.passed and (self.nonfinite or self.rel_l2 > self.bound):
            raise ResultsError(
                f"parity: passed with rel_l2 {self.rel_l2} of bound {self.bound}, {self.nonfinite} nonfinite"
            )


@dataclass(frozen=True, kw_only=True)
class CounterRow(Row):
    """One hardware counter or one state of the device (power, clocks) for a step on a workload."""

    TABLE: ClassVar[str] = "counters"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "workload", "metric")
    run_id: str = _text()
    op: str = _text()
    step: str = _text()
    source_sha: str = _text(optional=True)
    workload: str = _text(optional=True)
    metric: str = _text()
    value: float | None = _number(None)
    unit: str = _text(optional=True)

    def check_new(self) -> None:
        """A launch's sizes are whole: half a block is the mean of two kernels."""
        if self.metric.startswith("launch__") and "waves" not in self.metric and (self.value or 0.0) % 1:
            raise ResultsError(f"counters: {self.metric} must be whole, not {self.value!r}")


@dataclass(frozen=True, kw_only=True)
class SanitizerRow(Row):
    """One compute-sanitizer tool over one step."""

    TABLE: ClassVar[str] = "sanitizer"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "tool", "workload")
    run_id: str = _text()
    op: str = _text()
    step: str = _text()
    source_sha: str = _text(optional=True)
    tool: str = _text("memcheck", "racecheck", "initcheck", "synccheck")
    workload: str = _text(optional=True)
    errors: int | None = _number()
    passed: bool | None = _number()

    def check(self) -> None:
        if self.passed and self.errors:
            raise ResultsError(f"sanitizer: passed with {self.errors} errors")


@dataclass(frozen=True, kw_only=True)
class NotebookRow(Row):
    """How one notebook of a batch ended."""

    TABLE: ClassVar[str] = "notebooks"
    KEY: ClassVar[tuple[str, ...]] = ("notebook",)
    run_id: str = _text()
    notebook: str = _text()
    status: str = _text("ok", "failed", "not run")
    seconds: float | None = _number(unit="s")
    cells_run: int | None = _number()
    cells: int | None = _number()
    rows: str = _text(optional=True)
    error: str = _text(optional=True)


@dataclass(frozen=True, kw_only=True)
class StaticRow(Row):
    """What the compiler and the disassembly say of one kernel of a step on one architecture."""

    TABLE: ClassVar[str] = "static"
    KEY: ClassVar[tuple[str, ...]] = ("op", "step", "arch", "kernel")
    op: str = _text()
    step: str = _text()
    source_sha: str = _text()
    arch: str = _text()
    kernel: str = _text()
    nvcc: str = _text(optional=True)
    registers: int | None = _number()
    smem_bytes: int | None = _number(optional=True)
    threads: int | None = _number(optional=True)
    spill_bytes: int | None = _number()
    HMMA: int | None = _number()
    HGMMA: int | None = _number()
    QGMMA: int | None = _number()
    LDSM: int | None = _number()
    LDGSTS: int | None = _number()
    UTMALDG: int | None = _number()
    FFMA: int | None = _number()


_ROWS: tuple[type[Row], ...] = (
    RunRow, TimingRow, AblationRow, SampleRow, ParityRow, CounterRow, SanitizerRow, NotebookRow, StaticRow,
)  # fmt: skip
TABLES: dict[str, type[Row]] = {row.TABLE: row for row in _ROWS}
RUN_TABLES = tuple(name for name in TABLES if name != "static")

AnyRow = TypeVar("AnyRow", bound=Row)


def columns(table: str) -> tuple[str, ...]:
    """The columns of a table in order; ValueError lists the tables."""
    return tuple(f.name for f in dataclasses.fields(row_type(table)))


def row_type(table: str) -> type[Row]:
    """The dataclass of a table's rows; ValueError lists the tables."""
    if table not in TABLES:
        raise ValueError(f"table must be one of {', '.join(TABLES)}, not {table!r}")
    return TABLES[table]


_TYPES: dict[type[Row], dict[str, type]] = {}


def types(kind: type[Row]) -> dict[str, type]:
    """Column name to str, int, float or bool."""
    if kind not in _TYPES:
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]
        _TYPES[kind] = {name: next(iter(typing.get_args(hints[name])), hints[name]) for name in names}
    return _TYPES[kind]


def validate(row: Row) -> None:
    """Raise ResultsError naming the column whose value does not fit the schema, or ImpossibleRate."""
    kinds = types(type(row))
    for column in dataclasses.fields(row):
        _check_value(f"{row.TABLE}: {column.name}", getattr(row, column.name), kinds[column.name], column.metadata)
    row.check()


def _check_value(name: str, value: Any, kind: type, rules: Any) -> None:
    if value is None or value == "":
        if not rules["optional"]:
            raise ResultsError(f"{name} must not be empty")
        return
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ResultsError(f"{name} must be {kind.__name__}, not {value!r}")
    if kind is str:
        if rules["choices"] and value not in rules["choices"]:
            raise ResultsError(f"{name} must be one of {', '.join(rules['choices'])}, not {value!r}")
        if any(ord(c) < 32 for c in value):
            raise ResultsError(f"{name} must be one line of text, not {value!r}")
        return
    if not math.isfinite(value):
        raise ResultsError(f"{name} must be finite, not {value!r}")
    if rules["low"] is not None and value < rules["low"]:
        raise ResultsError(f"{name} must be at least {rules['low']:g}, not {value!r}")


# ---- one line of a table ---------------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """A value as a cell: empty for None, true or false, floats to 9 digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return format(value, ".9g")  # never the locale's decimal comma, and the same text when written again
    return str(value)


def _parse(text: str, kind: type) -> Any:
    if kind is str:
        return text
    if text == "":
        return None
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if kind is int and not re.fullmatch(r"-?[0-9]+", text) or "_" in text:
        raise ValueError(text)
    return kind(text)


def line(values: Iterable[str]) -> bytes:
    """Cells as one line of CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(list(values))
    return out.getvalue().encode()


def encode(row: Row) -> bytes:
    """A row as its line."""
    return line(format_value(getattr(row, name)) for name in columns(row.TABLE))


def decode(kind_of_row: type[AnyRow], fields: Sequence[str], where: str) -> AnyRow:
    """A row of cells, validated; errors begin with ``where``."""
    kinds = types(kind_of_row)
    if len(fields) != len(kinds):
        raise ResultsError(f"{where}: {len(fields)} columns, not {len(kinds)}")
    values = {}
    for (name, kind), text in zip(kinds.items(), fields, strict=True):
        try:
            values[name] = _parse(text, kind)
        except ValueError:
            raise ResultsError(f"{where}: {name} must be {kind.__name__}, not {text!r}") from None
    row = kind_of_row(**values)
    try:
        validate(row)
    except ImpossibleRate as error:
        raise ImpossibleRate(f"{where}: {error}") from None
    except ResultsError as error:
        raise ResultsError(f"{where}: {error}") from None
    return row
