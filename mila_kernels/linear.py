"""Linear layers for a few rows of activations: FP4 and FP8 weights, their quantisers and matvecs."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from . import build, steps
from .arguments import SMALLEST_FLOAT, check_flag, check_int, check_no_grad, check_tensor
from .layouts import (
    FP4_LAYOUTS,
    LAYOUT_CODES,
    bytes_to_words,
    from_fragments,
    pack_rows,
    to_fragments,
    unpack_rows,
    words_to_bytes,
)
from .operator import operator

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALE_CODES = {torch.bfloat16: 0, torch.float32: 1}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
SMALLEST_SCALE = SMALLEST_FLOAT  # a scale is never zero, nor a subnormal
GROUP_SIZES = (32, 64, 128, 256)
KERNEL_GROUP = 128  # the one that the kernels read
TILE_ROWS = 16  # rows of one mma, and of one tile of a shuffled weight
MAX_ROWS = 16  # of activations
ALIGNMENT = 16  # bytes: kernels load codes and scales in pieces of so many
CHUNK = 1 << 24  # elements quantised or shuffled at a time: bounds the scratch memory


class _MatvecArgs(ctypes.Structure):
    """What the arguments of both matvecs have: a library is built for one ``column_tiles`` (``Step.instances``)."""

    @property
    def column_tiles(self) -> int:
        """Of 8 columns of the B operand: those that the kernels have instances for."""
        columns = self.m * (2 if self.dtype == DTYPE_CODES[torch.float16] else 1)
        return 1 if columns <= 8 else 2 if columns <= 16 else 4


class MatvecFp4Args(_MatvecArgs):
    """The mirror of ``csrc/matvec_fp4/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("m", "n", "k", "dtype", "scale_dtype", "layout", "sm_count", "smem_limit", "chained")
        ),
    ]

    @property
    def few_rows(self) -> int:
        """The rows of x where they are BF16 and so few that a step may have kernels for each number, else 0."""
        return int(self.m) if self.dtype == DTYPE_CODES[torch.bfloat16] and self.m <= 2 else 0


