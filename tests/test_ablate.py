"""Steps with a stage left out: every declared one still applies, compiles and launches, and never counts as a step."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mila_kernels as mk
from mila_kernels import ablate, emulate, notebook, paths, results, steps, toolchain
from mila_kernels.results import AblationRow, RunRow, TimingRow

NAMES = ablate.names()
SOFTMAX = "prefill/07_softmax_spread without softmax"


@pytest.mark.parametrize("name", NAMES)
def test_declared_ablation_applies_and_compiles(name: str) -> None:
    step = steps.step(name)
    base = steps.step(step.predecessor or "")
    changed = [line for line in str(steps.diff(base, step)).splitlines() if line[:1] in "+-" and "#include" not in line]
    assert len(changed) > 2, "beside the two names of the files"
    command = [toolchain.cxx_path(), *emulate.FAST_FLAGS, "-fsyntax-only", f"-I{paths.CSRC}", "-x", "c++", step.path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_variants_are_told_apart_and_from_their_step() -> None:
    digests = {name: steps.step(name).source_sha for name in NAMES}
    assert len(set(digests.values())) == len(NAMES)
    assert not set(digests.values()) & {step.source_sha for step in steps.steps()}
    assert {step.id for step in steps.steps()}.isdisjoint(NAMES)
    assert steps.step("prefill/07 without softmax") == steps.step(SOFTMAX)
    assert ablate.names("prefill/07") == [name for name in NAMES if name.startswith("prefill/07")]


@pytest.mark.parametrize("name", ["prefill/07 without salt", "prefill/01 without softmax", "07_spread without softmax"])
def test_what_is_not_declared_is_an_error_that_lists_what_is(name: str) -> None:
    with pytest.raises(ValueError, match="step: .*07_softmax_spread"):
        steps.step(name)


def test_an_edit_that_no_longer_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, told in (
        ("not there", "0 places"),
        ("__syncthreads();", "places in the source"),
        ("constexpr int Br\n...\nzz", "nothing"),
    ):
        monkeypatch.setattr(ablate, "ABLATIONS", {"prefill/07_softmax_spread": {"softmax": ((old, ""),)}})
        with pytest.raises(ValueError, match=told):
            ablate.source("prefill/07_softmax_spread", "softmax")


def test_launches_in_emulation_and_is_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 64, generator=generator).bfloat16() for _ in range(3))
    whole = mk.prefill(q, k, v, step="prefill/07_softmax_spread")
    part = mk.prefill(q, k, v, step=SOFTMAX)
    assert isinstance(whole, torch.Tensor) and isinstance(part, torch.Tensor)
    assert part.shape == whole.shape and not torch.equal(part, whole)


def ablation(**values: object) -> AblationRow:
    step = steps.step(SOFTMAX)
    row = AblationRow(
        run_id="r", op=step.op, step=step.name, source_sha=step.source_sha, workload="prefill/published-instance",
        shape="b1 q512h16 kv8192h1 d512 causal bf16", dtype="bf16", cache="cold", warmup=1, n=10, median_us=500.0,
        p10_us=490.0, p90_us=510.0, min_us=480.0, flops=1e9, bytes=1e6, status="ok",
    )  # fmt: skip
    return replace(row, **values)  # type: ignore[arg-type]


def test_its_times_have_a_table_of_their_own(tmp_path: Path) -> None:
    results.append(tmp_path, RunRow(run_id="r", utc="2026-12-01T10:00:00Z"))
    results.append(tmp_path, ablation())
    results.append(tmp_path, ablation(step="06_qk_mma without softmax"))
    assert results.read(tmp_path, "timings") == []
    table = results.table("ablations", tmp_path)
    assert table["stale"].tolist() == [False, True], "the second has the digest of another variant"


def test_a_killed_case_leaves_its_row_in_that_table(tmp_path: Path) -> None:
    run = results.RunWriter(tmp_path, "r")
    with run:
        pass
    figures = dict.fromkeys(("warmup", "n", "median_us", "p10_us", "p90_us", "min_us", "flops", "bytes"))
    note = ablation(**figures, status="failed", error="the process was killed")
    with pytest.raises(KeyboardInterrupt), notebook.open_case(run, note):
        kept = (tmp_path / notebook._OPEN_CASE).read_text()
        raise KeyboardInterrupt
    (tmp_path / notebook._OPEN_CASE).write_text(kept)
    notebook.close_open_case(tmp_path, "r", "killed")
    assert results.read(tmp_path, "timings") == []
    (row,) = results.read(tmp_path, "ablations")
    assert isinstance(row, TimingRow) and (row.status, row.error) == ("failed", "killed")
