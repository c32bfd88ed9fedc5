"""Records what a GPU makes of every wrapper of hopper.cuh, for the emulation's twins to be held against.

``python data/ptx_vectors/record_hopper.py [--out FOLDER]`` on a machine with an sm_90 GPU writes
``FOLDER/hopper_sm_90.npz``, by default beside this file, and compares the GPU with the arithmetic of the manual and
with the emulation. The inputs are made anew from a fixed seed; of outputs that are exact a digest is kept, of the sums
of general products the words. ``--check`` compares the emulation with the file.
The kernel is tests/steps/emulation/05_hopper_conformance.cu.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import record as other  # noqa: E402

from mila_kernels.build import Buffer, emulation, load  # noqa: E402
from mila_kernels.steps import Step  # noqa: E402

SOURCE = HERE.parents[1] / "tests" / "steps" / "emulation" / "05_hopper_conformance.cu"
FILE = "hopper_sm_90.npz"
SEED = 20261129
THREADS = 128
IMAGE_BYTES = 40960
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class HopperArgs(ctypes.Structure):
    _fields_ = [
        ("in_", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("wrapper", ctypes.c_int32),
        ("trials", ctypes.c_int32),
        ("in_words", ctypes.c_int32),
        ("out_words", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("at", ctypes.c_int32 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
    ]


@dataclass(frozen=True)
class Tensor:
    """A copy of a box: sizes and coordinates from the innermost dimension, strides in bytes from the second on."""

    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Trial:
    """Inputs, and what must come out: ``exact`` in float64 where it is a general product, else ``words``."""

    given: Words
    words: Words
    tensor: Tensor | None = None
    exact: Numbers | None = None
    tolerance: Numbers | None = None
    notes: str = ""


def cases() -> dict[str, int]:
    """Names and numbers, from the ``case N:  // name`` comments of the kernel."""
    found = re.findall(r"case (\d+):  // (\w+)", SOURCE.read_text(encoding="utf-8"))
    return {name: int(number) for number, name in found}


def step() -> Step:
    return Step(op="emulation", order=5, name=SOURCE.stem, path=SOURCE, architectures=("sm_90a",))


