"""KV caches: thin typed views over tensors. They own no memory and copy none; decode() reads them through strides.

Position p of a sequence is its p-th token, from 0. ``lengths`` is always int32 ``[batch]`` and counts the tokens of
each sequence, those appended last included.

What is wrong in lengths or a page table is found in two ways. On the CPU every call checks them and raises. On a GPU a
check would have to wait for it: there the kernels never follow a bad entry, make the rows that needed it NaN, and note
the first fault in ``cache.fault``; ``cache.check(lengths)`` waits, looks at lengths, table and that note, and raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .arguments import LARGEST_FLOAT, SMALLEST_FLOAT, check_no_grad, check_tensor, shown

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
TOKEN_DTYPES = (*CACHE_DTYPES, torch.float32)
E4M3_MAX = 448.0
MAX_TOKENS = 2**31 - 2**16  # of a sequence, a ring or a pool: the kernels count them, and a tile more, in 32 bits
PAGE_SIZES = (16, 32, 64, 128)
LAYOUTS = ("NHD", "HND")
FAULT_LENGTH, FAULT_PAGE = 1, 2  # as in csrc/decode/args.cuh


@dataclass(eq=False)
class _Cache:
    """``k`` and ``v``: BF16, FP16 or E4M3, ``[batch or pages, slots, kv_heads, head_dim]`` (layout NHD) or
    ``[batch or pages, kv_heads, slots, head_dim]`` (HND), any strides with a contiguous last dim.
    ``k_scale`` and ``v_scale``: the factor of stored values, a float or float32 ``[kv_heads]``; E4M3 only. Finite and
    positive: floats and tensors on the CPU are looked at here, those on a GPU by :meth:`check`.

    A field may be set again; the next call looks at all of them as the constructor did. TypeError and ValueError name
    the field."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float | torch.Tensor | None = field(default=None, kw_only=True)
    v_scale: float | torch.Tensor | None = field(default=None, kw_only=True)
    layout: str = field(default="NHD", kw_only=True)
    fault: torch.Tensor = field(init=False, repr=False)

    _checked = False  # of the class: an object's own is True while its fields are as they were looked at

    def __post_init__(self) -> None:
        self.check_fields()
        self.fault = torch.zeros(3, dtype=torch.int32, device=self.k.device)
        self._make_scales()
        self._checked = True

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "_checked":
            object.__setattr__(self, "_checked", False)

    def prepare(self) -> None:
        """Looks at the fields, unless they are as they were, and makes the scales what kernels read."""
        if self._checked:
            return
        self.check_fields()
        if self.fault.device != self.k.device:
            self.fault = self.fault.to(self.k.device)
        self._make_scales()
        self._checked = True

    def _make_scales(self) -> None:
        self.k_scale = self._scale("k_scale", self.k_scale)
        self.v_scale = self._scale("v_scale", self.v_scale)

    def check_fields(self) -> None:
        """TypeError or ValueError for a tensor or a layout that does not fit, by name."""
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} must be one of {', '.join(LAYOUTS)}")
        for name in ("k", "v"):
            _check_store(name, getattr(self, name))
        if self.k.shape != self.v.shape or self.k.dtype != self.v.dtype or self.k.device != self.v.device:
            raise ValueError(
                f"v: {self.v.dtype} {tuple(self.v.shape)} on {self.v.device} must equal k, "
                f"{self.k.dtype} {tuple(self.k.shape)} on {self.k.device}"
            )
        if self.kv_heads < 1:
            raise ValueError(f"k: shape {tuple(self.k.shape)} has no head")
        if self._slots >= MAX_TOKENS:
            raise ValueError(f"k: its {self._slots} slots must be below 2^31 - 2^16")

    def _scale(self, name: str, scale: float | torch.Tensor | None) -> torch.Tensor | None:
        if scale is None:
            return None
        if self.k.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name}: only an E4M3 cache has scales, this one is {self.k.dtype}")
        if isinstance(scale, torch.Tensor):
            if not scale.dtype.is_floating_point:
                raise ValueError(f"{name}: dtype {scale.dtype} must be torch.float32, or another of floats")
            check_no_grad(name, scale)
        elif isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"{name}: a float or a torch.Tensor is needed, not {type(scale).__name__}")
        elif not SMALLEST_FLOAT <= scale <= LARGEST_FLOAT:  # nor a NaN
            raise ValueError(f"{name}: {shown(scale)} must be positive and finite in float32")
        values = torch.as_tensor(scale, dtype=torch.float32, device=self.k.device)
        if values.dim() > 1 or values.numel() not in (1, self.kv_heads):
            raise ValueError(
                f"{name}: shape {tuple(values.shape)} must be a scalar or [{self.kv_heads}], one a KV head"
            )
        if values.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_scales(name, values)
        return values.reshape(-1).expand(self.kv_heads).contiguous()

    @property
    def keys(self) -> torch.Tensor:
        """``[batch or pages, slots, kv_heads, head_dim]``, whatever the layout."""
        return self.k if self.layout == "NHD" else self.k.transpose(1, 2)

    @property
    def values(self) -> torch.Tensor:
        """Like ``keys``."""
        return self.v if self.layout == "NHD" else self.v.transpose(1, 2)

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def _slots(self) -> int:
        """Of a sequence, or of a page."""
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """Positions that fit a sequence (a ring: that are kept)."""
        return self._slots

    def check(self, lengths: torch.Tensor | None = None) -> None:
        """Waits for the device and raises ValueError for what is wrong in scales or ``lengths`` now, or what kernels
        have noted since the last check: which sequence, and which entry."""
        self.prepare()
        for name, scales in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if scales is not None:
                _check_scales(name, torch.as_tensor(scales))
        code, row, detail = self.fault.tolist()
        self.fault.zero_()
        if lengths is not None:  # first, as a length that is too large leads to entries that are not in use
            self._check_lengths(lengths)
        if code == FAULT_LENGTH:
            raise ValueError(f"lengths: row {row} is {detail}, and must be between 0 and {self._told_longest()}")
        if code == FAULT_PAGE:
            raise ValueError(
                f"page_table: row {row}, column {detail} named no page of the pool when it was used; or the length of "
                f"row {row} was more than its tokens"
            )

    def _check_lengths(self, lengths: torch.Tensor) -> None:
        for row, length in enumerate(lengths.tolist()):
            if length < 0 or length > self._longest():
                raise ValueError(f"lengths: row {row} is {length}, and must be between 0 and {self._told_longest()}")

    def _longest(self) -> int:
        return self.capacity

    def _told_longest(self) -> str:
        return f"the capacity, {self.capacity}"

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the first two dims of ``keys`` of positions ``[batch, n]``, all within the capacity."""
        rows = torch.arange(self.batch, device=positions.device).unsqueeze(1).expand_as(positions)
        return rows, positions

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> None:
        """Writes the newest tokens, ``k`` and ``v`` ``[batch, n, kv_heads, head_dim]``, to positions ``lengths - n`` to
        ``lengths - 1`` of each sequence; positions below 0, beyond the capacity or in a page outside the pool are left
        out. They may be BF16, FP16, FP32 or E4M3; what an E4M3 cache cannot hold saturates at 448 times the scale, and
        NaN stays NaN. Waits for nothing on a GPU. TypeError or ValueError names what does not fit."""
        self.prepare()
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
            if x.dim() != 4 or tuple(x.shape) != (self.batch, k.shape[1], self.kv_heads, self.head_dim):
                raise ValueError(
                    f"{name}: shape {tuple(x.shape)} must be [{self.batch}, n, {self.kv_heads}, {self.head_dim}]"
                )
            if x.dtype not in TOKEN_DTYPES:
                raise ValueError(f"{name}: dtype {x.dtype} must be one of {', '.join(map(str, TOKEN_DTYPES))}")
            if x.device != self.k.device:
                raise ValueError(f"{name}: device {x.device} must equal that of the cache, {self.k.device}")
            check_no_grad(name, x)
            check_no_grad("cache", getattr(self, name))
        check_lengths(lengths, self.batch, self.k.device)
        n = k.shape[1]
        if n > self.capacity:
            raise ValueError(f"k: {n} tokens are more than the capacity, {self.capacity}")
        if n == 0 or self.batch == 0:
            return
        if lengths.device.type == "cpu":
            self.check(lengths)
        positions = lengths.long().unsqueeze(1) - n + torch.arange(n, device=lengths.device)
        outer, inner = self.slots(positions.clamp(min=0).clamp(max=self._longest() - 1))
        valid = (positions >= 0) & (positions < self._longest()) & (outer >= 0) & (outer < self.k.shape[0])
        # A token that is left out repeats the first one that is written: no shape depends on the data, so nothing has
        # to be waited for. If none is written, the old value is written back.
        first = valid.flatten().long().argmax()
        source = torch.where(valid.flatten(), torch.arange(valid.numel(), device=valid.device), first)
        outer, inner = outer.flatten()[source].clamp(0, self.k.shape[0] - 1), inner.flatten()[source]
        for store, new, scale in ((self.keys, k, self.k_scale), (self.values, v, self.v_scale)):
            fresh = self._stored(new, scale).flatten(0, 1)[source]
            kept = torch.where(valid.any(), _bits(fresh), _bits(store)[outer, inner])
            _bits(store)[outer, inner] = kept

    def _stored(self, x: torch.Tensor, scale: float | torch.Tensor | None) -> torch.Tensor:
        if self.k.dtype != torch.float8_e4m3fn:
            return x.to(self.k.dtype)
        scaled = x.float() if scale is None else x.float() / torch.as_tensor(scale).unsqueeze(-1)
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def gather(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The live keys and values of one sequence in order, scaled, float64 ``[1, n, kv_heads, head_dim]`` each, and
        the position of the first: what a reference needs."""
        first = max(0, length - self.capacity)
        positions = torch.arange(first, length, device=self.k.device)
        outer, inner = (index[row] for index in self.slots(positions.expand(self.batch, -1)))
        k = _bits(self.keys)[outer, inner].view(self.k.dtype).double()
        v = _bits(self.values)[outer, inner].view(self.k.dtype).double()
        if self.k_scale is not None:
            k = k * torch.as_tensor(self.k_scale).double().unsqueeze(-1)
        if self.v_scale is not None:
            v = v * torch.as_tensor(self.v_scale).double().unsqueeze(-1)
        return k.unsqueeze(0), v.unsqueeze(0), first

    def poisoned(self, value: float) -> tuple[_Cache, Callable[[], int]]:
        """The same cache as strided views inside storage full of ``value``, and a check that counts the bytes changed
        in it: see :func:`mila_kernels.parity.poison`."""
        from .parity import poisoned  # which imports what imports this

        twin = copy.copy(self)
        twin.k, k_changed = poisoned(self.k, value)
        twin.v, v_changed = poisoned(self.v, value, margin=2)
        return twin, lambda: k_changed() + v_changed()