class MatvecFp8Args(_MatvecArgs):
    """The mirror of ``csrc/matvec_fp8/args.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k", "dtype", "layout", "sm_count", "smem_limit", "chained")),
    ]


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp4Weight:
    """A weight matrix [n, k] in E2M1 with one scale per ``group_size`` columns of a row.

    ``codes`` are bytes and ``scales`` FP32 or BF16, in ``layout``. ``"rows"``: codes ``[n, k / 2]``, two a byte, the
    even column in the low nibble; scales ``[n, k / group_size]``. The other layouts are for the steps that
    :meth:`shuffle` names: tiles of 16 rows, each lane's bytes in the order in which it needs them: codes
    ``[n / 16, k / 128, 1024]``, scales ``[n / 16, k / 128, 8, 2]``.

    Raises:
        TypeError, ValueError: a field that does not fit, by name. The values of codes and scales are not looked at.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    group_size: int = KERNEL_GROUP
    layout: str = "rows"
    _shuffled: dict[str, Fp4Weight] = field(default_factory=dict, repr=False, compare=False)
    # What gemm_w4a8 reads: codes and scales in one tensor, which is no weight of its own.
    _blocks: list[torch.Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_layout(self.layout, ("rows", *FP4_LAYOUTS))
        n, k = check_int("n", self.n, 1), check_int("k", self.k, 1)
        group = self.group_size
        if isinstance(group, bool) or not isinstance(group, int):
            raise TypeError(f"group_size: an int is needed, not {type(group).__name__}")
        allowed = GROUP_SIZES if self.layout == "rows" else (KERNEL_GROUP,)
        if group not in allowed:
            raise ValueError(f"group_size: {group} must be {_one_of(allowed)} in layout {self.layout!r}")
        if k % group:
            raise ValueError(f"k: {k} must be a multiple of the group size {group}")
        codes_shape: tuple[int, ...] = (n, k // 2)
        scales_shape: tuple[int, ...] = (n, k // group)
        if self.layout != "rows":
            tiles, groups = _ceil_div(n, TILE_ROWS), k // KERNEL_GROUP
            codes_shape, scales_shape = (tiles, groups, TILE_ROWS * KERNEL_GROUP // 2), (tiles, groups, 8, 2)
        check_stored("codes", self.codes, (torch.uint8,), codes_shape, self.layout)
        check_stored("scales", self.scales, tuple(SCALE_CODES), scales_shape, self.layout)
        _check_same_device(self.codes, self.scales)

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    def to(self, device: torch.device | str) -> Fp4Weight:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), _shuffled={})

    def poisoned(self, value: float = math.nan) -> tuple[Fp4Weight, Callable[[], int]]:
        """The same weight between guard zones: ``value`` around the scales, 0xFF around the codes; and a check that
        counts the bytes of either storage that have changed since."""
        codes, codes_changed = _guarded(self.codes, 0xFF)
        scales, scales_changed = _guarded(self.scales, value)
        return replace(self, codes=codes, scales=scales, _shuffled={}), lambda: codes_changed() + scales_changed()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix ``[n, k]`` that the codes stand for: magnitude x scale, exact in FP32 but for rounding of the
        product."""
        nibbles, scales = self._nibbles(), self._row_scales()
        magnitudes = torch.tensor(FP4_MAGNITUDES, dtype=torch.float64, device=self.device)
        out = torch.empty(self.n, self.k, dtype=dtype, device=self.device)
        for rows in _row_chunks(self.n, self.k):
            code = nibbles[rows].int()
            value = magnitudes[code & 7] * torch.where(code > 7, -1.0, 1.0)
            value = value.view(-1, self.k // self.group_size, self.group_size) * scales[rows, :, None].double()
            out[rows] = value.view(-1, self.k).to(dtype)
        return out

    def shuffle(self, for_step: str | steps.Step | None = None) -> Fp4Weight:
        """The same weight in the layout that a step reads (None: the fastest step of this device for one row).

        It is made once and remembered by the weight; drop the weight and keep the result to have one copy only.
        """
        step = steps.choose("matvec_fp4", for_step, lambda s: build.device_misfit(s, self.device), rows=1)
        return self.in_layout(step_layout(step))

    def in_layout(self, layout: str) -> Fp4Weight:
        """The same weight in the layout of that name."""
        if layout == self.layout:
            return self
        if layout not in self._shuffled:
            self._remember(layout)
        return self._shuffled[layout]

    @torch.compiler.disable
    def _remember(self, layout: str) -> None:
        self._shuffled[layout] = self._relaid(layout)

    def _relaid(self, layout: str) -> Fp4Weight:
        if layout not in ("rows", *FP4_LAYOUTS):
            raise ValueError(f"layout: {layout!r} is none of rows, {', '.join(FP4_LAYOUTS)}")
        if layout == "rows":
            return self._in_rows()
        if self.layout != "rows":
            return self._in_rows().in_layout(layout)
        if self.group_size != KERNEL_GROUP:
            raise ValueError(f"w: group_size {self.group_size} must be {KERNEL_GROUP} to be shuffled")
        tiles, groups = _ceil_div(self.n, TILE_ROWS), self.k // KERNEL_GROUP
        codes = torch.empty(tiles, groups, TILE_ROWS * KERNEL_GROUP // 2, dtype=torch.uint8, device=self.device)
        for some in _row_chunks(tiles, TILE_ROWS * self.k):
            nibbles = unpack_rows(_padded_rows(self.codes, some))
            words = FP4_LAYOUTS[layout].pack(FP4_LAYOUTS[layout].order(nibbles))
            codes[some] = words_to_bytes(words).view(-1, *codes.shape[1:])
        scales = _padded_rows(self.scales, slice(0, tiles)).view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
        return replace(self, codes=codes, scales=scales, layout=layout, _shuffled={})

    def _in_rows(self) -> Fp4Weight:
        codes = pack_rows(self._nibbles())
        return replace(self, codes=codes, scales=self._row_scales(), layout="rows", _shuffled={})

    def _nibbles(self) -> torch.Tensor:
        """uint8 [n, k], one code each."""
        if self.layout == "rows":
            return unpack_rows(self.codes)
        out = torch.empty(self.codes.shape[0] * TILE_ROWS, self.k, dtype=torch.uint8, device=self.device)
        for some in _row_chunks(self.codes.shape[0], TILE_ROWS * self.k):
            words = bytes_to_words(self.codes[some])
            layout = FP4_LAYOUTS[self.layout]
            out[some.start * TILE_ROWS : some.stop * TILE_ROWS] = layout.restore(layout.unpack(words), self.k)
        return out[: self.n]

    def _row_scales(self) -> torch.Tensor:
        if self.layout == "rows":
            return self.scales
        return self.scales.permute(0, 3, 2, 1).reshape(-1, self.k // self.group_size)[: self.n].contiguous()


@dataclass(frozen=True)
class Fp8Weight:
    """A weight matrix [n, k] in E4M3 with one FP32 scale a row; layouts as in :class:`Fp4Weight`.

    ``"rows"``: codes uint8 ``[n, k]`` (the bytes of ``torch.float8_e4m3fn``), scales ``[n]``. ``"fragments"``: codes
    ``[n / 16, k / 128, 2048]``, scales of whole tiles. ``k`` is a multiple of 128. Errors as :class:`Fp4Weight`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    layout: str = "rows"
    _shuffled: dict[str, Fp8Weight] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_layout(self.layout, ("rows", "fragments"))
        n, k = check_int("n", self.n, 1), check_int("k", self.k, 1)
        if k % KERNEL_GROUP:
            raise ValueError(f"k: {k} must be a multiple of {KERNEL_GROUP}")
        tiles = _ceil_div(n, TILE_ROWS)
        whole = (tiles, k // KERNEL_GROUP, TILE_ROWS * KERNEL_GROUP)
        codes_shape, scales_shape = ((n, k), (n,)) if self.layout == "rows" else (whole, (tiles * TILE_ROWS,))
        check_stored("codes", self.codes, (torch.uint8,), codes_shape, self.layout)
        check_stored("scales", self.scales, (torch.float32,), scales_shape, self.layout)
        _check_same_device(self.codes, self.scales)

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    def to(self, device: torch.device | str) -> Fp8Weight:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), _shuffled={})

    def poisoned(self, value: float = math.nan) -> tuple[Fp8Weight, Callable[[], int]]:
        """The same weight between guard zones: ``value`` around the scales, 0xFF around the codes; and a check that
        counts the bytes of either storage that have changed since."""
        codes, codes_changed = _guarded(self.codes, 0xFF)
        scales, scales_changed = _guarded(self.scales, value)
        return replace(self, codes=codes, scales=scales, _shuffled={}), lambda: codes_changed() + scales_changed()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix ``[n, k]`` that the codes stand for."""
        codes, scales = self._row_codes(), self.scales[: self.n]
        out = torch.empty(self.n, self.k, dtype=dtype, device=self.device)
        for rows in _row_chunks(self.n, self.k):
            value = codes[rows].view(torch.float8_e4m3fn).double()
            out[rows] = (value * scales[rows, None].double()).to(dtype)
        return out

    def shuffle(self, for_step: str | steps.Step | None = None) -> Fp8Weight:
        """The same weight in the layout that a step reads, made once and remembered; see :meth:`Fp4Weight.shuffle`."""
        step = steps.choose("matvec_fp8", for_step, lambda s: build.device_misfit(s, self.device))
        return self.in_layout(step_layout(step))

    def in_layout(self, layout: str) -> Fp8Weight:
        """The same weight in the layout of that name: ``"rows"`` or ``"fragments"``."""
        if layout == self.layout:
            return self
        if layout not in self._shuffled:
            self._remember(layout)
        return self._shuffled[layout]

    @torch.compiler.disable
    def _remember(self, layout: str) -> None:
        self._shuffled[layout] = self._relaid(layout)

    def _relaid(self, layout: str) -> Fp8Weight:
        if layout == "rows":
            return replace(self, codes=self._row_codes(), scales=self.scales[: self.n], layout="rows", _shuffled={})
        if layout != "fragments":
            raise ValueError(f"layout: {layout!r} is none of rows, fragments")
        tiles, groups = _ceil_div(self.n, TILE_ROWS), self.k // KERNEL_GROUP
        codes = torch.empty(tiles, groups, TILE_ROWS * KERNEL_GROUP, dtype=torch.uint8, device=self.device)
        for some in _row_chunks(tiles, TILE_ROWS * self.k):
            # [.., lane, quarter, step, word, register, half] to [.., quarter, lane, step, word, half, register]: 16
            # bytes a lane side by side; in a word the second register's codes are the low bytes of the halves.
            codes_of = to_fragments(_padded_rows(self.codes, some)).view(-1, 32, 2, 2, 2, 2, 2)
            codes[some] = codes_of.flip(5).permute(0, 2, 1, 3, 4, 6, 5).reshape(-1, *codes.shape[1:])
        scales = _padded_rows(self.scales[:, None], slice(0, tiles)).view(-1)
        return replace(self, codes=codes, scales=scales, layout=layout, _shuffled={})

    def _row_codes(self) -> torch.Tensor:
        if self.layout == "rows":
            return self.codes
        fragments = self.codes.view(-1, 2, 32, 2, 2, 2, 2).permute(0, 2, 1, 3, 4, 6, 5).flip(5)
        return from_fragments(fragments, self.k)[: self.n].contiguous()


def _check_layout(layout: object, known: tuple[str, ...]) -> None:
    if not isinstance(layout, str):
        raise TypeError(f"layout: a str is needed, not {type(layout).__name__}")
    if layout not in known:
        raise ValueError(f"layout: {layout!r} is none of {', '.join(known)}")


def check_stored(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], layout: str
) -> None:
    """TypeError or ValueError unless a weight's tensor is what kernels read in that layout, through its address."""
    check_tensor(name, x)
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {x.dtype} must be {_one_of(dtypes)}")
    if x.shape != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)} must be {shape} in layout {layout!r}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: device {x.device} must be a CUDA device, or cpu for emulation")
    if not x.is_contiguous():
        raise ValueError(f"{name}: strides {x.stride()} must be those of a contiguous tensor; pass {name}.contiguous()")
    check_no_grad(name, x)
    # A fake has no address.
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and x.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name}: its address must be a multiple of {ALIGNMENT} bytes; pass {name}.clone()")


