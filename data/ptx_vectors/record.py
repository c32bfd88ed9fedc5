"""Records what a GPU makes of every wrapper of ptx.cuh, for the emulation's twins to be held against.

``python data/ptx_vectors/record.py [--out FOLDER]`` on a machine with a GPU writes ``FOLDER/sm_90.npz``, by default
beside this file: for every wrapper ``in/NAME`` [trials, 32, words] and ``out/NAME``, uint32, a row a lane, and
``about`` (JSON: GPU, driver, versions, date). ``--check`` compares the emulation with the files here instead.
The kernel is tests/steps/emulation/02_conformance.cu; its comments name the wrappers.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from mila_kernels.build import Buffer, emulation, load  # noqa: E402
from mila_kernels.steps import Step  # noqa: E402

SOURCE = HERE.parents[1] / "tests" / "steps" / "emulation" / "02_conformance.cu"
SEED = 20261129
WARP = 32
Words = npt.NDArray[np.uint32]


class ConformanceArgs(ctypes.Structure):
    _fields_ = [
        ("in_", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("wrapper", ctypes.c_int32),
        ("trials", ctypes.c_int32),
        ("in_words", ctypes.c_int32),
        ("out_words", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Wrapper:
    """One case of the conformance kernel: its number, and the words that a lane reads and writes."""

    name: str
    number: int
    in_words: int
    out_words: int
    needs: int  # 10 x compute capability


def wrappers() -> dict[str, Wrapper]:
    """What the kernel's ``case N:  // name in -> out (sm_NNN)`` comments say."""
    found = re.findall(r"case (\d+):  // (\w+) (\d+) -> (\d+)(?: \(sm_(\d+)\))?", SOURCE.read_text(encoding="utf-8"))
    return {name: Wrapper(name, int(n), int(i), int(o), int(sm or 80)) for n, name, i, o, sm in found}


def step() -> Step:
    return Step(op="emulation", order=2, name=SOURCE.stem, path=SOURCE, architectures=("sm_90a", "sm_100a"))


