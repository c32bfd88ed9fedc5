"""The tables: safe appends, merging, stale rows, export. Their schema is in :mod:`mila_kernels.schema`.

A run writes CSV tables of raw figures into its own folder, ``results/local/<run id>/``; :func:`record` merges that
into a tracked folder such as ``results/h200/``. Rows are validated when written and when read. Several processes may
write to one folder at once, and any of them may be killed at any moment: a line that a killed writer left half written
is set aside in ``<table>.csv.torn`` and never parsed.

Speed-ups, rates and shares are not stored; :func:`with_rates` derives them.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import secrets
import socket
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import pandas as pd

from mila_kernels import ablate, paths, steps
from mila_kernels.files import write_atomically
from mila_kernels.peaks import check_rate, peak
from mila_kernels.schema import (
    RUN_TABLES,
    TABLES,
    AblationRow,
    AnyRow,
    CounterRow,
    NotebookRow,
    ParityRow,
    ResultsError,
    Row,
    RunRow,
    SampleRow,
    SanitizerRow,
    StaticRow,
    TimingRow,
    columns,
    decode,
    encode,
    format_value,
    line,
    row_type,
    types,
    validate,
)

__all__ = [
    "TABLES", "AblationRow", "CounterRow", "NotebookRow", "ParityRow", "ResultsError", "Row", "RunRow", "RunWriter",
    "SampleRow", "SanitizerRow", "StaticRow", "TimingRow", "append", "columns", "export", "limit_us", "merge", "read",
    "record", "table", "with_rates", "write",
]  # fmt: skip

RUN_FOLDER_VARIABLE = "MILA_RUN_FOLDER"  # set by a batch, so that all of its processes write into one run
RUN_ID_VARIABLE = "MILA_RUN_ID"
LOCK_SECONDS = 60.0
ERROR_LENGTH = 500

# ---- texts ----

_PATH = re.compile(r"(?<![\w./:])(?:/|~/|[A-Za-z]:\\)(?:[^\s'\"<>|:,;()\[\]]+[/\\])+")


def clean(text: str, length: int = ERROR_LENGTH) -> str:
    """Text fit for a row: one line of at most ``length`` characters, without absolute paths and this host's name."""
    text = text.replace(f"{paths.ROOT}{os.sep}", "").replace(f"{Path.home()}{os.sep}", "")
    text = _PATH.sub("", text)
    host = socket.gethostname()
    if len(host) > 2 and host != "localhost":
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", text)
    text = " ".join("".join(c if ord(c) >= 32 else " " for c in text).split())
    return text if len(text) <= length else text[: length - 3] + "..."


def _cleaned(row: AnyRow) -> AnyRow:
    """The row with all of its texts made fit."""
    texts = {f.name: value for f in dataclasses.fields(row) if isinstance(value := getattr(row, f.name), str)}
    most = {"samples_us": 1 << 20}
    return replace(row, **{name: clean(value, most.get(name, ERROR_LENGTH)) for name, value in texts.items()})


# ---- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Exclusive use of a folder's tables; the kernel frees the lock of a killed process."""
    lock = filelock.FileLock(folder / ".lock", timeout=LOCK_SECONDS)
    try:
        with lock:
            yield
    except filelock.Timeout:
        raise ResultsError(f"{folder / '.lock'} is held by another process for {LOCK_SECONDS:g} s") from None


def _path(folder: Path, table: str) -> Path:
    return folder / f"{table}.csv"


def append(folder: Path, row: Row) -> None:
    """Add a row to its table in ``folder`` (made if missing), on disk when this returns.

    The line goes out whole, in one write under the folder's lock. Raises ResultsError for a row or file that does not
    fit the schema, before anything is written.
    """
    validate(row)
    row.check_new()
    with _lock(_made(folder)):
        _append(folder, row)