def _check_same_device(codes: torch.Tensor, scales: torch.Tensor) -> None:
    if scales.device != codes.device:
        raise ValueError(f"scales: device {scales.device} must equal that of codes, {codes.device}")


def _one_of(allowed: tuple[object, ...]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, allowed[:-1])), str(allowed[-1]))))


# ---- the layout of a step, and parts of a weight ---------------------------------------------------------------------


def step_layout(step: steps.Step) -> str:
    """The weight layout that a matvec step reads: its source names it as LAYOUT_ROWS, LAYOUT_FRAGMENTS, ..."""
    found = re.search(r"\bLAYOUT_([A-Z]+)\b", step.source)
    if not found:
        raise ValueError(f"step: {step.id} names no weight layout")
    return found[1].lower()


def _padded_rows(x: torch.Tensor, tiles: slice) -> torch.Tensor:
    """The rows of some tiles, zeros below the last row of the matrix."""
    rows = x[tiles.start * TILE_ROWS : tiles.stop * TILE_ROWS]
    missing = (tiles.stop - tiles.start) * TILE_ROWS - rows.shape[0]
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows.contiguous()


def _guarded(x: torch.Tensor, value: float) -> tuple[torch.Tensor, Callable[[], int]]:
    """A copy of x amid a larger storage full of ``value``, and a count of the bytes of it that have changed since."""
    margin = 512 // x.element_size()
    storage = torch.full((x.numel() + 2 * margin,), value, dtype=x.dtype, device=x.device)
    view = storage[margin:-margin].view(x.shape)
    view.copy_(x)
    before = storage.view(torch.uint8).clone()
    return view, lambda: int((storage.view(torch.uint8) != before).sum())


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- quantisers ------------------------------------------------------------------------------------------------------


