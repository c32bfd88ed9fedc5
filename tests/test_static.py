"""The static table: what it reads out of nvcc's and cuobjdump's output, and what it refuses."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mila_kernels import paths, results, static, steps
from mila_kernels.steps import Step

needs_nvcc = pytest.mark.skipif(
    static.find_nvcc() is None or static.find_cuobjdump() is None, reason="needs nvcc and cuobjdump; there is none here"
)

HEADER = "// Change: a.\n// Prediction: b.\n// Measured: not yet.\n// Verdict: not yet.\n"

SCALE = """
#include "shared.cuh"
template <int N>
struct Smem { float x[N]; };
template <int N>
__global__ void __launch_bounds__(N) scale(float* x, float a, float b) {
  Smem<N>& smem = dynamic_smem<Smem<N>>();
  smem.x[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = smem.x[N - 1 - threadIdx.x] * a + b;
}
template __global__ void scale<64>(float*, float, float);
template __global__ void scale<128>(float*, float, float);
"""

# 128 values are alive at once, in a kernel that may use 64 registers.
SPILL = """
__global__ void __launch_bounds__(1024) spill(const float* x, float* y, int n) {
  float r[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) r[i] = x[threadIdx.x + i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) y[threadIdx.x + i * n] = r[127 - i] * r[i];
}
"""

SERIALISED = """
__global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    d[0] += 1.0f;  // the accumulator is touched while the product may still be running
    asm volatile("wgmma.commit_group.sync.aligned;");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""

NO_CAP = """
__global__ void no_cap(float* out) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  out[threadIdx.x] = 1;
}
"""

SHARED = """
#pragma once
template <typename Smem>
__device__ __forceinline__ Smem& dynamic_smem() {
  asm volatile("// dynamic shared memory: %0 bytes" ::"n"(sizeof(Smem)));
  extern __shared__ unsigned char block[];
  return *reinterpret_cast<Smem*>(block);
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_step(folder: Path, body: str, extra: str = "", arch: str = "sm_90a") -> Step:
    folder.mkdir(exist_ok=True)
    (folder / "shared.cuh").write_text(SHARED)
    source = folder / "01_test.cu"
    source.write_text(f"{HEADER}// Architectures: {arch}\n{extra}{body}")
    return steps.from_file(source, op="test")


@needs_nvcc
def test_a_row_a_kernel(tmp_path: Path) -> None:
    step = make_step(tmp_path / "a b ü", SCALE, arch="sm_89 sm_90a")
    rows, problems = static.collect([step])
    assert problems == []
    assert [(row.arch, row.kernel) for row in rows] == [
        ("sm_89", "scale<64>"), ("sm_89", "scale<128>"), ("sm_90a", "scale<64>"), ("sm_90a", "scale<128>"),
    ]  # fmt: skip
    assert [row.smem_bytes for row in rows] == [256, 512, 256, 512]
    assert [row.threads for row in rows] == [64, 128, 64, 128]
    assert all(row.FFMA == 1 and row.HMMA == 0 and row.spill_bytes == 0 and row.registers for row in rows)
    assert {(row.op, row.step, row.source_sha) for row in rows} == {("test", "01_test", step.source_sha)}


@needs_nvcc
def test_the_cache_knows_its_headers(tmp_path: Path, own_cache: Path) -> None:
    step = make_step(tmp_path / "s", SCALE)
    first = static.collect([step])
    (file,) = (own_cache / "static").glob("*.json")
    stamp = file.stat().st_mtime_ns
    assert static.collect([step]) == first
    assert file.stat().st_mtime_ns == stamp
    (step.path.parent / "shared.cuh").write_text(SHARED + "// another comment\n")
    assert static.collect([step]) == first
    assert len(list((own_cache / "static").glob("*.json"))) == 2


@needs_nvcc
def test_a_broken_cache_entry_is_made_anew(tmp_path: Path, own_cache: Path) -> None:
    step = make_step(tmp_path / "s", SCALE)
    first = static.collect([step])
    (file,) = (own_cache / "static").glob("*.json")
    file.write_text(file.read_text()[:40])
    assert static.collect([step]) == first


@needs_nvcc
def test_spills_must_be_declared(tmp_path: Path) -> None:
    rows, problems = static.collect([make_step(tmp_path / "s", SPILL)])
    (row,) = rows
    assert row.spill_bytes and row.registers == 64
    assert problems == [
        f"test/01_test sm_90a spill: {row.spill_bytes} bytes of spills, no `// Spills: reason` in the header"
    ]
    assert static.collect([make_step(tmp_path / "d", SPILL, "// Spills: shows what a spill costs\n")])[1] == []


@needs_nvcc
@pytest.mark.parametrize(("body", "code"), [(SERIALISED, "C7511"), (NO_CAP, "C7508")])
def test_promises_that_the_compiler_breaks(tmp_path: Path, body: str, code: str) -> None:
    _, problems = static.collect([make_step(tmp_path / "s", body)])
    assert any(code in problem and problem.startswith("test/01_test sm_90a: ") for problem in problems), problems


@needs_nvcc
def test_listings(tmp_path: Path) -> None:
    step = make_step(tmp_path / "s", SCALE)
    listing = static.sass(step, kernel="64")
    assert listing.startswith("scale<64>\n") and "FFMA" in listing and "EXIT ;" in listing
    assert "/*" not in listing and "scale<128>" not in listing
    assert ".entry" in static.ptx(step, kernel="128") and "fma.rn.f32" in static.ptx(step, kernel="128")
    assert static.instruction_mix(step)["scale<64>"]["FFMA"] == 1
    with pytest.raises(ValueError, match="kernel='256': the step has scale<64>, scale<128>"):
        static.sass(step, kernel="256")
    with pytest.raises(ValueError, match="arch='sm_75': test/01_test is written for sm_90a"):
        static.sass(step, arch="sm_75")


@needs_nvcc
def test_source_that_does_not_compile_spares_the_others(tmp_path: Path) -> None:
    broken = make_step(tmp_path / "s", "__global__ void f() { undefined_thing(); }\n")
    rows, (problem,) = static.collect([broken, make_step(tmp_path / "good", SCALE)])
    assert problem.startswith("test/01_test sm_90a: nvcc ended with code ")
    assert "01_test.cu" in problem and "undefined_thing" in problem
    assert [row.kernel for row in rows] == ["scale<64>", "scale<128>"]


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").touch()
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    os.chmod(home / "bin" / "nvcc", 0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    static.nvcc_version.cache_clear()
    try:
        with pytest.raises(static.ToolError, match="nvcc ended with code 3:\nno licence"):
            static.nvcc_version()
    finally:
        static.nvcc_version.cache_clear()


@needs_nvcc
def test_write_then_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step(tmp_path / "s", SCALE)
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(steps, "steps", lambda op=None: [step])
    parser = argparse.ArgumentParser()
    static.add_arguments(parser)
    check = parser.parse_args(["--check"])

    assert static.main(check) == 1  # nothing recorded yet
    assert "test/01_test sm_90a scale<64>: not recorded" in capsys.readouterr().err
    assert static.main(parser.parse_args([])) == 0
    text = (tmp_path / "results" / "static.csv").read_text()
    assert static.main(check) == 0
    assert static.main(parser.parse_args(["--jobs", "1"])) == 0
    assert (tmp_path / "results" / "static.csv").read_text() == text
    (tmp_path / "results" / "static.csv").write_text("op,step,older,columns\n")
    assert static.main(parser.parse_args([])) == 0
    assert (tmp_path / "results" / "static.csv").read_text() == text

    rows = results.read(tmp_path / "results", "static")
    results.write(tmp_path / "results", "static", [replace(rows[0], registers=3), rows[1]])
    capsys.readouterr()
    assert static.main(check) == 1
    assert f"scale<64>: registers 3 -> {rows[0].registers}" in capsys.readouterr().err

    other = replace(rows[0], op="other")
    results.write(tmp_path / "results", "static", [other])
    monkeypatch.setattr(steps, "step", lambda name: step)
    assert static.main(parser.parse_args(["test/01"])) == 0  # the rows of other steps stay
    assert results.read(tmp_path / "results", "static") == [other, *rows]
    assert static.main(parser.parse_args(["test/01", "--check"])) == 0
    assert static.main(check) == 1
    assert "other/01_test sm_90a scale<64>: recorded, but no longer there" in capsys.readouterr().err

    results.write(tmp_path / "results", "static", [replace(row, nvcc="1.2.3", registers=3) for row in rows])
    assert static.main(check) == 0
    assert "static.csv is of nvcc 1.2.3" in capsys.readouterr().out


def test_differences_name_lost_and_new_kernels() -> None:
    counts = dict.fromkeys(static.INSTRUCTIONS, 0)
    row = results.StaticRow(
        op="a", step="01_b", source_sha="0" * 12, arch="sm_80", kernel="k<64>", nvcc="13.0.88",
        registers=32, smem_bytes=0, spill_bytes=0, **counts,
    )  # fmt: skip
    other = replace(row, kernel="k<128>")
    assert static.differences([row], [row]) == []
    assert static.differences([row], [other]) == [
        "a/01_b sm_80 k<128>: not recorded", "a/01_b sm_80 k<64>: recorded, but no longer there",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void prefill_scalar<__nv_bfloat16, 512>(PrefillArgs)", "prefill_scalar<bf16, 512>"),
        ("scale(float*, int)", "scale"),
        ("void f<__half, (int)64, (bool)1>(void (*)(int))", "f<fp16, 64, 1>"),
        ("void (anonymous namespace)::g<(Mode)2>(float)", "g<2>"),
    ],
)
def test_short_names(signature: str, name: str) -> None:
    assert static.short_name(signature) == name


def test_predicated_and_uniform_instructions_count() -> None:
    sass = """
\t\tFunction : k
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000fe20000000f00 */
        /*0010*/              @!P1 HMMA.16816.F32.BF16 R0, R1, R2, R0 ; /* 0x0 */
        /*0020*/             @!UP0 UTMALDG.3D [UR4], [UR6] ;   /* 0x0 */
        /*0030*/               @P0 LDSM.16.MT88.4 R4, [R3] ;   /* 0x0 */
        /*0040*/                   HMMA.16816.F32.BF16 R0, R1, R2, R0 ; /* 0x0 */
        /*0050*/              @UPT UIADD3 UR4, UR4, 0x1, URZ ; /* 0x0 */
\t\tFunction : other
        /*0000*/                   EXIT ;                      /* 0x0 */
"""
    mixes = static.parse_sass(sass)
    assert mixes["k"] == {"LDC": 1, "HMMA": 2, "UTMALDG": 1, "LDSM": 1, "UIADD3": 1}
    assert mixes["other"] == {"EXIT": 1}


def test_a_log_without_registers_is_refused() -> None:
    with pytest.raises(static.ToolError, match="no registers or spills for _Z1kv"):
        static.parse_log("ptxas info : Compiling entry function '_Z1kv' for 'sm_90a'\n")
