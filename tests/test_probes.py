"""Probes: right for a right step, and a key too many or too few is seen by each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mila_kernels import ops, probes, results, shapes, steps

CASES = {
    "prefill/01_scalar": "b2 q9h2 kv40h1 d64 w7 causal bf16",
    "prefill_ring/01_hs_split": "b2 q9h2 kv40h1 d64 w7 causal bf16",
    "decode/02_split_k": "b2 q2h2 kv40h1 d64 w7 bf16",
}


@pytest.mark.parametrize("step", CASES)
def test_a_right_step_passes_every_probe_and_is_recorded(step: str, device: torch.device, tmp_path: Path) -> None:
    with results.RunWriter(tmp_path) as run:
        rows = probes.check(step, shapes.parse_shape(step.split("/")[0], CASES[step]), device, run)
    assert [(row.shape, row.passed) for row in results.read(tmp_path, "parity")] == [(r.shape, r.passed) for r in rows]
    assert [row.shape.split()[-1] for row in rows] == ["count", "mean", "mask", "poison"]
    assert all(row.passed and row.max_abs is not None and row.max_abs <= (row.bound or 0) for row in rows)


@pytest.mark.parametrize("window", [6, 8])
@pytest.mark.parametrize("step", CASES)
def test_a_key_too_many_or_too_few_is_seen_by_every_probe(
    step: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = shapes.parse_shape(step.split("/")[0], CASES[step])
    op = ops.op(w.op)
    make = op.make_inputs

    def one_off(workload: shapes.Workload, seed: int, device: torch.device) -> dict[str, Any]:
        wide = shapes.parse_shape(w.op, CASES[step].replace("w7", "w8"))  # a ring that holds what either sees
        return {**make(wide, seed, device), "window": window}

    monkeypatch.setitem(ops.OPS, w.op, type(op)(**{**vars(op), "make_inputs": one_off}))
    rows = probes.check(step, w, "emulation")
    assert not any(row.passed for row in rows if not row.shape.endswith("poison"))


def test_which_keys_are_seen() -> None:
    def bounds(text: str) -> list[list[int]]:
        return [x.tolist() for x in probes.seen(shapes.parse_shape("prefill", text))]

    assert bounds("b1 q3h1 kv8h1 d64 causal bf16") == [[0, 0, 0], [6, 7, 8]]
    assert bounds("b1 q3h1 kv8h1 d64 w4 causal bf16") == [[2, 3, 4], [6, 7, 8]]
    assert bounds("b1 q4h1 kv2h1 d64 causal bf16") == [[0, 0, 0, 0], [0, 0, 1, 2]]
    assert bounds("b1 q2h1 kv5h1 d64 full bf16") == [[0, 0], [5, 5]]


def test_no_probe_where_positions_are_not_exact() -> None:
    assert probes.kinds(shapes.parse_shape("prefill", "b1 q1h1 kv300h1 d64 causal bf16")) == ["count", "poison"]
    assert probes.kinds(shapes.parse_shape("decode", "b1 q1h1 kv65h1 d128 bf16 kvfp8 page64")) == [
        "count", "mask", "poison"
    ]  # fmt: skip
    assert probes.kinds(shapes.parse_shape("prefill", "b1 q1h1 kv0h1 d64 causal bf16")) == ["count"]
    assert probes.kinds(shapes.parse_shape("matvec_fp4", "n64 k256 m1 bf16")) == []


@pytest.mark.parametrize("step", CASES)
def test_poison_that_is_read_is_seen(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that sees one key more than it should passes on what that key has."""
    w = shapes.parse_shape(step.split("/")[0], CASES[step])
    op = ops.op(w.op)

    def one_more(**inputs: Any) -> Any:
        return op.run(**{**inputs, "window": 8})

    def wide(workload: shapes.Workload, seed: int, device: torch.device) -> dict[str, Any]:
        return op.make_inputs(shapes.parse_shape(w.op, CASES[step].replace("w7", "w8")), seed, device)

    monkeypatch.setitem(ops.OPS, w.op, type(op)(**{**vars(op), "run": one_more, "make_inputs": wide}))
    (row,) = (row for row in probes.check(step, w, "emulation") if row.shape.endswith(" poison"))
    assert not row.passed and row.max_abs


@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_read_around_a_tensor_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes a row before the first for the first."""
    op = ops.op("prefill")

    def row_before(**inputs: Any) -> Any:
        x = inputs[name]
        return op.run(**{**inputs, name: x.as_strided(x.shape, x.stride(), x.storage_offset() - x.stride(1))})

    w = shapes.parse_shape("prefill", "b1 q9h1 kv9h1 d64 causal bf16")
    monkeypatch.setitem(ops.OPS, "prefill", type(op)(**{**vars(op), "run": row_before}))
    assert not probes._poison(steps.step("prefill/01"), w, torch.device("cpu")).passed
    monkeypatch.undo()
    assert probes._poison(steps.step("prefill/01"), w, torch.device("cpu")).passed


def test_chunks_that_do_not_agree_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    w = shapes.parse_shape("prefill", "b1 q200h1 kv200h1 d64 causal bf16")
    (row,) = (row for row in probes.check("prefill/08_ldmatrix", w, "emulation") if row.shape.endswith(" chunks"))
    assert row.passed and row.rel_l2 is not None and row.rel_l2 < 2e-3
    op = ops.op("prefill")

    def no_offset(**inputs: Any) -> Any:
        return op.run(
            **{**inputs, "k": inputs["k"][:, : inputs["q"].shape[1]], "v": inputs["v"][:, : inputs["q"].shape[1]]}
        )

    monkeypatch.setitem(ops.OPS, "prefill", type(op)(**{**vars(op), "run": no_offset}))
    (row,) = (row for row in probes.check("prefill/08_ldmatrix", w, "emulation") if row.shape.endswith(" chunks"))
    assert not row.passed


def test_which_rows_are_probes() -> None:
    assert probes.is_probe("b1 q1h1 kv65h1 d128 causal bf16 mean")
    assert not probes.is_probe("b1 q1h1 kv65h1 d128 causal bf16") and not probes.is_probe("b1 q1h1 d64 bf16 poisoned")
