"""compute-sanitizer's output, and what happens where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mila_kernels import sanitize, steps

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
        sanitize.sanitize(steps.step("prefill/01"), "lint")
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


def test_racecheck_looks_at_our_kernels_and_the_others_at_all() -> None:
    step = steps.step("prefill/02")
    assert sanitize._only_ours(step, "racecheck") == ["--kernel-name", "kernel_substring=prefill"]
    assert sanitize._only_ours(step, "initcheck") == []
