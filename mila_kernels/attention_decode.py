"""Decode: attention of the newest tokens over a KV cache, and the merging of partial results."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from . import build, outputs, steps
from .arrivals import arrivals
from .attention import (
    DTYPE_CODES,
    MAX_GRID_YZ,
    _check_alignment,
    _check_scale,
    _check_tensors,
    _check_window,
    _resolve_step,
    _strides,
)
from .cache import Cache, ContiguousCache, PagedCache, RingCache, check_lengths, check_queries
from .operator import operator

MAX_Q_LEN = 8
MAX_SPLITS = 1024
ROWS = 16  # as in csrc/decode/args.cuh
EMULATED_SMS = 4  # what the automatic number of splits aims to fill on the CPU
BLOCKS_PER_SM = 2
KV_DTYPE_CODES = {**DTYPE_CODES, torch.float8_e4m3fn: 2}
ARRIVALS_PER_ITEM = 8  # MAX_CLUSTER of csrc/decode/bulk.cuh


class DecodeArgs(ctypes.Structure):
    """The mirror of ``csrc/decode/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "lengths", "page_table", "sink")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale", "partial_o", "partial_sum", "arrivals", "fault")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "qkvo"),
        ("page_table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("batch", "q_len", "q_heads", "kv_heads", "head_dim", "group")),
        *((name, ctypes.c_int32) for name in ("capacity", "page_shift", "pages", "ring", "window", "splits")),
        *((name, ctypes.c_int32) for name in ("automatic", "blocks")),
        *((name, ctypes.c_int32) for name in ("dtype", "kv_dtype")),
        *((name, ctypes.c_float) for name in ("scale", "inverse_group")),
    ]


