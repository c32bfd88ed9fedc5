"""The tables: schema, concurrent and killed writers, merging, stale rows, export."""

from __future__ import annotations

import dataclasses
import json
import locale
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from mila_kernels import results, steps
from mila_kernels.paths import ROOT
from mila_kernels.peaks import ImpossibleRate
from mila_kernels.results import (
    CounterRow,
    NotebookRow,
    ParityRow,
    ResultsError,
    RunRow,
    RunWriter,
    SampleRow,
    TimingRow,
)

H200 = "NVIDIA H200"


def timing(**changes) -> TimingRow:
    row = TimingRow(
        run_id="r1", op="prefill", step="01_scalar", source_sha="", workload="", shape="b1 q8h1 kv8h1 d64 causal bf16",
        dtype="bf16", cache="cold", warmup=3, n=20, median_us=100.0, p10_us=90.0, p90_us=120.0, min_us=80.0,
        flops=1e9, bytes=1e8, status="ok",
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def parity(**changes) -> ParityRow:
    row = ParityRow(
        run_id="r1", op="prefill", step="01_scalar", source_sha="", backend="emulation", shape="s", seed=0,
        rel_l2=1e-3, max_abs=0.01, nonfinite=0, bound=4e-3, passed=True,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def a_run(folder: Path, run_id: str, utc: str, gpu: str = H200, **more) -> None:
    results.append(folder, RunRow(run_id=run_id, utc=utc, gpu=gpu, **more))


# ---- schema ----


def test_columns_are_those_of_the_design():
    assert ",".join(results.columns("runs")) == (
        "run_id,utc,gpu,sm,driver,cuda,nvcc,torch,triton,git_sha,dirty,power_w,temp_c,sm_mhz,read_gbps,bf16_tflops,"
        "fp8_tflops"
    )
    assert ",".join(results.columns("timings")) == (
        "run_id,op,step,source_sha,workload,shape,dtype,cache,warmup,n,median_us,p10_us,p90_us,min_us,flops,bytes,"
        "status,error"
    )
    assert ",".join(results.columns("parity")) == (
        "run_id,op,step,source_sha,backend,shape,seed,rel_l2,max_abs,nonfinite,bound,passed"
    )
    assert ",".join(results.columns("counters")) == "run_id,op,step,source_sha,workload,metric,value,unit"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (timing(median_us=float("nan")), "median_us must be finite"),
        (timing(median_us=float("inf")), "median_us must be finite"),
        (timing(median_us="100"), "median_us must be float"),
        (timing(n=True), "n must be int"),
        (timing(n=0), "n must be at least 1"),
        (timing(min_us=-1.0), "min_us must be at least 0"),
        (timing(p10_us=101.0), "min <= p10 <= median <= p90"),
        (timing(cache="warm"), "cache must be one of cold, hot"),
        (timing(op=""), "op must not be empty"),
        (timing(flops=None), "missing: \\['flops'\\]"),
        (timing(status="failed"), "a failed row has an error and no figures"),
        (timing(error="odd"), "no error"),
        (timing(shape="two\nlines"), "shape must be one line"),
        (parity(backend="gpu"), "backend must be one of"),
        (parity(rel_l2=1.0), "passed with rel_l2 1.0"),
        (parity(nonfinite=1), "1 nonfinite"),
        (parity(passed=None), "passed must not be empty"),
        (RunRow(run_id="r", utc="yesterday"), "utc must read like"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, row, message):
    with pytest.raises(ResultsError, match=message):
        results.append(tmp_path / "run", row)
    assert not list((tmp_path).iterdir())


def test_rows_come_back_as_written(tmp_path):
    nothing = {"median_us": None, "p10_us": None, "p90_us": None, "min_us": None}
    rows = [
        timing(),
        timing(workload='with "quotes", commas', median_us=1e-7 * 2**30, bytes=3e20),
        timing(status="failed", error="out of memory", **nothing),
    ]
    for row in rows:
        results.append(tmp_path, row)
    again = results.read(tmp_path, "timings")
    assert again[0] == rows[0] and again[2] == rows[2]
    assert again[1].median_us == pytest.approx(rows[1].median_us, rel=1e-8)
    text = (tmp_path / "timings.csv").read_bytes()
    results.write(tmp_path, "timings", again)
    assert (tmp_path / "timings.csv").read_bytes() == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b",100,", b",fast,", "timings.csv line 2: median_us must be float, not 'fast'"),
        (b",100,", b",nan,", "line 2: timings: median_us must be finite"),
        (b",20,", b",20.5,", "n must be int"),
        (b",cold,", b",cold,0,", "19 columns, not 18"),
        (b"median_us", b"median_ms", "its columns are"),
        (b",ok,", b",good,", "status must be one of ok, failed"),
    ],
)
def test_reading_validates_and_names_the_place(tmp_path, old, new, message):
    results.append(tmp_path, timing())
    path = tmp_path / "timings.csv"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ResultsError, match=message):
        results.read(tmp_path, "timings")
    if "columns are" in message:
        with pytest.raises(ResultsError, match=message):
            results.append(tmp_path, timing())


