"""Bugs to plant in correct kernels by a change of their text, and what check mode must say of each, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mila_kernels import paths, steps
from mila_kernels.steps import Step

SOURCES = Path(__file__).parent / "steps" / "emulation"
PRODUCT = Step(op="emulation", order=1, name="01_product", path=SOURCES / "01_product.cu")


@dataclass(frozen=True)
class Bug:
    """``find`` in the step's source becomes ``replace``; the report matches ``says``.

    The report names the line of one of the fragments ``at`` in the changed source. Which of several witnesses of a
    race comes first depends on the order of the threads, hence alternatives.
    """

    name: str
    step: str
    find: str
    replace: str
    says: str
    at: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.step.rpartition('/')[2]}-{self.name.replace(' ', '_')}"

    def plant(self, folder: Path) -> Step:
        """The changed step, its source in ``folder``."""
        original = PRODUCT if self.step == PRODUCT.id else steps.from_file(paths.CSRC / f"{self.step}.cu")
        text = original.source
        assert self.find in text, f"{original.id} has changed: {self.find!r} is not in it"
        # Includes from another folder, and one of the many instances, so that it compiles fast.
        text = re.sub(r'#include "\.\./(ptx|hopper)\.cuh"', r'#include "\1.cuh"', text)
        text = text.replace('#include "args.cuh"', f'#include "{original.op}/args.cuh"')
        text = text.replace("return dispatch(*args, [&]", "return one_instance([&]")
        if "one_instance" in text:
            at = text.index('extern "C"')
            text = f"{text[:at]}{_ONE_INSTANCE}\n{text[at:]}"
        path = folder / original.path.name
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")
        return Step(op="planted", order=1, name=original.name, path=path)


_ONE_INSTANCE = """template <typename F>
const char* one_instance(F f) {
  return f.template operator()<bf16, 64>();
}
"""

_P = PRODUCT.id
_LANDED = "__syncthreads();  // the tile has landed"
_READ = "__syncthreads();  // the tile has been read"
_A_ROW = "&smem.a[stage][warp * 16 + lane % 16][k + lane / 16 * 8]"
_LDMATRIX = ("ldmatrix_x4(a", "ldmatrix_x4(b")
_COPY = "cp_async_cg_zfill("
_STORE = "args.c[static_cast<int64_t>(m) * args.n + n]"
_NOT_LANDED = "in flight: .*reads|race: .*was waited for, but no barrier|uninitialised: .*reads"

PRODUCT_BUGS = [
    Bug("missing barrier", _P, _LANDED, "", _NOT_LANDED, _LDMATRIX),
    Bug("missing barrier after the first tile", _P, _LANDED, f"if (tile == 0) {_LANDED}", _NOT_LANDED, _LDMATRIX),
    Bug("missing trailing barrier", _P, _READ, "", "race: .*overwrites by cp.async.*read there", (_COPY,)),
    Bug(
        "missing __syncwarp",
        _P,
        "__syncwarp();  // the warp's rows are written",
        "",
        "race: .*reads 4 bytes.*wrote there|uninitialised: .*reads 4 bytes",
        (_STORE,),
    ),
    Bug(
        "tile not filled",
        _P,
        "i < ROWS * BK / 8;",
        "i < ROWS * BK / 8 - 1;",
        "uninitialised: .*which nobody wrote",
        _LDMATRIX,
    ),
    Bug(
        "array index out of bounds",
        _P,
        "smem.c[warp][row][column];",
        "smem.c[warp][row + 1][column];",
        r"out of bounds: index 16 of an array .*\[16\]",
        ("smem.c[warp][row + 1]",),
    ),
    Bug(
        "shared pointer out of bounds",
        _P,
        "smem.c[warp][row][column];",
        "(&smem.c[0][0][0])[WARPS * 16 * BN + i];",
        "out of bounds: .*of shared memory, which has",
        ("WARPS * 16 * BN + i];",),
    ),
    Bug(
        "shared address out of bounds",
        _P,
        "smem_u32(&tile[row][column])",
        "smem_u32(&tile[row][column]) + sizeof(Smem)",
        "cp.async .*out of bounds",
        ("+ sizeof(Smem)",),
    ),
    Bug(
        "ldmatrix with a generic address",
        _P,
        f"smem_u32({_A_ROW})",
        f"static_cast<uint32_t>(reinterpret_cast<uintptr_t>({_A_ROW}))",
        "ldmatrix .*a generic address, cut to 32 bits",
        ("static_cast<uint32_t>(reinterpret",),
    ),
    Bug(
        "ldmatrix on a row that is not aligned",
        _P,
        "k + lane / 16 * 8]",
        "k + lane / 16 * 4]",
        "ldmatrix .*misaligned, must be a multiple of 16",
        ("lane / 16 * 4",),
    ),
    Bug(
        "shared address of a register",
        _P,
        f"smem_u32({_A_ROW})",
        "smem_u32(a)",
        "the shared address of .*not in the block's shared memory",
        ("smem_u32(a)",),
    ),
    Bug(
        "cp.async read before its wait",
        _P,
        "cp_async_wait_group<1>",
        "cp_async_wait_group<2>",
        "in flight: .*reads .*while a cp.async .*is in flight",
        _LDMATRIX,
    ),
    Bug(
        "cp.async overwritten before its wait",
        _P,
        "cp_async_wait_group<1>();",
        "if (threadIdx.x < 32) smem.a[tile % STAGES][lane][0] = bf16(0.0f);",
        "in flight: .*writes|race: .*overwrites by cp.async.*wrote there",
        ("smem.a[tile % STAGES][lane][0] =",),
    ),
    Bug(
        "cp.async from shared memory",
        _P,
        "from + offset, inside",
        "&tile[0][0], inside",
        "cp.async .*on shared memory, which is not global",
        ("&tile[0][0], inside",),
    ),
    Bug(
        "cp.async source out of bounds",
        _P,
        "first_row + row < rows &&",
        "true &&",
        "out of bounds: .*reads 16 bytes.* (before|from) the start of [abc]",
        (_COPY,),
    ),
    Bug(
        "global store out of bounds",
        _P,
        "m < args.m && n",
        "n",
        "out of bounds: .*writes 4 bytes.*of c, which",
        (_STORE,),
    ),
    Bug(
        "store to what is only read",
        _P,
        f"{_STORE} =",
        "const_cast<bf16*>(args.a)[0] =",
        "read-only: .*writes 2 bytes.*of a, .*is only read",
        ("const_cast<bf16*>",),
    ),
    Bug(
        "barrier skipped by a warp",
        _P,
        _LANDED,
        f"if (warp == 0) {_LANDED}",
        f"{_NOT_LANDED}|race|divergence",
        (_LANDED, _READ, *_LDMATRIX, _COPY),
    ),
    Bug(
        "barrier in half a warp",
        _P,
        "  load_stage(0);",
        "  if (lane < 16) __syncthreads();\n  load_stage(0);",
        "divergence within a block",
        ("if (lane < 16) __syncthreads();",),
    ),
    Bug(
        "barrier that a warp never reaches",
        _P,
        "  __syncwarp();  // the",
        "  if (warp) __syncthreads();\n  __syncwarp();  // the",
        "divergence: some threads have exited: .*waits at __syncthreads",
        ("if (warp) __syncthreads();",),
    ),
    Bug(
        "divergent mma",
        _P,
        "mma_m16n8k16<bf16>(c_regs[1]",
        "if (lane < 31) mma_m16n8k16<bf16>(c_regs[1]",
        "divergence within a warp",
        ("if (lane < 31) mma", *_LDMATRIX, _READ),
    ),
    Bug(
        "mma in two branches",
        _P,
        "mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]);",
        "if (lane < 8) mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]);\n"
        "      else mma_m16n8k16<bf16>(c_regs[1], a, b[2], b[3]); // other",
        "divergence within a warp: .*is at mma .*waits at mma",
        ("// other",),
    ),
    Bug(
        "lane that has left",
        _P,
        "  __syncwarp();  // the",
        "  if (lane == 3) return;\n  __syncwarp();  // the",
        "divergence within a warp: .*has exited|has exited, but",
        ("__syncwarp();  // the",),
    ),
    Bug(
        "shuffle from a lane outside its mask",
        _P,
        "  __syncwarp();  // the",
        "  if (lane < 4) c_regs[0][0] += __shfl_sync(0xfu, c_regs[0][0], 5);\n  __syncwarp();  // the",
        "a shuffle reads lane 5, which its mask leaves out",
        ("__shfl_sync(0xfu",),
    ),
    Bug(
        "another thread's local memory",
        _P,
        "  load_stage(0);",
        "  float** shared = reinterpret_cast<float**>(&smem.c[0][0][0]);\n"
        "  if (threadIdx.x == 0) *shared = &c_regs[0][0];\n"
        "  __syncthreads();\n"
        "  if (threadIdx.x == 1) **shared = 1.0f;\n"
        "  __syncthreads();\n"
        "  load_stage(0);",
        "local memory: .*another thread's local memory",
        ("**shared = 1.0f",),
    ),
    Bug(
        "misaligned vector",
        _P,
        "  load_stage(0);",
        "  c_regs[0][0] += reinterpret_cast<const float4*>(args.a + 4)->x;\n  load_stage(0);",
        "misaligned: .*float4.*not a multiple of 16",
        ("args.a + 4",),
    ),
]

_S = "prefill/02_smem_tiles"
_TILE_READ = "__syncthreads();  // the last tile has been read"
_TILE_THERE = "    __syncthreads();\n\n    for (int key"
_RACE_OF_TILES = "race: .*(read|wrote) there|uninitialised"
_TILE_LINES = ("to_float(k[", "smem.k[j]", "smem.v[j]")

SMEM_TILES_BUGS = [
    Bug("missing barrier", _S, _TILE_THERE, "    for (int key", _RACE_OF_TILES, _TILE_LINES),
    Bug(
        "missing barrier after the first tile",
        _S,
        _TILE_THERE,
        "    if (tile == block_keys.begin) __syncthreads();\n\n    for (int key",
        _RACE_OF_TILES,
        _TILE_LINES,
    ),
    Bug("missing trailing barrier", _S, _TILE_READ, "", _RACE_OF_TILES, _TILE_LINES),
    Bug("uninitialised shared read", _S, "j = warp;", "j = warp + 1;", "uninitialised", ("to_float(k[",)),
    Bug(
        "shared index out of bounds",
        _S,
        "smem.v[j][i * WARP + lane] =",
        "smem.v[j][i * WARP + lane + 8] =",
        r"out of bounds: index \d+ of an array .*\[64\]",
        ("lane + 8]",),
    ),
    Bug(
        "global read out of bounds",
        _S,
        "j < min(Bc, block_keys.end - tile)",
        "j < Bc",
        r"out of bounds: .*reads 2 bytes.* (before|from) the start of \w+",
        ("= k[i * WARP", "= v[i * WARP"),
    ),
    Bug(
        "global write out of bounds",
        _S,
        "if (!owns_row) return;",
        "",
        "out of bounds: .*writes",
        ("o[i * WARP + lane] =", "args.lse["),
    ),
    Bug(
        "barrier skipped by a warp",
        _S,
        _TILE_READ,
        f"if (warp) {_TILE_READ}",
        f"divergence|{_RACE_OF_TILES}",
        (_TILE_READ, "__syncthreads();", *_TILE_LINES),
    ),
]

_L = "prefill/08_ldmatrix"
_K_ROW = "&smem.k[n + tile_row()][first_column + k * 16 + tile_column()]"

LDMATRIX_BUGS = [
    Bug(
        "ldmatrix with a generic address",
        _L,
        f"smem_u32({_K_ROW})",
        f"static_cast<uint32_t>(reinterpret_cast<uintptr_t>({_K_ROW}))",
        "ldmatrix .*a generic address, cut to 32 bits",
        ("static_cast<uint32_t>(reinterpret",),
    ),
    Bug(
        "missing barrier in the double buffer",
        _L,
        "__syncthreads();  // K is there,",
        "// K is there,",
        "race|in flight",
        (
            "ldmatrix_x4(k_regs",
            "ldmatrix_x4_trans(v_regs",
            "ldmatrix_x4(q_regs",
            "cp_async_cg_zfill",
            "ldmatrix_x4(p_regs",
        ),
    ),
    Bug(
        "missing barrier before P and V",
        _L,
        "__syncthreads();  // P and V are there",
        "// P and V are there",
        "race|in flight|uninitialised",
        ("ldmatrix_x4_trans(v_regs", "ldmatrix_x4(p_regs", "smem.rescale[g]", "smem.p[r][j]", "smem.rescale[r]"),
    ),
    Bug(
        "V read before its wait",
        _L,
        "cp_async_wait_group<1>();",
        "",
        "in flight: .*reads .*while a cp.async",
        ("ldmatrix_x4_trans(v_regs",),
    ),
]