def run(
    name: str, trial: Trial, device: str = "cpu", check: bool = False, seed: int = 0, of: Step | None = None
) -> Words:
    """The outputs of one trial on a GPU or in emulation; ``of`` another kernel than the conformance kernel."""
    kernel = of or step()
    given = torch.from_numpy(trial.given.view(np.int32).copy()).to(device)
    out = torch.zeros(len(trial.words), dtype=torch.int32, device=device)
    args = HopperArgs(given.data_ptr(), out.data_ptr(), cases()[name], 1, len(trial.given), len(trial.words))
    if trial.tensor:
        t = trial.tensor
        args.rank, args.element_bytes, args.swizzle = len(t.sizes), t.element_bytes, t.swizzle
        for field_name, values in (("at", t.at), ("box", t.box), ("sizes", t.sizes), ("strides", t.strides)):
            for i, value in enumerate(values):
                getattr(args, field_name)[i] = value
    if given.is_cuda:
        load(kernel, "cuda")(args, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    else:
        buffers = [Buffer("in", given.data_ptr(), given.nbytes, False), Buffer("out", out.data_ptr(), out.nbytes, True)]
        with emulation(check=check, seed=seed):
            load(kernel, "emulation", check=check)(args, buffers=buffers)
    return out.cpu().numpy().view(np.uint32)


# ---- layouts, as the manual draws them -------------------------------------------------------------------------------


def swizzled(address: Ints, swizzle: int) -> Ints:
    """Bits 4 and up exclusive-or'ed with bits 7 and up: 0, 1, 2 or 3 of them."""
    return address ^ ((address >> 7 & ((1 << swizzle) - 1)) << 4)


@dataclass(frozen=True)
class Layout:
    """Where an operand [rows of M or N, K] lies in the image: byte offsets, as its descriptor says them."""

    start: int
    leading: int
    stride: int
    swizzle: int
    mn_major: bool = False

    @property
    def descriptor(self) -> int:
        layout = 4 - self.swizzle if self.swizzle else 0
        return self.start >> 4 | (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | layout << 62

    def addresses(self, rows: int, depth: int, element_bytes: int) -> Ints:
        """The byte of every element [rows, depth]."""
        row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
        byte = k * element_bytes
        if self.mn_major:
            linear = row // 64 * self.leading + row % 64 * element_bytes + k // 8 * self.stride + k % 8 * 128
        elif self.swizzle:
            linear = row // 8 * self.stride + row % 8 * (16 << self.swizzle) + byte
        else:
            linear = row // 8 * self.stride + row % 8 * 16 + byte // 16 * self.leading + byte % 16
        return swizzled(self.start + linear, self.swizzle)


def put(image: Bytes, addresses: Ints, codes: npt.NDArray[np.uint32], element_bytes: int) -> None:
    for i in range(element_bytes):
        image[addresses + i] = (codes >> (8 * i) & 255).astype(np.uint8)


def codes_of(values: Numbers, form: str) -> npt.NDArray[np.uint32]:
    """The codes of values that the format holds, one a word."""
    table = other.table_of(form)
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")
    found = order[np.searchsorted(table[order], values)]
    assert np.array_equal(table[found], values)
    return found.astype(np.uint32)


def accumulator_rows_columns(n: int) -> tuple[Ints, Ints]:
    """Row and column of D of register [128, n / 2]."""
    thread, i = np.arange(THREADS)[:, None], np.arange(n // 2)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 4 // 2)
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def a_registers(codes: npt.NDArray[np.uint32], bits: int) -> Words:
    """A [64, K] as the lanes' registers [128, 4]."""
    per_word = 32 // bits
    thread, j = np.arange(THREADS)[:, None], np.arange(4)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (j % 2)
    column = per_word * (thread % 4 + 4 * (j // 2))
    words = np.zeros((THREADS, 4), dtype=np.uint32)
    for e in range(per_word):
        words |= codes[row, column + e] << np.uint32(bits * e)
    return words


# ---- trials ----------------------------------------------------------------------------------------------------------

_BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8}  # of b; a is of the same format, or E4M3 beside E5M2
# A term of a sum loses at most this part of the sum of magnitudes: E4M3 sums are kept short.
_LOSS = {"bf16": 2.0**-22, "fp16": 2.0**-22, "e4m3": 2.0**-12, "e5m2": 2.0**-12}


def _values(rng: np.random.Generator, shape: tuple[int, ...], exact: bool, form: str) -> Numbers:
    """Small integers; or numbers of 4 significant bits, of E5M2 3, and many sizes, which all formats hold."""
    if exact:
        return rng.integers(-8, 9, shape).astype(np.float64)
    sign = rng.integers(0, 2, shape) * 2 - 1
    most = 8 if form == "e5m2" else 16
    return sign * rng.integers(most // 2, most, shape) * 2.0 ** (rng.integers(-3, 4, shape) - 3)


@dataclass(frozen=True)
class _Form:
    swizzle: int = 3
    advance: int = 0  # in K, of 32 bytes (K-major), of 16 k (MN-major)
    leading: int = 0
    stride: int = 0
    keeps: bool = True
    exact: bool = True


def _layout(form: _Form, start: int, mn_major: bool) -> Layout:
    if mn_major:
        return Layout(start + 2048 * form.advance, 4096, 1024, 3, True)
    stride = form.stride or (128 << form.swizzle if form.swizzle else 256)
    return Layout(start + 32 * form.advance, form.leading or (0 if form.swizzle else 128), stride, form.swizzle)


def _wgmma_forms(name: str) -> list[_Form]:
    _, form, n, _, a_major, b_major = name.split("_")
    if "mn" in (a_major, b_major):
        forms = [_Form(), _Form(advance=1, keeps=False)]
    elif n == "64":
        forms = [
            _Form(), _Form(advance=3, keeps=False), _Form(swizzle=2, advance=1), _Form(swizzle=1), _Form(swizzle=0),
            _Form(swizzle=0, leading=2048, stride=128), _Form(advance=1, exact=False),
        ]  # fmt: skip
    else:
        forms = [_Form(advance=2), _Form(keeps=False)]
    if form == "e5m2":
        return [*forms, _Form(swizzle=0, leading=128, stride=256), _Form(swizzle=0, exact=False)]
    if n in ("8", "16"):
        forms.append(_Form(stride=2048) if n == "16" else _Form(exact=False))
    return forms


def _wgmma_trial(name: str, form: _Form, rng: np.random.Generator) -> Trial:
    _, kind, n_text, source, a_major, b_major = name.split("_")
    n, bits = int(n_text), _BITS[kind]
    depth = 256 // bits
    a_kind = "e4m3" if kind == "e5m2" else kind
    a, b = _values(rng, (64, depth), form.exact, a_kind), _values(rng, (n, depth), form.exact, kind)
    a_layout = _layout(form, 0, a_major == "mn")
    b_layout = _layout(form, 16384 if form.stride == 2048 else 8192, b_major == "mn")
    image = np.full(IMAGE_BYTES, 255, dtype=np.uint8)
    if source == "s":
        put(image, a_layout.addresses(64, depth, bits // 8), codes_of(a, a_kind), bits // 8)
    put(image, b_layout.addresses(n, depth, bits // 8), codes_of(b, kind), bits // 8)
    row, column = accumulator_rows_columns(n)
    before = np.zeros((64, n))
    before[row, column] = (np.arange(THREADS)[:, None] * 7 + np.arange(n // 2)[None, :] * 5) % 64
    d = a @ b.T + form.keeps * before
    magnitude = np.abs(a) @ np.abs(b).T + form.keeps * before
    head = np.zeros(8, dtype=np.uint32)
    head[:4] = np.array([a_layout.descriptor, b_layout.descriptor], dtype=np.uint64).view(np.uint32)
    head[4] = form.keeps
    given = np.concatenate([head, a_registers(codes_of(a, a_kind), bits).reshape(-1), image.view(np.uint32)])
    words = d[row, column].astype(np.float32).view(np.uint32).reshape(-1)
    if form.exact:
        return Trial(given, words, notes=str(form))
    tolerance = (depth + 1) * _LOSS[kind] * magnitude
    return Trial(given, words, None, d[row, column].reshape(-1), tolerance[row, column].reshape(-1), str(form))


def _wgmma_groups(rng: np.random.Generator) -> Trial:
    a, b = _values(rng, (64, 64), True, "bf16"), _values(rng, (8, 64), True, "bf16")
    image = np.full(IMAGE_BYTES, 255, dtype=np.uint8)
    layouts = Layout(0, 0, 1024, 3), Layout(8192, 0, 1024, 3)
    for layout, matrix in zip(layouts, (a, b), strict=True):
        put(image, layout.addresses(len(matrix), 64, 2), codes_of(matrix, "bf16"), 2)
    head = np.zeros(8, dtype=np.uint32)
    head[:4] = np.array([layout.descriptor for layout in layouts], dtype=np.uint64).view(np.uint32)
    row, column = accumulator_rows_columns(8)
    parts = [(x @ y.T)[row, column] for x, y in ((a[:, :16], b[:, :16]), (a[:, 16:48], b[:, 16:48]))]
    given = np.concatenate([head, np.zeros(4 * THREADS, dtype=np.uint32), image.view(np.uint32)])
    return Trial(given, np.concatenate(parts, axis=1).astype(np.float32).view(np.uint32).reshape(-1))


def _bits(rng: np.random.Generator, n: int) -> Words:
    return rng.integers(0, 1 << 32, n, dtype=np.uint32)


def _mbarrier(rng: np.random.Generator) -> Trial:
    given, out = _bits(rng, 32), np.zeros(40, dtype=np.uint32)
    ended = [-1, -1, 0, 0, 1, 1, 2, -1]  # the last phase that has ended, at each question
    out[:16] = [int(phase % 2 == parity) for phase in ended for parity in (0, 1)]
    out[16:32], out[32:36], out[36:] = given[:16], given[16:20], given[24:28]
    return Trial(given, out)


def _named_barriers(rng: np.random.Generator) -> Trial:
    given = _bits(rng, THREADS)
    return Trial(given, np.concatenate([given[:64][::-1], given[64:]]))


def _cp_async_arrive(rng: np.random.Generator) -> Trial:
    given = _bits(rng, 2 * 4 * THREADS)
    return Trial(given, given.reshape(2, THREADS, 4)[:, ::-1].reshape(-1))


def _stmatrix(name: str, rng: np.random.Generator) -> Trial:
    count, transposed = int(name[10]), name.endswith("trans")
    given = _bits(rng, 5 * 32).reshape(32, 5)
    given[:, 4] = rng.permutation(32)
    memory = np.zeros((32, 8), dtype=np.uint16)
    for i in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                if transposed:
                    row, column = column, row
                memory[given[8 * i + row, 4], column] = given[lane, i] >> (16 * half) & 0xFFFF
    return Trial(given.reshape(-1), memory.reshape(-1).view(np.uint32))


def _bulk(rng: np.random.Generator) -> Trial:
    given = _bits(rng, 512)
    return Trial(given, np.concatenate([given[256:], given[8:136]]))


# Boxes that lie partly outside. Along the innermost dimension a copy starts at a multiple of 16 bytes, and a store at
# no negative coordinate: an H200 takes anything else for an illegal instruction.
LOADS = [
    Tensor(2, (100, 40), (208,), (64, 32), (48, -3), 3),
    Tensor(2, (100, 40), (208,), (64, 32), (-8, 20), 3),
    Tensor(1, (300, 20), (304,), (128, 16), (128, 2), 3),
    Tensor(1, (300, 20), (304,), (64, 24), (272, 1), 2),
    Tensor(1, (300, 20), (304,), (32, 40), (16, -9), 1),
    Tensor(4, (33, 9), (144,), (12, 7), (24, 4), 0),
    Tensor(4, (33, 9), (144,), (256, 3), (-200, 8), 0),
    Tensor(2, (64, 10, 5), (128, 1280), (64, 4, 3), (0, 8, 3), 3),
    Tensor(1, (144, 6, 3, 4), (144, 864, 2592), (128, 2, 2, 3), (16, 5, -1, 2), 3),
    Tensor(2, (48, 3, 7, 3), (2016, 96, 672), (16, 2, 8, 2), (32, 1, -1, 2), 1),
    Tensor(2, (64, 5, 3, 4, 2), (128, 640, 1920, 7680), (64, 4, 2, 2, 2), (0, -2, 2, 3, 1), 3),
]
# Stores know four dimensions.
STORES = [replace(t, at=tuple(max(0, x) for x in t.at)) for t in LOADS if len(t.at) < 5]


def _tensor_trial(t: Tensor, rng: np.random.Generator, store: bool) -> Trial:
    shape = t.box[::-1]
    index = np.indices(shape)[::-1]  # of each dimension, the innermost first
    at = [i + start for i, start in zip(index, t.at, strict=True)]
    piece = 16 // t.element_bytes if store else 1  # a store writes a row's last 16 bytes whole, past the tensor's end
    sizes = (-(-t.sizes[0] // piece) * piece, *t.sizes[1:])
    inside = np.logical_and.reduce([(x >= 0) & (x < size) for x, size in zip(at, sizes, strict=True)])
    pitches = (t.element_bytes, *t.strides)
    in_tensor = sum(x * pitch for x, pitch in zip(at, pitches, strict=True))
    in_box = swizzled(np.arange(inside.size).reshape(shape) * t.element_bytes, t.swizzle)
    last = sum((size - 1) * pitch for size, pitch in zip(t.sizes, pitches, strict=True)) + t.element_bytes
    tensor_bytes = -(-last // 16) * 16
    box_bytes = inside.size * t.element_bytes
    given = _bits(rng, (box_bytes if store else tensor_bytes) // 4 + 4)
    source = given.view(np.uint8)
    out = np.zeros((tensor_bytes if store else box_bytes) // 4, dtype=np.uint32)
    target = out.view(np.uint8)
    for i in range(t.element_bytes):
        if store:
            target[in_tensor[inside] + i] = source[in_box[inside] + i]
        else:
            target[in_box[inside] + i] = source[in_tensor[inside] + i]
    return Trial(given, out, t, notes=str(t))


def trials(name: str) -> list[Trial]:
    """A wrapper's trials, the same on every machine: they are drawn as integers only."""
    rng = np.random.default_rng([SEED, *name.encode()])
    simple: dict[str, Callable[[np.random.Generator], Trial]] = {
        "wgmma_groups": _wgmma_groups, "mbarrier": _mbarrier, "named_barriers": _named_barriers, "bulk": _bulk,
        "cp_async_arrive": _cp_async_arrive,
        "elect": lambda rng: Trial(np.zeros(1, np.uint32), np.full(THREADS, 17, np.uint32)),
    }  # fmt: skip
    if name in simple:
        return [simple[name](rng)]
    if name.startswith("stmatrix"):
        return [_stmatrix(name, rng)]
    if name.startswith("tensor"):
        store = name == "tensor_store"
        return [_tensor_trial(t, rng, store) for t in (STORES if store else LOADS)]
    if name == "setmaxnreg":
        given = _bits(rng, 3 * THREADS)
        return [Trial(given, given + np.repeat(np.array([1, 2, 2], np.uint32), THREADS))]
    return [_wgmma_trial(name, form, rng) for form in _wgmma_forms(name)]


# ---- comparing and recording -----------------------------------------------------------------------------------------


def digest(words: Words) -> str:
    """Of exact outputs; -0 counts as 0."""
    return hashlib.sha256(np.where(words == 0x80000000, 0, words).astype("<u4").tobytes()).hexdigest()[:16]


def difference(name: str, trial: Trial, got: Words, wanted: Words) -> str:
    """Empty where ``got`` is what ``wanted`` allows."""
    if trial.exact is None:
        wrong = (got != wanted) & ((got | wanted) != 0x80000000)
    else:
        x, y = got.view(np.float32).astype(np.float64), wanted.view(np.float32).astype(np.float64)
        assert trial.tolerance is not None
        wrong = ~(np.abs(x - y) <= trial.tolerance)
    if not wrong.any():
        return ""
    i = int(np.argmax(wrong))
    values = [f"{hex(int(w))} ({w.view(np.float32)})" for w in (got[i], wanted[i])]
    count = f"{int(wrong.sum())} of {wrong.size} differ"
    return f"{name} {trial.notes}: {count}; first at {i}: {values[0]}, wanted {values[1]}"


@dataclass
class Recorded:
    """What the file holds: of each trial a digest or an array."""

    about: dict[str, str]
    digests: dict[str, str]
    arrays: dict[str, Words] = field(default_factory=dict)

    def wrong(self, name: str, i: int, trial: Trial, got: Words) -> str:
        """Empty where the outputs of trial ``i`` agree with the GPU's."""
        key = f"{name}/{i}"
        if trial.exact is not None:
            return difference(name, trial, got, self.arrays[key]) if key in self.arrays else f"{key}: not recorded"
        if key not in self.digests:
            return f"{key}: not recorded"
        return "" if self.digests[key] == digest(got) else f"{key} {trial.notes}: not what the GPU gave"


def recorded(folder: Path = HERE) -> Recorded:
    with np.load(folder / FILE) as file:
        texts = json.loads(str(file["digests"]))
        arrays = {key: file[key] for key in file.files if "/" in key}
        return Recorded(json.loads(str(file["about"])), texts, arrays)


def record_parts(folder: Path, names: Sequence[str]) -> None:
    """Runs wrappers on the GPU and writes a file for each, for a fault of the GPU ends the process."""
    for name in names:
        digests: dict[str, str] = {}
        arrays: dict[str, Words] = {}
        lines = []
        for i, trial in enumerate(trials(name)):
            got = run(name, trial, "cuda")
            lines.append(difference(name, trial, got, trial.words))
            if trial.exact is None:
                digests[f"{name}/{i}"] = digest(got)
            else:
                arrays[f"{name}/{i}"] = got
        part = json.dumps({"digests": digests, "lines": [line for line in lines if line]})
        np.savez(folder / f"{name}.npz", part=np.array(part), **arrays)  # type: ignore[arg-type]


def record(folder: Path) -> Sequence[str]:
    """Runs everything on the GPU and writes the file; lines for what differs from the manual's arithmetic or fails."""
    digests: dict[str, str] = {}
    arrays: dict[str, Words] = {}
    lines = []
    load(step(), "cuda")
    with tempfile.TemporaryDirectory() as parts:
        left = list(cases())
        while left:
            subprocess.run([sys.executable, __file__, "--parts", parts, *left], check=False, stderr=subprocess.DEVNULL)
            missing = [name for name in left if not (Path(parts) / f"{name}.npz").is_file()]
            lines += [f"{name}: fails on the GPU" for name in missing[:1]]
            left = missing[1:]
        for path in sorted(Path(parts).iterdir()):
            with np.load(path) as file:
                part = json.loads(str(file["part"]))
                digests |= part["digests"]
                lines += part["lines"]
                arrays |= {key: file[key] for key in file.files if "/" in key}
    about = other._about() | {"source_sha": step().source_sha}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / FILE,
        about=np.array(json.dumps(about)),
        digests=np.array(json.dumps(digests)),
        **arrays,  # type: ignore[arg-type]
    )
    return [f"GPU against the manual: {line}" for line in lines]


def replay(folder: Path) -> list[str]:
    known = recorded(folder)
    found = [known.wrong(name, i, t, run(name, t)) for name in cases() for i, t in enumerate(trials(name))]
    return [f"emulation against the GPU: {line}" for line in found if line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the file that is written")
    parser.add_argument("--check", action="store_true", help="compare the emulation with what is recorded")
    parser.add_argument("--parts", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        record_parts(options.parts, options.names)
        return 0
    lines: list[str] = []
    if not options.check:
        if not torch.cuda.is_available():
            print("record_hopper.py: no CUDA device here", file=sys.stderr)
            return 1
        lines += record(options.out)
        print(f"wrote {options.out / FILE} ({(options.out / FILE).stat().st_size} bytes)")
    lines += replay(options.out)
    print("\n".join(lines) or "manual, GPU and emulation agree")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
