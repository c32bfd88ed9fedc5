"""One entry an operation: inputs, call, truth, work and error bound, so that checks, benchmarks and notebooks need no
special cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import attention, cache, gemm, linear, outputs, reference
from .attention_decode import decode
from .attention_ring import prefill_ring
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
    """Half a unit in the last place of an output. Over many, its rounding is 1.65e-3 (BF16) and 2.1e-4 (FP16) of it,
    and that of the probabilities, in steps that multiply on tensor cores, as much again."""
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
    return prefill_ring(q, cache.RingCache(k, v), step=step, return_lse=True, **inputs)  # type: ignore[return-value]


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


MIB_ELEMENTS = 1 << 26  # random numbers made at once: a float32 block of 256 MiB


def _random_store(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values, made a block of the first dim at a time: a cache may be larger than half the memory."""
    store = torch.empty(shape, dtype=dtype, device=generator.device)
    bits = store.view(torch.uint8) if dtype == torch.float8_e4m3fn else store
    rows = max(1, MIB_ELEMENTS // max(1, store[:1].numel()))
    for start in range(0, shape[0], rows):
        part = bits[start : start + rows]
        values = torch.randn((len(part), *shape[1:]), generator=generator, device=generator.device).to(dtype)
        part.copy_(values.view(bits.dtype))
    return store


def _decode_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    """A shuffled pool of pages (HND), a ring just large enough for the window, or a contiguous cache; NaN wherever no
    token lies, and page-table entries that are not in use out of range."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPES[w.dtype]
    kv_dtype = {**TORCH_DTYPES, "fp8": torch.float8_e4m3fn}[w.kv_dtype or w.dtype]
    q = torch.randn((w.batch, w.q_len, w.q_heads, w.head_dim), generator=generator, device=device).to(dtype)
    lengths = torch.full((w.batch,), w.kv_len, dtype=torch.int32, device=device)
    inputs = {"q": q, "lengths": lengths, "window": w.window}
    spare = 2  # pages that no sequence has, and columns of the table that no sequence reaches
    if w.page:
        used = -(-w.kv_len // w.page)
        pages = w.batch * used + spare
        shape: tuple[int, ...] = (pages, w.kv_heads, w.page, w.head_dim)
        order = torch.randperm(pages, generator=generator, device=device).int()
        table = torch.full((w.batch, used + spare), -1, dtype=torch.int32, device=device)
        table[:, :used] = order[: w.batch * used].view(w.batch, used)
    elif w.window:
        shape = (w.batch, w.window + w.q_len - 1, w.kv_heads, w.head_dim)
    else:
        shape = (w.batch, w.kv_len + spare, w.kv_heads, w.head_dim)
    k, v = _random_store(shape, kv_dtype, generator), _random_store(shape, kv_dtype, generator)
    for store in (k, v):
        if w.page:
            for page in order[w.batch * used :].tolist():
                outputs.fill_bad(store[page])
            rest = used * w.page - w.kv_len
            for row in range(w.batch if rest else 0):
                outputs.fill_bad(store[int(table[row, used - 1]), :, w.page - rest :])
        elif w.window:
            outputs.fill_bad(store[:, min(w.kv_len, shape[1]) :])
        else:
            outputs.fill_bad(store[:, w.kv_len :])
    if w.page:
        return {**inputs, "cache": cache.PagedCache(k, v, table, layout="HND")}
    return {**inputs, "cache": cache.RingCache(k, v) if w.window else cache.ContiguousCache(k, v)}


def _run_decode(
    q: torch.Tensor, cache: cache.Cache, lengths: torch.Tensor, step: str | Step | None = None, **inputs: Any
) -> tuple[torch.Tensor, ...]:
    return decode(q, cache, lengths, step=step, return_lse=True, **inputs)  # type: ignore[return-value]


def _reference_decode(**inputs: Any) -> tuple[torch.Tensor, ...]:
    return reference.decode(**inputs)


def _decode_flops(w: Workload) -> float:
    return 4.0 * w.batch * w.q_heads * w.head_dim * w.pairs


def _decode_bytes(w: Workload) -> float:
    """Keys and values of the tokens that are seen, in the cache's type; q and o."""
    element = 1 if w.kv_dtype == "fp8" else 2
    seen = w.kv_len if not w.window else min(w.kv_len, w.window + w.q_len - 1)
    return float(w.batch * w.head_dim * (2 * element * seen * w.kv_heads + 4 * w.q_len * w.q_heads))


def _decode_bound(w: Workload) -> float:
    """As prefill's; with E4M3 keys and values, whose probabilities are FP16, the rounding of the output and a tenth."""
    if w.kv_dtype == "fp8":
        return {"bf16": 2e-3, "fp16": 2.0**-11}[w.dtype]
    return _attention_bound(w)


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


def _gemm_inputs(w: Workload, seed: int, device: torch.device) -> dict[str, Any]:
    """A pair of codes and scales in place of the activations: of the product alone is the time, and the error too."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = linear.quantize_fp4(_weight(w, generator, device))
    x_codes, x_scales = reference.quantize_activations(_activations(w, generator, device))
    return {"w": weight, "x_codes": x_codes, "x_scales": x_scales}


def _run_gemm(
    x_codes: torch.Tensor, x_scales: torch.Tensor, w: linear.Fp4Weight, step: str | Step | None = None, **inputs: Any
) -> tuple[torch.Tensor, ...]:
    return (gemm.gemm_w4a8((x_codes, x_scales), w, step=step, **inputs),)


def _reference_gemm(
    x_codes: torch.Tensor, x_scales: torch.Tensor, w: linear.Fp4Weight, bias: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, ...]:
    x = x_codes.double() * x_scales.double()[:, None]
    return (reference.matvec(x, w.dequantize(torch.float32), bias),)


def _gemm_bytes(w: Workload) -> float:
    """Codes and FP32 scales of both matrices, and y."""
    return w.n * w.k * (0.5 + 4 / linear.KERNEL_GROUP) + w.m * (w.k + 4.0 + 2.0 * w.n)


def _gemm_bound(w: Workload) -> float:
    """Rounding of the output, 1.65e-3 of it in BF16 (half a unit in the last place of a few outputs), and a little for
    the tensor cores' sums of 128, which are kept to some 13 bits."""
    if w.m * w.n < 1024:
        return 2.0**-8
    return 1.8e-3


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
    "gemm_w4a8": Op(
        "gemm_w4a8", _gemm_inputs, _run_gemm, _reference_gemm, _matvec_flops, _gemm_bytes, _gemm_bound
    ),
    "decode": Op(
        "decode", _decode_inputs, _run_decode, _reference_decode, _decode_flops, _decode_bytes, _decode_bound
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
