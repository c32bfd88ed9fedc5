"""The emulation: right results in any order of threads, and every planted bug found with its file and line."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mila_kernels import steps
from mila_kernels.attention import PrefillArgs
from mila_kernels.build import Buffer, KernelError, emulation, load
from mila_kernels.steps import Step

SOURCES = Path(__file__).parent / "steps" / "emulation"


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    ]


def _buffer(name: str, x: torch.Tensor, writable: bool = False) -> Buffer:
    return Buffer(name, x.data_ptr(), x.numel() * x.element_size(), writable)


def _source_step(path: Path, op: str = "emulation") -> Step:
    return Step(op=op, order=1, name=path.stem, path=path)


PRODUCT = _source_step(SOURCES / "01_product.cu")


def product(step: Step = PRODUCT, *, check: bool, m: int = 40, n: int = 24, k: int = 104, seed: int = 0) -> torch.Tensor:
    """Runs the test's product on new random matrices; the result [m, n] after comparing it with float64."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(n, k, generator=generator).bfloat16()
    c = torch.full((m, n), float("nan"))
    args = ProductArgs(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)
    buffers = [_buffer("a", a), _buffer("b", b), _buffer("c", c, True)]
    with emulation(check=check, seed=seed):
        load(step, "emulation", check=check)(args, buffers=buffers)
    reference = a.double() @ b.double().T
    assert (c - reference).norm() <= 1e-6 * reference.norm()
    return c


@pytest.mark.parametrize("check", [False, True])
def test_product_is_right_in_any_order(check: bool) -> None:
    for seed in range(20):
        product(check=check, seed=seed)


