"""compute-sanitizer's output, and what happens where it is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mila_kernels import results, sanitize, shapes, steps

CLEAN = "========= COMPUTE-SANITIZER\n2 of 2 cases passed\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("log", "code", "errors", "passed"),
    [
        (CLEAN, 0, 0, True),
        (CLEAN, 1, 0, False),  # clean memory, but a wrong result
        ("========= ERROR SUMMARY: 12 errors\n", 0, 12, False),
        ("========= ERROR SUMMARY: 1 error\n", 0, 1, False),
        (RACES, 0, 3, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0, True),
        (CLEAN + RACES, 0, 3, False),  # two processes: both count
        ("Error: Device not supported\n", 0, 0, False),  # no summary is no proof
        ("", 0, 0, False),
    ],
)
def test_only_a_whole_clean_run_passes(log: str, code: int, errors: int, passed: bool) -> None:
    finding = sanitize.judge(log, code)
    assert (finding.errors, finding.passed) == (errors, passed)


def test_unknown_tool_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="tool must be one of memcheck, racecheck, initcheck, synccheck, not 'lint'"):
        sanitize.sanitize([steps.step("prefill/01")], "lint")
    assert sanitize.main(["prefill/99_nothing"]) == 2
    assert "prefill/99_nothing" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["prefill/01"]) == 2
    assert "sanitize: " in capsys.readouterr().err


def test_the_tool_is_found_where_the_toolkit_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find_sanitizer() == tool


def test_only_our_kernels_are_looked_at_but_all_writes_are_seen() -> None:
    chosen = [steps.step("prefill/02"), steps.step("prefill/03")]
    filters = ["--kernel-name", "kernel_substring=prefill_smem_tiles"]
    filters += ["--kernel-name", "kernel_substring=prefill_wmma_hs_split"]
    assert sanitize._only_ours(chosen, "racecheck") == sanitize._only_ours(chosen, "memcheck") == filters
    assert sanitize._only_ours(chosen, "initcheck") == []


@pytest.mark.parametrize("step", [step.id for step in steps.steps()])
def test_every_kernel_of_a_step_is_looked_at(step: str) -> None:
    path = steps.step(step).path
    text = "".join(source.read_text() for source in (path, *steps.headers(path)))
    kernels = len(re.findall(r"^__global__", text, re.M))
    assert len(sanitize._only_ours([steps.step(step)], "racecheck")) == 2 * kernels > 0


@pytest.mark.parametrize("step", [step.id for step in steps.steps()])
def test_a_row_names_the_shapes_that_were_checked(step: str) -> None:
    chosen = steps.step(step)
    named = sanitize.shapes_of(chosen, ()).split("; ")
    assert all(shapes.parse_shape(chosen.op, text).fits(chosen) for text in named)
    assert len("; ".join(named)) < results.ERROR_LENGTH, "else it is cut"
    assert sanitize.shapes_of(chosen, ("a", "b")) == "a; b"


def test_groups_are_of_one_operation_and_hold_every_step_once() -> None:
    chosen = steps.steps()
    found = sanitize.groups(chosen)
    assert all(len({step.op for step in group}) == 1 and len(group) <= sanitize.GROUP for group in found)
    assert sorted(step.id for group in found for step in group) == sorted(step.id for step in chosen)


TOOL = """#!/usr/bin/env python3
import os, re, sys
assert os.environ["MILA_SANITIZER"] in sys.argv
ids = [word for word in sys.argv if re.fullmatch(r"prefill/\\w+", word)]
tool = sys.argv[sys.argv.index("--tool") + 1]
bad = "prefill/02_smem_tiles" in ids and tool == "memcheck"
print(" ".join(ids))
print(f"========= ERROR SUMMARY: {3 if bad else 0} errors")
"""


def test_whose_an_error_is_comes_from_runs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: tool)
    monkeypatch.setattr(sanitize, "check_command", lambda chosen, shapes: ["true", *(step.id for step in chosen)])
    monkeypatch.setenv(results.RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv(results.RUN_ID_VARIABLE, results.new_run_id())
    chosen = [steps.step(f"prefill/0{n}") for n in (1, 2, 3)]
    assert sanitize.run(chosen, ("memcheck", "synccheck"), (), jobs=2) == 1
    rows = {(row.step, row.tool): (row.errors, row.passed) for row in results.read(tmp_path / "run", "sanitizer")}
    clean = {(step.name, tool) for step in chosen for tool in ("memcheck", "synccheck")} - {
        ("02_smem_tiles", "memcheck")
    }
    shown = {row.step: row.workload for row in results.read(tmp_path / "run", "sanitizer")}
    assert shown["01_scalar"].split("; ")[0] == "b1 q40h4 kv97h1 d512 causal bf16"
    assert rows == {("02_smem_tiles", "memcheck"): (3, False)} | dict.fromkeys(clean, (0, True))
    logs = sorted(path.name for path in (tmp_path / "run" / "sanitizer").iterdir())
    assert "prefill-01_scalar-03_wmma_hs_split-synccheck.log" in logs and "prefill-02_smem_tiles-memcheck.log" in logs
    assert "FAILED  prefill/02_smem_tiles  memcheck  3 errors" in capsys.readouterr().out
