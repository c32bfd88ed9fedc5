"""Score workspace: the published figures, recorded ones, and on a GPU the allocator's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mila_kernels import notebook, paths, results, shapes, workspace
from mila_kernels.results import CounterRow, RunRow
from mila_kernels.workspace import MIB

WHOLE, SLIDING = shapes.geometry("gemma4-12b-global"), shapes.geometry("gemma4-12b-local")


def test_computed_bytes_are_the_published_ones() -> None:
    # Published: about 1 GB a buffer at 64K, two buffers; sliding layers attend to min(T, window + chunk - 1).
    assert workspace.score_bytes(WHOLE, 65_536) == 2 * 2**30
    assert workspace.score_bytes(SLIDING, 65_536) == 2 * 2 * 16 * 512 * 1535
    assert workspace.score_bytes(SLIDING, 1024) == 2 * 2 * 16 * 512 * 1024
    assert workspace.cache_bytes(SLIDING, 262_144) == 80 * 2**30
    rows = workspace.computed([4096, 262_144], WHOLE, SLIDING).pivot(index="context", columns="series", values="value")
    assert rows.loc[262_144, workspace.STORED] == 64 * rows.loc[4096, workspace.STORED]
    assert rows.loc[262_144, workspace.GLOBAL_FLASH] == rows.loc[4096, workspace.GLOBAL_FLASH]
    assert (rows[workspace.FLASH] == 0).all()


def test_recorded_figures_stand_beside_the_computed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    folder = tmp_path / "h200"
    results.append(folder, RunRow(run_id="r", utc="2026-12-01T10:00:00Z", gpu="NVIDIA H200"))
    peaks = {("prefill", True): 130.0, ("prefill", False): 0.0, ("prefill_ring", True): 49.0}
    texts = {
        "prefill": "b1 q512h16 kv4096h1 d512 causal bf16",
        "prefill_ring": "b1 q512h16 kv4096h8 d256 w1024 causal bf16",
    }
    for (op, stored), mib in peaks.items():
        name = workspace.THREE_CALLS if stored else "16_packed_gqa"
        results.append(folder, CounterRow(run_id="r", op=op, step=name, workload=texts[op], metric=workspace.METRIC,
                                          value=mib * MIB, unit="byte"))  # fmt: skip
    rows = workspace.table(notebook.start("emulation"), [4096, 8192])
    shown = workspace.as_text(rows)
    assert shown.loc["4K", f"{workspace.STORED} (measured)"] == "130 MiB"
    assert shown.loc["4K", workspace.STORED] == "128 MiB"
    assert shown.loc["4K", f"{workspace.GLOBAL_FLASH} (measured)"] == "49 MiB"
    assert f"{workspace.FLASH} (measured)" not in shown.columns, "the ring's own step has no row"
    assert shown.loc["8K", f"{workspace.STORED} (measured)"] == ""


@pytest.mark.parametrize(
    ("mib", "text"), [(0, "0 MiB"), (95.94, "95.9 MiB"), (999.4, "999 MiB"), (1021, "0.997 GiB"), (1024, "1 GiB")]
)
def test_no_power_of_ten_beside_a_unit(mib: float, text: str) -> None:
    assert workspace._mib(mib) == text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocator_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(results.RUN_FOLDER_VARIABLE, str(tmp_path))
    rows = workspace.table(notebook.start("cuda"), [4096]).set_index(["series", "kind"])["value"]
    for name in (workspace.STORED, workspace.GLOBAL_FLASH):
        assert rows[name, "measured"] == pytest.approx(rows[name, "computed"], rel=0.05)
    assert rows[workspace.FLASH, "measured"] < 1
