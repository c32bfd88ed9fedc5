"""The geometries and workloads by name: what every benchmark, notebook and test means by a shape.

A *geometry* is a model's attention layer (heads, head dim, window, softmax scale), a *linear shape* the size of one
of its weight matrices; both are rows of ``data/shapes.csv``. A *workload* is one benchmarked case with its peer and
target; the named ones are rows of ``data/workloads.csv``, the others are made by :func:`attention_workload` and
:func:`linear_workload` and have an empty name.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mila_kernels.paths import DATA

if TYPE_CHECKING:
    from mila_kernels.steps import Step

ATTENTION_OPS = ("prefill", "prefill_ring", "decode")
LINEAR_OPS = ("matvec_fp4", "matvec_fp8", "gemm_w4a8")
MASKS = ("causal", "full", "")
DTYPES = ("bf16", "fp16")
KV_DTYPES = (*DTYPES, "fp8")
MOST = 2**31 - 2**16 - 1  # of tokens, rows or columns: the kernels count them, and a tile more, in 32 bits
MOST_ELEMENTS = 2**40  # of one tensor: more fits no memory
PUBLISHED_INSTANCE = "prefill/published-instance"

T = TypeVar("T")


@dataclass(frozen=True)
class Geometry:
    """One attention layer of a model: heads, head dim, window in tokens (None: none), softmax scale, layers of it."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    layers: int
    note: str = ""


@dataclass(frozen=True)
class LinearShape:
    """One weight matrix [n, k] (row-major, out features by in features), its stored format and layers that have it."""

    name: str
    n: int
    k: int
    dtype: str
    layers: int
    note: str = ""


