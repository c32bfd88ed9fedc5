"""Decode with its knobs turned: other numbers of splits, other capacities, the same tokens.

A turned knob must not change the result, and its time says what the knob is for. Such times stand in the table
``ablations`` under ``<step> with <setting>``, so that they are never taken for a step's own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from . import ops, results, steps
from .ablate import WITH
from .cache import PagedCache
from .results import AblationRow
from .shapes import Workload

if TYPE_CHECKING:
    from .notebook import Session

EAGER = "eager calls"

Inputs = dict[str, Any]
Setting = Callable[[Inputs], Inputs]


def splits(numbers: Iterable[int]) -> dict[str, Setting]:
    """Settings that cut the keys of a head over that many blocks."""
    return {f"{n} splits": functools.partial(_with_splits, number=n) for n in numbers}


def capacities(tokens: Iterable[int]) -> dict[str, Setting]:
    """Settings with a page table for that many tokens; only the workload's own are in use."""
    return {f"capacity {n}": functools.partial(_with_capacity, tokens=n) for n in tokens}


def _with_splits(inputs: Inputs, number: int) -> Inputs:
    return {**inputs, "num_splits": number}


def _with_capacity(inputs: Inputs, tokens: int) -> Inputs:
    cache = inputs["cache"]
    if not isinstance(cache, PagedCache):
        raise ValueError(f"workload: its cache must be paged, not {type(cache).__name__}")
    table = cache.page_table
    columns = tokens // cache.page_size
    used = -(-int(inputs["lengths"].max()) // cache.page_size)
    if columns < used:
        raise ValueError(f"tokens: {tokens} are fewer than the {used} pages in use hold")
    wider = torch.full((table.shape[0], columns), -1, dtype=torch.int32, device=table.device)
    wider[:, :used] = table[:, :used]
    twin = PagedCache(
        cache.k, cache.v, wider, layout=cache.layout, k_scale=cache.k_scale, v_scale=cache.v_scale
    )  # fmt: skip
    return {**inputs, "cache": twin}


def differences(session: Session, name: str, workload: Workload, settings: Mapping[str, Setting]) -> pd.DataFrame:
    """What each setting changes in the output, here and now: the largest difference from the first one's, and whether a
    second call repeats every bit. Raises AssertionError where the outputs differ by more than the op's bound."""
    step, op = steps.step(name), ops.op("decode")
    inputs = op.make_inputs(workload, session.seed, session.device)
    first: torch.Tensor | None = None
    rows = []
    for label, change in settings.items():
        o, again = (op.run(step=step, **change(inputs))[0] for _ in range(2))
        first = o if first is None else first
        difference = float((o.double() - first.double()).norm() / first.double().norm())
        if difference > op.bound(workload):
            raise AssertionError(f"{step.id} with {label}: {difference:.2e} away from the first setting's output")
        rows.append({"setting": label, "relative difference": f"{difference:.1e}", "repeats": torch.equal(o, again)})
    return pd.DataFrame(rows)


def times(session: Session, name: str, workload: Workload, settings: Mapping[str, Setting]) -> pd.DataFrame:
    """Microseconds of a step with each setting: measured here on a GPU, elsewhere the recorded ones, perhaps none.

    Columns: ``step``, ``setting``, ``number`` (the one in it), ``median_us``, ``p10_us``, ``p90_us``, ``stale``.
    """
    step, op = steps.step(name), ops.op("decode")
    if session.live:
        from . import bench

        with session.run as run:
            for label, change in settings.items():
                bench.bench_call(
                    f"{step.name}{WITH}{label}",
                    lambda _change=change, **inputs: functools.partial(op.run, step=step, **_change(inputs)),
                    workload, op="decode", source_sha=step.source_sha, seed=session.seed, run=run, kind=AblationRow,
                )  # fmt: skip
    found = results.table("ablations", session.source)
    mine = found[(found["op"] == "decode") & (found["shape"] == workload.shape) & (found["status"] == "ok")]
    rows = []
    for label in settings:
        for _, row in mine[mine["step"] == f"{step.name}{WITH}{label}"].tail(1).iterrows():
            number = next(int(word) for word in label.split() if word.isdigit())
            stale = row["source_sha"] != step.source_sha
            figures = {column: row[column] for column in ("median_us", "p10_us", "p90_us")}
            rows.append({"step": step.id, "setting": label, "number": number, **figures, "stale": stale})
    return pd.DataFrame(rows, columns=["step", "setting", "number", "median_us", "p10_us", "p90_us", "stale"])


def eager_times(
    session: Session, name: str, workloads: Iterable[Workload], calls: int = 50, n: int = 9
) -> pd.DataFrame:
    """Microseconds of wall time a call from Python takes without a graph: ``n`` samples of ``calls`` calls in a row.

    Measured here on a GPU, elsewhere the recorded ones, perhaps none. Columns: ``workload``, ``median_us``,
    ``p10_us``, ``p90_us``, ``stale``. The inputs rotate as for cold timings.
    """
    step, op = steps.step(name), ops.op("decode")
    label = f"{step.name}{WITH}{EAGER}"
    chosen = list(workloads)
    if session.live:
        from . import bench

        with session.run as run:
            for workload in chosen:
                us = _eager_samples(session, step, workload, calls, n)
                median, p10, p90 = (bench.percentile(us, q) for q in (50, 10, 90))
                timed = AblationRow(
                    run_id=run.run_id, op="decode", step=label, source_sha=step.source_sha, workload=workload.name,
                    shape=workload.shape, dtype=workload.dtype, cache="cold", warmup=calls, n=n,
                    median_us=median, p10_us=p10, p90_us=p90, min_us=min(us),
                    flops=op.flops(workload), bytes=op.bytes(workload), status="ok", error="",
                )  # fmt: skip
                run.add(timed)
    found = results.table("ablations", session.source)
    mine = found[(found["op"] == "decode") & (found["step"] == label) & (found["status"] == "ok")]
    rows = []
    for workload in chosen:
        for _, row in mine[mine["shape"] == workload.shape].tail(1).iterrows():
            figures = {column: row[column] for column in ("median_us", "p10_us", "p90_us")}
            rows.append({"workload": workload.name, **figures, "stale": row["source_sha"] != step.source_sha})
    return pd.DataFrame(rows, columns=["workload", "median_us", "p10_us", "p90_us", "stale"])


def _eager_samples(session: Session, step: steps.Step, workload: Workload, calls: int, n: int) -> list[float]:
    from . import bench

    op, device = ops.op("decode"), session.device
    sets = bench.rotation_sets(int(op.bytes(workload)), bench.l2_bytes(device)) or 1
    inputs = [op.make_inputs(workload, session.seed + i, device) for i in range(sets)]
    samples = []
    for _ in range(n + 1):  # the first one warms up
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for i in range(calls):
            op.run(step=step, **inputs[i % sets])
        torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return samples[1:]
