"""Decode: attention of the newest tokens over a KV cache, and the merging of partial results."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from . import build, outputs, steps
from .arguments import check_flag, check_int, check_no_grad, check_tensor, shown
from .arrivals import arrivals
from .attention import (
    DTYPE_CODES,
    MAX_GRID_YZ,
    _check_scale,
    _check_step,
    _check_tensors,
    _check_window,
    _resolve_step,
    _strides,
)
from .cache import Cache, ContiguousCache, PagedCache, RingCache, check_lengths, check_queries, seen_by_kernels
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
        scale: factor of the scores, at most 2^80 either way; None: ``1 / sqrt(head_dim)``. Gemma 4 uses 1.0.
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
    check_flag("return_lse", return_lse)
    _check_tensors(q=q)
    batch, q_len, q_heads, head_dim = q.shape
    check_queries(cache, q, (ContiguousCache, RingCache, PagedCache), (q.dtype, torch.float8_e4m3fn))
    _check_sizes(batch, q_len, q_heads)
    check_lengths(lengths, batch, q.device)
    _check_sink(sink, q)
    window = _check_window(window)
    if isinstance(cache, RingCache):
        window = _check_ring(window, cache.capacity, q_len)
    splits = _check_splits(num_splits)
    scale = _check_scale(scale, head_dim)
    rows = min(q_len * q_heads // cache.kv_heads, ROWS)
    k, v = cache.keys, cache.values
    chosen = _resolve_step("decode", step, q, k, v, rows=rows)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        cache.check(lengths)
    o, lse = _decode(
        q, k, v, lengths, getattr(cache, "page_table", None), sink, cache.k_scale, cache.v_scale, cache.fault, chosen,
        isinstance(cache, RingCache), window, splits, scale, return_lse,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def _check_decode_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None,
    sink: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, fault: torch.Tensor,
    step: str, ring: bool, window: int, splits: int, scale: float, *_: Any,
) -> None:  # fmt: skip
    """The operator's own check, for who calls it directly."""
    _check_tensors(q=q)
    batch, q_len, q_heads, head_dim = q.shape
    _check_sizes(batch, q_len, q_heads)
    cache: Cache
    if page_table is not None:
        cache = seen_by_kernels(PagedCache, k, v, page_table=page_table)
    else:
        cache = seen_by_kernels(RingCache, k, v) if ring else seen_by_kernels(ContiguousCache, k, v)
    check_queries(cache, q, (type(cache),), (q.dtype, torch.float8_e4m3fn))
    check_lengths(lengths, batch, q.device)
    _check_sink(sink, q)
    for name, x, size in (("k_scale", k_scale, k.shape[2]), ("v_scale", v_scale, k.shape[2]), ("fault", fault, 3)):
        dtype = torch.int32 if name == "fault" else torch.float32
        if x is not None and name != "fault" and k.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name}: only an E4M3 cache has scales, this one is {k.dtype}")
        if x is not None and (x.dtype != dtype or x.shape != (size,) or x.device != q.device or x.stride(0) != 1):
            raise ValueError(
                f"{name}: {x.dtype} {tuple(x.shape)} on {x.device} must be {dtype} [{size}], contiguous, on {q.device}"
            )
    check_int("window", window, 0)
    if ring:
        check_int("window", _check_ring(window, cache.capacity, q_len), 1)
    check_int("splits", splits, 0, MAX_SPLITS)
    _check_scale(scale, head_dim)
    _check_step("decode", step, q, k, v)


@operator("mila_kernels::decode", mutates_args=("fault",), check=_check_decode_call)
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
    pair, O in the first's dtype, computed in float32. A sink must be in one of the parts only. TypeError or ValueError
    where ``partials`` are not such pairs, or their shapes or devices differ.
    """
    if not isinstance(partials, list | tuple):
        raise TypeError(f"partials: a list of (O, LSE) pairs is needed, not {type(partials).__name__}")
    if not partials:
        raise ValueError("partials: at least one (O, LSE) pair is needed")
    for i, pair in enumerate(partials):
        _check_pair(i, pair)
    first_o, _ = partials[0]
    batch, q_len, q_heads, _ = first_o.shape
    for i, (o, lse) in enumerate(partials):
        if o.device != first_o.device or lse.device != first_o.device:
            raise ValueError(f"partials: pair {i} is on {o.device} and {lse.device}, not on {first_o.device}")
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


def _check_pair(i: int, pair: object) -> None:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(x, torch.Tensor) for x in pair):
        raise TypeError(f"partials: pair {i} must be two tensors, (O, LSE), not {type(pair).__name__}")
    o, lse = pair
    if o.dim() != 4 or o.dtype not in (*DTYPE_CODES, torch.float32):
        raise ValueError(
            f"partials: O of pair {i} is {o.dtype} {tuple(o.shape)} and must be torch.bfloat16, torch.float16 or "
            "torch.float32 [batch, q_len, q_heads, head_dim]"
        )
    if lse.dtype != torch.float32:
        raise ValueError(f"partials: LSE of pair {i} is {lse.dtype} and must be torch.float32")


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _check_sizes(batch: int, q_len: int, q_heads: int) -> None:
    if q_len > MAX_Q_LEN:
        raise ValueError(f"q: q_len {q_len} must be at most {MAX_Q_LEN}; use prefill() for more")
    for name, size in (("batch", batch), ("q_len times q_heads", q_len * q_heads)):
        if size > MAX_GRID_YZ:
            raise ValueError(f"q: {name} {size} is above {MAX_GRID_YZ}")


def _check_sink(sink: torch.Tensor | None, q: torch.Tensor) -> None:
    if sink is None:
        return
    check_tensor("sink", sink)
    check_no_grad("sink", sink)
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
        raise ValueError(f"num_splits: {shown(num_splits)} must be between 1 and {MAX_SPLITS}")
    return num_splits
