"""Bytes that a prefill needs beside weights and activations: stored scores, and the K and V of the sliding layers.

A pipeline of matmul, softmax and matmul keeps two buffers [heads, chunk, attended keys], which all layers share, so the
layer that attends to most keys sets their size. A kernel that keeps its scores on the chip needs none. On a GPU the
allocator is asked; elsewhere, and beside it, the bytes are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from . import ops, peers, results, shapes, steps
from .results import CounterRow
from .shapes import Geometry, Workload

if TYPE_CHECKING:
    from .notebook import Session

CHUNK = 512  # queries at once, as published
BUFFERS = 2  # scores, and their softmax
ELEMENT = 2  # bytes
METRIC = "peak bytes allocated beside inputs and output"
THREE_CALLS = "torch three calls"
MIB = 1 << 20

STORED, GLOBAL_FLASH, FLASH = "scores stored", "scores of sliding layers stored", "no scores stored"
KEPT, RING = "K and V of sliding layers, all kept", "K and V of sliding layers, ring"


def attended(context: int, chunk: int = CHUNK, window: int | None = None) -> int:
    """Keys that a chunk of queries at the end of a context attends to, all of its queries together."""
    return context if window is None else min(context, window + chunk - 1)


def score_bytes(geometry: Geometry, context: int, chunk: int = CHUNK) -> int:
    """Bytes of the score buffers of one layer: two of [heads, chunk, attended keys], 16 bits each."""
    return BUFFERS * ELEMENT * geometry.q_heads * chunk * attended(context, chunk, geometry.window)


def cache_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of K and V of so many tokens, in all layers of that geometry."""
    return geometry.layers * 2 * ELEMENT * geometry.kv_heads * geometry.head_dim * tokens


def computed(contexts: Sequence[int], whole: Geometry, sliding: Geometry, chunk: int = CHUNK) -> pd.DataFrame:
    """Bytes by context: rows with context, series, kind and value. ``whole`` has no window, ``sliding`` has one."""
    table = []
    for context in contexts:
        of_whole, of_sliding = score_bytes(whole, context, chunk), score_bytes(sliding, context, chunk)
        values = {
            STORED: max(of_whole, of_sliding), GLOBAL_FLASH: of_sliding, FLASH: 0,
            KEPT: cache_bytes(sliding, context), RING: cache_bytes(sliding, attended(context, chunk, sliding.window)),
        }  # fmt: skip
        table += [{"context": context, "series": name, "kind": "computed", "value": v} for name, v in values.items()]
    return pd.DataFrame(table)


def peak_bytes(call: Callable[[], torch.Tensor]) -> int:
    """The most bytes that a call has allocated at once on the current CUDA device, its output not counted.

    The call runs once before, so that what a library keeps for itself from then on does not count either.
    """
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.untyped_storage().nbytes()


def measure(session: Session, contexts: Sequence[int], whole: Geometry, sliding: Geometry, chunk: int = CHUNK) -> None:
    """Ask torch's allocator, on a GPU, and write a row of counters a case; a case that does not fit leaves none."""
    with session.run as run:
        for context in contexts:
            for op, geometry in (("prefill", whole), ("prefill_ring", sliding)):
                case = _case(op, geometry, context, chunk)
                for name, source_sha, value in _peaks(case, session.seed, session.device):
                    run.add(CounterRow(run_id="", op=op, step=name, source_sha=source_sha, workload=case.shape,
                                       metric=METRIC, value=float(value), unit="byte"))  # fmt: skip


def _case(op: str, geometry: Geometry, context: int, chunk: int) -> Workload:
    return shapes.attention_workload(
        op, q_heads=geometry.q_heads, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim,
        q_len=min(chunk, context), kv_len=context, window=geometry.window,
    )  # fmt: skip


def _peaks(case: Workload, seed: int, device: torch.device) -> list[tuple[str, str, int]]:
    """Name, source digest and peak of the stored scores and of our last kept step, as far as they fit the memory."""
    op = ops.op(case.op)
    found = []
    try:
        inputs = op.make_inputs(case, seed, device)
        capability = torch.cuda.get_device_capability(device)
        fit = [one for one in steps.steps(case.op) if one.runs_on(capability) and case.head_dim in one.head_dims]
        step = [one for one in fit if one.kept][-1]
        found.append((step.name, step.source_sha, peak_bytes(lambda: op.run(step=step, **inputs)[0])))
        for peer in peers.peers(case.op, case):
            if peer.name == THREE_CALLS:
                found.append((peer.name, "", peak_bytes(peer.prepare(**inputs))))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return found


def measured(session: Session, contexts: Sequence[int], whole: Geometry, sliding: Geometry) -> pd.DataFrame:
    """The allocator's figures as rows like those of :func:`computed`: of this run on a GPU, elsewhere recorded ones."""
    table = results.table("counters", session.source)
    rows = table[table["metric"] == METRIC]
    found = []
    for context in contexts:
        peaks: dict[tuple[str, bool], float] = {}
        for row in rows.to_dict("records"):
            for op, geometry in (("prefill", whole), ("prefill_ring", sliding)):
                if (row["op"], row["workload"]) == (op, _case(op, geometry, context, CHUNK).shape):
                    peaks[op, row["step"] == THREE_CALLS] = row["value"]
        values: dict[str, tuple[float | None, ...]] = {
            STORED: (peaks.get(("prefill", True)), peaks.get(("prefill_ring", True))),
            GLOBAL_FLASH: (peaks.get(("prefill", False)), peaks.get(("prefill_ring", True))),
            FLASH: (peaks.get(("prefill", False)), peaks.get(("prefill_ring", False))),
        }
        for name, parts in values.items():
            if None not in parts:
                value = max(part for part in parts if part is not None)
                found.append({"context": context, "series": name, "kind": "measured", "value": value})
    return pd.DataFrame(found, columns=["context", "series", "kind", "value"])


def table(session: Session, contexts: Sequence[int]) -> pd.DataFrame:
    """Everything about these contexts for Gemma 4 12B, in MiB: computed, and measured where it can be or has been."""
    whole, sliding = shapes.geometry("gemma4-12b-global"), shapes.geometry("gemma4-12b-local")
    if session.live:
        measure(session, contexts, whole, sliding)
    rows = pd.concat(
        [computed(contexts, whole, sliding), measured(session, contexts, whole, sliding)], ignore_index=True
    )
    return rows.assign(value=rows["value"].astype(float) / MIB)


def as_text(rows: pd.DataFrame) -> pd.DataFrame:
    """:func:`table` as text: a row a context, a column a series; measured figures beside the computed ones."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        name = str(row["series"]) + (" (measured)" if row["kind"] == "measured" else "")
        lines.setdefault(f"{row['context'] // 1024}K", {})[name] = _mib(row["value"])
    order: dict[str, Any] = dict.fromkeys(str(name) for name in rows["series"])
    names = [name + kind for name in order for kind in ("", " (measured)")]
    wide = pd.DataFrame(lines).T
    return wide[[name for name in names if name in wide.columns]].fillna("").rename_axis("context")


def _mib(value: float) -> str:
    """Three digits, and GiB from where MiB would take a fourth."""
    return f"{value / 1024:.3g} GiB" if value >= 999.5 else f"{value:.3g} MiB"
