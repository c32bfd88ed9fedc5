"""Shapes and workloads by name."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mila_kernels import shapes, steps
from mila_kernels.paths import DATA, ROOT


def test_every_row_is_typed_and_its_shape_reads_back():
    table = shapes.workloads()
    assert len(table) == 52 and len({w.name for w in table}) == 52
    for w in table:
        again = shapes.parse_shape(w.op, w.shape)
        assert again.shape == w.shape and again.offset == w.offset, w.name
        assert w.name.split("/")[0] == w.op
        assert (w.unit, w.better) in {("us", "lower"), ("tflops", "higher")}


def test_canonical_texts():
    assert shapes.workload("prefill/published-instance").shape == "b1 q512h16 kv8192h1 d512 causal bf16"
    assert shapes.workload("matvec_fp4/gate_up-m1").shape == "n30720 k3840 m1 bf16"
    ring = shapes.workload("prefill_ring/d256-16x8-w1024-n8192")
    assert ring.shape == "b1 q8192h16 kv8192h8 d256 w1024 causal bf16"
    assert shapes.workload("decode/d512-8x4-b64-kv28k-fp8").shape == "b64 q1h8 kv28672h4 d512 bf16 kvfp8 page64"


def test_published_instance_is_sixteen_chunks():
    parts = shapes.workload("prefill/published-instance").parts()
    assert [p.kv_len for p in parts] == [512 * i for i in range(1, 17)]
    assert {p.q_len for p in parts} == {512} and [p.offset for p in parts][:2] == [0, 512]
    whole = shapes.workload("prefill/d512-16x1-n8192")
    assert whole.parts() == (whole,)
    assert sum(p.pairs for p in parts) == whole.pairs


@given(
    q_len=st.integers(0, 12), kv_len=st.integers(0, 12), causal=st.booleans(),
    window=st.none() | st.integers(1, 15),
)  # fmt: skip
def test_attended_pairs_counts_the_mask(q_len, kv_len, causal, window):
    offset = kv_len - q_len
    count = sum(
        (not causal or j <= offset + i) and (window is None or j > offset + i - window)
        for i in range(q_len) for j in range(kv_len)
    )  # fmt: skip
    assert shapes.attended_pairs(q_len, kv_len, causal=causal, window=window) == count


def test_geometries():
    g = shapes.geometry("gemma4-12b global")
    assert (g.q_heads, g.kv_heads, g.head_dim, g.window, g.scale) == (16, 1, 512, None, 1.0)
    assert shapes.geometry("llama3-8b").scale == pytest.approx(1 / math.sqrt(128))
    assert shapes.geometry("gemma4-12b-local").window == 1024
    assert (shapes.linear_shape("gate_up").n, shapes.linear_shape("lm_head").dtype) == (30720, "fp8")
    named = {w.name: w for w in shapes.workloads("matvec_fp4")}
    for linear in shapes.linear_shapes():
        w = named[f"matvec_fp4/{linear.name}-m1"]
        assert (w.n, w.k) == (linear.n, linear.k)


def test_unknown_names_list_close_ones():
    with pytest.raises(ValueError, match="prefill/published-instance"):
        shapes.workload("prefill/published")
    with pytest.raises(ValueError, match="gemma4-12b-global"):
        shapes.geometry("gemma4-12b-globl")
    with pytest.raises(ValueError, match="op must be one of"):
        shapes.workloads("prefil")
    with pytest.raises(ValueError, match="must read like"):
        shapes.parse_shape("prefill", "b1 q512")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"window": 0}, "window of a prefill workload must be an integer from 1 to 2147418111, not 0"),
        ({"page": 0}, "page of a prefill workload must be an integer from 1"),
        ({"page": 1.5}, "page of a prefill workload must be an integer from 1 .*, not 1.5"),
        ({"kv_len": 2**31}, "kv_len of a prefill workload must be an integer from 0 to 2147418111, not 2147483648"),
        ({"kv_len": 2**30, "q_heads": 64, "kv_heads": 64}, "k of a prefill workload must have at most 2.40 elements, "),
        ({"dtype": "fp32"}, "dtype must be one of bf16, fp16, not 'fp32'"),
        ({"kv_dtype": "fp4"}, "kv_dtype must be one of bf16, fp16, fp8 or ''"),
        ({"q_len": -1}, "q_len of a prefill workload"),
        ({"mask": "diagonal"}, "mask must be"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"head_dim": 64.0}, "head_dim of a prefill workload"),
    ],
)
def test_bad_workloads_name_the_argument(changes, message):
    values = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "q_len": 3, "kv_len": 8} | changes
    with pytest.raises(ValueError, match=message):
        shapes.attention_workload(**values)


@pytest.mark.parametrize(
    ("op", "text", "message"),
    [
        ("prefill", "b1 q512h16 kv8192h1 d512 causal fp32", "shape of prefill must read like .*, not 'b1 q512h16"),
        ("matvec_fp4", "n64 k256 m1 fp32", "shape of matvec_fp4 must read like"),
        ("prefill", "b1 q99999999999h1 kv1h1 d64 causal bf16", "q_len of a prefill .* to 2147418111, not 99999999999"),
        (
            "prefill",
            f"b1 q1{'0' * 5000}h1 kv1h1 d64 causal bf16",
            r"q_len of a prefill .* not 1(0){19}\.\.\. ",
        ),
        (
            "gemm_w4a8",
            "n2000000000 k2000000000 m1 bf16",
            "w of a gemm_w4a8 workload must have at most 2.40 elements",
        ),
        ("sort", "n64 k256 m1 bf16", "op must be one of prefill, prefill_ring, decode, .*, not 'sort'"),
    ],
)
def test_shapes_that_no_operation_takes(op, text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        shapes.parse_shape(op, text)


def test_names_of_another_type():
    for call in (shapes.geometry, shapes.workload, shapes.linear_shape):
        with pytest.raises(TypeError, match="^name: a str is needed, not int"):
            call(3)
    with pytest.raises(TypeError, match="^text: a str is needed, not int"):
        shapes.parse_shape("prefill", 3)


def test_a_missing_data_folder_is_said(tmp_path: Path):
    (tmp_path / "mila_kernels").mkdir()
    for name in ("shapes.py", "paths.py"):
        (tmp_path / "mila_kernels" / name).write_text((ROOT / "mila_kernels" / name).read_text())
    (tmp_path / "mila_kernels" / "__init__.py").touch()
    code = "from mila_kernels import shapes; shapes.workloads()"
    done = subprocess.run([sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1 and "reads its shapes and workloads from the data/ folder" in done.stderr


# ---- published figures ----


def published() -> list[dict[str, str]]:
    with (DATA / "published.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_published_figures_have_a_source_and_name_what_exists():
    rows = published()
    assert len(rows) > 250
    names = {w.name for w in shapes.workloads()}
    own = {(s.op, s.name) for s in steps.steps()}
    for row in rows:
        assert row["source"] and row["source_detail"] and row["gpu"] and row["quantity"] and row["unit"], row
        assert math.isfinite(float(row["value"])) and "," not in row["value"], row
        assert not row["workload"] or row["workload"] in names, row
        assert not row["step"] or (row["op"], row["step"]) in own, row
        assert row["date"] == "" or date.fromisoformat(row["date"]), row


def test_no_figure_is_given_twice():
    keys = [tuple(row[name] for name in row if name not in ("value", "unit")) for row in published()]
    assert len(set(keys)) == len(keys)


def test_the_peers_of_the_workloads_are_among_the_published():
    """The peer that a workload is to beat is one of the figures with a source, within rounding."""
    to_unit = {"ms": 1000.0, "us": 1.0, "TFLOP/s": 1.0}
    figures: dict[str, list[float]] = {}
    for row in published():
        if row["workload"] and row["unit"] in to_unit:
            figures.setdefault(row["workload"], []).append(float(row["value"]) * to_unit[row["unit"]])
    for w in shapes.workloads():
        if w.peer is not None:
            assert any(value == pytest.approx(w.peer, rel=0.01) for value in figures.get(w.name, [])), w.name
