"""Attention: prefill over contiguous keys and values."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from . import build, outputs, steps
from .arguments import check_flag, check_int, check_no_grad, check_tensor, shown
from .operator import operator

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_GRID_YZ = 65535  # heads and batch are the grid's y and z
MAX_LENGTH = 2**31 - 2**16  # the kernels add a tile to a position in 32 bits
# The product of two FP16 rows is below 2^41. Times such a scale and log2(e), as the kernels have it, FP32 holds it.
MAX_SCALE = 2.0**80


class PrefillArgs(ctypes.Structure):
    """The mirror of ``csrc/prefill/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in "qkvo"),
        *((name, ctypes.c_int32) for name in ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("causal", "window", "dtype")),
        ("scale", ctypes.c_float),
    ]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    step: str | steps.Step | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of many queries: ``softmax(scale * q k^T) v`` per head, computed in FP32.

    Args:
        q: ``[batch, q_len, q_heads, head_dim]``, BF16 or FP16, last dim contiguous, any other strides. ``head_dim`` is
            a multiple of 32 from 64 to 512; most steps take its powers of two.
        k, v: ``[batch, kv_len, kv_heads, head_dim]``, like ``q``; ``q_heads`` is a multiple of ``kv_heads``.
        step: an optimisation step (``"prefill/02_smem_tiles"``); None: the fastest that fits device and shape.
        causal: query ``i`` sits at position ``kv_len - q_len + i`` and sees no later key.
        window: the number of keys a query sees, its own included; None: all. Needs ``causal``.
        scale: factor of the scores, at most 2^80 either way, so that no score overflows by it alone; None:
            ``1 / sqrt(head_dim)``. Gemma 4 uses 1.0.
        return_lse: also return ``ln(sum(exp(score)))``, float32 ``[batch, q_heads, q_len]``.

    Returns:
        ``[batch, q_len, q_heads, head_dim]`` in ``q``'s dtype, and the LSE if asked for. A query that sees no key
        gives zeros and an LSE of -inf.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, before anything is launched.
        mila_kernels.build.KernelError: the launch was refused.

    CUDA tensors run on their device and its current stream, CPU tensors in emulation. Forward only.
    """
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    window = _check_window(window)
    _check_prefill(q, k, v, causal, window)
    scale = _check_scale(scale, q.shape[3])
    chosen = _resolve_step("prefill", step, q, k, v)
    o, lse = _prefill(q, k, v, chosen, causal, window, scale, return_lse)
    return (o, lse) if return_lse else o


def _check_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int) -> None:
    """TypeError or ValueError where q, k and v do not fit each other; a window of 0 is none."""
    _check_tensors(q=q, k=k, v=v)
    batch, q_len, q_heads, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"v: shape {tuple(v.shape)} must equal that of k, {tuple(k.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k: shape {tuple(k.shape)} must be [batch, kv_len, kv_heads, head_dim] with q's batch {batch} "
            f"and head_dim {head_dim}"
        )
    kv_heads = k.shape[2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q: {q_heads} heads must be a multiple of k's {kv_heads}")
    for name, size, most in (("batch", batch, MAX_GRID_YZ), ("q_heads", q_heads, MAX_GRID_YZ)):
        if size > most:
            raise ValueError(f"q: {name} {size} is above {most}")
    if max(q_len, k.shape[1]) >= MAX_LENGTH:
        raise ValueError(f"q, k: lengths {q_len} and {k.shape[1]} must be below 2^31 - 2^16")
    if window and not causal:
        raise ValueError(f"window: {window} needs causal=True")


def _check_prefill_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: str, causal: bool, window: int, scale: float, *_: Any
) -> None:
    """The operator's own check, for who calls it directly."""
    check_int("window", window, 0)
    _check_prefill(q, k, v, causal, window)
    _check_scale(scale, q.shape[3])
    _check_step("prefill", step, q, k, v)


@operator("mila_kernels::prefill", check=_check_prefill_call)
def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: str,
    causal: bool,
    window: int,
    scale: float,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _prefill_outputs(q, k, v, step, causal, window, scale, with_lse)
    args = PrefillArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr(), lse=lse.data_ptr() if with_lse else None,
        q_stride=_strides(q), k_stride=_strides(k), v_stride=_strides(v), o_stride=_strides(o),
        batch=q.shape[0], q_len=q.shape[1], kv_len=k.shape[1], q_heads=q.shape[2], kv_heads=k.shape[2],
        head_dim=q.shape[3], causal=causal, window=window, dtype=DTYPE_CODES[q.dtype], scale=scale,
    )  # fmt: skip
    if o.numel():
        build.launch(steps.step(step), args, q.device, reads={"q": q, "k": k, "v": v}, writes={"o": o, "lse": lse})
    return o, lse