def test_numbers_do_not_depend_on_the_locale(tmp_path):
    before = locale.setlocale(locale.LC_NUMERIC)
    commas = [name for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE.utf8") if _has_locale(name)]
    try:
        if commas:
            locale.setlocale(locale.LC_NUMERIC, commas[0])
        results.append(tmp_path, timing(median_us=99.5))
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert ",99.5," in (tmp_path / "timings.csv").read_text()


def _has_locale(name: str) -> bool:
    before = locale.setlocale(locale.LC_NUMERIC)
    try:
        locale.setlocale(locale.LC_NUMERIC, name)
    except locale.Error:
        return False
    locale.setlocale(locale.LC_NUMERIC, before)
    return True


# ---- rates that cannot be ----


def test_a_rate_above_the_theoretical_peak_is_an_error_not_a_row(tmp_path):
    a_run(tmp_path, "r1", "2026-11-29T10:00:00Z")
    run = RunWriter(tmp_path, "r1")
    run.add(timing(bytes=4.9e8))  # 4,900 GB/s of 4,917
    with pytest.raises(ImpossibleRate, match="4950 GB/s, above the 4917 GB/s of NVIDIA H200"):
        run.add(timing(bytes=4.95e8))
    with pytest.raises(ImpossibleRate, match="TFLOP/s, above"):
        run.add(timing(flops=3e11))
    with pytest.raises(ImpossibleRate, match="read_gbps 5000 is above"):
        run.update(read_gbps=5000.0)
    assert len(results.read(tmp_path, "timings")) == 1
    # What L2 holds need not pass device memory in a hot run; what it cannot hold must.
    run.add(timing(cache="hot", bytes=5e7, median_us=9.0, p10_us=8.5, min_us=8.4, p90_us=10.0))
    with pytest.raises(ImpossibleRate):
        run.add(timing(cache="hot", bytes=6e8))
    # Nor does a row put there by other means pass when it is read.
    results.append(tmp_path, timing(bytes=4.95e8))
    with pytest.raises(ImpossibleRate):
        results.table("timings", tmp_path)


# ---- writers ----

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from mila_kernels.results import CounterRow, append
n = 0
while n < int(sys.argv[4]):
    append(Path(sys.argv[1]), CounterRow(run_id=sys.argv[2], op="prefill", step="s" * 200, metric=f"m{n}", value=n))
    n += 1
    print(n, flush=True)
"""


def writer(folder: Path, name: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(folder), name, str(ROOT), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_writers_at_once_lose_and_mix_nothing(tmp_path):
    both = [writer(tmp_path, name, 60) for name in ("a", "b")]
    assert [p.wait(60) for p in both] == [0, 0]
    for p in both:
        p.stdout.close()
    rows = results.read(tmp_path, "counters")
    for name in ("a", "b"):
        assert [row.value for row in rows if row.run_id == name] == [float(i) for i in range(60)]


def test_a_killed_writer_blocks_nobody_and_leaves_whole_rows(tmp_path):
    process = writer(tmp_path, "a", 10**6)
    for _ in range(5):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    told = 5 + len(process.stdout.readlines())
    process.wait(30)
    process.stdout.close()
    began = time.monotonic()
    results.append(tmp_path, CounterRow(run_id="b", op="prefill", step="s", metric="m", value=1.0))
    assert time.monotonic() - began < 5
    rows = results.read(tmp_path, "counters")
    assert [row.value for row in rows[:-1]] == [float(i) for i in range(len(rows) - 1)] and rows[-1].run_id == "b"
    assert len(rows) - 1 in (told, told + 1)


def test_half_a_block_is_not_written(tmp_path):
    """Rows of before keep their means of two kernels; new ones must be of one."""
    half = CounterRow(run_id="b", op="prefill", step="s", metric="launch__grid_size", value=4096.5)
    with pytest.raises(results.ResultsError, match="counters: launch__grid_size must be whole, not 4096.5"):
        results.append(tmp_path, half)
    results.write(tmp_path, "counters", [half])
    results.append(tmp_path, dataclasses.replace(half, metric="launch__waves_per_multiprocessor"))
    assert [row.value for row in results.read(tmp_path, "counters")] == [4096.5, 4096.5]


@pytest.mark.parametrize("reader_first", [True, False])
@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_last_line_is_set_aside(tmp_path, cut, reader_first):
    results.append(tmp_path, timing())
    whole = (tmp_path / "timings.csv").read_bytes()
    results.append(tmp_path, timing(median_us=101.0))
    path = tmp_path / "timings.csv"
    torn = path.read_bytes()[:-cut]
    path.write_bytes(torn)
    with pytest.warns(UserWarning, match=r"half a row; it is in timings.csv.torn"):
        if reader_first:
            assert len(results.read(tmp_path, "timings")) == 1
        else:
            results.append(tmp_path, timing(median_us=102.0))
    expected = [100.0] if reader_first else [100.0, 102.0]
    assert [row.median_us for row in results.read(tmp_path, "timings")] == expected
    assert (tmp_path / "timings.csv.torn").read_bytes() == torn[len(whole) :] + b"\n"


def test_a_torn_header_does_not_stop_the_table(tmp_path):
    (tmp_path / "timings.csv").write_bytes(b"run_id,op,st")
    with pytest.warns(UserWarning, match="half a row"):
        results.append(tmp_path, timing())
    assert results.read(tmp_path, "timings") == [timing()]


def test_a_held_lock_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "LOCK_SECONDS", 0.2)
    with results._lock(tmp_path), pytest.raises(ResultsError, match=r"\.lock is held by another process for 0.2 s"):
        results.append(tmp_path, timing())


def test_a_replaced_table_is_the_old_one_or_the_new_one(tmp_path):
    results.write(tmp_path, "timings", [timing()])
    bad = timing(median_us=1.0)
    with pytest.raises(ResultsError):
        results.write(tmp_path, "timings", [timing(), bad])
    assert results.read(tmp_path, "timings") == [timing()]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".timings")]


# ---- runs ----


def test_a_run_writes_its_provenance_and_rows(tmp_path):
    with RunWriter(tmp_path / "run") as run:
        run.add(parity(run_id=""))
        run.add(timing(status="failed", error=f"no such file: {ROOT}/mila_kernels/x.cu:7\n in /tmp/some where/y",
                       median_us=None, p10_us=None, p90_us=None, min_us=None))  # fmt: skip
    (row,) = results.read(tmp_path / "run", "runs")
    assert row.run_id == run.run_id and row.torch and row == run.row
    (failed,) = results.read(tmp_path / "run", "timings")
    assert failed.error == "no such file: mila_kernels/x.cu:7 in some where/y" and failed.run_id == run.run_id
    assert run.update(temp_c=41.0).temp_c == 41.0
    assert results.read(tmp_path / "run", "parity")[0].run_id == run.run_id


def test_processes_of_a_batch_share_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv(results.RUN_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(results.RUN_ID_VARIABLE, "batch-1")
    for _ in range(2):
        with RunWriter() as run:
            run.add(parity(seed=_))
    assert run.folder == tmp_path and [r.run_id for r in results.read(tmp_path, "runs")] == ["batch-1"]
    assert [r.run_id for r in results.read(tmp_path, "parity")] == ["batch-1"] * 2


def test_processes_that_begin_at_once_make_one_run(tmp_path):
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    code = f"{path}; from mila_kernels.results import RunWriter; RunWriter().__enter__()"
    environment = os.environ | {results.RUN_FOLDER_VARIABLE: str(tmp_path), results.RUN_ID_VARIABLE: "batch-2"}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    assert [row.run_id for row in results.read(tmp_path, "runs")] == ["batch-2"]


def test_clean_takes_paths_and_host_out(monkeypatch):
    monkeypatch.setattr(results.socket, "gethostname", lambda: "box-17")
    assert results.clean("in /home/me/tree/a.py on box-17: 3/4 of b/c") == "in a.py on <host>: 3/4 of b/c"
    assert results.clean("x" * 600).endswith("...") and len(results.clean("x" * 600)) == results.ERROR_LENGTH
    assert results.clean("see https://example.org/a/b") == "see https://example.org/a/b"


# ---- record and merge ----


def local_run(root: Path, run_id: str, utc: str, gpu: str = H200, **changes) -> Path:
    folder = root / "local" / run_id
    a_run(folder, run_id, utc, gpu)
    results.append(folder, timing(run_id=run_id, **changes))
    results.append(folder, NotebookRow(run_id=run_id, notebook="n", status="ok", seconds=1.0, cells_run=1, cells=1))
    (folder / "figures").mkdir()
    (folder / "figures" / "ladder.svg").write_text("<svg/>")
    (folder / "notebooks").mkdir()
    said = {"output_type": "stream", "name": "stderr", "text": ["/home/me/my work/src/mila_kernels/bench.py:7: hot\n"]}
    notebook = {
        "cells": [{"cell_type": "code", "source": [], "outputs": [said]}],
        "metadata": {"papermill": {"input_path": "/home/me/n.ipynb", "output_path": "/x/n.ipynb"}},
    }
    (folder / "notebooks" / "n.ipynb").write_text(json.dumps(notebook))
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_failed_notebook_takes_no_good_ones_place(tmp_path):
    local_run(tmp_path, "r1", "2026-11-29T10:00:00Z")
    results.record("r1", "h200", tmp_path)
    good = (tmp_path / "h200" / "notebooks" / "n.ipynb").read_bytes()
    folder = tmp_path / "local" / "r2"
    a_run(folder, "r2", "2026-11-30T10:00:00Z", H200)
    failed = NotebookRow(run_id="r2", notebook="n", status="failed", seconds=1.0, cells_run=0, cells=1, error="no")
    results.append(folder, failed)
    (folder / "notebooks").mkdir()
    for name in ("n", "cut_off"):
        (folder / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"cells": [], "metadata": {"other": name}}))
    assert results.record("r2", "h200", tmp_path)["files"] == 0
    assert (tmp_path / "h200" / "notebooks" / "n.ipynb").read_bytes() == good
    assert not (tmp_path / "h200" / "notebooks" / "cut_off.ipynb").exists()


def test_record_twice_changes_nothing(tmp_path):
    local_run(tmp_path, "r1", "2026-11-29T10:00:00Z")
    gained = results.record("r1", "h200", tmp_path)
    assert gained == {"runs": 1, "timings": 1, "notebooks": 1, "files": 2}
    before = snapshot(tmp_path / "h200")
    copied = before["notebooks/n.ipynb"].decode()
    assert "home" not in copied and "mila_kernels/bench.py:7: hot" in copied
    assert results.record("r1", "h200", tmp_path) == {"runs": 0, "timings": 0, "notebooks": 0, "files": 0}
    assert snapshot(tmp_path / "h200") == before


def test_record_keeps_earlier_runs_and_takes_later_rows(tmp_path):
    local_run(tmp_path, "r1", "2026-11-29T10:00:00Z", median_us=100.0)
    folder = local_run(tmp_path, "r2", "2026-11-29T11:00:00Z", median_us=95.0)
    results.record("r1", "h200", tmp_path)
    results.record("r2", "h200", tmp_path)
    results.append(folder, timing(run_id="r2", shape="b1 q9h1 kv9h1 d64 causal bf16"))
    assert results.record(folder, "h200", tmp_path)["timings"] == 1
    assert len(results.read(tmp_path / "h200", "timings")) == 3
    latest = results.table("timings", "h200", results=tmp_path)
    assert sorted(latest["median_us"]) == [95.0, 100.0] and set(latest["run_id"]) == {"r2"}
    everything = results.table("timings", "h200", latest=False, results=tmp_path)
    assert len(everything) == 3


def test_a_later_failure_hides_the_earlier_figure(tmp_path):
    a_run(tmp_path / "h200", "new", "2026-11-29T11:00:00Z")
    a_run(tmp_path / "h200", "old", "2026-11-29T10:00:00Z")
    nothing = {"median_us": None, "p10_us": None, "p90_us": None, "min_us": None}
    results.append(tmp_path / "h200", timing(run_id="new", status="failed", error="killed", **nothing))
    results.append(tmp_path / "h200", timing(run_id="old"))
    frame = results.table("timings", "h200", results=tmp_path)
    assert frame["status"].tolist() == ["failed"] and frame["median_us"].isna().all()


def test_record_refuses_a_wrong_name(tmp_path):
    local_run(tmp_path, "r1", "2026-11-29T10:00:00Z")
    for wrong in ("rtx4070", "local", "../h200", "H200", ""):
        with pytest.raises(ValueError, match="as:"):
            results.record("r1", wrong, tmp_path)
    with pytest.raises(ValueError, match="is no run; there are: r1"):
        results.record("r9", "h200", tmp_path)
    local_run(tmp_path, "c1", "2026-11-29T10:00:00Z", gpu="")
    with pytest.raises(ValueError, match="made on no GPU"):
        results.record("c1", "h200", tmp_path)
    assert results.record("c1", "cpu", tmp_path)["runs"] == 1
    assert not (tmp_path / "h200").exists()


def test_merge_of_another_machine(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    local_run(theirs, "r1", "2026-11-29T10:00:00Z")
    results.record("r1", "h200", theirs)
    local_run(theirs, "r3", "2026-11-29T10:00:00Z", gpu="NVIDIA GeForce RTX 4070", bytes=1e7)
    results.record("r3", "rtx4070", theirs)
    local_run(ours, "r2", "2026-11-29T09:00:00Z")
    results.record("r2", "h200", ours)
    assert {name: gained["timings"] for name, gained in results.merge(theirs, ours).items()} == {
        "h200": 1,
        "rtx4070": 1,
    }
    before = snapshot(ours)
    results.merge(theirs, ours)
    assert snapshot(ours) == before
    assert {row.run_id for row in results.read(ours / "h200", "runs")} == {"r1", "r2"}
    results.write(theirs / "h200", "runs", [RunRow(run_id="r2", utc="2020-01-01T00:00:00Z", gpu=H200)])
    with pytest.raises(ResultsError, match="r2 is two different runs"):
        results.merge(theirs, ours)
    with pytest.raises(ValueError, match="has no <gpu>/runs.csv"):
        results.merge(tmp_path / "nothing")


# ---- reading for people ----


def test_stale_rows_are_marked(tmp_path):
    step = steps.steps("prefill")[0]
    now = step.source_sha
    for sha, name in (
        (now, step.name), ("0" * 12, step.name), ("0" * 12, "99_gone"), ("", "torch-sdpa"),
        (now, f"{step.name} with 8 splits"), ("0" * 12, f"{step.name} with 8 splits"),
        (now, f"{step.name} without all"),
    ):  # fmt: skip
        results.append(tmp_path, timing(source_sha=sha, step=name, shape=f"b1 {name} {sha}"))
    assert results.table("timings", tmp_path)["stale"].tolist() == [False, True, True, False, False, True, True]


def test_missing_tables_are_empty_and_typed(tmp_path):
    frame = results.table("timings", "h200", results=tmp_path)
    assert len(frame) == 0 and list(frame.columns) == [*results.columns("timings"), "stale"]
    assert frame["median_us"].dtype == "float64"
    assert len(results.with_rates(frame, "h200", results=tmp_path)) == 0
    with pytest.raises(ValueError, match="table must be one of runs, timings"):
        results.table("timing", "h200")


def test_rates_and_shares_are_derived_from_the_rows_own_run(tmp_path):
    a_run(tmp_path, "r1", "2026-11-29T10:00:00Z", read_gbps=4000.0, bf16_tflops=500.0)
    results.append(tmp_path, timing(bytes=2e8, flops=1e10))
    results.append(tmp_path, timing(bytes=2e8, flops=4e10, shape="b2 x"))
    results.append(tmp_path, timing(bytes=2e7, flops=1e10, cache="hot"))
    frame = results.with_rates(results.table("timings", tmp_path), tmp_path)
    assert frame["gbps"].tolist()[:2] == [2000.0, 2000.0] and pd.isna(frame["gbps"][2])
    assert frame["tflops"].tolist() == [100.0, 400.0, 100.0]
    assert frame["limit_us"].tolist() == [50.0, 80.0, 20.0]
    assert frame["share"].tolist()[:2] == [0.5, 0.8] and pd.isna(frame["share"][2])


def test_export(tmp_path):
    frame = pd.DataFrame({"step": ["a_b", "c|d"], "ms": [1.5, float("nan")], "ok": [True, False]})
    assert results.export(frame, "csv") == "step,ms,ok\na_b,1.5,true\nc|d,,false\n"
    assert results.export(frame) == (
        "| step | ms | ok |\n| --- | ---: | --- |\n| a_b | 1.5 | true |\n| c\\|d |  | false |\n"
    )
    latex = results.export(frame, "latex")
    assert latex.startswith("\\begin{tabular}{lrl}\n\\toprule\nstep & ms & ok \\\\\n") and "a\\_b & 1.5 & true" in latex
    with pytest.raises(ValueError, match="format must be csv, md or latex, not 'html'"):
        results.export(frame, "html")


def test_samples_are_numbers(tmp_path):
    row = SampleRow(run_id="r", op="o", step="s", shape="x", cache="cold", method="graph", samples_us="1.5 2.25")
    results.append(tmp_path, row)
    assert results.read(tmp_path, "samples") == [row]
    with pytest.raises(ResultsError, match="samples_us must be numbers"):
        results.append(tmp_path, dataclasses.replace(row, samples_us="1.5 fast"))


def test_a_copied_tree_says_which_commit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("MILA_GIT_SHA", told)
    for dirty, is_dirty in (("0", False), ("1", True), ("", None)):
        monkeypatch.setenv("MILA_GIT_DIRTY", dirty)
        found = results.provenance()
        assert (found["git_sha"], found["dirty"]) == (told, is_dirty)
    monkeypatch.delenv("MILA_GIT_SHA")
    assert results.provenance()["git_sha"] != told


def test_no_recorded_file_names_a_folder_of_a_machine() -> None:
    texts = [p for p in (ROOT / "results").glob("*/**/*") if p.suffix in (".csv", ".ipynb") and "local" not in p.parts]
    assert texts
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|work|tmp|Users)/|/mila_kernels/(csrc|\w+\.py)", text), path