def _append(folder: Path, row: Row) -> None:
    """Under the lock: one write of the whole line."""
    header, written = line(columns(row.TABLE)), encode(row)
    path = _path(folder, row.TABLE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = _set_aside_torn(path, descriptor)
        if end:
            _check_header(path, os.pread(descriptor, len(header) + 1024, 0), header)
        data = written if end else header + written
        if os.pwrite(descriptor, data, end) != len(data):
            os.ftruncate(descriptor, end)
            raise OSError(f"{path}: the disk took only a part of the row; it was taken back")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_header(path: Path, start: bytes, header: bytes) -> None:
    found = start.split(b"\n", 1)[0] + b"\n"
    if found != header:
        raise ResultsError(f"{path}: its columns are {found.decode(errors='replace').strip()}, not "
                           f"{header.decode().strip()}")  # fmt: skip


def _set_aside_torn(path: Path, descriptor: int) -> int:
    """Move a last line without its end into ``<table>.csv.torn``; returns the size of what is whole."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0) if size else b""
    end = data.rfind(b"\n") + 1
    if end == size:
        return end
    with open(f"{path}.torn", "ab") as torn:
        torn.write(data[end:] + b"\n")
        torn.flush()
        os.fsync(torn.fileno())
    os.ftruncate(descriptor, end)
    os.fsync(descriptor)
    warnings.warn(f"{path.name}: a killed writer left half a row; it is in {path.name}.torn", stacklevel=3)
    return end


def read(folder: Path, table: str) -> list[Any]:
    """All rows of a table in a folder (none if there is no such file), each validated.

    Raises ResultsError naming file, line and column of what does not fit.
    """
    kind_of_row = row_type(table)
    path = _path(folder, table)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if data and not data.endswith(b"\n"):
        data = _read_whole(path, data)
    if not data:
        return []
    _check_header(path, data, line(columns(table)))
    lines = data.decode("utf-8").splitlines()
    where = f"{path.parent.name}/{path.name}"
    parsed = csv.reader(lines[1:], strict=True)
    try:
        return [decode(kind_of_row, values, f"{where} line {number}") for number, values in enumerate(parsed, start=2)]
    except csv.Error as error:
        raise ResultsError(f"{where} line {parsed.line_num + 1}: {error}") from None


def _read_whole(path: Path, seen: bytes) -> bytes:
    """The whole lines of a table whose last line is not: by now written, or else set aside where one may write."""
    try:
        with _lock(path.parent):
            _settle(path)
            return path.read_bytes()
    except (OSError, NotImplementedError):
        warnings.warn(f"{path.name}: its last line is torn and left out", stacklevel=3)
        return seen[: seen.rfind(b"\n") + 1]


def _settle(path: Path) -> None:
    """Under the lock: set a torn last line aside, so that read() takes what is there."""
    if path.exists():
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _set_aside_torn(path, descriptor)
        finally:
            os.close(descriptor)


def write(folder: Path, table: str, rows: Sequence[Row]) -> None:
    """Replace a table by ``rows``, atomically: a reader or a kill sees the old table or the new one."""
    with _lock(_made(folder)):
        _replace(folder, table, rows)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _replace(folder: Path, table: str, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.TABLE != table:
            raise ResultsError(f"a row of {row.TABLE} does not belong into {table}")
        validate(row)
    write_atomically(_path(folder, table), b"".join([line(columns(table)), *map(encode, rows)]), durable=True)


# ---- runs ------------------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    """A name for a run that sorts by time and that no other run has, e.g. ``20261129T181500Z-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def provenance() -> dict[str, Any]:
    """What a runs row says of this machine and tree; what is absent here is left out.

    In a copied tree ``MILA_GIT_SHA`` and ``MILA_GIT_DIRTY`` (0 or 1) say what was copied; they go before git's word.
    """
    import torch

    from mila_kernels import nvml

    found: dict[str, Any] = {
        "torch": torch.__version__, "triton": _version("triton"), "nvcc": _nvcc_version(), **_git(),
    }  # fmt: skip
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        state = nvml.state()
        found |= {
            "gpu": torch.cuda.get_device_name(), "sm": f"sm_{major}{minor}", "cuda": torch.version.cuda or "",
            "driver": nvml.driver(), "power_w": state.power_w, "temp_c": state.temp_c, "sm_mhz": state.sm_mhz,
        }  # fmt: skip
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvcc_version() -> str:
    found = re.search(r"release [\d.]+, V([\d.]+)", _output("nvcc", "--version") or "")
    return found[1] if found else ""


def _git() -> dict[str, Any]:
    told, dirty = os.environ.get("MILA_GIT_SHA", ""), os.environ.get("MILA_GIT_DIRTY", "")
    if told:
        return {"git_sha": told, "dirty": dirty == "1" if dirty in ("0", "1") else None}
    sha = _output("git", "rev-parse", "HEAD")
    # What a run writes under results/ is no change of the code that it measured.
    changed = _output("git", "status", "--porcelain", "--", ".", ":!results") if sha else None
    return {"git_sha": sha or "", "dirty": bool(changed) if changed is not None else None}


class RunWriter:
    """One run's folder, open for rows: ``with RunWriter() as run: run.add(row)``.

    Inside a batch (its environment names folder and id) all processes share the batch's run; elsewhere a new
    ``results/local/<run id>/`` is made. The run's row of ``runs`` is written on entering, unless it is there.
    """

    def __init__(self, folder: Path | None = None, run_id: str | None = None) -> None:
        named = os.environ.get(RUN_FOLDER_VARIABLE) if folder is None else None
        inherited = os.environ.get(RUN_ID_VARIABLE) if named else None
        self.run_id: str = run_id or inherited or new_run_id()
        self.folder: Path = folder or (Path(named) if named else paths.RESULTS / "local" / self.run_id)

    def __enter__(self) -> RunWriter:
        if self._row() is None:
            utc = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            row = RunRow(run_id=self.run_id, utc=utc, **provenance())
            validate(row)
            with _lock(_made(self.folder)):
                _settle(_path(self.folder, "runs"))
                if self._row() is None:  # another process of the batch may have come first
                    _append(self.folder, row)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Nothing to close: every row is on disk since it was added."""

    def _row(self) -> RunRow | None:
        return next((row for row in read(self.folder, "runs") if row.run_id == self.run_id), None)

    @property
    def row(self) -> RunRow:
        """This run's row of ``runs`` as it is on disk."""
        found = self._row()
        if found is None:
            raise ResultsError(f"run {self.run_id} has no row in {self.folder.name}/runs.csv")
        return found

    def add(self, row: AnyRow) -> AnyRow:
        """Append a row, with this run's id and with texts made fit; returns it as written.

        Raises ImpossibleRate for a timing above the GPU's theoretical peak: nothing is written then.
        """
        written = replace(_cleaned(row), run_id=self.run_id)  # type: ignore[call-arg]
        if isinstance(written, TimingRow) and written.status == "ok":
            validate(written)
            check_timing(written, self.row.gpu)
        append(self.folder, written)
        return written

    def update(self, **values: Any) -> RunRow:
        """Change columns of this run's row (ceilings, clocks), atomically; returns the new row."""
        with _lock(_made(self.folder)):
            _settle(_path(self.folder, "runs"))
            rows = read(self.folder, "runs")
            changed = [replace(row, **values) if row.run_id == self.run_id else row for row in rows]
            _replace(self.folder, "runs", changed)
        return self.row


def check_timing(row: TimingRow, gpu: str) -> None:
    """Raise ImpossibleRate if an ok row's rate is above the theoretical peak of the GPU of that name (if known)."""
    if row.status == "ok" and row.median_us and row.flops is not None and row.bytes is not None:
        what = f"{row.op}/{row.step} {row.workload or row.shape} {row.cache}"
        check_rate(
            peak(gpu), flops=row.flops, bytes=row.bytes, seconds=row.median_us * 1e-6, cache=row.cache, what=what
        )


# ---- merging ---------------------------------------------------------------------------------------------------------


def record(run_id: str | Path, as_: str, results: Path | None = None) -> dict[str, int]:
    """Merge a local run into the tracked ``results/<as_>/``: rows, notebooks that ran to their end, and figures.

    ``run_id`` names a folder of ``results/local/``, or is a run's folder itself. Doing it twice changes nothing.
    Returns how many rows each table gained, and under "files" how many files were copied.

    Raises ValueError for an unknown run, or a name that does not fit the GPU the run was made on.
    """
    results = results or paths.RESULTS
    source = Path(run_id) if Path(run_id).is_dir() else results / "local" / str(run_id)
    if not source.is_dir():
        there = sorted(p.name for p in (results / "local").glob("*") if p.is_dir())
        raise ValueError(f"run_id: {str(run_id)!r} is no run; there are: {', '.join(there[-5:]) or 'none'}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", as_) or as_ == "local":
        raise ValueError(f"as: {as_!r} must be a short name such as h200 or h200-x2, of a-z, 0-9, '-' and '.'")
    runs = read(source, "runs")
    if not runs:
        raise ValueError(f"run_id: {source.name} holds no run (its runs.csv has no row)")
    for row in runs:
        _check_name(as_, row.gpu)
    gained = _merge_tables(source, results / as_)
    whole = [f"{row.notebook}.ipynb" for row in read(source, "notebooks") if row.status == "ok"]
    gained["files"] = sum(
        _copy_files(source / kind, results / as_ / kind, patterns)
        for kind, patterns in (("notebooks", whole), ("figures", ("*.svg", "*.png")))
    )
    return gained


def _check_name(as_: str, gpu: str) -> None:
    """h200 and h200-x2 fit NVIDIA H200; cpu fits a run without a GPU."""
    base = re.sub(r"-x\d+$", "", as_)
    plain = "".join(c for c in gpu.lower() if c.isalnum()) or "cpu"
    if "".join(c for c in base if c.isalnum()) not in plain:
        raise ValueError(f"as: {as_!r} does not fit a run made on {gpu or 'no GPU (use cpu)'}")


def _merge_tables(source: Path, target: Path) -> dict[str, int]:
    """Add to target's tables the rows of source's that are not there."""
    gained = {}
    for name in RUN_TABLES:
        new = [_cleaned(row) for row in read(source, name)]
        if not new:
            continue
        with _lock(_made(target)):
            _settle(_path(target, name))
            old = read(target, name)
            merged = _merge_runs(old, new) if name == "runs" else _union(old, new)
            if merged != old:
                _replace(target, name, merged)
            gained[name] = len(merged) - len(old)
    return gained


def _union(old: list[Any], new: list[Any]) -> list[Any]:
    there = {encode(row) for row in old}
    return old + [row for row in new if encode(row) not in there]


def _merge_runs(old: list[RunRow], new: list[RunRow]) -> list[RunRow]:
    """One row a run; a run's later row (its ceilings measured since) replaces the earlier one in place."""
    table = {row.run_id: row for row in old}
    for row in new:
        before = table.get(row.run_id)
        if before and (before.utc, before.gpu, before.git_sha) != (row.utc, row.gpu, row.git_sha):
            raise ResultsError(f"runs: {row.run_id} is two different runs: {before} and {row}")
        table[row.run_id] = row
    return list(table.values())


def _copy_files(source: Path, target: Path, patterns: Sequence[str]) -> int:
    copied = 0
    for path in sorted(p for pattern in patterns for p in source.glob(pattern)):
        data = _without_paths(path.read_bytes()) if path.suffix == ".ipynb" else path.read_bytes()
        destination = target / path.name
        if destination.exists() and destination.read_bytes() == data:
            continue
        write_atomically(destination, data, durable=True)
        copied += 1
    return copied


_CHECKOUT = re.compile(r"(?<![\w./])/(?:[^\s/:\"'\\][^/:\"'\\]*/)+(?=mila_kernels/)")


def _without_paths(notebook: bytes) -> bytes:
    """An executed notebook that names files, not the folders of the machine that ran it: papermill's and warnings'."""
    content = json.loads(_CHECKOUT.sub("", notebook.decode()))
    marks = content.get("metadata", {}).get("papermill", {})
    for key in ("input_path", "output_path"):
        if isinstance(marks.get(key), str):
            marks[key] = Path(marks[key]).name
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def merge(folder: Path, results: Path | None = None) -> dict[str, dict[str, int]]:
    """Merge another machine's results folder: each of its ``<gpu>/`` into ours. Returns the rows gained by folder.

    Raises ValueError where ``folder`` holds no tables.
    """
    results = results or paths.RESULTS
    sources = sorted(p.parent for p in Path(folder).glob("*/runs.csv") if p.parent.name != "local")
    if not sources:
        raise ValueError(f"folder: {Path(folder).name!r} has no <gpu>/runs.csv; record a single run with record()")
    for source in sources:
        for row in read(source, "runs"):
            _check_name(source.name, row.gpu)
    gained = {}
    for source in sources:
        gained[source.name] = _merge_tables(source, results / source.name)
        for kind, patterns in (("notebooks", ("*.ipynb",)), ("figures", ("*.svg", "*.png"))):
            if not (results / source.name / kind).exists():  # ours of record stay
                _copy_files(source / kind, results / source.name / kind, patterns)
    return gained


# ---- reading for people ----------------------------------------------------------------------------------------------

_DTYPES: dict[type, str] = {str: "object", int: "Int64", float: "float64", bool: "boolean"}


def table(
    name: str, gpu: str | Path | None = None, *, latest: bool = True, results: Path | None = None
) -> pd.DataFrame:
    """A table as a DataFrame, with a ``stale`` column where rows name a source that has changed since.

    ``gpu`` names a folder of results/ (``h200``, ``local/<run id>``), or is a folder; ``static`` lies in results/
    itself. With ``latest`` only the latest run's row of each case is given, also where that case failed there. A
    missing table is empty, with all columns.
    """
    kind_of_row = row_type(name)
    root = results or paths.RESULTS
    folder = gpu if isinstance(gpu, Path) else root / gpu if gpu else root
    rows = read(folder, name)
    runs = {row.run_id: row for row in read(folder, "runs")} if name != "static" else {}
    for row in rows if name in ("timings", "ablations") else ():
        check_timing(row, runs[row.run_id].gpu if row.run_id in runs else "")
    if latest:
        rows = _latest(rows, kind_of_row.KEY, runs)
    frame = pd.DataFrame(
        {column: pd.Series([getattr(row, column) for row in rows], dtype=_DTYPES[kind])
         for column, kind in types(kind_of_row).items()}
    )  # fmt: skip
    if "source_sha" in frame:
        now = _CurrentSources()
        frame["stale"] = pd.Series([now.stale(row.op, row.step, row.source_sha) for row in rows], dtype="boolean")
    return frame


def _latest(rows: list[Any], key: Sequence[str], runs: dict[str, RunRow]) -> list[Any]:
    def when(row: Any) -> str:
        run = runs.get(getattr(row, "run_id", ""))
        return run.utc if run else ""

    order = sorted(range(len(rows)), key=lambda i: (when(rows[i]), i))
    chosen = {tuple(getattr(rows[i], column) for column in key): i for i in order}
    return [rows[i] for i in sorted(chosen.values())]


class _CurrentSources:
    """Digests of the steps as they are now."""

    def __init__(self) -> None:
        sources = [*steps.steps(), *steps.beside()]
        self.digests = {(step.op, step.name): step.source_sha for step in sources} | dict(ablate.digests())

    def stale(self, op: str, step: str, source_sha: str) -> bool:
        """True for a row of a step whose source has changed or is gone; peers have no source of ours."""
        name = step.rpartition("/")[2].partition(ablate.WITH)[0]
        return bool(source_sha) and self.digests.get((op, name)) != source_sha


FP8_OPS = ("gemm_w4a8",)


def limit_us(op: str, flops: float, bytes: float, run: RunRow) -> float | None:
    """The least microseconds that the run's measured ceilings allow: the larger of arithmetic and memory time."""
    rate = run.fp8_tflops if op in FP8_OPS else run.bf16_tflops
    terms = [flops / (rate * 1e6)] if rate else []
    terms += [bytes / (run.read_gbps * 1e3)] if run.read_gbps else []
    return max(terms, default=None)


def with_rates(timings: pd.DataFrame, gpu: str | Path, *, results: Path | None = None) -> pd.DataFrame:
    """Timings with ``tflops``, ``gbps``, ``limit_us`` and ``share`` (limit over median, 1 is the limit) beside them.

    The limits are the ceilings measured in each row's own run. A hot row whose bytes may come from L2 has no gbps and
    no share: device memory is not its limit.
    """
    root = results or paths.RESULTS
    folder = gpu if isinstance(gpu, Path) else root / gpu
    runs = {row.run_id: row for row in read(folder, "runs")}
    out = timings.copy()
    cold = out["cache"] == "cold"
    out["tflops"] = out["flops"] / out["median_us"] / 1e6
    out["gbps"] = (out["bytes"] / out["median_us"] / 1e3).where(cold)
    limits = [
        limit_us(row["op"], row["flops"], row["bytes"], runs[row["run_id"]])
        if row["run_id"] in runs and pd.notna(row["flops"]) and pd.notna(row["bytes"]) else None
        for row in out.to_dict("records")
    ]  # fmt: skip
    out["limit_us"] = pd.Series(limits, index=out.index, dtype="float64")
    out["share"] = (out["limit_us"] / out["median_us"]).where(cold)
    return out


def export(frame: pd.DataFrame, format: str = "md") -> str:
    """A table as text: ``csv``, ``md`` (Markdown) or ``latex`` (booktabs). Numbers do not depend on the locale."""
    cells = [[_cell(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    names = [str(name) for name in frame.columns]
    if format == "csv":
        return b"".join(line(row) for row in [names, *cells]).decode()
    numeric = [pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype) for dtype in frame.dtypes]
    if format == "md":
        rule = ["---:" if right else "---" for right in numeric]
        lines = [
            [name.replace("|", "\\|") for name in names],
            rule,
            *[[c.replace("|", "\\|") for c in r] for r in cells],
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if format == "latex":
        layout = "".join("r" if right else "l" for right in numeric)
        body = "".join(" & ".join(map(_latex, row)) + r" \\" + "\n" for row in cells)
        head = " & ".join(map(_latex, names)) + r" \\"
        return f"\\begin{{tabular}}{{{layout}}}\n\\toprule\n{head}\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
    raise ValueError(f"format must be csv, md or latex, not {format!r}")


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format_value(value.item() if hasattr(value, "item") else value)


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