@dataclass(eq=False)
class ContiguousCache(_Cache):
    """``k``, ``v`` ``[batch, capacity, kv_heads, head_dim]`` (NHD) or ``[batch, kv_heads, capacity, head_dim]`` (HND):
    position p lies in slot p."""


@dataclass(eq=False)
class RingCache(_Cache):
    """Like ContiguousCache, but position p lies in slot ``p % capacity``: the newest ``capacity`` tokens are kept, and
    lengths go on counting. A decode of q_len tokens with window W needs ``capacity >= W + q_len - 1``."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.capacity < 1:
            raise ValueError(f"k: a ring needs at least one slot, not shape {tuple(self.k.shape)}")

    def _longest(self) -> int:
        return MAX_TOKENS

    def _told_longest(self) -> str:
        return f"{MAX_TOKENS}, whatever the ring's capacity"

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, positions = super().slots(positions)
        return rows, positions % self.capacity


@dataclass(eq=False)
class PagedCache(_Cache):
    """``k``, ``v``: a pool ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages, kv_heads, page_size,
    head_dim]`` (HND), page size 16, 32, 64 or 128. ``page_table`` int32 ``[batch, max_pages]``: position p lies in
    slot ``p % page_size`` of page ``page_table[row, p // page_size]``. Entries beyond a sequence's length, or before
    its window, may hold anything."""

    page_table: torch.Tensor

    def check_fields(self) -> None:
        super().check_fields()
        table = self.page_table
        check_tensor("page_table", table)
        if table.dtype != torch.int32 or table.dim() != 2 or table.device != self.k.device:
            raise ValueError(
                f"page_table: {table.dtype} {tuple(table.shape)} on {table.device} must be torch.int32 "
                f"[batch, max_pages] on {self.k.device}"
            )
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise ValueError(f"page_table: the last dim's stride is {table.stride(1)} and must be 1")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"k: page size {self.page_size} must be one of {', '.join(map(str, PAGE_SIZES))}")
        if self.pages >= MAX_TOKENS:
            raise ValueError(f"k: its {self.pages} pages must be below 2^31 - 2^16")
        if self.capacity >= MAX_TOKENS:
            raise ValueError(f"page_table: {table.shape[1]} pages of {self.page_size} pass 2^31 - 2^16 positions")
        if table.numel() and not self.pages:
            raise ValueError("k: the pool has no page, and the page table has entries")

    @property
    def page_size(self) -> int:
        return self._slots

    @property
    def pages(self) -> int:
        return self.k.shape[0]

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        return self.page_table.shape[1] * self.page_size

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.gather(self.page_table.long(), 1, positions // self.page_size)
        return pages, positions % self.page_size

    def _check_lengths(self, lengths: torch.Tensor) -> None:
        super()._check_lengths(lengths)
        columns = torch.arange(self.page_table.shape[1], device=self.k.device)
        used = columns * self.page_size < lengths.unsqueeze(1)
        bad = used & ((self.page_table < 0) | (self.page_table >= self.pages))
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"page_table: row {row}, column {column} is {int(self.page_table[row, column])}, and must be between 0 "
                f"and {self.pages - 1}"
            )


Cache = ContiguousCache | RingCache | PagedCache
C = TypeVar("C", ContiguousCache, RingCache, PagedCache)


def seen_by_kernels(kind: type[C], k: torch.Tensor, v: torch.Tensor, **more: torch.Tensor) -> C:
    """The cache of what a kernel is given, its fields looked at; no memory of its own, thus no fault and no scales."""
    found = object.__new__(kind)
    found.__dict__.update({"k": k, "v": v, "k_scale": None, "v_scale": None, "layout": "NHD", **more})
    found.check_fields()
    found._checked = True
    return found


def check_queries(cache: Cache, q: torch.Tensor, kinds: Sequence[type], dtypes: Sequence[torch.dtype]) -> None:
    """TypeError or ValueError where queries ``[batch, q_len, q_heads, head_dim]`` do not fit a cache of these kinds and
    dtypes, the first of them q's own."""
    if not isinstance(cache, tuple(kinds)):
        *others, last = (kind.__name__ for kind in kinds)
        needed = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"cache: {needed} is needed, not {type(cache).__name__}")
    if not cache._checked:
        cache.prepare()
    if (cache.k.requires_grad or cache.v.requires_grad) and torch.is_grad_enabled():
        raise ValueError("cache: k or v requires grad, and there is no backward; use torch.no_grad()")
    if cache.k.device != q.device:
        raise ValueError(f"cache: device {cache.k.device} must equal that of q, {q.device}")
    if cache.k.dtype not in dtypes:
        more = "".join(f", or {dtype}" for dtype in dtypes[1:])
        raise ValueError(f"cache: dtype {cache.k.dtype} must be that of q, {q.dtype}{more}")
    batch, _, q_heads, head_dim = q.shape
    if cache.batch != batch or cache.head_dim != head_dim:
        raise ValueError(
            f"cache: batch {cache.batch} and head_dim {cache.head_dim} must equal those of q, {batch} and {head_dim}"
        )
    if q_heads % cache.kv_heads:
        raise ValueError(f"q: {q_heads} heads must be a multiple of the cache's {cache.kv_heads}")


