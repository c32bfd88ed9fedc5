"""Linear layers for a few rows of activations: FP4 and FP8 weights, their quantisers, layouts and matvecs."""

from __future__ import annotations

import ctypes
import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import build, steps
from .operator import operator

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALE_CODES = {torch.bfloat16: 0, torch.float32: 1}
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal of BF16 and FP32: a scale is never zero, nor a subnormal
GROUP_SIZES = (32, 64, 128, 256)
KERNEL_GROUP = 128  # the one that the kernels read
TILE_ROWS = 16  # rows of one mma, and of one tile of a shuffled weight
MAX_ROWS = 16  # of activations
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
    :meth:`shuffle` names: tiles of 16 rows, each lane's bytes in the order in which it needs them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    group_size: int = KERNEL_GROUP
    layout: str = "rows"
    _shuffled: dict[str, Fp4Weight] = field(default_factory=dict, repr=False, compare=False)

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
            nibbles = _unpack_rows(_padded_rows(self.codes, some))
            words = FP4_LAYOUTS[layout].pack(FP4_LAYOUTS[layout].order(nibbles))
            codes[some] = _words_to_bytes(words).view(-1, *codes.shape[1:])
        scales = _padded_rows(self.scales, slice(0, tiles)).view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
        return replace(self, codes=codes, scales=scales, layout=layout, _shuffled={})

    def _in_rows(self) -> Fp4Weight:
        codes = _pack_rows(self._nibbles())
        return replace(self, codes=codes, scales=self._row_scales(), layout="rows", _shuffled={})

    def _nibbles(self) -> torch.Tensor:
        """uint8 [n, k], one code each."""
        if self.layout == "rows":
            return _unpack_rows(self.codes)
        out = torch.empty(self.codes.shape[0] * TILE_ROWS, self.k, dtype=torch.uint8, device=self.device)
        for some in _row_chunks(self.codes.shape[0], TILE_ROWS * self.k):
            words = _bytes_to_words(self.codes[some])
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

    ``"rows"``: codes uint8 ``[n, k]`` (the bytes of ``torch.float8_e4m3fn``), scales ``[n]``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    layout: str = "rows"
    _shuffled: dict[str, Fp8Weight] = field(default_factory=dict, repr=False, compare=False)

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
            codes_of = _fragments(_padded_rows(self.codes, some)).view(-1, 32, 2, 2, 2, 2, 2)
            codes[some] = codes_of.flip(5).permute(0, 2, 1, 3, 4, 6, 5).reshape(-1, *codes.shape[1:])
        scales = _padded_rows(self.scales[:, None], slice(0, tiles)).view(-1)
        return replace(self, codes=codes, scales=scales, layout=layout, _shuffled={})

    def _row_codes(self) -> torch.Tensor:
        if self.layout == "rows":
            return self.codes
        fragments = self.codes.view(-1, 2, 32, 2, 2, 2, 2).permute(0, 2, 1, 3, 4, 6, 5).flip(5)
        return _unfragment(fragments, self.k)[: self.n].contiguous()


# ---- layouts of shuffled weights -------------------------------------------------------------------------------------