@dataclass(frozen=True)
class Workload:
    """One case to run: the columns of ``data/workloads.csv``; sizes that do not apply are 0, the rest None or ''.

    Attention uses batch to page (query i of q_len sits at position kv_len - q_len + i when causal), linear ops use
    n, k (weights [n, k]) and m (rows of activations). ``floor``, ``peer`` and ``target`` are in ``unit`` (``us`` or
    ``tflops``), and ``better`` says which direction wins.
    """

    op: str
    name: str = ""
    batch: int = 0
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    q_len: int = 0
    kv_len: int = 0
    window: int | None = None
    mask: str = ""
    dtype: str = "bf16"
    kv_dtype: str = ""
    page: int | None = None
    n: int = 0
    k: int = 0
    m: int = 0
    unit: str = "us"
    better: str = "lower"
    floor: float | None = None
    peer: float | None = None
    peer_name: str = ""
    target: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask must be 'causal', 'full' or '', not {self.mask!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_dtype and self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)} or '', not {self.kv_dtype!r}")
        if self.is_attention:
            self._check_attention()
            self._check_elements("q", self.batch, self.q_len, self.q_heads, self.head_dim)
            self._check_elements("k", self.batch, self.kv_len, self.kv_heads, self.head_dim)
        else:
            self._check_numbers(("n", "k"), least=1)
            self._check_numbers(("m",), least=0)
            for name, rows, columns in (("w", self.n, self.k), ("x", self.m, self.k), ("y", self.m, self.n)):
                self._check_elements(name, rows, columns)

    def _check_attention(self) -> None:
        self._check_numbers(("q_heads", "kv_heads", "head_dim"), least=1)
        self._check_numbers(("batch", "q_len", "kv_len"), least=0)
        self._check_numbers([name for name in ("window", "page") if getattr(self, name) is not None], least=1)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads must be a multiple of kv_heads, not {self.q_heads} and {self.kv_heads}")

    def _check_numbers(self, names: Iterable[str], least: int) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
                raise ValueError(
                    f"{name} of a {self.op} workload must be an integer from {least} to {MOST}, not {_short(value)}"
                )

    def _check_elements(self, name: str, *sizes: int) -> None:
        if math.prod(sizes) > MOST_ELEMENTS:
            raise ValueError(
                f"{name} of a {self.op} workload must have at most 2^40 elements, not {' x '.join(map(str, sizes))}"
            )

    @property
    def is_attention(self) -> bool:
        """True for attention shapes, False for weight matrices."""
        return not (self.n or self.k)

    def fits(self, step: Step) -> bool:
        """Whether a step takes the element type, and of attention the head dim."""
        return self.dtype in step.dtypes and (not self.is_attention or self.head_dim in step.head_dims)

    @property
    def causal(self) -> bool:
        """Whether a query sees only the keys up to its own position; decode (no mask named) is causal."""
        return self.is_attention and self.mask != "full"

    @property
    def offset(self) -> int | None:
        """Position of the first query when causal (negative where there are more queries than keys), else None."""
        if not self.causal:
            return None
        return self.kv_len - self.q_len

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs one head of one sequence attends to."""
        return attended_pairs(self.q_len, self.kv_len, causal=self.causal, window=self.window)

    @property
    def shape(self) -> str:
        """Canonical text, ``b1 q512h16 kv8192h1 d512 causal bf16`` or ``n30720 k3840 m1 bf16``; see parse_shape."""
        if not self.is_attention:
            return f"n{self.n} k{self.k} m{self.m} {self.dtype}"
        words = [f"b{self.batch}", f"q{self.q_len}h{self.q_heads}", f"kv{self.kv_len}h{self.kv_heads}"]
        words += [f"d{self.head_dim}", f"w{self.window}" if self.window is not None else "", self.mask, self.dtype]
        words += [f"kv{self.kv_dtype}" if self.kv_dtype else "", f"page{self.page}" if self.page else ""]
        return " ".join(word for word in words if word)

    def parts(self) -> tuple[Workload, ...]:
        """The launches that one figure of this workload is the mean of.

        The published instance is a mean over the chunks of a prefill (16 chunks of 512 queries of 8192 tokens), each
        of which sees the keys so far; every other workload is itself.
        """
        if self.name != PUBLISHED_INSTANCE:
            return (self,)
        ends = range(self.q_len, self.kv_len + 1, self.q_len)
        bare = replace(self, name="", note="", peer=None, peer_name="", target=None, floor=None)
        return tuple(replace(bare, kv_len=end) for end in ends)


def attended_pairs(q_len: int, kv_len: int, *, causal: bool, window: int | None = None) -> int:
    """Number of (query, key) pairs inside the mask: sum over queries of the keys in [max(0, p - window + 1), p].

    Query i sits at p = kv_len - q_len + i when causal. Without causality every query sees every key (a window then
    still bounds the keys before its position, not those after).
    """
    offset = kv_len - q_len
    if causal:
        return _sum_to(kv_len - 1, window) - _sum_to(offset - 1, window)
    if window is None:
        return q_len * kv_len
    return sum(kv_len - min(kv_len, max(0, p - window + 1)) for p in range(offset, offset + q_len))


def _sum_to(position: int, window: int | None) -> int:
    """Keys seen by all queries at positions 0..position: 1 + 2 + ... each at most window."""
    count = position + 1
    if count <= 0:
        return 0
    ramp = count if window is None else min(count, window)
    return ramp * (ramp + 1) // 2 + (count - ramp) * ramp


def attention_workload(
    op: str = "prefill",
    batch: int = 1,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    q_len: int,
    kv_len: int,
    window: int | None = None,
    mask: str = "causal",
    dtype: str = "bf16",
    kv_dtype: str = "",
    page: int | None = None,
) -> Workload:
    """An attention workload outside the table (empty name). ValueError names the argument that does not fit."""
    unit, better = ("us", "lower") if op == "decode" else ("tflops", "higher")
    return Workload(
        op=op, batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, q_len=q_len, kv_len=kv_len,
        window=window, mask=mask, dtype=dtype, kv_dtype=kv_dtype, page=page, unit=unit, better=better,
    )  # fmt: skip


def linear_workload(op: str, *, n: int, k: int, m: int, dtype: str = "bf16") -> Workload:
    """A linear workload outside the table: weights [n, k], activations [m, k] in dtype."""
    unit, better = ("tflops", "higher") if op == "gemm_w4a8" else ("us", "lower")
    return Workload(op=op, n=n, k=k, m=m, dtype=dtype, unit=unit, better=better)


_ATTENTION_SHAPE = re.compile(
    r"b(?P<batch>\d+) q(?P<q_len>\d+)h(?P<q_heads>\d+) kv(?P<kv_len>\d+)h(?P<kv_heads>\d+) d(?P<head_dim>\d+)"
    r"(?: w(?P<window>\d+))?(?: (?P<mask>causal|full))? (?P<dtype>bf16|fp16)"
    r"(?: kv(?P<kv_dtype>bf16|fp16|fp8))?(?: page(?P<page>\d+))?"
)
_LINEAR_SHAPE = re.compile(r"n(?P<n>\d+) k(?P<k>\d+) m(?P<m>\d+) (?P<dtype>bf16|fp16)")
_TEXTS = {"mask", "dtype", "kv_dtype"}


def parse_shape(op: str, text: str) -> Workload:
    """The workload whose ``.shape`` is text; ValueError shows the form that op takes, or names a size that is none."""
    if op not in (*ATTENTION_OPS, *LINEAR_OPS):
        raise ValueError(f"op must be one of {', '.join((*ATTENTION_OPS, *LINEAR_OPS))}, not {op!r}")
    if not isinstance(text, str):
        raise TypeError(f"text: a str is needed, not {type(text).__name__}")
    linear = op in LINEAR_OPS
    pattern, example = (_LINEAR_SHAPE, "n30720 k3840 m1 bf16") if linear else (
        _ATTENTION_SHAPE, "b1 q512h16 kv8192h1 d512 causal bf16")  # fmt: skip
    match = pattern.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(f"shape of {op} must read like {example!r}, not {text!r}")
    values = {name: (value or "") if name in _TEXTS else None if value is None else _size(value)
              for name, value in match.groupdict().items()}  # fmt: skip
    unit, better = ("tflops", "higher") if op in ("gemm_w4a8", "prefill", "prefill_ring") else ("us", "lower")
    return Workload(op=op, unit=unit, better=better, **values)  # type: ignore[arg-type]


def _size(digits: str) -> int:
    """The number; of very many digits, which Python may refuse to read, one as far above all sizes."""
    return int(digits) if len(digits) < 99 else 10**99


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:20]}... ({len(text)} digits)"


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.name} is missing from {path.parent}: mila_kernels reads its shapes and workloads from the data/ "
            "folder of the repository. Install it in place (pip install -e .) from a complete checkout."
        ) from None


_SIZES = {"batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len", "n", "k", "m"}
_OPTIONAL_INTS = {"window", "page"}
_FLOATS = {"floor", "peer", "target"}


def _workload_from_row(row: dict[str, str], line: int) -> Workload:
    values: dict[str, object] = {"name": row["workload"]}
    for field in fields(Workload):
        if field.name == "name":
            continue
        text = row[field.name]
        try:
            if field.name in _SIZES:
                values[field.name] = int(text) if text else 0
            elif field.name in _OPTIONAL_INTS:
                values[field.name] = int(text) if text else None
            elif field.name in _FLOATS:
                values[field.name] = float(text) if text else None
            else:
                values[field.name] = text
        except ValueError:
            raise ValueError(f"workloads.csv line {line}: {field.name} must be a number, not {text!r}") from None
    return Workload(**values)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _workloads(folder: Path) -> dict[str, Workload]:
    rows = _rows(folder / "workloads.csv")
    table = {row["workload"]: _workload_from_row(row, line) for line, row in enumerate(rows, start=2)}
    if len(table) != len(rows):
        raise ValueError("workloads.csv has a workload name twice")
    return table


def workloads(op: str | None = None) -> list[Workload]:
    """The named workloads, of one op or of all, in the table's order."""
    table = list(_workloads(DATA).values())
    if op is None:
        return table
    known = sorted({w.op for w in table})
    if op not in known:
        raise ValueError(f"op must be one of {', '.join(known)}, not {op!r}")
    return [w for w in table if w.op == op]


