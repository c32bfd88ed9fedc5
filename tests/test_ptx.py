"""Every wrapper of ptx.cuh: its twin in the emulation against what a GPU gave, and against the manual's own words."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from mila_kernels import paths

Words = npt.NDArray[np.uint32]
VECTORS = paths.DATA / "ptx_vectors"


def _load_recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ptx_vectors_record", VECTORS / "record.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


record = _load_recorder()
WRAPPERS = record.wrappers()


def _twin(name: str) -> tuple[Words, Words]:
    """New random inputs of a wrapper and what the emulation makes of them."""
    words = record.inputs(name, seed=7)
    return words, record.run(WRAPPERS[name], words)


def _floats(words: Words) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(words).view(np.float32)


# ---- against a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, w in WRAPPERS.items() if w.needs <= 90])
def test_twin_gives_what_the_gpu_gave(name: str) -> None:
    path = VECTORS / "sm_90.npz"
    assert path.is_file(), f"{path} is missing: run data/ptx_vectors/record.py on a machine with an sm_90 GPU"
    with np.load(path) as recorded:
        assert f"in/{name}" in recorded, f"{name} has not been recorded: run data/ptx_vectors/record.py on an sm_90 GPU"
        given, wanted = recorded[f"in/{name}"], recorded[f"out/{name}"]
    got = record.run(WRAPPERS[name], given)
    assert record.difference(name, given, got, wanted) == ""


def test_recorded_vectors_say_where_they_come_from() -> None:
    files = sorted(VECTORS.glob("sm_*.npz"))
    assert files, "nothing has been recorded: run data/ptx_vectors/record.py on a machine with a GPU"
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        with np.load(path) as recorded:
            about = json.loads(str(recorded["about"]))
        assert {"gpu", "driver", "cuda", "nvcc", "utc", "source_sha"} <= about.keys()


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_one_wrong_output_is_noticed(name: str) -> None:
    given, out = _twin(name)
    assert record.difference(name, given, out, out) == ""
    changed = out.copy()
    finite = np.argwhere((out & 0x7F80_0000) < 0x7F00_0000)
    changed[tuple(finite[len(finite) // 2])] ^= 0x0444_0444
    assert record.difference(name, given, changed, out).startswith(f"{name}: 1 of")


def test_every_wrapper_is_among_them() -> None:
    """No wrapper of ptx.cuh escapes the conformance kernel."""
    header = (paths.CSRC / "ptx.cuh").read_text()
    names = set(re.findall(r"^DEVICE \w+ (\w+)(?:<\w+>)?\(", header, re.M))
    names |= set(re.findall(r"^LD_GLOBAL_NC_V4\((\w+)", header, re.M))
    assert len(names) > 40
    kernel = record.SOURCE.read_text()
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", kernel)) == []


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_conformance_kernel_is_clean_in_check_mode(name: str) -> None:
    words = record.inputs(name, seed=11)
    fast = record.run(WRAPPERS[name], words, seed=1)
    checked = record.run(WRAPPERS[name], words, check=True, seed=2)
    assert record.difference(name, words, checked, fast) == ""


# ---- against the manual ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WRAPPERS if "mma" in name])
def test_products_through_the_documented_layouts(name: str) -> None:
    words, out = _twin(name)
    exact, got = record.product(name, words), record.product_outputs(name, out)
    finite = np.isfinite(exact.exact)
    assert finite.mean() > 0.9 and not finite.all()
    assert np.array_equal(np.isnan(got), np.isnan(exact.exact))
    error = np.abs(got[finite] - exact.exact[finite])
    assert (error <= (exact.depth + 1) * 2.0**-24 * exact.magnitude[finite]).all()
    assert np.array_equal(got[1], exact.exact[1])  # small integers


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name.startswith("ldmatrix")])
def test_ldmatrix_places_every_element(name: str) -> None:
    words, out = _twin(name)
    count = WRAPPERS[name].out_words
    for given, got in zip(words, out, strict=True):
        memory = np.ascontiguousarray(given[:, :16]).reshape(-1).view(np.uint16).reshape(128, 8)
        for matrix in range(count):
            rows = memory[given[8 * matrix : 8 * matrix + 8, 16] % 128]
            if name.endswith("trans"):
                rows = rows.T
            assert np.array_equal(np.ascontiguousarray(rows).reshape(32, 2).view(np.uint32)[:, 0], got[:, matrix])


def test_prmt() -> None:
    words, out = _twin("prmt")
    for (a, b, selector), got in zip(words.reshape(-1, 3).tolist(), out.reshape(-1).tolist(), strict=True):
        source = (b << 32 | a).to_bytes(8, "little")
        picked = [(source[s & 7], s & 8) for s in (selector >> 4 * i & 15 for i in range(4))]
        assert got == int.from_bytes(bytes((255 if x & 128 else 0) if sign else x for x, sign in picked), "little")


def test_lop3() -> None:
    words, out = _twin("lop3")
    a, b, c = (words[..., i] for i in range(3))
    named = {0: a & b ^ c, 1: a & b | c, 2: a & b | ~a & c, 4: ~(a | b | c), 5: a | b | c}
    for table, got in zip((0x6A, 0xEA, 0xCA, 0x1B, 0x01, 0xFE), np.moveaxis(out, -1, 0), strict=True):
        bits = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                bits |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        assert np.array_equal(got, bits)
    for index, wanted in named.items():
        assert np.array_equal(out[..., index], wanted)


@pytest.mark.parametrize(
    ("name", "form", "relative"),
    [
        ("ex2_approx_ftz", "fp32", 2.0**-22),
        ("ex2_approx_f16x2", "fp16", 2.0**-11),
        ("ex2_approx_ftz_bf16x2", "bf16", 2.0**-8),
    ],
)
def test_ex2(name: str, form: str, relative: float) -> None:
    words, out = _twin(name)
    if form == "fp32":
        with np.errstate(invalid="ignore"):
            x, y = _floats(words).astype(np.float64), _floats(out).astype(np.float64)
    else:
        x, y = record.unpacked(words, form), record.unpacked(out, form)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.exp2(x)
        largest = {"fp32": 3.5e38, "bf16": 3.5e38, "fp16": 65520.0}[form]
        wanted = np.where(wanted >= largest, np.inf, wanted)
        least = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-25}[form]
        near = np.abs(y - wanted) <= relative * wanted + least
    assert (near | (y == wanted) | (np.isnan(y) & np.isnan(wanted))).all()
    assert (np.isnan(y) == np.isnan(x)).all() and np.isnan(y).any() and np.isinf(y).any() and (y == 0).any()


def _nearest(x: npt.NDArray[np.float32], table: npt.NDArray[np.float64], nan: int) -> npt.NDArray[np.int64]:
    """The code whose value is nearest, even where two are; what is too large gives the largest. ``table`` ascends from
    0; codes with a sign have one bit more."""
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    distance = np.abs(np.minimum(magnitude, table[-1])[..., None] - table)
    nearest = distance == distance.min(-1, keepdims=True)
    even = np.arange(len(table)) % 2 == 0
    code = np.where((nearest & even).any(-1), (nearest & even).argmax(-1), nearest.argmax(-1))
    sign = np.where(np.signbit(x), nan + 1, 0)
    return np.where(np.isnan(x), nan, code + sign)


E4M3 = np.array([(m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)) for e in range(16) for m in range(8)][:-1])
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_rounding_to_e4m3() -> None:
    words, out = _twin("cvt_rn_satfinite_e4m3x2_f32")
    high, low = _nearest(_floats(words[..., 0]), E4M3, 127), _nearest(_floats(words[..., 1]), E4M3, 127)
    assert np.array_equal(out[..., 0], high << 8 | low)
    words, out = _twin("cvt_rn_satfinite_e4m3x2_f16x2")
    pairs = record.unpacked(words, "fp16").astype(np.float32)
    codes = _nearest(pairs, E4M3, 127)
    assert np.array_equal(out[..., 0], codes[..., 1] << 8 | codes[..., 0])


def test_rounding_to_e2m1() -> None:
    words, out = _twin("cvt_rn_satfinite_e2m1x2_f32")
    high, low = _nearest(_floats(words[..., 0]), E2M1, 7), _nearest(_floats(words[..., 1]), E2M1, 7)
    assert np.array_equal(out[..., 0], high << 4 | low)


def test_widening_is_exact() -> None:
    words, out = _twin("cvt_rn_f16x2_e4m3x2")
    wanted = record.e4m3s(np.stack([words[..., 0] & 255, words[..., 0] >> 8 & 255], axis=-1)).astype(np.float64)
    got = record.unpacked(out, "fp16")
    assert np.array_equal(got, wanted, equal_nan=True) and np.isnan(got).any()
    words, out = _twin("cvt_rn_f16x2_e2m1x2")
    codes = np.stack([words[..., 0] & 15, words[..., 0] >> 4 & 15], axis=-1).astype(np.int64)
    wanted = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    assert np.array_equal(record.unpacked(out, "fp16"), wanted)


def _bf16(x: npt.NDArray[np.float32]) -> Words:
    bits = x.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


def _fp16(x: npt.NDArray[np.float32]) -> Words:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def test_rounding_to_16_bits() -> None:
    for name, rounded in (("cvt_rn_bf16x2_f32", _bf16), ("cvt_rn_f16x2_f32", _fp16)):
        words, out = _twin(name)
        high, low = rounded(_floats(words[..., 0])), rounded(_floats(words[..., 1]))
        assert np.array_equal(out[..., 0], high << 16 | low)
    words, out = _twin("conversions")
    x = _floats(words[..., 0])
    low_half = (words[..., 0] & 0xFFFF).astype(np.uint32)
    assert np.array_equal(out[..., 0], _bf16(x)) and np.array_equal(out[..., 1], _fp16(x))
    assert np.array_equal(_floats(out[..., 2]), record.bfloats(low_half), equal_nan=True)
    assert np.array_equal(_floats(out[..., 3]), record.halves(low_half), equal_nan=True)
    assert np.array_equal(out[..., 4], _bf16(x) | 0x3F800000) and np.array_equal(out[..., 5], _fp16(x) | 0x3C000000)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_packed_arithmetic_rounds_once(form: str) -> None:
    words, out = _twin(f"packed_{form}")
    a, b, c = (record.unpacked(words[..., i : i + 1], form) for i in range(3))
    table = record.table_of(form)
    finite = np.unique(np.abs(table[np.isfinite(table)]))
    with np.errstate(invalid="ignore"):
        for index, exact in enumerate((a + b, a - b, a * b, a * b + c)):
            got = record.unpacked(out[..., index : index + 1], form)
            small = np.abs(exact) <= finite[-1]
            at = np.clip(np.searchsorted(finite, np.abs(exact)), 1, len(finite) - 1)
            step = finite[at] - finite[at - 1]
            assert (np.abs(got - exact)[small] <= step[small] / 2).all()
            assert np.array_equal(np.isnan(got), np.isnan(exact))


def test_cp_async_fills_with_zeros() -> None:
    words, out = _twin("cp_async")
    for given, got in zip(words.reshape(-1, 8), out.reshape(-1, 32), strict=True):
        size = int(given[4] % 17)
        data, memory = given[:4].tobytes(), got.tobytes()
        unwritten = (0xDEADBEEF).to_bytes(4, "little")

        def filled(n: int, size: int = size, data: bytes = data) -> bytes:
            return data[: min(size, n)].ljust(n, b"\0")

        assert memory[:64] == filled(4) + unwritten + filled(8) + 3 * filled(16)
        assert memory[64:] == data[4:8] + unwritten + data[8:16] + 3 * data


def test_shuffles() -> None:
    words, out = _twin("shuffle")
    lanes = np.arange(32)
    for given, got in zip(words, out, strict=True):
        x, by = given[:, 0], (given[:, 1] % 32).astype(int)
        for width, first in ((32, 0), (8, 4)):
            base, last = lanes & -width, (lanes & -width) + width - 1
            sources = [base | by & width - 1, lanes - by, lanes + by, lanes ^ by]
            for i, source in enumerate(sources):
                inside = (source >= base if i == 1 else source <= last) if i else np.full(32, True)
                assert np.array_equal(got[:, first + i], x[np.where(inside, source, lanes)]), (width, i)
        assert np.array_equal(got[:12, 8], x[lanes[:12] ^ 3])
        assert np.array_equal(got[:, 9], given[::-1, 1]) and np.array_equal(got[:, 10], x[::-1])


def test_votes() -> None:
    words, out = _twin("vote")
    for given, got in zip(words[..., 0], out, strict=True):
        ballot = sum(1 << lane for lane in range(32) if given[lane] & 2)
        match = [sum(1 << j for j in range(32) if given[j] & 3 == given[i] & 3) for i in range(32)]
        wanted: list[int] = [
            int((given & 1).any()), int((given & 1).all()), ballot, 0, int(given.sum(dtype=np.uint64)) & 0xFFFFFFFF,
            int(given.min()), int(given.max()), int(np.bitwise_and.reduce(given | 0xFF00)),
            int(np.bitwise_or.reduce(given & 0xFF00)), int(np.bitwise_xor.reduce(given)),
        ]  # fmt: skip
        for index, value in enumerate(wanted):
            assert got[:, index].tolist() == (match if index == 3 else [value] * 32), index


def test_loads_and_stores() -> None:
    words, out = _twin("ld_global_nc")
    assert np.array_equal(out, words[..., [3, 2, 3, *7 * (0, 1, 2, 3)]])
    words, out = _twin("st_global_cs")
    assert np.array_equal(out, words)
    words, out = _twin("smem_u32")
    assert np.array_equal(out, words % 1024 * 4)


def _flushed(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def test_atomic_additions() -> None:
    words, out = _twin("red_atom")
    with np.errstate(over="ignore", invalid="ignore"):  # additions in global memory know no subnormals
        total = _flushed(_flushed(_floats(words[..., 0])) + _flushed(_floats(words[..., 1])))
    assert np.array_equal(_floats(out[..., 0]), total, equal_nan=True)
    assert np.array_equal(_floats(out[..., 1]), total, equal_nan=True)
    assert np.array_equal(_floats(out[..., 2]), _floats(words[..., 0]), equal_nan=True)
    for column in (3, 4):
        assert np.array_equal(out[..., column], words[..., 2] + words[..., 3])
    assert np.array_equal(out[..., 5], words[..., 2])
    assert (_floats(out[:, 0, 6]) == 31 * 16).all()
    assert np.array_equal(out[:, 0, 7], words[..., 3].sum(-1, dtype=np.uint32))


def test_integer_functions() -> None:
    words, out = _twin("integers")
    for (a, b, c), got in zip(words.reshape(-1, 3).tolist(), out.reshape(-1, 7).tolist(), strict=True):
        both, shift = b << 32 | a, c & 31
        wanted = [
            a.bit_count(), (a & -a).bit_length(), 32 - a.bit_length(), int(f"{a:032b}"[::-1], 2),
            (both << shift) >> 32 & 0xFFFFFFFF, both >> shift & 0xFFFFFFFF,
        ]  # fmt: skip
        assert got[:6] == wanted
        x = float(np.uint32(a).view(np.float32))
        rounded = 0 if x != x else round(min(max(x, -(2.0**31)), 2.0**31 - 1))
        assert got[6] == rounded & 0xFFFFFFFF
