"""Inputs whose right answer is arithmetic, not another program's: which keys an attention step counts, to the last one.

With q = 0 every key that is seen has the same weight. COUNT: exp(LSE) is how many there are. MEAN: V[j] = j, and the
output is the mean position seen. MASK: V[j] = one-hot(j), and the columns that are not zero are the keys seen.

With random values two runs of a step must agree. POISON: NaN, in K, in V, in both, wherever no query sees a key (and,
of prefill, all around them in memory) gives bit for bit what zeros there give. CHUNKS: a prompt cut in four ways gives
what it gives whole, but for the rounding.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from . import build, ops, shapes, steps
from .parity import Parity, compare, poisoned
from .results import ParityRow, RunWriter
from .shapes import Workload
from .steps import Step

MEAN_LENGTH = 256  # BF16 holds every integer up to here
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place of the output
SEED = 0  # of the keys, which no right answer depends on
PROBES = ("count", "mean", "mask", "poison", "chunks")
CUTS = ((128, 72), (64, 64, 72), (199, 1), (1,) * 200)  # of a prompt of 200 tokens
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
    counting = ["count", *(["mean"] if exact else []), *(["mask"] if 0 < w.kv_len <= w.head_dim else [])]
    chunks = w.op == "prefill" and w.mask == "causal" and not w.window and w.q_len == w.kv_len == sum(CUTS[0])
    return [*counting, *(["poison"] if _has_dead(w) else []), *(["chunks"] if chunks else [])]


def is_probe(shape: str) -> bool:
    """Whether a parity row's shape is a probe's: its errors are not those of random inputs."""
    return shape.rpartition(" ")[2] in PROBES


def _has_dead(w: Workload) -> bool:
    """Whether there is memory of K and V that no query sees; a ring that was made for a workload has some if its text
    is shorter, a pool always, and tensors have what lies around them."""
    return bool(w.kv_len and w.q_len and w.batch) and (w.op != "prefill_ring" or bool(w.window))


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
    if kind in ("poison", "chunks"):
        verdict = _poison(step, w, device) if kind == "poison" else _chunks(step, w, device)
        return _parity_row(step, w, kind, device, verdict)
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
    return _parity_row(step, w, kind, device, verdict)


def _parity_row(step: Step, w: Workload, kind: str, device: torch.device, verdict: Parity) -> ParityRow:
    return ParityRow(
        run_id="", op=step.op, step=step.name, source_sha=step.source_sha,
        backend="cuda" if device.type == "cuda" else "emulation", shape=f"{w.shape} {kind}", seed=SEED,
        **asdict(verdict),
    )  # fmt: skip


def _poison(step: Step, w: Workload, device: torch.device) -> Parity:
    """How many elements of O and the LSE, as bits, a NaN that nobody may read changes; none is right."""
    op = ops.op(w.op)
    inputs = op.make_inputs(w, SEED, device)
    stores = _stores(w, inputs)
    dead = torch.ones(stores[0].shape, dtype=torch.bool, device=device)
    dead[_slots(w, inputs, torch.arange(int(seen(w)[0][0]), w.kv_len, device=device))] = False

    def run(bad: str) -> list[torch.Tensor]:
        for name, store in zip("kv", stores, strict=True):
            value = math.nan if name in bad else 0.0
            bits = store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store
            bits.masked_fill_(dead, 0x7F if bits.dtype == torch.uint8 and name in bad else value)
            if w.op == "prefill":
                inputs[name] = poisoned(store, value)[0]
        return [x.clone() for x in op.run(step=step, **inputs)]

    clean = run("")
    wrong = elements = 0
    for bad in ("k", "v", "kv"):
        for a, b in zip(run(bad), clean, strict=True):
            wrong += int((a.view(torch.uint8) != b.view(torch.uint8)).view(*a.shape, -1).any(-1).sum())
            elements += a.numel()
    return Parity(rel_l2=wrong / max(elements, 1), max_abs=float(wrong), nonfinite=0, bound=0.0, passed=wrong == 0)


def _chunks(step: Step, w: Workload, device: torch.device) -> Parity:
    """The cut whose O differs most from the whole prompt's, over the rounding of both."""
    op = ops.op(w.op)
    inputs = op.make_inputs(w, SEED, device)
    q, k, v = (inputs.pop(name) for name in "qkv")
    whole = op.run(step=step, q=q, k=k, v=v, **inputs)[0].double()
    worst = None
    for cut in CUTS:
        ends = torch.tensor(cut).cumsum(0).tolist()
        parts = [
            op.run(step=step, q=q[:, end - n : end], k=k[:, :end], v=v[:, :end], **inputs)[0]
            for n, end in zip(cut, ends, strict=True)
        ]
        found = compare(torch.cat(parts, dim=1), whole, ROUNDING[w.dtype])
        if worst is None or not found.passed or found.rel_l2 > worst.rel_l2:
            worst = found
    assert worst is not None
    return worst


def _stores(w: Workload, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where an operation's inputs keep K and V."""
    return (inputs["cache"].keys, inputs["cache"].values) if w.op == "decode" else (inputs["k"], inputs["v"])


def _slots(w: Workload, inputs: dict[str, Any], positions: torch.Tensor) -> Any:
    """The index of positions of every sequence in a store."""
    if w.op == "decode":
        return inputs["cache"].slots(positions.expand(w.batch, -1))
    return slice(None), positions % inputs["v"].shape[1]


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
    store, at = _stores(w, inputs)[1], _slots(w, inputs, live)
    bits = store.view(torch.uint8) if store.dtype == torch.float8_e4m3fn else store
    bits[at] = values[None, :, None, :].to(store.dtype).view(bits.dtype).expand(w.batch, -1, w.kv_heads, -1)
    return inputs