def prefill(step: Step, *, check: bool, seed: int = 0) -> None:
    """Runs a prefill step on one small shape with several tiles, straight through its launcher."""
    generator = torch.Generator().manual_seed(seed)
    batch, q_len, kv_len, heads, dim = 1, 18, 75, 2, 64
    q = torch.randn(batch, q_len, heads, dim, generator=generator).bfloat16()
    k = torch.randn(batch, kv_len, 1, dim, generator=generator).bfloat16()
    v = torch.randn(batch, kv_len, 1, dim, generator=generator).bfloat16()
    o = torch.empty_like(q)
    lse = torch.empty(batch, heads, q_len)
    args = PrefillArgs()
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
        setattr(args, name, x.data_ptr())
        setattr(args, f"{name}_stride", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    args.lse = lse.data_ptr()
    args.batch, args.q_len, args.kv_len, args.q_heads, args.kv_heads, args.head_dim = 1, q_len, kv_len, heads, 1, dim
    args.causal, args.window, args.dtype, args.scale = 1, 0, 0, 0.125
    buffers = [_buffer("q", q), _buffer("k", k), _buffer("v", v), _buffer("o", o, True), _buffer("lse", lse, True)]
    with emulation(check=check, seed=seed):
        load(step, "emulation", check=check)(args, buffers=buffers)


@dataclass(frozen=True)
class Bug:
    """A change of a correct source and what check mode must say of it, at the line that holds ``at`` after the change.

    ``run`` launches the changed step. ``at`` may be several fragments: the report must name one of their lines.
    """

    name: str
    source: str
    find: str
    replace: str
    says: str
    at: tuple[str, ...]


LANDED = "__syncthreads();  // the tile has landed"
READ = "__syncthreads();  // the tile has been read"
LDMATRIX_A = "ldmatrix_x4(a, smem_u32("
COPY = "cp_async_cg_zfill("
PRODUCT_BUGS = [
    Bug("missing barrier", "01_product", LANDED, "", "in flight: .*reads|race: .*was waited for, but no barrier",
        (LDMATRIX_A, "ldmatrix_x4(b")),
    Bug("missing barrier after the first tile", "01_product", LANDED, "if (tile == 0) " + LANDED,
        "in flight: .*reads|race: .*was waited for, but no barrier", (LDMATRIX_A, "ldmatrix_x4(b")),
    Bug("missing trailing barrier", "01_product", READ, "", "race: .*overwrites by cp.async.*read there", (COPY,)),
    Bug("missing __syncwarp", "01_product", "__syncwarp();  // the warp's rows are written", "",
        "race: .*reads 4 bytes.*wrote there|uninitialised: .*reads 4 bytes", ("args.c[static_cast",)),
    Bug("tile not filled", "01_product", "i < ROWS * BK / 8;", "i < ROWS * BK / 8 - 1;",
        "uninitialised: .*which nobody wrote", (LDMATRIX_A, "ldmatrix_x4(b")),
    Bug("array index out of bounds", "01_product", "smem.c[warp][row][column];", "smem.c[warp][row + 1][column];",
        r"out of bounds: index 16 of an array .*\[16\]", ("smem.c[warp][row + 1]",)),
    Bug("shared pointer out of bounds", "01_product", "smem.c[warp][row][column];",
        "(&smem.c[0][0][0])[WARPS * 16 * BN + i];",
        "out of bounds: .*of shared memory, which has", ("16 * BN + i];",)),
    Bug("shared address out of bounds", "01_product", "smem_u32(&tile[row][column])",
        "smem_u32(&tile[row][column]) + sizeof(Smem)", "cp.async .*out of bounds", ("+ sizeof(Smem)",)),
    Bug("ldmatrix with a generic address", "01_product", LDMATRIX_A + "&smem.a",
        "ldmatrix_x4(a, static_cast<uint32_t>(reinterpret_cast<uintptr_t>(&smem.a",
        "ldmatrix .*a generic address, cut to 32 bits", ("static_cast<uint32_t>(reinterpret",)),
    Bug("ldmatrix on a row that is not aligned", "01_product", "k + lane / 16 * 8]", "k + lane / 16 * 4]",
        "ldmatrix .*misaligned, must be a multiple of 16", ("lane / 16 * 4",)),
    Bug("cp.async read before its wait", "01_product", "cp_async_wait_group<1>", "cp_async_wait_group<2>",
        "in flight: .*reads .*while a cp.async .*is in flight", (LDMATRIX_A, "ldmatrix_x4(b")),
    Bug("cp.async overwritten before its wait", "01_product", "cp_async_wait_group<1>();",
        "if (threadIdx.x == 0) smem.a[tile % STAGES][0][0] = smem.a[0][0][0];",
        "in flight: ", ("smem.a[tile % STAGES][0][0] =",)),
    Bug("cp.async from shared memory", "01_product", "from + offset, inside", "&tile[0][0], inside",
        "cp.async .*on shared memory, which is not global", ("&tile[0][0], inside",)),
    Bug("global copy out of bounds", "01_product", "first_row + row < rows &&", "true &&",
        "out of bounds: .*reads 16 bytes.* from the start of [ab], which has", (COPY,)),
    Bug("global store out of bounds", "01_product", "m < args.m && n", "n", "out of bounds: .*writes 4 bytes.*of c, which",
        ("args.c[static_cast",)),
    Bug("store to what is only read", "01_product", "args.c[static_cast<int64_t>(m) * args.n + n] =",
        "const_cast<bf16*>(args.a)[0] =", "read-only: .*writes 2 bytes.*a, .*is only read", ("const_cast<bf16*>",)),
    Bug("barrier skipped by a warp", "01_product", LANDED, "if (warp == 0) " + LANDED,
        "race: .*no barrier|in flight|divergence", (LANDED, READ, "ldmatrix")),
    Bug("barrier in half a warp", "01_product", "  load_stage(0);", "  if (lane < 16) __syncthreads();\n  load_stage(0);",
        "divergence within a block", ("if (lane < 16) __syncthreads();",)),
    Bug("barrier that a warp never reaches", "01_product", "  __syncwarp();  // the",
        "  if (warp) __syncthreads();\n  __syncwarp();  // the",
        "divergence: some threads have exited: .*waits at __syncthreads", ("if (warp) __syncthreads();",)),
    Bug("divergent mma", "01_product", "mma_m16n8k16<bf16>(c_regs[1]", "if (lane < 31) mma_m16n8k16<bf16>(c_regs[1]",
        "divergence within a warp", ("if (lane < 31) mma", LDMATRIX_A, READ)),
    Bug("mma in two branches", "01_product", "mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]);",
        "if (lane < 8)\n mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]);\n else\n"
        " mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]); // other",
        "divergence within a warp: .*is at mma .*waits at mma", ("// other",)),
    Bug("lanes that have left", "01_product", "__syncwarp();  // the", "if (lane == 3) return;\n  __syncwarp();  // the",
        "divergence within a warp: .*has exited|has exited, but", ("__syncwarp();  // the",)),
    Bug("shuffle from a lane outside its mask", "01_product", "__syncwarp();  // the",
        "if (lane < 4) c_regs[0][0] += __shfl_sync(0xfu, c_regs[0][0], 5);\n  __syncwarp();  // the",
        "a shuffle reads lane 5, which its mask leaves out", ("__shfl_sync(0xfu",)),
    Bug("another thread's local memory", "01_product", "load_stage(0);",
        "float** shared = reinterpret_cast<float**>(&smem.c[0][0][0]);\n  if (threadIdx.x == 0) *shared = &c_regs[0][0];\n"
        "  __syncthreads();\n  if (threadIdx.x == 1) **shared = 1.0f;\n  __syncthreads();\n  load_stage(0);",
        "local memory: .*another thread's local memory", ("**shared = 1.0f",)),
    Bug("misaligned vector", "01_product", "load_stage(0);",
        "if (args.m == 40) c_regs[0][0] += reinterpret_cast<const float4*>(args.a + 4)->x;\n  load_stage(0);",
        "misaligned: .*float4.*not a multiple of 16", ("args.a + 4",)),
    Bug("shared address of a register", "01_product", LDMATRIX_A + "&smem.a", "ldmatrix_x4(a, smem_u32(a) + 0 * smem_u32(&smem.a",
        "the shared address of .*not in the block's shared memory", ("smem_u32(a)",)),
]  # fmt: skip

TILE_READ = "__syncthreads();  // the last tile has been read"
SMEM_TILES_BUGS = [
    Bug("missing barrier", "02_smem_tiles", "    __syncthreads();\n\n", "\n\n", "race: .*(read|wrote) there|uninitialised",
        ("to_float(k[", "smem.k[j]")),
    Bug("missing barrier after the first tile", "02_smem_tiles", "    __syncthreads();\n\n",
        "    if (tile == block_keys.begin) __syncthreads();\n\n", "race|divergence", ("to_float(k[", "smem.k[j]", "__syncthreads();")),
    Bug("missing trailing barrier", "02_smem_tiles", TILE_READ, "", "race: .*(read|wrote) there",
        ("smem.k[j]", "smem.v[j]")),
    Bug("uninitialised shared read", "02_smem_tiles", "j = warp;", "j = warp + 1;", "uninitialised", ("to_float(k[",)),
    Bug("shared index out of bounds", "02_smem_tiles", "smem.v[j][i * WARP + lane] =", "smem.v[j][i * WARP + lane + 8] =",
        r"out of bounds: index \d+ of an array .*\[64\]", ("lane + 8]",)),
    Bug("global read out of bounds", "02_smem_tiles", "j < min(Bc, block_keys.end - tile)", "j < Bc",
        "out of bounds: .*reads 2 bytes.*from the start of [kv], which has", ("= k[i * WARP", "= v[i * WARP")),
    Bug("global write out of bounds", "02_smem_tiles", "if (!owns_row) return;", "", "out of bounds: .*writes",
        ("o[i * WARP + lane] =", "args.lse[")),
    Bug("barrier skipped by a warp", "02_smem_tiles", TILE_READ, "if (warp) " + TILE_READ, "divergence",
        (TILE_READ, "    __syncthreads();")),
]  # fmt: skip


def _planted(bug: Bug, folder: Path) -> Step:
    if bug.source == "01_product":
        text = (SOURCES / "01_product.cu").read_text()
    else:
        text = steps.step(f"prefill/{bug.source}").source.replace('#include "args.cuh"', '#include "prefill/args.cuh"')
    assert text.count(bug.find) >= 1, f"{bug.find!r} is not in {bug.source}"
    changed = text.replace(bug.find, bug.replace)
    # A cast that was opened is closed at the end of its line.
    if bug.replace.count("(") - bug.replace.count(")") > bug.find.count("(") - bug.find.count(")"):
        missing = bug.replace.count("(") - bug.replace.count(")") - bug.find.count("(") + bug.find.count(")")
        lines = changed.split("\n")
        at = next(i for i, line in enumerate(lines) if bug.replace in line)
        lines[at] = lines[at].replace(");", ")" * missing + ");")
        changed = "\n".join(lines)
    path = folder / f"{bug.source}.cu"
    path.write_text(changed)
    return _source_step(path, op="planted")


def _found(bug: Bug, folder: Path, run: Callable[..., object]) -> None:
    step = _planted(bug, folder)
    with pytest.raises(KernelError) as caught:
        run(step, check=True)
    text = caught.value.text
    assert re.search(bug.says, text), text
    lines = [i for i, line in enumerate(step.source.split("\n"), 1) if any(part in line for part in bug.at)]
    assert lines, f"{bug.at} is not in the changed source"
    named = {int(n) for n in re.findall(rf"{bug.source}\.cu:(\d+)", text)}
    assert named & set(lines), f"lines {lines} are not among those of: {text}"


@pytest.mark.parametrize("bug", PRODUCT_BUGS, ids=lambda bug: bug.name)
def test_planted_bug_of_the_product_is_found(bug: Bug, tmp_path: Path) -> None:
    _found(bug, tmp_path, product)


@pytest.mark.parametrize("bug", SMEM_TILES_BUGS, ids=lambda bug: bug.name)
def test_planted_bug_of_shared_tiles_is_found(bug: Bug, tmp_path: Path) -> None:
    _found(bug, tmp_path, prefill)
