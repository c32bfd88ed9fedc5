"""Prefill over a ring cache: attention of a chunk of a prompt over the newest tokens, the chunk's own included."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import build, outputs, steps
from .arguments import check_flag, check_int
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
from .cache import RingCache, check_lengths, check_queries, seen_by_kernels
from .operator import operator

MAX_ROWS = 2**31 - 2**16  # tokens times query heads of a KV head: the kernels count them in 32 bits


class PrefillRingArgs(ctypes.Structure):
    """The mirror of ``csrc/prefill_ring/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "lengths")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "qkvo"),
        *((name, ctypes.c_int32) for name in ("batch", "q_len", "capacity", "q_heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("window", "dtype")),
        ("scale", ctypes.c_float),
    ]


def largest_chunk(capacity: int, window: int) -> int:
    """The most tokens that may be appended to a ring at once and still find, each, the ``window`` keys it sees.

    The chunk's last token overwrites the slot of the token ``capacity`` before it, and the chunk's first token sees
    ``window - 1`` tokens before itself: ``capacity - window + 1``, or 0 where the ring is smaller than the window. It
    is never more than ``capacity``: of more tokens the last would overwrite the chunk's own first.
    """
    check_int("capacity", capacity, 0)
    check_int("window", window, 0)
    return min(capacity, max(0, capacity - window + 1))


def prefill_ring(
    q: torch.Tensor,
    cache: RingCache,
    lengths: torch.Tensor,
    *,
    step: str | steps.Step | None = None,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest ``q_len`` tokens of each sequence over its ring, which holds them already.

    Args:
        q: ``[batch, q_len, q_heads, head_dim]``, BF16 or FP16, last dim contiguous; ``q_heads`` is a multiple of the
            cache's ``kv_heads``. Query ``i`` sits at position ``length - q_len + i`` and sees no later key.
        cache: position p in slot ``p % capacity``, in ``q``'s dtype. Slots that no query sees are not read.
        lengths: int32 ``[batch]`` on ``q``'s device: the tokens of each sequence so far. Read on the device.
        step: an optimisation step (``"prefill_ring/02_row_split"``); None: the fastest that fits device and shape.
            A step takes the head dims in its ``head_dims``: 512 needs one that splits the columns of O over warps, as
            ``01_hs_split`` does, since a warp that owns 16 rows would need 256 registers a thread for O alone.
        window: the number of keys a query sees, its own included; None: as many as the ring keeps for all of them,
            ``capacity - q_len + 1``, which is the whole text where a ring has room for it and ``q_len - 1`` tokens
            more. ``q_len`` is at most :func:`largest_chunk` of capacity and window. So a window above ``capacity`` is
            refused, also where the text is shorter: lengths are on the device, and of a longer one the keys that such
            a window promises would be missing without a word.
        scale: factor of the scores; None: ``1 / sqrt(head_dim)``. Gemma 4 uses 1.0.
        return_lse: also return ``ln(sum(exp(score)))``, float32 ``[batch, q_heads, q_len]``.

    Returns:
        ``[batch, q_len, q_heads, head_dim]`` in ``q``'s dtype, and the LSE if asked for. A query before position 0
        sees no key: zeros and an LSE of -inf.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, before anything is launched. Values in
            ``lengths`` are looked at on the CPU only.
        mila_kernels.build.KernelError: the launch was refused.

    CUDA tensors run on their device and its current stream, CPU tensors in emulation. Forward only.
    """
    check_flag("return_lse", return_lse)
    _check_tensors(q=q)
    batch, q_len, _, head_dim = q.shape
    check_queries(cache, q, (RingCache,), (q.dtype,))
    check_lengths(lengths, batch, q.device)
    if q_len > cache.capacity:
        raise ValueError(
            f"q: q_len {q_len} is above {cache.capacity}, the ring's capacity: its last tokens overwrite its first ones"
        )
    window = _check_window(window) or largest_chunk(cache.capacity, max(q_len, 1))
    _check_ring(q, cache, window)
    scale = _check_scale(scale, head_dim)
    chosen = _resolve_step("prefill_ring", step, q, cache.keys, cache.values)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        cache.check(lengths)
    o, lse = _prefill_ring(q, cache.keys, cache.values, lengths, chosen, window, scale, return_lse)
    return (o, lse) if return_lse else o


def _check_ring(q: torch.Tensor, cache: RingCache, window: int) -> None:
    """ValueError where the queries are more than a ring or a grid takes."""
    batch, q_len, q_heads, _ = q.shape
    most = largest_chunk(cache.capacity, window)
    if q_len > most:
        raise ValueError(
            f"q: q_len {q_len} is above {most}, the largest chunk of a ring of {cache.capacity} slots with a window of "
            f"{window}: its last tokens overwrite keys that its first ones see"
        )
    for name, size, limit in (
        ("batch", batch, MAX_GRID_YZ), ("q_heads", q_heads, MAX_GRID_YZ),
        ("q_len times q_heads / kv_heads", q_len * (q_heads // cache.kv_heads), MAX_ROWS),
    ):  # fmt: skip
        if size > limit:
            raise ValueError(f"q: {name} {size} is above {limit}")


def prefill_through_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: RingCache,
    lengths: torch.Tensor,
    *,
    window: int,
    chunk: int | None = None,
    step: str | steps.Step | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A prompt of any length through a ring of any capacity from ``window`` on: append a chunk, attend, and so on.

    ``q`` ``[batch, tokens, q_heads, head_dim]``, ``k`` and ``v`` ``[batch, tokens, kv_heads, head_dim]`` are the new
    tokens and ``lengths`` int32 ``[batch]`` those before them, not changed. ``chunk`` is at most, and None is,
    :func:`largest_chunk` of the capacity and the window. Otherwise as :func:`prefill_ring`; afterwards the cache holds
    the newest tokens.
    """
    check_flag("return_lse", return_lse)
    _check_tensors(q=q, k=k, v=v)
    check_queries(cache, q, (RingCache,), (q.dtype,))
    check_lengths(lengths, q.shape[0], q.device)
    _check_scale(scale, q.shape[3])
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != (q.shape[0], q.shape[1], cache.kv_heads, q.shape[3]):
            raise ValueError(
                f"{name}: shape {tuple(x.shape)} must be {(q.shape[0], q.shape[1], cache.kv_heads, q.shape[3])}"
            )
    if window is None:
        raise TypeError("window: an int is needed, not NoneType")
    most = largest_chunk(cache.capacity, _check_window(window))
    chunk = most if chunk is None else chunk
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"chunk: an int or None is needed, not {type(chunk).__name__}")
    if not 1 <= chunk <= most:
        raise ValueError(f"chunk: {chunk} must be between 1 and {most}, for {cache.capacity} slots and window {window}")
    # The first chunk is appended before its attention would refuse a step.
    _resolve_step("prefill_ring", step, q, cache.keys, cache.values)
    o = outputs.empty(q, q.shape)
    lse = outputs.empty(q, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    for start in range(0, q.shape[1], chunk):
        stop = min(start + chunk, q.shape[1])
        cache.append(k[:, start:stop], v[:, start:stop], lengths + stop)
        part = prefill_ring(
            q[:, start:stop], cache, lengths + stop, step=step, window=window, scale=scale, return_lse=True
        )
        o[:, start:stop], lse[:, :, start:stop] = part
    return (o, lse) if return_lse else o


def _check_prefill_ring_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
    step: str, window: int, scale: float, *_: Any,
) -> None:  # fmt: skip
    """The operator's own check, for who calls it directly."""
    _check_tensors(q=q)
    cache = seen_by_kernels(RingCache, k, v)
    check_queries(cache, q, (RingCache,), (q.dtype,))
    check_lengths(lengths, q.shape[0], q.device)
    check_int("window", window, 1)
    _check_ring(q, cache, window)
    _check_scale(scale, q.shape[3])
    _check_step("prefill_ring", step, q, k, v)


@operator("mila_kernels::prefill_ring", check=_check_prefill_ring_call)
def _prefill_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
    step: str, window: int, scale: float, with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = _prefill_ring_outputs(q, k, v, lengths, step, window, scale, with_lse)
    args = PrefillRingArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr(), lse=lse.data_ptr() if with_lse else None,
        lengths=lengths.data_ptr(),
        q_stride=_strides(q), k_stride=_strides(k), v_stride=_strides(v), o_stride=_strides(o),
        batch=q.shape[0], q_len=q.shape[1], capacity=k.shape[1], q_heads=q.shape[2], kv_heads=k.shape[2],
        head_dim=q.shape[3], window=window, dtype=DTYPE_CODES[q.dtype], scale=scale,
    )  # fmt: skip
    if o.numel():
        reads = {"q": q, "k": k, "v": v, "lengths": lengths}
        build.launch(steps.step(step), args, q.device, reads=reads, writes={"o": o, "lse": lse})
    return o, lse


@_prefill_ring.register_fake
def _prefill_ring_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
    step: str, window: int, scale: float, with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if with_lse else (0,)
    return outputs.empty(q, q.shape), outputs.empty(q, lse_shape, torch.float32)