def run(wrapper: Wrapper, words: Words, device: str = "cpu", check: bool = False, seed: int = 0) -> Words:
    """The wrapper's outputs [trials, 32, out_words] for inputs [trials, 32, in_words], on a GPU or in emulation."""
    trials = words.shape[0]
    assert words.shape == (trials, WARP, wrapper.in_words) and words.dtype == np.uint32
    given = torch.from_numpy(words.view(np.int32).copy()).to(device)
    out = torch.zeros(trials, WARP, wrapper.out_words, dtype=torch.int32, device=device)
    args = ConformanceArgs(
        given.data_ptr(), out.data_ptr(), wrapper.number, trials, wrapper.in_words, wrapper.out_words
    )
    if given.is_cuda:
        load(step(), "cuda")(args, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    else:
        buffers = [Buffer("in", given.data_ptr(), given.nbytes, False), Buffer("out", out.data_ptr(), out.nbytes, True)]
        with emulation(check=check, seed=seed):
            load(step(), "emulation", check=check)(args, buffers=buffers)
    return out.cpu().numpy().view(np.uint32)


# ---- values ----------------------------------------------------------------------------------------------------------


def bfloats(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """BF16 bits as float32."""
    return (np.asarray(x).astype(np.uint32) << 16).astype(np.uint32).view(np.float32)


def halves(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """FP16 bits as float32."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.uint16).view(np.float16).astype(np.float32)


def e4m3s(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """E4M3 codes as float32."""
    code = np.asarray(x).astype(np.int64) & 255
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


def e5m2s(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """E5M2 codes, which are the upper bytes of FP16's, as float32."""
    return halves((np.asarray(x).astype(np.int64) & 255) << 8)


FORMATS: dict[str, tuple[int, Callable[[npt.ArrayLike], npt.NDArray[np.float32]]]] = {
    "bf16": (16, bfloats),
    "fp16": (16, halves),
    "e4m3": (8, e4m3s),
    "e5m2": (8, e5m2s),
}


def table_of(form: str) -> npt.NDArray[np.float64]:
    """The values of all codes of a format."""
    bits, value = FORMATS[form]
    with np.errstate(invalid="ignore"):
        return value(np.arange(1 << bits)).astype(np.float64)


def unpacked(words: Words, form: str) -> npt.NDArray[np.float64]:
    """[..., n] words as [..., n * elements a word] values, the lowest bits first."""
    bits, value = FORMATS[form]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words[..., None] >> shifts & np.uint32((1 << bits) - 1)
    with np.errstate(invalid="ignore"):
        return value(codes).astype(np.float64).reshape(*words.shape[:-1], -1)


def packed(values: npt.NDArray[np.float64], form: str) -> Words:
    """Values that the format holds exactly, [..., n] as [..., n / elements a word] words."""
    bits, table = FORMATS[form][0], table_of(form)
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")
    found = order[np.searchsorted(table[order], values)]
    assert np.array_equal(table[found], values)
    per_word = 32 // bits
    grouped = found.astype(np.uint32).reshape(*values.shape[:-1], -1, per_word)
    return np.bitwise_or.reduce(grouped << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).astype(np.uint32)


# ---- layouts: from the lanes' words to matrices, as the instruction set's manual draws them --------------------------


def mma_a(words: Words, form: str) -> npt.NDArray[np.float64]:
    """[..., 32, 4] words as A [..., 16, K]."""
    return _scatter(unpacked(words, form), 16, lambda g, t, i, j, n: (g + 8 * (i % 2), n * t + j + 4 * n * (i // 2)))


def mma_b(words: Words, form: str) -> npt.NDArray[np.float64]:
    """[..., 32, 2] words as B [..., K, 8]."""
    columns = _scatter(unpacked(words, form), 8, lambda g, t, i, j, n: (g, n * t + j + 4 * n * i))
    return columns.swapaxes(-1, -2)


def mma_c(words: Words) -> npt.NDArray[np.float64]:
    """[..., 32, 4] FP32 words as C [..., 16, 8]."""
    values = np.ascontiguousarray(words).view(np.float32).astype(np.float64)
    out = np.empty((*words.shape[:-2], 16, 8))
    for lane in range(WARP):
        for i in range(4):
            out[..., lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = values[..., lane, i]
    return out


def _scatter(
    values: npt.NDArray[np.float64], rows: int, place: Callable[[int, int, int, int, int], tuple[int, int]]
) -> npt.NDArray[np.float64]:
    registers = 4 if rows == 16 else 2
    per_word = values.shape[-1] // registers
    out = np.full((*values.shape[:-2], rows, 8 * per_word), np.nan)
    for lane in range(WARP):
        for i in range(registers):
            for j in range(per_word):
                row, column = place(lane // 4, lane % 4, i, j, per_word)
                out[..., row, column] = values[..., lane, i * per_word + j]
    return out


@dataclass(frozen=True)
class Product:
    """What a product's outputs must be: D = A B + C in float64, and the sum of the magnitudes that went into it."""

    exact: npt.NDArray[np.float64]
    magnitude: npt.NDArray[np.float64]
    depth: int


def product(name: str, words: Words) -> Product:
    """Of an ``mma_...`` or ``wmma_...`` wrapper, in the layout of :func:`product_outputs`."""
    kind, form, *order = name.split("_") if name.startswith("wmma") else ("mma", name.rsplit("_", 1)[1])
    if kind == "mma":
        a, b, c = mma_a(words[..., :4], form), mma_b(words[..., 4:6], form), mma_c(words[..., 6:10])
    else:
        square = (words.shape[0], 16, 16)
        a = unpacked(words[..., :4], form).reshape(square)
        b = unpacked(words[..., 4:8], form).reshape(square)
        b = b.swapaxes(-1, -2) if order[-1] == "col" else b
        c = np.ascontiguousarray(words[..., 8:]).view(np.float32).astype(np.float64).reshape(square)
    with np.errstate(invalid="ignore"):
        return Product(a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c), a.shape[-1])


def product_outputs(name: str, words: Words) -> npt.NDArray[np.float64]:
    """An ``mma`` or ``wmma`` wrapper's outputs as matrices [trials, 16, 8 or 16]."""
    if not name.startswith("wmma"):
        return mma_c(words)
    return np.ascontiguousarray(words).view(np.float32).astype(np.float64).reshape(words.shape[0], 16, 16)


# ---- inputs ----------------------------------------------------------------------------------------------------------

_SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF,
     0x00800000, 0x80800000, 0x007FFFFF, 0x00000001, 0x80000001, 0x3F800000, 0xBF800000, 0x43E00000, 0x43E80000,
     0x43E80001, 0x43F00000, 0xC3E80000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FF000, 0x33000000, 0x33000001,
     0x33800000, 0x387FC000, 0x387FE000, 0x38800000, 0x3A800000, 0x3A800001, 0x3B000000, 0x3C7FFFFF, 0x7F7F7FFF,
     0x7F7F8000, 0x4B000000, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0xCF000001, 0x3F000000, 0x3FC00000, 0x40200000],
    dtype=np.uint32,
)  # fmt: skip


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Words:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], low: int = -20, high: int = 20) -> Words:
    """FP32: normal numbers of many sizes, any bits, special values, and ties between neighbours of narrower formats."""
    size = np.exp2(rng.uniform(low, high, shape))
    normal = (rng.standard_normal(shape) * size).astype(np.float32).view(np.uint32)
    small = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    kept = rng.choice(np.array([16, 13, 20, 22], dtype=np.uint32), shape)  # bits below BF16, FP16, E4M3, E2M1
    tie = (small >> kept << kept) | np.uint32(1) << (kept - np.uint32(1))
    choice = rng.integers(0, 5, shape)
    special = rng.choice(_SPECIAL, shape)
    return np.choose(choice, [normal, small, _bits(rng, shape), special, tie]).astype(np.uint32)


def _pairs(rng: np.random.Generator, shape: tuple[int, ...], form: str) -> Words:
    """Two 16-bit values a word: near 1, and any bits."""
    x = rng.standard_normal((*shape, 2)).astype(np.float32)
    codes = x.astype(np.float16).view(np.uint16) if form == "fp16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    near = codes[..., 0].astype(np.uint32) | codes[..., 1].astype(np.uint32) << 16
    return np.where(rng.random(shape) < 0.6, near, _bits(rng, shape)).astype(np.uint32)


def _exponents(rng: np.random.Generator, trials: int) -> Words:
    x = rng.uniform(-160, 140, (trials, WARP, 1)).astype(np.float32)
    x[:, ::2] = rng.uniform(-20, 4, x[:, ::2].shape)
    return np.where(rng.random(x.shape) < 0.1, rng.choice(_SPECIAL, x.shape), x.view(np.uint32)).astype(np.uint32)


def _exponent_pairs(rng: np.random.Generator, trials: int, form: str) -> Words:
    x = rng.uniform(-18, 10, (trials, WARP, 1, 2)).astype(np.float32)
    codes = x.astype(np.float16).view(np.uint16) if form == "fp16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    words = codes[..., 0].astype(np.uint32) | codes[..., 1].astype(np.uint32) << 16
    special = {"fp16": [0x7C00FC00, 0x7E000000, 0x80008000, 0x04000001], "bf16": [0x7F80FF80, 0x7FC00000, 0x80008000,
               0x00800001]}[form]  # fmt: skip
    return np.where(rng.random(words.shape) < 0.1, rng.choice(np.array(special, np.uint32), words.shape), words).astype(
        np.uint32
    )


def _operands(rng: np.random.Generator, trials: int, name: str, a_words: int, b_words: int, c_words: int) -> Words:
    """Operands of products; trial by trial: normal, integers (exact sums), many sizes, the format's extremes."""
    form = next(f for f in FORMATS if f in name)
    bits, table = FORMATS[form][0], table_of(form)
    finite = np.unique(table[np.isfinite(table)])
    out = np.empty((trials, WARP, a_words + b_words + c_words), dtype=np.uint32)
    for trial in range(trials):
        shape = (WARP, (a_words + b_words) * (32 // bits))
        c = rng.standard_normal((WARP, c_words))
        match trial % 4:
            case 0:
                x = rng.standard_normal(shape)
            case 1:
                x = rng.integers(-8, 9, shape).astype(np.float64)
                c = rng.integers(-1000, 1001, c.shape).astype(np.float64)
            case 2:
                spread = {"bf16": 25, "fp16": 6, "e4m3": 4}[form]
                x = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape))
                c = c * np.exp2(rng.uniform(-spread, spread, c.shape))
            case _:  # A tiny, subnormals included, and B large
                least = finite[finite > 0][0]
                tiny = least * rng.integers(-200 if bits == 16 else -10, 200 if bits == 16 else 10, shape)
                large = rng.standard_normal(shape) * (2.0**100 if form == "bf16" else 64)
                from_a = np.arange(shape[1]) < a_words * (32 // bits)
                x, c = np.where(from_a, tiny, large), c * 2.0**-20
        nearest = finite[np.clip(np.searchsorted(finite, x), 0, len(finite) - 1)]
        out[trial, :, : a_words + b_words] = packed(nearest, form)
        out[trial, :, a_words + b_words :] = c.astype(np.float32).view(np.uint32)
    return out


def _special_operands(rng: np.random.Generator, name: str, words: Words) -> Words:
    """The last trial with an infinity in some rows of A and a NaN in another."""
    form = next(f for f in FORMATS if f in name)
    nan, infinity = {"bf16": (0x7FC0, 0x7F80), "fp16": (0x7E00, 0x7C00), "e4m3": (0x7F, 0x7F)}[form]
    words = words.copy()
    for lane, code in ((1, nan), (9, infinity), (14, infinity)):
        words[-1, lane, 0] = words[-1, lane, 0] >> 16 << 16 | np.uint32(code)
    return words


def inputs(name: str, seed: int = SEED) -> Words:
    """Random inputs of a wrapper [trials, 32, words]."""
    wrapper = wrappers()[name]
    rng = np.random.default_rng([seed, *name.encode()])
    n = wrapper.in_words
    if "mma" in name:
        split = (4, 4, 8) if name.startswith("wmma") else (4, 2, 4)
        return _special_operands(rng, name, _operands(rng, 5, name, *split))
    if name.startswith("ldmatrix") or name in ("cp_async", "vote"):
        return _bits(rng, (3, WARP, n))
    match name:
        case "ex2_approx_ftz":
            return _exponents(rng, 32)
        case "ex2_approx_f16x2":
            return _exponent_pairs(rng, 24, "fp16")
        case "ex2_approx_ftz_bf16x2":
            return _exponent_pairs(rng, 24, "bf16")
        case "cvt_rn_satfinite_e4m3x2_f16x2" | "packed_fp16":
            return _pairs(rng, (12, WARP, n), "fp16")
        case "packed_bf16":
            return _pairs(rng, (12, WARP, n), "bf16")
        case "cvt_rn_f16x2_e4m3x2" | "cvt_rn_f16x2_e2m1x2":
            return np.arange(256 * WARP, dtype=np.uint32)[: 8 * WARP].reshape(8, WARP, 1) * np.uint32(257)
        case "cvt_rn_satfinite_e4m3x2_f32" | "cvt_rn_satfinite_e2m1x2_f32":
            return _floats(rng, (24, WARP, n), -10, 10)
        case "cvt_rn_bf16x2_f32" | "cvt_rn_f16x2_f32" | "conversions" | "red_atom":
            return _floats(rng, (16, WARP, n))
        case "functions":
            x = np.abs(_floats(rng, (12, WARP, n), -6, 6).view(np.float32))
            return np.where(np.isfinite(x) & (x > 2.0**-120), x, np.float32(1)).astype(np.float32).view(np.uint32)
        case "integers":
            words = _bits(rng, (16, WARP, n))
            words[:8, :, 0] = _floats(rng, (8, WARP))
            words[8:10, :, 0] >>= rng.integers(0, 32, (2, WARP)).astype(np.uint32)
            return words
    return _bits(rng, (4, WARP, n))


# ---- comparing -------------------------------------------------------------------------------------------------------

# How many units in the last place expf, exp2f, logf and rsqrtf may differ by: each side keeps to 2.
_FUNCTION_ULPS = 4
# FP32 products and sums in any order, cut where the hardware cuts: each of the K + 1 terms may lose one part in 2^23 of
# the sum of magnitudes.
_TERM_LOSS = 2.0**-23
_EX2 = {"ex2_approx_ftz": 2.0**-21.5, "ex2_approx_f16x2": 2.0**-9, "ex2_approx_ftz_bf16x2": 2.0**-6.5}


def difference(name: str, given: Words, got: Words, wanted: Words) -> str:
    """Empty where ``got`` is what ``wanted`` allows; else the first place that is not, and how many there are."""
    if "mma" in name:
        wrong = _wrong_products(name, given, got, wanted)
        got, wanted = product_outputs(name, got), product_outputs(name, wanted)  # type: ignore[assignment]
    elif name in _EX2:
        form = "fp32" if name == "ex2_approx_ftz" else "fp16" if "f16x2" in name and "bf" not in name else "bf16"
        wrong = _far(_values(got, form), _values(wanted, form), _EX2[name], form).reshape(*got.shape, -1).any(-1)
    elif name == "functions":
        wrong = _far(_values(got, "fp32"), _values(wanted, "fp32"), _FUNCTION_ULPS * 2.0**-23, "fp32")
    else:
        wrong = (got != wanted) & ~_both_nan(name, got, wanted)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    what = (got[at], wanted[at]) if "mma" in name else (hex(int(got[at])), hex(int(wanted[at])))
    source = "" if "mma" in name else f" for inputs {[hex(int(x)) for x in given[at[0], at[1]]]}"
    return f"{name}: {int(wrong.sum())} of {wrong.size} differ; first at {at}: {what[0]}, wanted {what[1]}{source}"


def _values(words: Words, form: str) -> npt.NDArray[np.float64]:
    if form == "fp32":
        return np.ascontiguousarray(words).view(np.float32).astype(np.float64)
    return unpacked(words, form)


def _far(
    got: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], relative: float, form: str
) -> npt.NDArray[np.bool_]:
    least = {"fp32": 2.0**-126, "fp16": 2.0**-24, "bf16": 2.0**-126}[form]
    with np.errstate(invalid="ignore"):
        near = np.abs(got - wanted) <= relative * np.abs(wanted) + least
    return ~(near | (got == wanted) | (np.isnan(got) & np.isnan(wanted)))


def _wrong_products(name: str, given: Words, got: Words, wanted: Words) -> npt.NDArray[np.bool_]:
    exact = product(name, given)
    x, y = product_outputs(name, got), product_outputs(name, wanted)
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= (exact.depth + 1) * _TERM_LOSS * exact.magnitude
    # Small integers: every order gives the same sums.
    near[1] = x[1] == y[1]
    return ~(near | (x == y) | (np.isnan(x) & np.isnan(y)))


def _both_nan(name: str, got: Words, wanted: Words) -> npt.NDArray[np.bool_]:
    """Where a NaN may have any bits: results of arithmetic and widening."""
    same = np.zeros(got.shape, dtype=bool)
    if name == "red_atom":
        columns = [0, 1, 2]
    elif name == "conversions":
        columns = [2, 3]
    elif name in ("packed_bf16", "packed_fp16"):
        form = name.split("_")[1]
        a, b = (unpacked(w, form).reshape(*w.shape, 2) for w in (got, wanted))
        bits = np.stack([(got ^ wanted) & 0xFFFF, (got ^ wanted) >> 16], axis=-1)
        return ((bits == 0) | (np.isnan(a) & np.isnan(b))).all(-1)
    else:
        return same
    for column in columns:
        pair = [np.isnan(np.ascontiguousarray(w[..., column]).view(np.float32)) for w in (got, wanted)]
        same[..., column] = pair[0] & pair[1]
    return same


# ---- recording -------------------------------------------------------------------------------------------------------


def _about() -> dict[str, str]:
    import subprocess

    from mila_kernels.toolchain import compiler_version, nvcc_path

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "nvcc": compiler_version(nvcc_path()).splitlines()[-1],
        "torch": torch.__version__,
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source_sha": step().source_sha,
    }


def record(folder: Path) -> Path:
    """Runs every wrapper that the current GPU has and writes the file; its path."""
    major, minor = torch.cuda.get_device_capability()
    arrays: dict[str, npt.NDArray[np.generic]] = {"about": np.array(json.dumps(_about()))}
    for name, wrapper in wrappers().items():
        if 10 * major + minor < wrapper.needs:
            continue
        words = inputs(name)
        arrays[f"in/{name}"] = words
        arrays[f"out/{name}"] = run(wrapper, words, "cuda")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sm_{major}{minor}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path


def replay(path: Path, check: bool = False) -> list[str]:
    """What the emulation makes of the inputs in a recorded file, where it differs from the outputs: a line each."""
    found = []
    with np.load(path) as recorded:
        for key in recorded.files:
            if key.startswith("in/"):
                name = key[3:]
                got = run(wrappers()[name], recorded[key], check=check)
                found.append(difference(name, recorded[key], got, recorded[f"out/{name}"]))
    return [line for line in found if line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the file that is written")
    parser.add_argument("--check", action="store_true", help="compare the emulation with what is recorded")
    options = parser.parse_args()
    if not options.check:
        if not torch.cuda.is_available():
            print("record.py: no CUDA device here", file=sys.stderr)
            return 1
        path = record(options.out)
        print(f"wrote {path} ({path.stat().st_size} bytes)")
    files = sorted(options.out.glob("sm_*.npz"))
    lines = [f"{path.name}: {line}" for path in files for line in replay(path)]
    print("\n".join(lines) or f"the emulation agrees with {', '.join(path.name for path in files) or 'nothing'}")
    return 1 if lines or not files else 0


if __name__ == "__main__":
    sys.exit(main())