def workload(name: str) -> Workload:
    """The workload of that name, e.g. ``prefill/d512-16x1-n8192``; ValueError lists close names."""
    return _lookup(_workloads(DATA), name, "workload")


@lru_cache(maxsize=4)
def _shapes(folder: Path) -> tuple[dict[str, Geometry], dict[str, LinearShape]]:
    geometries: dict[str, Geometry] = {}
    linears: dict[str, LinearShape] = {}
    for row in _rows(folder / "shapes.csv"):
        name, layers, note = row["name"], int(row["layers"]), row["note"]
        if row["kind"] == "linear":
            linears[name] = LinearShape(name, int(row["n"]), int(row["k"]), row["dtype"], layers, note)
            continue
        head_dim = int(row["head_dim"])
        scale = 1 / math.sqrt(head_dim) if row["scale"] == "1/sqrt(head_dim)" else float(row["scale"])
        window = int(row["window"]) if row["window"] else None
        geometries[name] = Geometry(
            name, int(row["q_heads"]), int(row["kv_heads"]), head_dim, window, scale, layers, note
        )
    return geometries, linears


def geometries() -> list[Geometry]:
    """All attention geometries."""
    return list(_shapes(DATA)[0].values())


def geometry(name: str) -> Geometry:
    """The attention geometry of that name, e.g. ``gemma4-12b-global`` (a space may stand for a dash)."""
    dashed = name.replace(" ", "-") if isinstance(name, str) else name
    return _lookup(_shapes(DATA)[0], dashed, "geometry")


def linear_shapes() -> list[LinearShape]:
    """All weight matrices of a Gemma 4 12B layer, and its lm_head."""
    return list(_shapes(DATA)[1].values())


def linear_shape(name: str) -> LinearShape:
    """The weight matrix of that name, e.g. ``gate_up``."""
    return _lookup(_shapes(DATA)[1], name, "linear shape")


def _lookup(table: dict[str, T], name: str, what: str) -> T:
    if not isinstance(name, str):
        raise TypeError(f"name: a str is needed, not {type(name).__name__}")
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=5, cutoff=0.4) or list(table)[:10]
    raise ValueError(f"{what} {name!r} is unknown; close to it: {', '.join(near)}")
