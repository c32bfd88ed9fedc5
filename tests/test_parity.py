"""Errors and verdicts, poison and guard zones; and that check() finds what a wrong kernel does."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from mila_kernels import ops, outputs, parity, results, shapes, steps
from mila_kernels.parity import compare, guarded, poison, poisoned

SHAPE = "b1 q20h2 kv35h1 d64 causal bf16"


# ---- compare ----


def test_error_is_relative_to_the_norm():
    ref = torch.tensor([3.0, 4.0]).double()
    p = compare(torch.tensor([3.0, 4.5]), ref, 0.1)
    assert p.rel_l2 == pytest.approx(0.1) and p.max_abs == 0.5 and p.passed
    assert not compare(torch.tensor([3.0, 4.5]), ref, 0.0999).passed


def test_nan_never_passes():
    ref = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    p = compare(ref.clone(), ref, 1.0)
    assert p.nonfinite == 1 and not p.passed and p.rel_l2 == 0
    for wrong in ([1.0, 2.0, -math.inf, -math.inf], [math.nan, 2.0, math.inf, -math.inf], [1.0, 2.0, 5.0, -math.inf]):
        p = compare(torch.tensor(wrong), torch.tensor([1.0, 2.0, math.inf, -math.inf]), 1.0)
        assert p.nonfinite == 1 and not p.passed, wrong
    assert compare(torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), 0.0).passed


def test_a_reference_of_zeros_takes_the_plain_norm():
    assert compare(torch.zeros(4), torch.zeros(4), 1e-3).passed
    p = compare(torch.full((4,), 0.5), torch.zeros(4), 1e-3)
    assert p.rel_l2 == 1.0 and not p.passed


def test_shapes_must_agree_and_empty_passes():
    with pytest.raises(ValueError, match=r"out: shape \(2,\) must equal that of ref, \(1, 2\)"):
        compare(torch.zeros(2), torch.zeros(1, 2), 1.0)
    assert compare(torch.zeros(1, 0, 3), torch.zeros(1, 0, 3), 0.0).passed


# ---- guard ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32])
def test_guard_sees_one_element_on_either_side(dtype):
    view, check = guarded((2, 3, 5), dtype)
    assert view.is_contiguous() and view.shape == (2, 3, 5) and view.data_ptr() % 64 == 0
    assert not dtype.is_floating_point or bool(view.float().isnan().all())
    view.copy_(torch.ones(2, 3, 5))
    assert check() == 0
    whole = view.as_strided((32,), (1,), view.storage_offset() - 1)
    assert whole[0].float() == 7.0 and whole[31].float() == 7.0
    whole[0] = 1.0
    assert check() == 1
    whole[31] = 1.0
    assert check() == 2


def test_guarding_reaches_what_is_allocated_inside_it_only():
    q = torch.zeros(3, dtype=torch.bfloat16)
    assert outputs.empty(q, (4,)).untyped_storage().nbytes() == 8
    with outputs.guarding() as changed:
        inside = outputs.empty(q, (4,), torch.float32)
        assert inside.dtype == torch.float32 and bool(inside.isnan().all())
        inside.as_strided((5,), (1,))[4] = 0
        assert changed() == 1
    assert outputs.empty(q, (4,)).untyped_storage().nbytes() == 8


# ---- poison ----


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_poison_surrounds_the_same_values(dtype, value):
    x = torch.randn(2, 3, 4, 64).to(dtype)
    view, changed = poisoned(x, value)
    assert torch.equal(view.float(), x.float()) and view.stride(3) == 1 and not view.is_contiguous()
    assert view.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in view.stride()[:3])
    storage = torch.empty(0, dtype=dtype).set_(view.untyped_storage()).float()
    dead = storage.numel() - x.numel()
    assert int((~torch.isfinite(storage)).sum()) == dead > x.numel()
    for dim in range(4):  # what lies one step outside in each dim is dead
        size, offset = list(x.shape), view.storage_offset() - view.stride(dim)
        size[dim] = 1
        assert not torch.isfinite(view.as_strided(size, view.stride(), offset).float()).any()
    assert changed() == 0
    view[1, 2, 3, 4] = 3.0 if x[1, 2, 3, 4].float() != 3.0 else 2.0
    assert 0 < changed() <= dtype.itemsize


def test_poison_of_a_call_leaves_other_arguments_alone():
    inputs = {"q": torch.randn(4, 8), "lengths": torch.tensor([1, 2]), "window": None, "k": torch.randn(4, 8)}
    found, changed = poison(inputs)
    assert found["lengths"] is inputs["lengths"] and found["window"] is None and changed() == 0
    assert torch.isnan(found["q"].as_strided((1,), (1,), 0)).all()
    assert torch.isinf(found["k"].as_strided((1,), (1,), 0)).all()
    with pytest.raises(TypeError, match="has no value that shows"):
        poisoned(torch.tensor([1]))


# ---- check ----


@pytest.fixture(scope="module")
def scalar() -> steps.Step:
    return steps.step("prefill/01_scalar")


def test_a_right_step_passes_and_leaves_rows(scalar, backend, tmp_path):
    with results.RunWriter(tmp_path) as run:
        rows = parity.check(scalar, shapes.parse_shape("prefill", SHAPE), 3, backend, run)
    assert [row.shape for row in rows] == [SHAPE, f"{SHAPE} poisoned"] and all(row.passed for row in rows)
    assert {(row.backend, row.seed, row.nonfinite) for row in rows} == {(backend, 3, 0)}
    assert all(0 < row.rel_l2 <= row.bound for row in rows)
    kept = results.read(tmp_path, "parity")
    assert [row.shape for row in kept] == [row.shape for row in rows] and kept[0].source_sha == scalar.source_sha


def test_inputs_are_fresh_random_and_follow_the_seed(device):
    w = shapes.parse_shape("prefill", SHAPE)
    a, b, again = (ops.op("prefill").make_inputs(w, seed, device) for seed in (0, 1, 0))
    for name in "qkv":
        assert bool(a[name].any()) and torch.equal(a[name], again[name]) and not torch.equal(a[name], b[name])


MUTATIONS = {
    "reads one key too many": ("key < keys.end", "key < keys.end + 1"),
    "leaves the last row unwritten": ("if (query >= args.q_len) return;", "if (query >= args.q_len - 1) return;"),
    "forgets the rescale": ("o_regs[i] * rescale +", "o_regs[i] +"),
    "takes the strides of v for those of k": ("row<T>(args.k, args.k_stride,", "row<T>(args.k, args.v_stride,"),
    "writes a row behind the end": (
        "o[i * WARP + lane] = from_float<T>(o_regs[i] * inverse);",
        "o[i * WARP + lane] = o[i * WARP + lane + args.o_stride[1]] = from_float<T>(o_regs[i] * inverse);",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_step_fails(scalar, name, tmp_path, monkeypatch):
    old, new = MUTATIONS[name]
    assert scalar.source.count(old) == 1
    path = tmp_path / scalar.path.name
    path.write_text(scalar.source.replace(old, new).replace('"args.cuh"', '"prefill/args.cuh"'))
    wrong = steps.from_file(path, op="prefill")
    monkeypatch.setattr(steps, "step", lambda name: wrong)  # the operator looks its step up by name
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows = parity.check(wrong, shapes.parse_shape("prefill", SHAPE), 0, "emulation")
    assert not rows[1].passed
    if name == "writes a row behind the end":
        assert any("changed 128 guard elements" in str(w.message) for w in told)


def test_a_workload_of_another_op_is_refused(scalar):
    with pytest.raises(ValueError, match="is of decode, and prefill/01_scalar is a step of prefill"):
        parity.check(scalar, "decode/d512-16x1-b1-kv4k-bf16")


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"step": 3}, TypeError, "step: a name or a Step is needed, not int"),
        ({"workload": 3}, TypeError, "workload: a name or a Workload is needed, not int"),
        ({"seed": "0"}, TypeError, "seed: an int is needed, not str"),
        ({"seed": -1}, ValueError, "seed: -1 must be from 0 to"),
        ({"seed": 2**64}, ValueError, "seed: 18446744073709551616 must be from 0 to"),
        ({"run": "here"}, TypeError, "run: a RunWriter or None is needed, not str"),
        ({"device": 3}, ValueError, "device: '3' must be auto"),
    ],
)
def test_check_refuses_by_name(changes, error, told):
    with pytest.raises(error, match=f"^{told}"):
        parity.check(**{"step": "prefill/01", "workload": "prefill/published-instance", **changes})
