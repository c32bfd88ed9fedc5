"""Matrix products of many rows of activations with an FP4 weight, on 8-bit tensor cores: W4A8."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from . import build, linear, outputs, paths, steps
from .arguments import check_int, check_no_grad, check_tensor
from .arrivals import arrivals
from .files import stamp
from .layouts import unpack_rows
from .linear import DTYPE_CODES, KERNEL_GROUP, SCALE_CODES, Fp4Weight
from .operator import operator

OP = "gemm_w4a8"
PHASES = {"quantize": 0, "weight": 1, "multiply": 2}
LAYOUTS = {"rows": 0, "blocks": 1}
CODES_DTYPE = torch.float8_e4m3fn
LARGEST_PRODUCT = linear.FP4_MAGNITUDES[-1] / linear.FP8_MAX  # times the largest scale: the range of scale x value
BLOCK_ROWS = 64  # of a shuffled weight: those of one wgmma
BLOCK_BYTES = BLOCK_ROWS * KERNEL_GROUP // 2 + BLOCK_ROWS * 4  # codes, then a scale a row
MAX_ROWS = 1 << 22
TILE = 128 * 256  # outputs of the largest tile of a step that splits K
# What the library's products take besides 128 columns; the kernels of ours take any number of rows of the weight.
LIBRARY_MULTIPLE = 16
LIBRARY_PRODUCTS = (f"{OP}/02_tensor_scale", f"{OP}/03_token_scale")

Pair = tuple[torch.Tensor, torch.Tensor]


class GemmW4a8Args(ctypes.Structure):
    """The mirror of ``csrc/gemm_w4a8/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_codes", "x_scales", "w_codes", "w_scales", "w_range")),
        *((name, ctypes.c_void_p) for name in ("w_scratch", "sums", "bias", "y", "partials", "arrivals")),
        *((name, ctypes.c_int64) for name in ("x_stride", "x_codes_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "phase", "x_dtype", "y_dtype", "w_scale_dtype")),
        *((name, ctypes.c_int32) for name in ("layout", "sm_count")),
    ]


def gemm_w4a8(
    x: torch.Tensor | Pair,
    w: Fp4Weight,
    *,
    step: str | steps.Step | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``x w^T + bias`` with activations in E4M3, a scale per token, and a weight in E2M1, a scale per group of 128.

    Args:
        x: ``[m, k]`` BF16 or FP16, last dim contiguous, any m: quantised inside. Or what
            :func:`quantize_activations` gives: codes ``[m, k]`` in ``torch.float8_e4m3fn`` and FP32 scales, ``[m]`` or,
            one for all tokens, ``[1]``.
        w: the weight ``[n, k]``, groups of 128, any n (steps 02 and 03, whose library multiplies: a multiple of 16).
            A step that needs another layout shuffles it at the first call, which must not be one that a CUDA graph
            captures, and remembers it.
        step: an optimisation step (``"gemm_w4a8/04_fused_mma"``); None: the fastest of this device.
        bias: ``[n]`` in ``out_dtype``, or None.
        out_dtype: ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        ``[m, n]`` in ``out_dtype``. A NaN or Inf in a token makes that token's outputs NaN, and no others.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, before anything is launched.
        mila_kernels.build.KernelError: the launch was refused.

    Scratch is allocated at each call on the current stream. Kept between calls are the shuffled weight, and of each
    stream, and each launch that a CUDA graph captured, some counters: zero before and after a launch.
    """
    if not isinstance(w, Fp4Weight):
        raise TypeError(f"w: an Fp4Weight is needed (quantize_fp4 makes one), not {type(w).__name__}")
    if w.group_size != KERNEL_GROUP:
        raise ValueError(f"w: group_size {w.group_size} must be {KERNEL_GROUP}")
    if out_dtype not in DTYPE_CODES:
        raise ValueError(f"out_dtype: {out_dtype} must be torch.bfloat16 or torch.float16")
    values, scales = _check_activations(x, w)
    if bias is not None:
        _check_bias(bias, values, w.n, out_dtype)
    chosen, layout = _resolve_step(step, values)
    _check_rows(chosen, w.n)
    codes, w_scales = _laid_out(w, layout)
    return _gemm(values, scales, codes, w_scales, bias, w.n, chosen, out_dtype)


def quantize_activations(x: torch.Tensor, *, step: str | steps.Step | None = None) -> Pair:
    """Activations to E4M3 as a step does inside: what :func:`gemm_w4a8` takes in their place.

    Args:
        x: ``[m, k]`` BF16 or FP16, last dim contiguous, k a multiple of 128.
        step: whose quantiser; None: the fastest of this device. All but ``02_tensor_scale`` scale each token.

    Returns:
        Codes ``[m, k]`` in ``torch.float8_e4m3fn`` and FP32 scales: ``[m]``, or ``[1]`` of step 02. A scale is
        absmax / 448 and at least 2^-126, so that a token of zeros has codes of zero.
    """
    return _quantize(x, _check_quantiser(x, step))


def _check_quantiser(x: torch.Tensor, step: str | steps.Step | None) -> str:
    """The id of the step asked for, or of the fastest, if it can quantise such activations."""
    _check_values(x, "x")
    if x.shape[1] % KERNEL_GROUP:
        raise ValueError(f"x: its {x.shape[1]} columns must be a multiple of {KERNEL_GROUP}")
    chosen, _ = _resolve_step(step, x)
    if not _quantises(chosen):
        raise ValueError(f"step: {chosen} does not quantise activations")
    return chosen


# ---- the operators ---------------------------------------------------------------------------------------------------


def _check_gemm_call(
    x: torch.Tensor, x_scales: torch.Tensor | None, w_codes: torch.Tensor, w_scales: torch.Tensor,
    bias: torch.Tensor | None, n: int, step: str, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    """The operator's own check, for who calls it directly."""
    check_int("n", n, 1)
    if out_dtype not in DTYPE_CODES:
        raise ValueError(f"out_dtype: {out_dtype} must be torch.bfloat16 or torch.float16")
    if x_scales is None:
        _check_values(x, "x")
    else:
        _check_codes(x, x_scales)
    chosen, layout = _resolve_step(step, x)
    k = x.shape[1]
    if k % KERNEL_GROUP:
        raise ValueError(f"x: its {k} columns must be a multiple of {KERNEL_GROUP}")
    shapes: dict[str, tuple[int, ...]] = {"w_codes": (n, k // 2), "w_scales": (n, k // KERNEL_GROUP)}
    if layout == "blocks":
        shapes = dict.fromkeys(("w_codes", "w_scales"), (k // KERNEL_GROUP, -(-n // BLOCK_ROWS), BLOCK_BYTES))
    for name, stored in (("w_codes", w_codes), ("w_scales", w_scales)):
        rows_scales = name == "w_scales" and layout == "rows"
        linear.check_stored(name, stored, tuple(SCALE_CODES) if rows_scales else (torch.uint8,), shapes[name], layout)
        if stored.device != x.device:
            raise ValueError(f"{name}: device {stored.device} must equal that of x, {x.device}")
    if bias is not None:
        _check_bias(bias, x, n, out_dtype)
    _check_rows(chosen, n)


@operator("mila_kernels::gemm_w4a8", check=_check_gemm_call)
def _gemm(
    x: torch.Tensor, x_scales: torch.Tensor | None, w_codes: torch.Tensor, w_scales: torch.Tensor,
    bias: torch.Tensor | None, n: int, step: str, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    chosen = steps.step(step)
    if not x.shape[0]:
        return _gemm_output(x, x_scales, w_codes, w_scales, bias, n, step, out_dtype)
    call = _Call(chosen, x, x_scales, w_codes, w_scales, bias, n, out_dtype)
    return _LIBRARY_STEPS.get(chosen.order, _Call.fused)(call)


@_gemm.register_fake
def _gemm_output(
    x: torch.Tensor, x_scales: torch.Tensor | None, w_codes: torch.Tensor, w_scales: torch.Tensor,
    bias: torch.Tensor | None, n: int, step: str, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return outputs.empty(x, (x.shape[0], n), out_dtype)


@operator("mila_kernels::quantize_activations", check=lambda x, step: _check_quantiser(x, step))
def _quantize(x: torch.Tensor, step: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = _quantize_outputs(x, step)
    if not x.shape[0]:
        return codes, scales
    # Step 02 finds the largest of each token first, in the floats after its one scale.
    room = outputs.empty(x, (1 + x.shape[0],), torch.float32) if _one_scale(step) else scales
    args = GemmW4a8Args(
        x=x.data_ptr(), x_codes=codes.data_ptr(), x_scales=room.data_ptr(), x_stride=x.stride(0),
        x_codes_stride=codes.stride(0), m=x.shape[0], k=x.shape[1], x_dtype=DTYPE_CODES[x.dtype],
        phase=PHASES["quantize"],
    )  # fmt: skip
    writes = {"x_codes": codes, "x_scales": room}
    build.launch(steps.step(step), args, x.device, reads={"x": x}, writes=writes)
    return codes, room[:1].clone() if _one_scale(step) else scales


@_quantize.register_fake
def _quantize_outputs(x: torch.Tensor, step: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales = 1 if _one_scale(step) else x.shape[0]
    return outputs.empty(x, x.shape, CODES_DTYPE), outputs.empty(x, (scales,), torch.float32)


def _one_scale(step: str) -> bool:
    return step == f"{OP}/02_tensor_scale"


class _Call:
    """One product: its tensors and how the steps get from them to y."""

    def __init__(
        self, step: steps.Step, x: torch.Tensor, x_scales: torch.Tensor | None, w_codes: torch.Tensor,
        w_scales: torch.Tensor, bias: torch.Tensor | None, n: int, out_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.step, self.x, self.x_scales, self.bias, self.out_dtype = step, x, x_scales, bias, out_dtype
        self.w_codes, self.w_scales = w_codes, w_scales
        self.m, self.k, self.n = x.shape[0], x.shape[1], n

    def fused(self) -> torch.Tensor:
        """Quantise unless that is done, and multiply in a kernel of ours."""
        codes, scales = self._pair()
        y = self._y()
        reads = {"x_codes": codes, "x_scales": scales, **self._weight()}
        if "w_range" in _code(self.step):
            reads["w_range"] = self._w_range()
        if self.bias is not None:
            reads["bias"] = self.bias
        writes = {"y": y}
        if "partials" in _code(self.step):
            writes |= self._parts()
        self._launch("multiply", reads, writes)
        return y if y.shape[1] == self.n else y[:, : self.n].contiguous()

    def upcast(self) -> torch.Tensor:
        """Step 01: the weight in 16 bits, and the library's product; a pair's scales are put in after it."""
        scratch = outputs.empty(self.x, (self.n, self.k), self._dtype())
        self._launch("weight", self._weight(), {"w_scratch": scratch})
        if self.x_scales is None:
            y = _matmul(self.x, scratch, self.bias if self.bias is None else self.bias.to(self.x.dtype))
            return y.to(self.out_dtype)
        y = _matmul(self.x.to(torch.bfloat16), scratch, None).float() * self._per_token(self.x_scales)[:, None]
        return (y if self.bias is None else y + self.bias.float()).to(self.out_dtype)

    def one_scale(self) -> torch.Tensor:
        """Step 02: one scale for the weights and one for the activations, both put in by the library."""
        x, x_scales = self.x, self.x_scales
        if x_scales is not None and x_scales.shape[0] != 1:  # tokens that were scaled one by one get one scale
            x, x_scales = (x.float() * x_scales[:, None]).to(torch.bfloat16), None
        codes, scale = (x, x_scales) if x_scales is not None else _quantize(x, self.step.id)
        w_range = self._w_range()
        w_codes = self._weight_codes(w_range)
        if not _has_library(self.x.device):
            sums = _sums(codes, w_codes) * (scale * w_range)
            return (sums if self.bias is None else sums + self.bias.float()).to(self.out_dtype)
        return torch._scaled_mm(
            _aligned(codes), w_codes.T, scale_a=scale, scale_b=w_range, bias=self.bias, out_dtype=self.out_dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def token_scale(self) -> torch.Tensor:
        """Step 03: the library's sums in FP32, and an epilogue of ours with a scale per token."""
        codes, scales = self._pair()
        w_range = self._w_range()
        w_codes = self._weight_codes(w_range)
        if not _has_library(self.x.device):
            sums = _sums(codes, w_codes)
        else:
            one = torch.ones(1, device=self.x.device)
            sums = torch._scaled_mm(
                _aligned(codes), w_codes.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
            )  # fmt: skip
        y = outputs.empty(self.x, (self.m, self.n), self.out_dtype)
        reads = {"x_scales": scales, "w_range": w_range, "sums": sums}
        if self.bias is not None:
            reads["bias"] = self.bias
        self._launch("multiply", reads, {"y": y})
        return y

    def _pair(self) -> Pair:
        if self.x_scales is None:
            return _quantize(self.x, self.step.id)
        return self.x, self._per_token(self.x_scales)

    def _per_token(self, scales: torch.Tensor) -> torch.Tensor:
        return scales if scales.shape[0] == self.m else scales.expand(self.m).contiguous()

    def _y(self) -> torch.Tensor:
        """Rows of a multiple of 16 bytes, as copies from shared memory need them."""
        return outputs.empty(self.x, (self.m, -(-self.n // 8) * 8), self.out_dtype)

    def _parts(self) -> dict[str, torch.Tensor]:
        """Room for two parts of a tile a multiprocessor, and counters of the tiles that are split."""
        sms = _sm_count(self.x.device)
        partials = outputs.empty(self.x, (2 * sms, TILE), torch.float32)
        return {"partials": partials, "arrivals": arrivals(self.x.device, 4 * sms)}

    def _weight(self) -> dict[str, torch.Tensor]:
        return {"w_codes": self.w_codes, "w_scales": self.w_scales}

    def _w_range(self) -> torch.Tensor:
        """The static scale of all weights, [1], found from the group scales at each call: it cannot be stale."""
        return self.w_scales.float().amax().mul(LARGEST_PRODUCT).view(1)

    def _weight_codes(self, w_range: torch.Tensor) -> torch.Tensor:
        scratch = outputs.empty(self.x, (self.n, self.k), CODES_DTYPE)
        self._launch("weight", {**self._weight(), "w_range": w_range}, {"w_scratch": scratch})
        return scratch

    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.x_scales is not None else self.x.dtype

    def _launch(self, phase: str, reads: dict[str, torch.Tensor], writes: dict[str, torch.Tensor]) -> None:
        every = {**reads, **writes}
        args = GemmW4a8Args(
            **{name: x.data_ptr() for name, x in every.items()},
            m=self.m, n=self.n, k=self.k, phase=PHASES[phase], x_dtype=DTYPE_CODES[self._dtype()],
            y_dtype=DTYPE_CODES[self.out_dtype], w_scale_dtype=SCALE_CODES.get(self.w_scales.dtype, 1),
            layout=LAYOUTS[step_layout(self.step)], sm_count=_sm_count(self.x.device),
            # The stride of a single row may be anything.
            x_codes_stride=every["x_codes"].stride(0) if "x_codes" in every and self.m > 1 else self.k,
            y_stride=every["y"].stride(0) if "y" in every else 0,
        )  # fmt: skip
        build.launch(self.step, args, self.x.device, reads=reads, writes=writes)


_LIBRARY_STEPS = {1: _Call.upcast, 2: _Call.one_scale, 3: _Call.token_scale}


def _has_library(device: torch.device) -> bool:
    """Whether the product is the library's: not on a CPU, nor under a sanitizer, which its kernels are not made for:
    racecheck ends with an error of its own in torch.matmul alone, and initcheck takes what they wrote for unwritten."""
    return device.type == "cuda" and paths.WATCHED not in os.environ


def _sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x times the transposed w, in FP32; on a GPU through FP64, as the reference, which the sanitizers let pass."""
    wide = torch.float32 if x.device.type == "cpu" else torch.float64
    return (x.to(wide) @ w.to(wide).T).float()


def _matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not _has_library(x.device):
        sums = _sums(x, w)
        return (sums if bias is None else sums + bias.float()).to(x.dtype)
    return torch.nn.functional.linear(x, w, bias)


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    """Rows one after another, as the library takes them, the stride of a single one too."""
    return codes.contiguous().view(-1).view(codes.shape)


def _sm_count(device: torch.device) -> int:
    """Multiprocessors to share the work over; in emulation a small number, so that a block has several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


# ---- the weight's layouts --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _code_of(path: Path, stamp: tuple[int, int]) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))


def _code(step: steps.Step) -> str:
    """A step's source without the lines of comment."""
    return _code_of(step.path, stamp(step.path))


def step_layout(step: steps.Step) -> str:
    """The weight layout that a step reads: ``"rows"``, or ``"blocks"`` where its source names LAYOUT_BLOCKS."""
    return "blocks" if "LAYOUT_BLOCKS" in _code(step) else "rows"


def _laid_out(w: Fp4Weight, layout: str) -> Pair:
    """Codes and scales in that layout, remembered by the weight. Blocks hold both: the scales are then the blocks."""
    if layout == "rows":
        rows = w.in_layout("rows")
        return rows.codes, rows.scales
    if not w._blocks:
        _remember_blocks(w)
    blocks = w._blocks[0]
    return blocks, blocks


@torch.compiler.disable
def _remember_blocks(w: Fp4Weight) -> None:
    w._blocks.append(_blocks(w.in_layout("rows")))


def _blocks(w: Fp4Weight) -> torch.Tensor:
    """uint8 ``[k / 128, n / 64, BLOCK_BYTES]``: 64 rows by 128 columns as A operands of four m64k32, then 64 scales.

    Thread t of a warpgroup finds its 64 codes in the 16 bytes at 16 t and at 2048 + 16 t. A word holds, for one
    k-step's 4 columns from 4 (t % 4) or from 16 more, the codes of rows g and g + 8, folded so that five operations
    make the bits of eight E4M3 values x 2^-6 of them: see csrc/gemm_w4a8/args.cuh. Rows past n are zeros.
    """
    units, groups = -(-w.n // BLOCK_ROWS), w.k // KERNEL_GROUP
    missing = units * BLOCK_ROWS - w.n
    out = torch.empty(groups, units, BLOCK_BYTES, dtype=torch.uint8, device=w.device)
    scales = torch.cat((w.scales.float(), w.scales.new_zeros(missing, groups, dtype=torch.float32)))
    scale_bytes = scales.view(units, BLOCK_ROWS, groups).permute(2, 0, 1).contiguous().view(torch.uint8)
    out[:, :, BLOCK_ROWS * KERNEL_GROUP // 2 :] = scale_bytes.view(groups, units, -1)
    some = max(1, linear.CHUNK // (BLOCK_ROWS * w.k))
    for start in range(0, units, some):
        stop = min(start + some, units)
        rows = w.codes[start * BLOCK_ROWS : stop * BLOCK_ROWS]
        rows = torch.cat((rows, rows.new_zeros((stop - start) * BLOCK_ROWS - rows.shape[0], rows.shape[1])))
        # unit, warp, half (row g or g + 8), g, group, two k-steps' half, k-step, columns from 16, t, byte
        nibbles = unpack_rows(rows).view(stop - start, 4, 2, 8, groups, 2, 2, 2, 4, 4)
        folded = _fold(nibbles[:, :, 0], nibbles[:, :, 1])  # unit, warp, g, group, 2, step, from 16, t, byte
        order = folded.permute(3, 0, 4, 1, 2, 7, 5, 6, 8)  # group, unit, 2, warp, g, t, step, from 16, byte
        out[:, start:stop, : BLOCK_ROWS * KERNEL_GROUP // 2] = order.reshape(groups, stop - start, -1)
    return out


def _fold(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: of the first, sign, exponent and mantissa where E4M3 has them; the second's between them.

    A code is s e1 e0 m. The byte is, from bit 7: s1, e1 of 2, s2, e1, e0, m of 1, e0, m of 2.
    """
    a, b = first.int(), second.int()
    placed = (a & 8) << 4 | (a & 7) << 2
    between = (b & 8) << 2 | (b & 4) << 4 | b & 3
    return (placed | between).to(torch.uint8)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _resolve_step(step: str | steps.Step | None, x: torch.Tensor) -> tuple[str, str]:
    """The id and the weight's layout of the step asked for, or of the fastest. Under a compiler addresses are not
    known: the operator's check looks at them."""
    if torch.compiler.is_compiling():
        return _step_to_compile(steps.name_of(step), x.dtype, x.device)
    chosen = linear.fitting_step(OP, step, x.dtype, x.device)
    linear.check_alignment(chosen, x)
    return chosen.id, step_layout(chosen)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _step_to_compile(step: str | None, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    chosen = linear.fitting_step(OP, step, dtype, device)
    return chosen.id, step_layout(chosen)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _quantises(step: str) -> bool:
    return "PHASE_QUANTIZE" in _code(steps.step(step))


def _check_activations(x: Any, w: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The activations or their codes, and the codes' scales."""
    scales: torch.Tensor | None = None
    values = x
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise ValueError(f"x: a pair (codes, scales) has 2 tensors, not {len(x)}")
        values, scales = x
        _check_codes(values, scales)
    else:
        _check_values(values, "x")
    if values.device != w.device:
        raise ValueError(f"x: device {values.device} must equal that of w, {w.device}")
    if values.shape[1] != w.k:
        raise ValueError(f"x: its {values.shape[1]} columns must equal the {w.k} of w")
    return values, scales


def _check_codes(codes: Any, scales: Any) -> None:
    _check_matrix(codes, "x codes")
    if codes.dtype != CODES_DTYPE:
        raise ValueError(f"x codes: dtype {codes.dtype} must be {CODES_DTYPE}")
    check_no_grad("x codes", codes)
    check_tensor("x scales", scales)
    if scales.dim() != 1 or scales.shape[0] not in (1, codes.shape[0]):
        raise ValueError(f"x scales: shape {tuple(scales.shape)} must be ({codes.shape[0]},) or (1,)")
    if scales.dtype != torch.float32 or scales.device != codes.device:
        raise ValueError(f"x scales: {scales.dtype} on {scales.device} must be torch.float32 on {codes.device}")
    if scales.shape[0] > 1 and scales.stride(0) != 1:
        raise ValueError(f"x scales: the stride is {scales.stride(0)} and must be 1; pass scales.contiguous()")
    check_no_grad("x scales", scales)


def _check_values(x: Any, name: str) -> None:
    _check_matrix(x, name)
    if x.dtype not in DTYPE_CODES:
        raise ValueError(f"{name}: dtype {x.dtype} must be torch.bfloat16 or torch.float16")
    check_no_grad(name, x)


def _check_matrix(x: Any, name: str) -> None:
    check_tensor(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name}: shape {tuple(x.shape)} must have 2 dims, [m, k]")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: device {x.device} must be a CUDA device, or cpu for emulation")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"{name}: {x.shape[0]} rows are more than {MAX_ROWS}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: the last dim's stride is {x.stride(1)} and must be 1; pass {name}.contiguous()")


def _check_rows(step: str, n: int) -> None:
    if step in LIBRARY_PRODUCTS and n % LIBRARY_MULTIPLE:
        raise ValueError(f"w: its {n} rows must be a multiple of {LIBRARY_MULTIPLE} for {step}")


def _check_bias(bias: Any, x: torch.Tensor, n: int, out_dtype: torch.dtype) -> None:
    check_tensor("bias", bias)
    if bias.shape != (n,):
        raise ValueError(f"bias: shape {tuple(bias.shape)} must be ({n},)")
    if bias.dtype != out_dtype or bias.device != x.device:
        raise ValueError(f"bias: {bias.dtype} on {bias.device} must be {out_dtype} on {x.device}")
    if n > 1 and bias.stride(0) != 1:
        raise ValueError(f"bias: its stride is {bias.stride(0)} and must be 1; pass bias.contiguous()")
    check_no_grad("bias", bias)