def check_lengths(lengths: torch.Tensor, batch: int, device: torch.device) -> None:
    """TypeError or ValueError unless ``lengths`` is int32 ``[batch]`` on ``device``; the values are not looked at."""
    check_tensor("lengths", lengths)
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,) or lengths.device != device:
        raise ValueError(
            f"lengths: {lengths.dtype} {tuple(lengths.shape)} on {lengths.device} must be torch.int32 [{batch}] "
            f"on {device}"
        )
    if batch > 1 and lengths.stride(0) != 1:
        raise ValueError(f"lengths: the stride is {lengths.stride(0)} and must be 1; pass lengths.contiguous()")


def _check_store(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x)
    if x.dim() != 4:
        raise ValueError(f"{name}: shape {tuple(x.shape)} must have 4 dims")
    if x.dtype not in CACHE_DTYPES:
        raise ValueError(f"{name}: dtype {x.dtype} must be one of {', '.join(map(str, CACHE_DTYPES))}")
    if x.stride(3) != 1 and x.shape[3] > 1:
        raise ValueError(f"{name}: the last dim's stride is {x.stride(3)} and must be 1")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: device {x.device} must be a CUDA device, or cpu for emulation")
    check_no_grad(name, x)


def _check_scales(name: str, scales: torch.Tensor) -> None:
    """ValueError unless all are positive and finite; waits for a GPU."""
    bad = ~((scales >= SMALLEST_FLOAT) & (scales <= LARGEST_FLOAT))
    if bool(bad.any()):
        found = float(scales.reshape(-1)[bad.reshape(-1)][0])
        raise ValueError(f"{name}: {found} must be positive and finite in float32")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same storage as integers: not every torch indexes E4M3."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