def quantize_fp4(
    w: torch.Tensor, group_size: int = KERNEL_GROUP, scale_dtype: torch.dtype = torch.float32
) -> Fp4Weight:
    """Weights to E2M1, with a scale of absmax / 6 per ``group_size`` columns of a row.

    Args:
        w: ``[n, k]`` FP32, BF16 or FP16, any strides; ``k`` a multiple of ``group_size``.
        group_size: 32, 64, 128 or 256; the kernels read 128.
        scale_dtype: ``torch.float32`` or ``torch.bfloat16``. The codes are chosen for the rounded scale.

    Returns:
        The weight in the ``"rows"`` layout. Each code is the nearest to w / scale, ties to even, as if computed
        exactly, so that CPU and GPU agree. A scale is at least 2^-126.

    Raises:
        TypeError, ValueError: an argument that does not fit; a NaN or Inf in ``w``, by row and group.
    """
    w = _check_weight(w)
    n, k = w.shape
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size: an int is needed, not {type(group_size).__name__}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: {group_size} must be one of {', '.join(map(str, GROUP_SIZES))}")
    if k % group_size:
        raise ValueError(f"w: its {k} columns must be a multiple of the group size {group_size}")
    if scale_dtype not in SCALE_CODES:
        raise ValueError(f"scale_dtype: {scale_dtype} must be torch.float32 or torch.bfloat16")
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, k // group_size, dtype=scale_dtype, device=w.device)
    for rows in _row_chunks(n, k):
        groups = w[rows].double().view(-1, k // group_size, group_size)
        _check_finite(groups, rows.start, group_size)
        scale = _scale(groups.abs().amax(-1, keepdim=True), FP4_MAGNITUDES[-1], scale_dtype)
        scales[rows] = scale.squeeze(-1).to(scale_dtype)
        codes[rows] = pack_rows(_nearest_fp4(groups, scale).view(-1, k))
    return Fp4Weight(codes, scales, n, k, group_size)


def quantize_fp8(w: torch.Tensor) -> Fp8Weight:
    """Weights to E4M3, with an FP32 scale of absmax / 448 a row.

    ``w`` is ``[n, k]`` FP32, BF16 or FP16 with ``k`` a multiple of 128. The result is in the ``"rows"`` layout; each
    code is the nearest to w / scale, ties to even, on CPU and GPU alike. Raises as :func:`quantize_fp4` does.
    """
    w = _check_weight(w)
    n, k = w.shape
    if k % KERNEL_GROUP:
        raise ValueError(f"w: its {k} columns must be a multiple of {KERNEL_GROUP}")
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, dtype=torch.float32, device=w.device)
    for rows in _row_chunks(n, k):
        values = w[rows].double()
        _check_finite(values.view(-1, k // KERNEL_GROUP, KERNEL_GROUP), rows.start, KERNEL_GROUP)
        scale = _scale(values.abs().amax(-1, keepdim=True), FP8_MAX, torch.float32)
        scales[rows] = scale.squeeze(-1).float()
        codes[rows] = _nearest_fp8(values / scale).view(torch.uint8)
    return Fp8Weight(codes, scales, n, k)


def _scale(absmax: torch.Tensor, largest: float, dtype: torch.dtype) -> torch.Tensor:
    """absmax / largest rounded to the scale's dtype, in float64. By a number, CUDA would multiply with its inverse."""
    return (absmax / absmax.new_full((), largest)).float().to(dtype).double().clamp_min(SMALLEST_SCALE)


def _nearest_fp4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 codes. Float64 holds boundary x scale exactly, so no division's rounding decides a tie."""
    magnitude = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for below, boundary in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        bound = scale * boundary
        code += magnitude > bound if below % 2 == 0 else magnitude >= bound  # a tie goes to the even code
    return code | torch.signbit(values).to(torch.uint8) << 3


def _nearest_fp8(values: torch.Tensor) -> torch.Tensor:
    """E4M3 of float64 values: rounded here, ties to even, so that the conversion is exact."""
    exponent = torch.frexp(values.abs().clamp(2.0**-6, FP8_MAX)).exponent - 1
    unit = torch.ldexp(torch.ones_like(values), exponent - 3)
    rounded = (values / unit).round() * unit
    return rounded.clamp(-FP8_MAX, FP8_MAX).float().to(torch.float8_e4m3fn)


def _check_weight(w: torch.Tensor) -> torch.Tensor:
    """The weight without its gradient, which nothing would flow back to."""
    check_tensor("w", w)
    if w.device.type not in ("cpu", "cuda"):
        raise ValueError(f"w: device {w.device} must be a CUDA device or cpu")
    if w.dim() != 2:
        raise ValueError(f"w: shape {tuple(w.shape)} must have 2 dims, [n, k]")
    if w.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"w: dtype {w.dtype} must be torch.float32, torch.bfloat16 or torch.float16")
    if not w.numel():
        raise ValueError(f"w: shape {tuple(w.shape)} is empty")
    return w.detach()


def _check_finite(groups: torch.Tensor, first_row: int, group_size: int) -> None:
    bad = ~torch.isfinite(groups)
    if not bool(bad.any()):
        return
    row, group, column = (int(i) for i in bad.nonzero()[0])
    start = group * group_size
    raise ValueError(
        f"w: row {first_row + row}, group {group} (columns {start} to {start + group_size - 1}) holds "
        f"{float(groups[row, group, column])}; weights must be finite"
    )


# ---- matvecs ---------------------------------------------------------------------------------------------------------


def matvec_fp4(
    x: torch.Tensor,
    w: Fp4Weight,
    *,
    step: str | steps.Step | None = None,
    bias: torch.Tensor | None = None,
    chained: bool = False,
) -> torch.Tensor:
    """``x w^T + bias`` for a few rows of activations and an FP4 weight, summed in FP32.

    Args:
        x: ``[m, k]`` BF16 or FP16, m from 0 to 16, last dim contiguous.
        w: the weight ``[n, k]``, groups of 128. A step that needs another layout shuffles it at the first call and
            remembers it; ``w.shuffle(step)`` does so beforehand.
        step: an optimisation step (``"matvec_fp4/05_tensor_cores"``); None: the fastest of this device.
        bias: ``[n]`` in ``x``'s dtype, or None.
        chained: let this launch start before the kernel in front of it on the stream has ended (sm_90 and later, steps
            that can). It reads ``w`` at once and ``x`` and ``bias`` when that kernel is done: right as long as that
            kernel does not write ``w``.

    Returns:
        ``[m, n]`` in ``x``'s dtype.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name, before anything is launched.
        mila_kernels.build.KernelError: the launch was refused.
    """
    if not isinstance(w, Fp4Weight):
        raise TypeError(f"w: an Fp4Weight is needed (quantize_fp4 makes one), not {type(w).__name__}")
    if w.group_size != KERNEL_GROUP:
        raise ValueError(f"w: group_size {w.group_size} must be {KERNEL_GROUP}")
    check_flag("chained", chained)
    chosen, layout = _resolve_step("matvec_fp4", step, x, w, bias)
    w = w.in_layout(layout)
    return _matvec_fp4(x, w.codes, w.scales, bias, w.n, w.layout, chosen, chained)


def matvec_fp8(
    x: torch.Tensor,
    w: Fp8Weight,
    *,
    step: str | steps.Step | None = None,
    bias: torch.Tensor | None = None,
    chained: bool = False,
) -> torch.Tensor:
    """``x w^T + bias`` for a few rows of activations and an FP8 weight; arguments and errors as :func:`matvec_fp4`."""
    if not isinstance(w, Fp8Weight):
        raise TypeError(f"w: an Fp8Weight is needed (quantize_fp8 makes one), not {type(w).__name__}")
    check_flag("chained", chained)
    chosen, layout = _resolve_step("matvec_fp8", step, x, w, bias)
    w = w.in_layout(layout)
    return _matvec_fp8(x, w.codes, w.scales, bias, w.n, w.layout, chosen, chained)


def _check_matvec_call(
    op: str, x: torch.Tensor, w: Fp4Weight | Fp8Weight, bias: torch.Tensor | None, step: str
) -> None:
    """The operators' own check, for who calls them directly: in ``w`` what they were given has been looked at."""
    _check_activations(x, w)
    if bias is not None:
        _check_bias(bias, x, w)
    chosen = fitting_step(op, step, x.dtype, x.device)
    if w.layout != step_layout(chosen):
        raise ValueError(f"layout: {w.layout!r} must be {step_layout(chosen)!r}, which {chosen.id} reads")
    check_alignment(chosen, x)


def _check_matvec_fp4_call(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> None:  # fmt: skip
    _check_values(x)
    _check_matvec_call("matvec_fp4", x, Fp4Weight(codes, scales, n, x.shape[1], layout=layout), bias, step)


def _check_matvec_fp8_call(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> None:  # fmt: skip
    _check_values(x)
    _check_matvec_call("matvec_fp8", x, Fp8Weight(codes, scales, n, x.shape[1], layout=layout), bias, step)


@operator("mila_kernels::matvec_fp4", check=_check_matvec_fp4_call)
def _matvec_fp4(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> torch.Tensor:  # fmt: skip
    y = _matvec_output(x, codes, scales, bias, n, layout, step, chained)
    args = MatvecFp4Args(**_common_args(x, codes, scales, bias, y, layout, chained))
    args.scale_dtype = SCALE_CODES[scales.dtype]
    _launch(step, args, x, codes, scales, bias, y)
    return y


@operator("mila_kernels::matvec_fp8", check=_check_matvec_fp8_call)
def _matvec_fp8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> torch.Tensor:  # fmt: skip
    y = _matvec_output(x, codes, scales, bias, n, layout, step, chained)
    _launch(step, MatvecFp8Args(**_common_args(x, codes, scales, bias, y, layout, chained)), x, codes, scales, bias, y)
    return y


@_matvec_fp4.register_fake
@_matvec_fp8.register_fake
def _matvec_output(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], n)


def _common_args(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, layout: str,
    chained: bool,
) -> dict[str, object]:  # fmt: skip
    sm_count, smem_limit = _device_limits(x.device)
    return {
        "x": x.data_ptr(), "codes": codes.data_ptr(), "scales": scales.data_ptr(), "y": y.data_ptr(),
        "bias": None if bias is None else bias.data_ptr(), "x_stride": x.stride(0), "y_stride": y.stride(0),
        "m": x.shape[0], "n": y.shape[1], "k": x.shape[1], "dtype": DTYPE_CODES[x.dtype],
        "layout": LAYOUT_CODES[layout], "sm_count": sm_count, "smem_limit": smem_limit, "chained": chained,
    }  # fmt: skip


def _launch(
    step: str, args: ctypes.Structure, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor,
    bias: torch.Tensor | None, y: torch.Tensor,
) -> None:  # fmt: skip
    if not y.numel():
        return
    reads = {"x": x, "codes": codes, "scales": scales} | ({} if bias is None else {"bias": bias})
    build.launch(steps.step(step), args, x.device, reads=reads, writes={"y": y})


def _device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have. In emulation few and what all GPUs since sm_80
    have, so that a block has several tiles."""
    if device.type != "cuda":
        return 3, 99 * 1024
    capability = torch.cuda.get_device_capability(device)
    kilobytes = {8: 163 if capability[1] in (0, 7) else 99, 9: 227, 10: 227, 11: 227}.get(capability[0], 99)
    return torch.cuda.get_device_properties(device).multi_processor_count, kilobytes * 1024


def _resolve_step(
    op: str, step: str | steps.Step | None, x: torch.Tensor, w: Fp4Weight | Fp8Weight, bias: torch.Tensor | None
) -> tuple[str, str]:
    """Checks x, w and bias; the id of the step asked for, or of the fastest, and the layout that it reads. Under a
    compiler addresses are not known: the operator's check looks at them."""
    _check_activations(x, w)
    if bias is not None:
        _check_bias(bias, x, w)
    rows = max(1, int(x.shape[0])) if x.dtype == torch.bfloat16 else None  # those for few rows are for BF16
    if torch.compiler.is_compiling():
        return _step_to_compile(op, steps.name_of(step), x.dtype, x.device, rows)
    chosen = fitting_step(op, step, x.dtype, x.device, rows)
    check_alignment(chosen, x)
    return chosen.id, step_layout(chosen)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _step_to_compile(
    op: str, step: str | None, dtype: torch.dtype, device: torch.device, rows: int | None
) -> tuple[str, str]:
    """A step's id and its layout, known while a compiler traces."""
    chosen = fitting_step(op, step, dtype, device, rows)
    return chosen.id, step_layout(chosen)


def fitting_step(
    op: str, step: str | steps.Step | None, dtype: torch.dtype, device: torch.device, rows: int | None = None
) -> steps.Step:
    """The step asked for, or the fastest for so many rows (None: for any number), that runs on the device and takes
    activations of the dtype."""

    def misfit(s: steps.Step) -> str | None:
        if dtype in DTYPE_NAMES and DTYPE_NAMES[dtype] not in s.dtypes:
            return f"x: dtype {dtype} must be one of {', '.join(s.dtypes)}"
        return build.device_misfit(s, device)

    return steps.choose(op, step, misfit, rows)


def check_alignment(step: str | steps.Step, x: torch.Tensor) -> None:
    """ValueError where a step cannot read activations ``[m, k]`` where they lie."""
    chosen = steps.step(step)
    row_bytes = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    if x.numel() and (x.data_ptr() % chosen.alignment or row_bytes % chosen.alignment):
        raise ValueError(
            f"step: {chosen.id} does not fit: x: address and row stride must be multiples of {chosen.alignment} bytes; "
            "pass x.clone()"
        )


def _check_values(x: torch.Tensor) -> None:
    check_tensor("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)} must have 2 dims, [m, k]")
    if x.dtype not in DTYPE_CODES:
        raise ValueError(f"x: dtype {x.dtype} must be torch.bfloat16 or torch.float16")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x: device {x.device} must be a CUDA device, or cpu for emulation")


def _check_activations(x: torch.Tensor, w: Fp4Weight | Fp8Weight) -> None:
    _check_values(x)
    if x.device != w.device:
        raise ValueError(f"x: device {x.device} must equal that of w, {w.device}")
    if x.shape[1] != w.k:
        raise ValueError(f"x: its {x.shape[1]} columns must equal the {w.k} of w")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows are more than the {MAX_ROWS} of a matvec")
    if x.stride(1) != 1:
        raise ValueError(f"x: the last dim's stride is {x.stride(1)} and must be 1; pass x.contiguous()")
    check_no_grad("x", x)


def _check_bias(bias: torch.Tensor, x: torch.Tensor, w: Fp4Weight | Fp8Weight) -> None:
    check_tensor("bias", bias)
    if bias.shape != (w.n,):
        raise ValueError(f"bias: shape {tuple(bias.shape)} must be ({w.n},)")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise ValueError(f"bias: {bias.dtype} on {bias.device} must be like x, {x.dtype} on {x.device}")
    if bias.stride(0) != 1:
        raise ValueError(f"bias: its stride is {bias.stride(0)} and must be 1; pass bias.contiguous()")
    check_no_grad("bias", bias)