def decode(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    *,
    step: str | steps.Step | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    num_splits: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens of each sequence over its cache, computed in FP32.

    Args:
        q: ``[batch, q_len, q_heads, head_dim]``, BF16 or FP16, q_len 1 to 8, last dim contiguous; ``q_heads`` is a
            multiple of the cache's ``kv_heads``. Query ``i`` sits at position ``length - q_len + i`` and sees no later
            key.
        cache: keys and values, those of these tokens included, in ``q``'s dtype or E4M3.
        lengths: int32 ``[batch]`` on ``q``'s device: the tokens of each sequence. Read on the device: a captured call
            replays with other lengths.
        step: an optimisation step (``"decode/02_split_k"``); None: the fastest that fits device and shape.
        window: the number of keys a query sees, its own included; None: all that the cache holds (a ring: the
            ``capacity - q_len + 1`` newest).
        sink: float32 ``[q_heads]``: a logit per head that takes weight and has no value.
        num_splits: over how many blocks the keys of a head are cut; None: enough to fill the device.
        scale: factor of the scores; None: ``1 / sqrt(head_dim)``. Gemma 4 uses 1.0.
        return_lse: also return ``ln(sum(exp(score)))``, the sink included, float32 ``[batch, q_heads, q_len]``.

    Returns:
        ``[batch, q_len, q_heads, head_dim]`` in ``q``'s dtype, and the LSE if asked for. A query that sees no key gives
        zeros and an LSE of -inf, or its sink.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, before anything is launched. Values in
            ``lengths`` and the page table are looked at on the CPU only; on a GPU see ``cache.check``.
        mila_kernels.build.KernelError: the launch was refused.

    CUDA tensors run on their device and its current stream, CPU tensors in emulation. Forward only.
    """
    _check_tensors(q=q)
    batch, q_len, q_heads, head_dim = q.shape
    check_queries(cache, q, (ContiguousCache, RingCache, PagedCache), (q.dtype, torch.float8_e4m3fn))
    if q_len > MAX_Q_LEN:
        raise ValueError(f"q: q_len {q_len} must be at most {MAX_Q_LEN}; use prefill() for more")
    for name, size in (("batch", batch), ("q_len times q_heads", q_len * q_heads)):
        if size > MAX_GRID_YZ:
            raise ValueError(f"q: {name} {size} is above {MAX_GRID_YZ}")
    check_lengths(lengths, batch, q.device)
    _check_sink(sink, q)
    window = _check_window(window)
    if isinstance(cache, RingCache):
        window = _check_ring(window, cache.capacity, q_len)
    splits = _check_splits(num_splits)
    rows = min(q_len * q_heads // cache.kv_heads, ROWS)
    k, v = cache.keys, cache.values
    chosen = _resolve_step("decode", step, q, k, v, rows=rows)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        cache.check(lengths)
    o, lse = _decode(
        q, k, v, lengths, getattr(cache, "page_table", None), sink, cache.k_scale, cache.v_scale, cache.fault, chosen,
        isinstance(cache, RingCache), window, splits, _check_scale(scale, head_dim), bool(return_lse),
    )  # fmt: skip
    return (o, lse) if return_lse else o


@operator(
    "mila_kernels::decode", mutates_args=("fault",),
    check=lambda q, k, v, lengths, page_table, sink, k_scale, v_scale, fault, step, *rest: (
        _check_alignment(step, q, k, v)
    ),
)  # fmt: skip
def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None,
    sink: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, fault: torch.Tensor,
    step: str, ring: bool, window: int, splits: int, scale: float, with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = _decode_outputs(
        q, k, v, lengths, page_table, sink, k_scale, v_scale, fault, step, ring, window, splits, scale, with_lse
    )
    if not o.numel():
        return o, lse
    batch, q_len, q_heads, head_dim = q.shape
    kv_heads, slots = k.shape[2], k.shape[1]
    rows = q_len * q_heads // kv_heads
    automatic, blocks = splits == 0, _sm_count(q.device) * BLOCKS_PER_SM
    splits = splits or automatic_splits(q.device, batch, kv_heads, rows)
    # What csrc/decode/schedule.cuh calls slots, or a slot a split; some steps keep rows in pairs.
    items = batch * kv_heads * -(-rows // ROWS)
    pairs = -(-min(rows, ROWS) // 2)
    rows = max(items * splits, items + blocks) * pairs * 2
    partial_o = outputs.empty(q, (rows, head_dim), torch.float32)
    partial_sum = outputs.empty(q, (rows, 2), torch.float32)
    counters = arrivals(q.device, max(batch * q_len * q_heads, items * ARRIVALS_PER_ITEM))
    args = DecodeArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr(), lse=lse.data_ptr() if with_lse else None,
        lengths=lengths.data_ptr(), page_table=_pointer(page_table), sink=_pointer(sink), k_scale=_pointer(k_scale),
        v_scale=_pointer(v_scale), partial_o=partial_o.data_ptr(), partial_sum=partial_sum.data_ptr(),
        arrivals=counters.data_ptr(), fault=fault.data_ptr(),
        q_stride=_strides(q), k_stride=_strides(k), v_stride=_strides(v), o_stride=_strides(o),
        page_table_stride=0 if page_table is None else page_table.stride(0),
        batch=batch, q_len=q_len, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        group=q_heads // kv_heads, capacity=slots if page_table is None else page_table.shape[1] * slots,
        page_shift=0 if page_table is None else slots.bit_length() - 1, pages=k.shape[0], ring=ring, window=window,
        splits=splits, automatic=automatic, blocks=blocks, dtype=DTYPE_CODES[q.dtype],
        kv_dtype=KV_DTYPE_CODES[k.dtype], scale=scale,
        inverse_group=kv_heads / q_heads,
    )  # fmt: skip
    reads = {"q": q, "k": k, "v": v, "lengths": lengths}
    optional = {"page_table": page_table, "sink": sink, "k_scale": k_scale, "v_scale": v_scale}
    reads |= {name: x for name, x in optional.items() if x is not None}
    writes = {"o": o, "lse": lse, "partial_o": partial_o, "partial_sum": partial_sum}
    build.launch(steps.step(step), args, q.device, reads, {**writes, "arrivals": counters, "fault": fault})
    return o, lse


@_decode.register_fake
def _decode_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None,
    sink: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, fault: torch.Tensor,
    step: str, ring: bool, window: int, splits: int, scale: float, with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, q_len, q_heads, _ = q.shape
    lse_shape = (batch, q_heads, q_len) if with_lse else (0,)
    return outputs.empty(q, q.shape), outputs.empty(q, lse_shape, torch.float32)


def automatic_splits(device: torch.device, batch: int, kv_heads: int, rows: int) -> int:
    """Splits that fill the device: two blocks an SM, whatever the lengths, which only the device knows."""
    blocks = _sm_count(device) * BLOCKS_PER_SM
    return max(1, min(MAX_SPLITS, blocks // (batch * kv_heads * -(-rows // ROWS))))


@functools.cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def merge(partials: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys from those over disjoint parts of them.

    ``partials`` are (O, LSE) pairs as decode() and prefill() return them: O ``[batch, q_len, q_heads, head_dim]`` and
    float32 LSE ``[batch, q_heads, q_len]``, natural log. (0, -inf), no key, is the neutral element. Returns such a
    pair, O in the first's dtype, computed in float32. A sink must be in one of the parts only. ValueError if shapes
    differ.
    """
    if not partials:
        raise ValueError("partials: at least one (O, LSE) pair is needed")
    first_o, first_lse = partials[0]
    batch, q_len, q_heads, _ = first_o.shape
    for i, (o, lse) in enumerate(partials):
        if o.shape != first_o.shape or tuple(lse.shape) != (batch, q_heads, q_len):
            raise ValueError(
                f"partials: pair {i} has shapes {tuple(o.shape)} and {tuple(lse.shape)}, not {tuple(first_o.shape)} "
                f"and {(batch, q_heads, q_len)}"
            )
    lses = torch.stack([lse.float() for _, lse in partials])
    total = torch.logsumexp(lses, dim=0)
    # No part has a key: the total is -inf, and the weights are exp(-inf - 0) = 0.
    weights = torch.exp(lses - total.masked_fill(total == -torch.inf, 0.0))
    o = torch.zeros_like(first_o, dtype=torch.float32)
    for weight, (part, _) in zip(weights, partials, strict=True):
        o += weight.transpose(1, 2).unsqueeze(-1) * part.float()
    return o.to(first_o.dtype), total


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _check_sink(sink: torch.Tensor | None, q: torch.Tensor) -> None:
    if sink is None:
        return
    if not isinstance(sink, torch.Tensor):
        raise TypeError(f"sink: a torch.Tensor is needed, not {type(sink).__name__}")
    if sink.dtype != torch.float32 or tuple(sink.shape) != (q.shape[2],) or sink.device != q.device:
        raise ValueError(
            f"sink: {sink.dtype} {tuple(sink.shape)} on {sink.device} must be torch.float32 [{q.shape[2]}] "
            f"on {q.device}"
        )
    if sink.stride(0) != 1 and sink.shape[0] > 1:
        raise ValueError(f"sink: the stride is {sink.stride(0)} and must be 1; pass sink.contiguous()")


def _check_ring(window: int, capacity: int, q_len: int) -> int:
    """The window of a ring: its oldest key must not have been overwritten by the newest token."""
    most = capacity - max(q_len, 1) + 1
    if most < 1:
        raise ValueError(f"q: {q_len} tokens are more than the ring's capacity, {capacity}")
    if window > most:
        raise ValueError(
            f"window: {window} is above {most}: a ring of {capacity} slots keeps no more for {q_len} new tokens"
        )
    return window or most


def _check_splits(num_splits: int | None) -> int:
    """0 stands for automatic from here on."""
    if num_splits is None:
        return 0
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: an int or None is needed, not {type(num_splits).__name__}")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: {num_splits} must be between 1 and {MAX_SPLITS}")
    return num_splits