def _fragments(rows: torch.Tensor) -> torch.Tensor:
    """Elements ``[16 tiles, k]`` in the order of m16n8k16's A operand: ``[tiles, k/64, lane, step, register, half]``.

    K is permuted so that lane 4g + t owns the 16 columns from 16t of every 64, of rows g and g + 8.
    """
    k = rows.shape[1]
    return rows.view(-1, 2, 8, k // 64, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7).contiguous().view(-1, 4, 2)


def _unfragment(fragments: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of :func:`_fragments`."""
    return fragments.reshape(-1, k // 64, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7).reshape(-1, k)


def _byte_fragments(rows: torch.Tensor) -> torch.Tensor:
    """Elements ``[16 tiles, k]`` in the order of wgmma's A operand of 8-bit numbers: ``[tiles, k/64, lane, step, 16
    columns, register, byte]``. Of every 16 columns lane 4g + t owns the four from 4t, of rows g and g + 8."""
    k = rows.shape[1]
    return rows.view(-1, 2, 8, k // 64, 2, 2, 4, 4).permute(0, 3, 2, 6, 4, 5, 1, 7).contiguous().view(-1, 2, 4)


def _from_byte_fragments(fragments: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of :func:`_byte_fragments`."""
    return fragments.reshape(-1, k // 64, 8, 4, 2, 2, 2, 4).permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(-1, k)


@dataclass(frozen=True)
class _WordLayout:
    """How 8 codes, ``[..., registers, codes of a register]``, lie in a 32-bit word (here in an int64), and which they
    are."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]
    order: Callable[[torch.Tensor], torch.Tensor] = _fragments
    restore: Callable[[torch.Tensor, int], torch.Tensor] = _unfragment


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Register r's two codes are the r-th nibbles from the top of the word's two halves."""
    word = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    for register in range(4):
        for half in range(2):
            word |= codes[..., register, half].long() << 16 * half + 12 - 4 * register
    return word


def _unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    codes = [[words >> 16 * half + 12 - 4 * register & 15 for half in range(2)] for register in range(4)]
    return torch.stack([torch.stack(pair, -1) for pair in codes], -2).to(torch.uint8)


_WORD = 0xFFFFFFFF
_BF16_BITS = 0x81C081C0  # of a pair of BF16: the sign, the two lowest bits of the exponent, the highest of the mantissa


def _unfold(word: Any) -> list[Any]:
    """The four registers of a folded word, as the kernels make them: eight operations for eight weights.

    A code's sign, exponent and mantissa stand where BF16 has them, with everything else zero: the value x 2^-126.
    Four shifts of one word cannot tile it with that pattern, so register 3 is the XOR of two of them.
    """
    rotated = (word << 12 | word >> 20) & _WORD
    return [part & _BF16_BITS for part in (word, word << 6, rotated, word >> 6 ^ word << 2)]


_E4M3_BITS = 0x9C9C9C9C  # of four E4M3: the sign, the two lowest bits of the exponent, the highest of the mantissa


def _unfold_bytes(word: Any) -> list[Any]:
    """The two registers of a word whose codes become E4M3, as the kernels make them: four operations for eight weights.

    A code's sign, exponent and mantissa stand where E4M3 has them, with everything else zero: the value x 2^-6.
    """
    return [word & _E4M3_BITS, (word >> 2 ^ word << 2) & _E4M3_BITS]


@functools.cache
def _folding(unfold: Callable[[Any], list[Any]], kept: int) -> tuple[tuple[int, int, int], ...]:
    """The inverse of ``unfold``, which keeps the bits ``kept`` of each register, over GF(2): (register, mask, left
    shift) of the terms whose XOR is the word."""
    places = [bit for bit in range(32) if kept >> bit & 1]
    rows = []  # per register bit: which bits of the word it is the XOR of, and in the high half which one it is
    for register in range(32 // len(places)):
        for place in places:
            sources = sum((unfold(1 << bit)[register] >> place & 1) << bit for bit in range(32))
            rows.append(sources | 1 << 32 + len(places) * register + places.index(place))
    for bit in range(32):
        pivot = next(i for i in range(bit, 32) if rows[i] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        rows = [row ^ rows[bit] if i != bit and row >> bit & 1 else row for i, row in enumerate(rows)]
    terms: dict[tuple[int, int], int] = {}
    for bit in range(32):
        for source in (i for i in range(32) if rows[bit] >> 32 + i & 1):
            register, place = source // len(places), places[source % len(places)]
            terms[register, bit - place] = terms.get((register, bit - place), 0) | 1 << place
    return tuple((register, mask, shift) for (register, shift), mask in terms.items())


def _pack_folded(codes: torch.Tensor) -> torch.Tensor:
    """The words that :func:`_unfold` turns into the registers of the codes."""
    sign_and_rest = codes.long()
    bits = (sign_and_rest >> 3) << 15 | (sign_and_rest & 7) << 6
    return _fold(bits[..., 0] | bits[..., 1] << 16, _folding(_unfold, _BF16_BITS))


def _pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The words that :func:`_unfold_bytes` turns into the registers of the codes."""
    bits = (codes.long() >> 3) << 7 | (codes.long() & 7) << 2
    registers = bits[..., 0] | bits[..., 1] << 8 | bits[..., 2] << 16 | bits[..., 3] << 24
    return _fold(registers, _folding(_unfold_bytes, _E4M3_BITS))


def _fold(registers: torch.Tensor, folding: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    word = torch.zeros(registers.shape[:-1], dtype=torch.int64, device=registers.device)
    for register, mask, shift in folding:
        term = registers[..., register] & mask
        word ^= term << shift if shift >= 0 else term >> -shift
    return word


def _unpack_folded(words: torch.Tensor) -> torch.Tensor:
    registers = torch.stack(_unfold(words), -1)
    halves = torch.stack((registers & 0xFFFF, registers >> 16), -1)
    return (halves >> 12 & 8 | halves >> 6 & 7).to(torch.uint8)


def _unpack_bytes(words: torch.Tensor) -> torch.Tensor:
    registers = torch.stack(_unfold_bytes(words), -1)
    values = torch.stack([registers >> 8 * byte & 0xFF for byte in range(4)], -1)
    return (values >> 4 & 8 | values >> 2 & 7).to(torch.uint8)


FP4_LAYOUTS: dict[str, _WordLayout] = {
    "fragments": _WordLayout(_pack_nibbles, _unpack_nibbles),
    "folded": _WordLayout(_pack_folded, _unpack_folded),
    "bytes": _WordLayout(_pack_bytes, _unpack_bytes, _byte_fragments, _from_byte_fragments),
}
LAYOUT_CODES = {"rows": 0, "fragments": 1, "folded": 2, "bytes": 3}


def step_layout(step: steps.Step) -> str:
    """The weight layout that a matvec step reads: its source names it as LAYOUT_ROWS, LAYOUT_FRAGMENTS, ..."""
    found = re.search(r"\bLAYOUT_([A-Z]+)\b", step.source)
    if not found:
        raise ValueError(f"step: {step.id} names no weight layout")
    return found[1].lower()


def _unpack_rows(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).view(codes.shape[0], -1)


def _pack_rows(nibbles: torch.Tensor) -> torch.Tensor:
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _padded_rows(x: torch.Tensor, tiles: slice) -> torch.Tensor:
    """The rows of some tiles, zeros below the last row of the matrix."""
    rows = x[tiles.start * TILE_ROWS : tiles.stop * TILE_ROWS]
    missing = (tiles.stop - tiles.start) * TILE_ROWS - rows.shape[0]
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows.contiguous()


def _words_to_bytes(words: torch.Tensor) -> torch.Tensor:
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.contiguous().view(torch.uint8)


def _bytes_to_words(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(-1).view(torch.int32).long() & 0xFFFFFFFF


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
    _check_weight(w)
    n, k = w.shape
    if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
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
        codes[rows] = _pack_rows(_nearest_fp4(groups, scale).view(-1, k))
    return Fp4Weight(codes, scales, n, k, group_size)


def quantize_fp8(w: torch.Tensor) -> Fp8Weight:
    """Weights to E4M3, with an FP32 scale of absmax / 448 a row.

    ``w`` is ``[n, k]`` FP32, BF16 or FP16 with ``k`` a multiple of 128. The result is in the ``"rows"`` layout; each
    code is the nearest to w / scale, ties to even, on CPU and GPU alike. Raises as :func:`quantize_fp4` does.
    """
    _check_weight(w)
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


def _check_weight(w: torch.Tensor) -> None:
    if not isinstance(w, torch.Tensor):
        raise TypeError(f"w: a torch.Tensor is needed, not {type(w).__name__}")
    if w.dim() != 2:
        raise ValueError(f"w: shape {tuple(w.shape)} must have 2 dims, [n, k]")
    if w.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"w: dtype {w.dtype} must be torch.float32, torch.bfloat16 or torch.float16")
    if not w.numel():
        raise ValueError(f"w: shape {tuple(w.shape)} is empty")


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
    chosen, layout = _resolve_step("matvec_fp4", step, x, w, bias)
    w = w.in_layout(layout)
    return _matvec_fp4(x, w.codes, w.scales, bias, w.n, w.layout, chosen, bool(chained))


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
    chosen, layout = _resolve_step("matvec_fp8", step, x, w, bias)
    w = w.in_layout(layout)
    return _matvec_fp8(x, w.codes, w.scales, bias, w.n, w.layout, chosen, bool(chained))


@operator(
    "mila_kernels::matvec_fp4",
    check=lambda x, codes, scales, bias, n, layout, step, *rest: check_alignment(step, x),
)
def _matvec_fp4(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, n: int, layout: str,
    step: str, chained: bool,
) -> torch.Tensor:  # fmt: skip
    y = _matvec_output(x, codes, scales, bias, n, layout, step, chained)
    args = MatvecFp4Args(**_common_args(x, codes, scales, bias, y, layout, chained))
    args.scale_dtype = SCALE_CODES[scales.dtype]
    _launch(step, args, x, codes, scales, bias, y)
    return y


@operator(
    "mila_kernels::matvec_fp8",
    check=lambda x, codes, scales, bias, n, layout, step, *rest: check_alignment(step, x),
)
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
        return _step_to_compile(op, step.id if isinstance(step, steps.Step) else step, x.dtype, x.device, rows)
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


def _check_activations(x: torch.Tensor, w: Fp4Weight | Fp8Weight) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: a torch.Tensor is needed, not {type(x).__name__}")
    if x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)} must have 2 dims, [m, k]")
    if x.dtype not in DTYPE_CODES:
        raise ValueError(f"x: dtype {x.dtype} must be torch.bfloat16 or torch.float16")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x: device {x.device} must be a CUDA device, or cpu for emulation")
    if x.device != w.device:
        raise ValueError(f"x: device {x.device} must equal that of w, {w.device}")
    if x.shape[1] != w.k:
        raise ValueError(f"x: its {x.shape[1]} columns must equal the {w.k} of w")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"x: {x.shape[0]} rows are more than the {MAX_ROWS} of a matvec")
    if x.stride(1) != 1:
        raise ValueError(f"x: the last dim's stride is {x.stride(1)} and must be 1; pass x.contiguous()")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x: requires grad, and there is no backward; use torch.no_grad() or x.detach()")


def _check_bias(bias: torch.Tensor, x: torch.Tensor, w: Fp4Weight | Fp8Weight) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: a torch.Tensor is needed, not {type(bias).__name__}")
    if bias.shape != (w.n,):
        raise ValueError(f"bias: shape {tuple(bias.shape)} must be ({w.n},)")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise ValueError(f"bias: {bias.dtype} on {bias.device} must be like x, {x.dtype} on {x.device}")
    if bias.stride(0) != 1:
        raise ValueError(f"bias: its stride is {bias.stride(0)} and must be 1; pass bias.contiguous()")
    if bias.requires_grad and torch.is_grad_enabled():
        raise ValueError("bias: requires grad, and there is no backward; use torch.no_grad() or bias.detach()")


# ---- weights from files ----------------------------------------------------------------------------------------------

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_LARGEST_HEADER = 100 << 20


def load_weight(path: str | Path, name: str | None = None) -> torch.Tensor:
    """A tensor by its name from a local ``.safetensors`` file or a ``torch.save``d state dict, on the CPU.

    Only that tensor's bytes are read from a safetensors file. With ``name`` None the file must hold one tensor.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is neither, or a name that it does not hold; the text lists close names.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no file {path}")
    if path.suffix == ".safetensors":
        return _load_safetensors(path, name)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"path: {path} holds a {type(state).__name__}, not a dict of tensors")
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors[_known_name(path, name, list(tensors))]


def weight_names(path: str | Path) -> list[str]:
    """The names of the tensors in a ``.safetensors`` file."""
    return list(_safetensors_header(Path(path))[0])


def _load_safetensors(path: Path, name: str | None) -> torch.Tensor:
    header, data_start = _safetensors_header(path)
    entry = header[_known_name(path, name, list(header))]
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        known = ", ".join(_SAFETENSORS_DTYPES)
        raise ValueError(f"name: {name!r} of {path} has dtype {entry['dtype']}, which is none of {known}")
    begin, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(data_start + begin)
        data = bytearray(file.read(end - begin))
    if len(data) != end - begin:
        raise ValueError(f"path: {path} is cut short: {name!r} needs {end - begin} bytes and {len(data)} are left")
    if not data:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(entry["shape"])


def _safetensors_header(path: Path) -> tuple[dict[str, dict], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"path: {path} is not a safetensors file") from error
    return header, 8 + length


def _known_name(path: Path, name: str | None, known: list[str]) -> str:
    if name is None and len(known) == 1:
        return known[0]
    if name in known:
        return str(name)
    close = difflib.get_close_matches(name or "", known, 5, 0.3) or known[:5]
    raise ValueError(f"name: {name!r} is not in {path}, which holds {len(known)} tensors such as {', '.join(close)}")
