"""Inputs whose right answer is arithmetic, not another program's: which keys an attention step counts, to the last one.

With q = 0 every key that is seen has the same weight. COUNT: exp(LSE) is how many there are. MEAN: V[j] = j, and the
output is the mean position seen. MASK: V[j] = one-hot(j), and the columns that are not zero are the keys seen.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from . import build, ops, shapes, steps
from .parity import Parity, compare
from .results import ParityRow, RunWriter
from .shapes import Workload
from .steps import Step

MEAN_LENGTH = 256  # BF16 holds every integer up to here
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place of the output
SEED = 0  # of the keys, which no right answer depends on
COUNT_BOUND = 1e-5  # of a logarithm in FP32; one key of 16,384 more or less is 6e-5


def seen(w: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query of an attention workload the first key it sees and the first it does not, int64 ``[q_len]``."""
    ends = torch.arange(w.kv_len - w.q_len, w.kv_len) + 1 if w.mask != "full" else torch.full((w.q_len,), w.kv_len)
    ends = ends.clamp_min(0)
    return (ends - w.window).clamp_min(0) if w.window else torch.zeros_like(ends), ends


def kinds(w: Workload) -> list[str]:
    """The probes that fit a workload: positions must be exact in its type, or as many as the head has columns."""
    if not w.is_attention:
        return []
    exact = w.kv_dtype in ("", w.dtype) and 0 < w.kv_len <= MEAN_LENGTH
    return ["count", *(["mean"] if exact else []), *(["mask"] if 0 < w.kv_len <= w.head_dim else [])]


def check(
    step: str | Step, workload: str | Workload, device: str | torch.device = "auto", run: RunWriter | None = None
) -> list[ParityRow]:
    """Run the probes that fit a workload, a row each, whose shape ends in the probe's name. The errors are of each
    element over its right value, and ``max_abs`` must be within the bound. Arguments and errors as of
    :func:`mila_kernels.parity.check`; workloads of other operations than attention have no probe."""
    chosen = steps.step(step)
    case = shapes.workload(workload) if isinstance(workload, str) else workload
    place = build.resolve_device(device)
    rows = [_row(chosen, case, kind, place) for kind in kinds(case)]
    return [run.add(row) if run else row for row in rows]


def _row(step: Step, w: Workload, kind: str, device: torch.device) -> ParityRow:
    op = ops.op(step.op)
    o, lse = op.run(step=step, **_inputs(w, kind, device))
    first, end = (bound.double().to(device) for bound in seen(w))
    count = end - first
    if kind == "count":
        verdict = _verdict(lse.double().exp(), count.expand(lse.shape), COUNT_BOUND)
    else:
        if kind == "mean":
            right = ((first + end - 1) / 2).where(count > 0, 0.0).unsqueeze(1)
        else:
            key = torch.arange(w.head_dim, device=device)
            right = ((key >= first[:, None]) & (key < end[:, None])) / count.clamp_min(1)[:, None]
        verdict = _verdict(o, right[:, None, :].expand(o.shape), ROUNDING[w.dtype])
    return ParityRow(
        run_id="", op=step.op, step=step.name, source_sha=step.source_sha,
        backend="cuda" if device.type == "cuda" else "emulation", shape=f"{w.shape} {kind}", seed=SEED,
        **asdict(verdict),
    )  # fmt: skip


def _verdict(out: torch.Tensor, right: torch.Tensor, bound: float) -> Parity:
    """Each element over its right value against 1, so that none can hide in a norm; of a zero the element itself."""
    scaled = torch.where(right == 0, 1.0 + out.double(), out.double() / right.where(right != 0, 1.0))
    found = compare(scaled, torch.ones_like(scaled), bound)
    return replace(found, passed=found.nonfinite == 0 and found.max_abs <= bound)


def _inputs(w: Workload, kind: str, device: torch.device) -> dict[str, Any]:
    """The operation's own inputs, with dead slots as they are there, and q and the live values of the probe."""
    inputs = ops.op(w.op).make_inputs(w, SEED, device)
    inputs["q"].zero_()
    if kind == "count" or not w.q_len:
        return inputs
    live = torch.arange(int(seen(w)[0][0]), w.kv_len, device=device)
    values = torch.nn.functional.one_hot(live, w.head_dim) if kind == "mask" else live[:, None].expand(-1, w.head_dim)
    if w.op == "decode":
        store = inputs["cache"].values
        at = inputs["cache"].slots(live.expand(w.batch, -1))
    else:
        store = inputs["v"]
        at = (slice(None), live % store.shape[1])
    bits = store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store
    bits[at] = values[None, :, None, :].to(store.dtype).view(bits.dtype).expand(w.batch, -1, w.kv_heads, -1)
    return inputs
