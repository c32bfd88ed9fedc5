"""What the W4A8 notebook counts: errors by token and by layer, tables from recorded rows."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from mila_kernels import notebook, paths, plots, results, static, steps, w4a8_study
from mila_kernels.results import CounterRow, ParityRow, TimingRow
from mila_kernels.shapes import linear_workload

CPU = torch.device("cpu")
ONE_SCALE, TOKEN_SCALE, EXACT = (f"gemm_w4a8/{name}" for name in ("02", "03", "10"))


def test_one_scale_loses_small_tokens_and_a_scale_each_does_not() -> None:
    errors = w4a8_study.magnitudes([ONE_SCALE, TOKEN_SCALE, EXACT], CPU)
    assert errors["02_tensor_scale"]["1e-8"] == 1.0 and errors["02_tensor_scale"]["1e7"] < 5e-2
    assert errors["03_token_scale"].max() < 5e-2
    assert errors["10_batches_in_flight"].max() < errors["03_token_scale"].min()


def test_errors_grow_through_layers_and_less_where_nothing_is_rounded_twice() -> None:
    stack = w4a8_study.random_stack(layers=4)
    errors = w4a8_study.stack_errors(stack, [ONE_SCALE, TOKEN_SCALE, EXACT], CPU, count=16)
    last = errors[errors["layer"] == 4].set_index("step")["rel_l2"]
    first = errors[errors["layer"] == 1].set_index("step")["rel_l2"]
    assert (last > first).all()
    assert last["10_batches_in_flight"] < last["03_token_scale"] < last["02_tensor_scale"]
    assert list(w4a8_study.stack_table(errors, (1, 4)).columns) == [1, 4]


def test_a_stack_with_exact_products_has_no_error() -> None:
    stack = w4a8_study.random_stack(layers=2)
    h = w4a8_study.tokens(3, stack.width)
    exact = [stack.run(h, lambda x, w: x @ w.dequantize(torch.float64).T) for _ in range(2)]
    assert len(exact[0]) == 2 and all(torch.equal(a, b) for a, b in zip(*exact, strict=True))
    assert bool(torch.isfinite(exact[0][-1]).all())


def test_a_sum_of_ones_is_their_number_in_emulation() -> None:
    assert w4a8_study.sum_of_ones(EXACT, 1024, CPU) == 1024


def test_recorded_sums_and_rates_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    session = notebook.start("emulation", gpu="h200")
    assert "only a GPU" in w4a8_study.long_sums_table(session, [EXACT], [64]).to_string()
    step, case = steps.step(EXACT), notebook.shapes.workload("gemm_w4a8/fc_down-m1024")
    for workload, metric, value, unit in (
        ("k64", w4a8_study.LONG_SUM, 32.0, ""),
        (case.name, w4a8_study.QUANTISED, 120.0, "us"),
    ):
        row = CounterRow(run_id="r", op=step.op, step=step.name, source_sha=step.source_sha, workload=workload,
                         metric=metric, value=value, unit=unit)  # fmt: skip
        results.append(tmp_path / "h200", row)
    assert w4a8_study.long_sums_table(session, [EXACT], [64]).loc[64].tolist() == ["0.5000"]
    rates = w4a8_study.rates_table(session, [EXACT], [case])
    assert rates["with quantisation"].tolist() == [f"{2 * case.m * case.n * case.k / 120e6:,.0f}"]
    assert rates["target"].tolist() == ["1,320"] and rates["fastest step"].tolist() == ["not measured"]


def test_rate_and_error_of_steps_by_the_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    session = notebook.start("emulation", gpu="h200")
    cases = [linear_workload("gemm_w4a8", n=256, k=256, m=m) for m in (16, 64)]
    assert w4a8_study.trade(session, [ONE_SCALE, EXACT], cases).empty
    for step in map(steps.step, [ONE_SCALE, EXACT]):
        for w in cases:
            same = {"run_id": "r", "op": step.op, "step": step.name, "source_sha": step.source_sha, "shape": w.shape}
            results.append(tmp_path / "h200", TimingRow(**same, workload="", dtype="bf16", cache="cold", warmup=3, n=10,
                           median_us=10.0, p10_us=9.0, p90_us=11.0, min_us=9.0, flops=1e9 * w.m, bytes=1e6, status="ok",
                           error=""))  # fmt: skip
            results.append(tmp_path / "h200", ParityRow(**same, backend="cuda", seed=0, rel_l2=w.m * 1e-4, max_abs=1.0,
                           nonfinite=0, bound=1.0, passed=True))  # fmt: skip
    rows = w4a8_study.trade(session, [ONE_SCALE, EXACT], cases)
    table = w4a8_study.trade_table(rows)
    assert table.loc["10_batches_in_flight"].tolist() == ["1,600", "6,400", "6.40e-03"]
    (axes,) = plots.trade(rows).axes
    assert sorted(axes.lines[0].get_ydata()) == [1600, 6400]


def test_errors_are_written_for_each_step_and_shape(tmp_path: Path) -> None:
    cases = [linear_workload("gemm_w4a8", n=64, k=256, m=m) for m in (5, 40)]
    with results.RunWriter(tmp_path) as run:
        w4a8_study.measure_errors([ONE_SCALE, EXACT], cases, 0, CPU, run)
        found = results.read(run.folder, "parity")
    assert [(row.step, row.passed) for row in found] == 2 * [("02_tensor_scale", True), ("10_batches_in_flight", True)]
    assert found[0].rel_l2 > 10 * found[1].rel_l2 > 0


def test_mma_sync_has_no_fp8_on_hopper() -> None:
    table = w4a8_study.tensor_instructions("gemm_w4a8/04", ["sm_89", "sm_90a"])
    if "instructions" in table:
        pytest.skip(table["instructions"][0])
    assert table.loc["sm_89", "QMMA"] > 0 and table.loc["sm_89", "HMMA"] == 0
    assert table.loc["sm_90a", "QMMA"] == 0 and table.loc["sm_90a", "HMMA"] > 0 and table.loc["sm_90a", "F2FP"] > 0


def test_without_a_compiler_the_table_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise static.ToolError("nvcc: not found\nand more")

    monkeypatch.setattr(static, "compile_step", missing)
    table = w4a8_study.tensor_instructions("gemm_w4a8/04", ["sm_89"])
    assert table["instructions"].tolist() == ["nvcc: not found"]


def test_curves_are_what_the_chart_takes() -> None:
    errors = pd.DataFrame({"step": ["a"], "layer": [1], "rel_l2": [0.5]})
    curve = w4a8_study.stack_curves(errors).iloc[0]
    assert (curve["series"], curve["value"], curve["kind"]) == ("a", 0.5, "computed") and math.isfinite(curve["value"])
