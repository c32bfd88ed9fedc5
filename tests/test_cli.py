"""The command line, as a user calls it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mila_kernels import __main__ as cli
from mila_kernels import counters, notices, parity, paths, results, steps
from mila_kernels.paths import ROOT

SHAPE = "b1 q9h2 kv21h1 d64 causal bf16"


def commands() -> list[str]:
    return list(cli.COMMANDS)


def test_commands_are_those_documented() -> None:
    assert commands() == ["list", "build", "check", "bench", "static", "profile", "reproduce", "record", "report"]


@pytest.mark.parametrize(
    "name", ["list", "build", "check", "bench", "static", "profile", "reproduce", "record", "report"]
)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 150


def test_build_compiles_steps_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILA_CACHE", str(tmp_path / "cache"))
    assert cli.main(["build", "prefill/01", "matvec_fp8/01", "--device", "emulation", "--jobs", "2"]) == 0
    said = capfd.readouterr().out
    assert "built   prefill/01_scalar" in said and "2 of 2 steps built for emulation" in said
    assert list((tmp_path / "cache").glob("*prefill-01_scalar*"))


def test_build_says_which_step_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert cli.main(["build", "prefill/01", "prefill/02", "--device", "emulation"]) == 1
    said = capfd.readouterr().out
    assert "FAILED  prefill/01_scalar" in said and "0 of 2 steps built" in said


def test_no_command_prints_help_and_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_runs_from_any_folder_as_a_module(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mila_kernels", "list", "prefill"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "prefill/01_scalar"
    assert list(tmp_path.iterdir()) == []


def test_unknown_step_is_wrong_use_and_names_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "prefill/02_smem_tile"]) == 2
    assert "prefill/02_smem_tiles" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "prefill/01", "--shape", "512 x 512"],
        ["check", "prefill/01", "--workload", "prefill/d512"],
        ["check", "prefill/01", "--shape", "b1 q9h2 kv21h1 d64 causal fp32"],
        ["check", "prefill/01", "--shape", "b1 q9h2 kv9999999999h1 d64 causal bf16"],
        ["check", "prefill/01", "--workload", "matvec_fp4/gate_up-m1"],
        ["bench", "prefill/01", "--workload", "matvec_fp4/gate_up-m1"],
        ["profile", "prefill/01", "--workload", "matvec_fp4/gate_up-m1"],
        ["check", "prefill/99"],
        ["build", "prefill/99"],
        ["bench", "prefill/99"],
        ["list", "refill"],
        ["reproduce", "--only", "77"],
        ["reproduce", "-p", "seed"],
        ["reproduce", "--only", "01", "--out", f"{__file__}/run"],
        ["reproduce", "--only", "01", "--out", f"{'long' * 99}/run"],
        ["reproduce", "--only", "01", "--out", "~nobody-of-that-name/run"],
        ["record", "no-such-run", "--as", "h200"],
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    notices.said.clear()  # a notice before the error would be a second line
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mila_kernels {arguments[0]}: ")
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments", [["check", "prefill/01"], ["check", "prefill/01", "--check-mode"], ["reproduce"]], ids=" ".join
)
def test_a_gpu_that_is_not_there_is_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert "sees no CUDA device" in printed.err and printed.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--seeds", "0"], ["check", "--device", "gpu"], ["nothing"], ["check", "--seed", "-1"],
        ["bench", "--seed", "-1"], ["profile", "prefill/01", "--seed", "9" * 30], ["check", "--seed", "one"],
        ["check", "--seed", "9" * 5000],
    ],
    ids=lambda words: " ".join(words)[:30],
)  # fmt: skip
def test_argparse_refuses_with_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < 2000


def test_what_cannot_be_written_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "RESULTS", Path(__file__) / "results")
    assert cli.main(["check", "prefill/01", "--shape", SHAPE, "--device", "emulation", "--save"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mila_kernels check: ") and error.count("\n") == 1


def test_a_workload_is_checked_by_the_steps_of_its_operation() -> None:
    args = cli.build_parser("check").parse_args(["check", "--workload", "matvec_fp4/gate_up-m1"])
    assert cli._check_workloads(steps.step("prefill/01"), args) == []
    assert [w.name for w in cli._check_workloads(steps.step("matvec_fp4/01"), args)] == ["matvec_fp4/gate_up-m1"]


def test_check_passes_and_says_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "prefill/01", "--shape", SHAPE, "--device", "emulation", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "prefill/01_scalar" in out and "seed 1" in out and "emulation" in out
    assert "2 of 2 cases passed" in out


def test_edges_are_shapes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "prefill/01", "--edges", "--device", "emulation"]) == 0
    out = capsys.readouterr().out
    assert "q4h1 kv2h1" in out and "kv0h1" in out and f"{len(cli.EDGE_SHAPES['prefill'])} of" in out


def test_check_mode_passes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "prefill/02", "--shape", SHAPE, "--device", "emulation", "--check-mode"]
    assert cli.main(arguments) == 0, capsys.readouterr().out


def test_check_fails_with_exit_code_1_when_the_error_is_above_its_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from mila_kernels import ops

    strict = replace(ops.OPS["prefill"], bound=lambda workload: 1e-9)
    monkeypatch.setitem(ops.OPS, "prefill", strict)
    assert cli.main(["check", "prefill/01", "--shape", SHAPE, "--device", "emulation"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "0 of 1 cases passed, 1 FAILED" in out


def test_bench_takes_peers_of_the_same_workloads_after_the_steps() -> None:
    words = ["bench", "prefill/01", "prefill/02", "--shape", SHAPE]
    alone, with_peers = (
        cli._bench_cases(cli.build_parser("bench").parse_args([*words, *more])) for more in ([], ["--peers"])
    )
    assert [timed.name for timed, _ in alone] == ["01_scalar", "02_smem_tiles"]
    assert [timed.name for timed, _ in with_peers[2:]] == ["torch three calls", "torch SDPA"]
    assert with_peers[:2] == alone and {workload.shape for _, workload in with_peers} == {SHAPE}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so bench measures")
def test_bench_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "prefill"]) == 2
    assert "CUDA device" in capsys.readouterr().err


def test_profile_without_ncu_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    if counters.shutil.which("ncu", path="/usr/local/cuda/bin"):
        pytest.skip("ncu is installed at its default place")
    assert cli.main(["profile", "prefill/01"]) == 1
    error = capsys.readouterr().err
    assert "ncu" in error and "Nsight Compute" in error


# ---------------------------------------------------------------------------------------------- counters

STALL = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
COLUMNS = {
    "gpu__time_duration.sum": ("ns", ["1,000", "3,000"]),
    "dram__bytes_read.sum": ("byte", ["10", "30"]),
    "lts__t_sector_hit_rate.pct": ("%", ["80.5", "90.5"]),
    "launch__grid_size": ("", ["128", "256"]),
    STALL: ("inst", ["4", "8"]),
    "sm__cycles_active.avg": ("cycle", ["7", "7"]),
}


def raw_page() -> str:
    """A raw page as ``ncu --csv --page raw --log-file`` writes it: calls of two, one and no whole launch."""
    fixed = ["ID", "Kernel Name", "Device"]
    text = ["==PROF== Connected to process 42", '==PROF== Profiling "prefill_scalar": 0%....100% - 9 passes']
    rows = [fixed + list(COLUMNS), ["", "", ""] + [unit for unit, _ in COLUMNS.values()]]
    spin = "at::cuda::<unnamed>::spin_kernel(long)"
    ours, fill = "void <unnamed>::prefill_scalar<(int)64>(PrefillArgs)", "void at::native::fill<int>(A, B)"
    launches = [(ours, 0), (fill, 1), (spin, 0), (ours, 0), (spin, 0), ("cut(A)", 0)]
    rows += [
        [str(i), name, "GPU"] + [values[which] for _, values in COLUMNS.values()]
        for i, (name, which) in enumerate(launches)
    ]
    text += [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join([*text, "==PROF== Disconnected from process 42"])


def test_counters_are_read_from_ncu_and_only_of_the_steps_own_kernel() -> None:
    assert list(csv.reader([raw_page().splitlines()[2]]))[0][3] == "gpu__time_duration.sum"
    launches, single = counters.parse(raw_page())
    assert [len(launch.counters) for launch in launches] == [5, 5], "metrics without a label are left out"
    assert len(single) == 1 and single[0].counters["launch__grid_size"].value == 128.0
    found = {counter.metric: counter for counter in counters.longest(steps.step("prefill/01"), launches)}
    assert found["gpu__time_duration.sum"] == counters.Counter("gpu__time_duration.sum", 1000.0, "ns")
    assert found["launch__grid_size"].value == 128.0, "the fill's 256 are left out, though it took longer"
    assert found["lts__t_sector_hit_rate.pct"].value == 80.5 and found[STALL].value == 4.0


def test_of_several_kernels_of_a_step_the_longest_is_counted() -> None:
    def launch(kernel: str, micros: float, blocks: float) -> counters.Launch:
        values = {"gpu__time_duration.sum": micros, "launch__grid_size": blocks}
        return counters.Launch(kernel, {name: counters.Counter(name, value, "") for name, value in values.items()})

    split = steps.step("decode/02_split_k")
    both = [launch("decode_split_k(DecodeArgs)", 5.0, 8.0), launch("merge_splits(DecodeArgs)", 2.0, 16.0)]
    assert [counter.value for counter in counters.longest(split, both)] == [5.0, 8.0]
    with pytest.raises(counters.ProfileError, match="decode/02_split_k: none of its kernels ran, but xmma_gemm"):
        counters.longest(split, [launch("xmma_gemm(A)", 5.0, 8.0)])


def test_counters_of_output_without_a_table() -> None:
    assert counters.parse("==ERROR== ERR_NVGPUCTRPERM") == []


def test_counters_have_words() -> None:
    assert counters.label(STALL) == "stall: long scoreboard"
    assert counters.label("lts__t_sector_hit_rate.pct") == "L2 hit rate"
    assert counters.label("unheard.of") == "unheard.of"


@pytest.mark.parametrize("edges", [[], ["--edges"]], ids=["default", "edges"])
@pytest.mark.parametrize("op", steps.ops())
def test_every_step_has_default_shapes_that_fit_it(op: str, edges: list[str]) -> None:
    args = cli.build_parser("check").parse_args(["check", *edges])
    for step in steps.steps(op):
        assert cli._check_workloads(step, args), step.id


def test_a_long_error_of_a_case_is_cut_and_the_next_case_still_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = parity.check

    def breaks(step: steps.Step, workload: object, seed: int, *rest: object) -> object:
        if seed == 0:
            raise RuntimeError("first line\n" + "template noise\n" * 99)
        return original(step, workload, seed, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(parity, "check", breaks)
    assert cli.main(["check", "prefill/01", "--shape", SHAPE, "--device", "emulation", "--seeds", "2"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: first line" in out and "more lines" in out and out.count("template noise") < 20
    assert "1 of 2 cases passed, 1 FAILED" in out


def test_saved_rows_are_recorded_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    assert cli.main(["check", "prefill/01", "--shape", SHAPE, "--device", "emulation", "--save"]) == 0
    (run,) = (tmp_path / "local").iterdir()
    assert cli.main(["record", run.name, "--as", "h200"]) == 2, "a run without a GPU is no H200's"
    for _ in range(2):
        assert cli.main(["record", run.name, "--as", "cpu"]) == 0
    assert "0 new in parity" in capsys.readouterr().out
    assert len(results.read(tmp_path / "cpu", "parity")) == 2