@_prefill.register_fake
def _prefill_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: str,
    causal: bool,
    window: int,
    scale: float,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, q_heads, _ = q.shape
    lse_shape = (batch, q_heads, q_len) if with_lse else (0,)
    return outputs.empty(q, q.shape), outputs.empty(q, lse_shape, torch.float32)


def _strides(x: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Batch, token and head strides in elements."""
    return (ctypes.c_int64 * 3)(*x.stride()[:3])


def _check_tensors(**tensors: torch.Tensor) -> None:
    """Type, dims, dtype, device, last stride and grad of attention's tensors; the first sets what the others match."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)} must have 4 dims, [batch, tokens, heads, head_dim]")
        if x.dtype not in DTYPE_CODES:
            raise ValueError(f"{name}: dtype {x.dtype} must be torch.bfloat16 or torch.float16")
        if x.dtype != first.dtype:
            raise ValueError(f"{name}: dtype {x.dtype} must equal that of {first_name}, {first.dtype}")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: device {x.device} must be a CUDA device, or cpu for emulation")
        if x.device != first.device:
            raise ValueError(f"{name}: device {x.device} must equal that of {first_name}, {first.device}")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name}: the last dim's stride is {x.stride(3)} and must be 1; pass {name}.contiguous()")
        check_no_grad(name, x)


def _check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale: a float is needed, not {type(scale).__name__}")
    if not -MAX_SCALE <= scale <= MAX_SCALE:  # nor a NaN
        raise ValueError(f"scale: {shown(scale)} must be finite, from -2^80 to 2^80")
    return float(scale)


def _check_window(window: int | None) -> int:
    """0 stands for no window from here on."""
    if window is None:
        return 0
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window: an int or None is needed, not {type(window).__name__}")
    if window <= 0:
        raise ValueError(f"window: {shown(window)} must be positive, or None for no window")
    return min(window, 2**31 - 1)


def _resolve_step(op: str, step: str | steps.Step | None, *tensors: torch.Tensor, rows: int | None = None) -> str:
    """The id of the step asked for, if it can run on these tensors; without one, of the fastest that can, of those for
    so many query rows a KV head if ``rows`` is given. Under a compiler addresses are not known: the operator's check
    looks at them."""
    q = tensors[0]
    if torch.compiler.is_compiling():
        return _step_to_compile(op, steps.name_of(step), q.shape[3], q.dtype, q.device, rows)

    def misfit(s: steps.Step) -> str | None:
        return _unfit(s, q.shape[3], q.dtype, q.device) or _misaligned(s, *tensors)

    return steps.choose(op, step, misfit, rows).id


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _step_to_compile(
    op: str, step: str | None, head_dim: int, dtype: torch.dtype, device: torch.device, rows: int | None
) -> str:
    return steps.choose(op, step, lambda s: _unfit(s, head_dim, dtype, device), rows).id


def _unfit(step: steps.Step, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a step cannot run on such tensors, or None."""
    if head_dim not in step.head_dims:
        return f"q: head_dim {head_dim} must be one of {', '.join(map(str, step.head_dims))}"
    if DTYPE_NAMES[dtype] not in step.dtypes:
        return f"q: dtype {dtype} must be one of {', '.join(step.dtypes)}"
    reason = build.device_misfit(step, device)
    return f"q: {reason}" if reason else None


def _misaligned(step: steps.Step, *tensors: torch.Tensor) -> str | None:
    """Why a step cannot read q, k, v where they lie, or None."""
    for name, x in zip("qkv", tensors, strict=False):
        sizes, strides, size = x.shape, x.stride(), x.element_size()
        bits = x.data_ptr() if x.numel() else 0  # of the address and all strides: an alignment is a power of two
        for dim in range(3):
            if sizes[dim] > 1:
                bits |= strides[dim] * size
        if bits % step.alignment:
            return f"{name}: address and strides must be multiples of {step.alignment} bytes; pass {name}.contiguous()"
    return None


def _check_step(op: str, step: str, *tensors: torch.Tensor) -> None:
    """ValueError where a step is none of the op's, or cannot run on q, k and v as they are."""
    q = tensors[0]
    steps.choose(op, step, lambda s: _unfit(s, q.shape[3], q.dtype, q.device) or _misaligned(s, *tensors))
