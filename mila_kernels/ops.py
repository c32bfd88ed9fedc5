"""One entry an operation: inputs, call, truth, work and error bound, so that checks, benchmarks and notebooks need no
special cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import attention, cache, linear, prefill_ring, reference
from .shapes import Workload
from .steps import Step

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Op:
    """An operation.

    ``make_inputs(workload, seed, device)`` gives fresh random keyword arguments of ``run``; ``run(step=..., **inputs)``
    and ``reference(**inputs)`` give the same outputs, the latter in float64; ``flops`` and ``bytes`` count the
    mathematical operations and the fewest bytes through device memory; ``bound`` is the largest relative L2 error.
    """

    name: str
    make_inputs: Callable[[Workload, int, torch.device], dict[str, Any]]
    run: Callable[..., tuple[torch.Tensor, ...]]
    reference: Callable[..., tuple[torch.Tensor, ...]]
    flops: Callable[[Workload], float]
    bytes: Callable[[Workload], float]
    bound: Callable[[Workload], float]


def _attention_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        shape = (w.batch, tokens, heads, w.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[w.dtype])

    q, k, v = normal(w.q_len, w.q_heads), normal(w.kv_len, w.kv_heads), normal(w.kv_len, w.kv_heads)
    return {"q": q, "k": k, "v": v, "causal": w.mask == "causal", "window": w.window}


def _run_prefill(step: str | Step | None = None, **inputs: Any) -> tuple[torch.Tensor, ...]:
    return attention.prefill(step=step, return_lse=True, **inputs)  # type: ignore[return-value]


def _reference_attention(**inputs: Any) -> tuple[torch.Tensor, ...]:
    return reference.attention(**inputs)


def visible_pairs(w: Workload) -> int:
    """Pairs of a query and a key it sees, per head."""
    if w.mask != "causal":
        return w.q_len * w.kv_len
    offset = w.kv_len - w.q_len
    window = w.window or w.kv_len

    def up_to(n: int) -> int:  # pairs of the queries at positions below n, n <= kv_len
        n = max(n, 0)
        full = min(n, window)
        return full * (full + 1) // 2 + (n - full) * window

    return up_to(w.kv_len) - up_to(offset)


def _attention_flops(w: Workload) -> float:
    return 4.0 * w.batch * w.q_heads * w.head_dim * visible_pairs(w)


def _attention_bytes(w: Workload) -> float:
    element = 2
    seen = w.kv_len if not w.window or w.mask != "causal" else min(w.kv_len, w.window + w.q_len - 1)
    return float(element * w.batch * w.head_dim * (2 * w.q_len * w.q_heads + 2 * seen * w.kv_heads))


def _attention_bound(w: Workload) -> float:
    """Half a unit in the last place of the output (2^-9 for BF16, 2^-12 for FP16) and the same again for the rounding
    of the probabilities in steps that multiply on tensor cores."""
    return {"bf16": 2.0**-8, "fp16": 2.0**-11}[w.dtype]


def _ring_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    """The smallest ring that these queries may be a chunk of; NaN in every slot that none of them sees."""
    window = w.window or max(w.kv_len, 1)
    capacity = max(w.q_len, 1) + window - 1
    inputs = _attention_inputs(replace(w, window=window), seed, device)
    first = max(0, w.kv_len - w.q_len - window + 1)
    slots = torch.arange(first, w.kv_len, device=device) % capacity
    rings = {}
    for name in ("k", "v"):
        live = inputs[name][:, first:]
        rings[name] = live.new_full((w.batch, capacity, w.kv_heads, w.head_dim), float("nan"))
        rings[name][:, slots] = live
    lengths = torch.full((w.batch,), w.kv_len, dtype=torch.int32, device=device)
    return {"q": inputs["q"], **rings, "lengths": lengths, "window": window}


def _run_prefill_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: str | Step | None = None, **inputs: Any
) -> tuple[torch.Tensor, ...]:
    return prefill_ring.prefill_ring(q, cache.RingCache(k, v), step=step, return_lse=True, **inputs)  # type: ignore[return-value]


def _reference_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, window: int
) -> tuple[torch.Tensor, ...]:
    """Each sequence on its own: its live keys in order, the queries at the end of them."""
    outputs = []
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - q.shape[1] - window + 1)
        slots = torch.arange(first, length, device=k.device) % k.shape[1]
        one = slice(row, row + 1)
        outputs.append(reference.attention(q[one], k[one, slots], v[one, slots], causal=True, window=window))
    if not outputs:
        return reference.attention(q, k, v)
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def _weight(w: Workload, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randn(w.n, w.k, generator=generator, device=device) / w.k**0.5


def _activations(w: Workload, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randn(w.m, w.k, generator=generator, device=device).to(TORCH_DTYPES[w.dtype])


def _fp4_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        "w": linear.quantize_fp4(_weight(w, generator, device), scale_dtype=torch.bfloat16),
        "x": _activations(w, generator, device),
    }


def _fp8_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)
    return {"w": linear.quantize_fp8(_weight(w, generator, device)), "x": _activations(w, generator, device)}


def _run_matvec_fp4(step: str | Step | None = None, **inputs: Any) -> tuple[torch.Tensor, ...]:
    return (linear.matvec_fp4(step=step, **inputs),)


def _run_matvec_fp8(step: str | Step | None = None, **inputs: Any) -> tuple[torch.Tensor, ...]:
    return (linear.matvec_fp8(step=step, **inputs),)


def _reference_matvec(
    x: torch.Tensor, w: linear.Fp4Weight | linear.Fp8Weight, bias: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, ...]:
    return (reference.matvec(x, w.dequantize(torch.float32), bias),)


def _matvec_flops(w: Workload) -> float:
    return 2.0 * w.m * w.n * w.k


def _fp4_bytes(w: Workload) -> float:
    """Codes, BF16 scales, x and y."""
    return w.n * w.k * (0.5 + 2 / linear.KERNEL_GROUP) + 2.0 * w.m * (w.n + w.k)


def _fp8_bytes(w: Workload) -> float:
    """Codes, FP32 scales, x and y."""
    return w.n * (w.k + 4.0) + 2.0 * w.m * (w.n + w.k)


def _matvec_bound(w: Workload) -> float:
    """Rounding of the output is 1.65e-3 (BF16) and 2.1e-4 (FP16) of it, and the FP32 sums add little; of a few outputs
    it may be half a unit in the last place."""
    if w.m * w.n < 1024:
        return {"bf16": 2.0**-8, "fp16": 2.0**-11}[w.dtype]
    return {"bf16": 2e-3, "fp16": 3e-4}[w.dtype]


OPS: dict[str, Op] = {
    "prefill": Op(
        "prefill", _attention_inputs, _run_prefill, _reference_attention,
        _attention_flops, _attention_bytes, _attention_bound,
    ),
    "matvec_fp4": Op(
        "matvec_fp4", _fp4_inputs, _run_matvec_fp4, _reference_matvec, _matvec_flops, _fp4_bytes, _matvec_bound
    ),
    "matvec_fp8": Op(
        "matvec_fp8", _fp8_inputs, _run_matvec_fp8, _reference_matvec, _matvec_flops, _fp8_bytes, _matvec_bound
    ),
    "prefill_ring": Op(
        "prefill_ring", _ring_inputs, _run_prefill_ring, _reference_ring,
        _attention_flops, _attention_bytes, _attention_bound,
    ),
}  # fmt: skip


def op(name: str) -> Op:
    """The operation of that name; ValueError lists the known ones."""
    if name not in OPS:
        raise ValueError(f"op: {name!r} is none of {', '.join(OPS)}")
    return OPS[name]
