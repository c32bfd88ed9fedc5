"""The FP4 and FP8 matvecs: every step against float64, and the inputs that break software of this kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mila_kernels.linear as linear
from mila_kernels import build, reference, steps
from mila_kernels.linear import Fp4Weight, Fp8Weight, quantize_fp4, quantize_fp8
from mila_kernels.ops import op
from mila_kernels.shapes import linear_workload

STEPS = [s.id for name in ("matvec_fp4", "matvec_fp8") for s in steps.steps(name)]
STEPS_FP4 = [s.id for s in steps.steps("matvec_fp4")]
TENSOR_CORE_STEPS = [s for s in STEPS if linear.step_layout(steps.step(s)) != "rows"]
BF16, FP16 = torch.bfloat16, torch.float16


def quantize(step: str, w: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> Fp4Weight | Fp8Weight:
    return quantize_fp4(w, scale_dtype=scale_dtype) if step.startswith("matvec_fp4") else quantize_fp8(w)


def matvec(step: str, x: torch.Tensor, w: Any, **more: Any) -> torch.Tensor:
    return (linear.matvec_fp4 if isinstance(w, Fp4Weight) else linear.matvec_fp8)(x, w, step=step, **more)


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rel_l2(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def bound(y: torch.Tensor) -> float:
    w = linear_workload("matvec_fp4", n=y.shape[1], k=128, m=y.shape[0], dtype=linear.DTYPE_NAMES[y.dtype])
    return op("matvec_fp4").bound(w)


def skip_unless_it_runs(step: str, device: torch.device) -> None:
    reason = build.device_misfit(steps.step(step), device)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_against_float64(step: str, dtype: torch.dtype, device: torch.device, large: bool) -> None:
    skip_unless_it_runs(step, device)
    shapes = [(1, 40, 384), (3, 37, 1280), (16, 33, 512), (9, 100, 128), (5, 1, 256), (2, 16, 3840)]
    if large:
        shapes += [
            (1, 30720, 3840),
            (1, 3840, 15360),
            (8, 3840, 4096),
            (16, 8192, 3840),
            (16, 3840, 15360),
            (1, 8704, 8192),
        ]
    for seed, (m, n, k) in enumerate(shapes):
        w = quantize(step, random((n, k), seed) / k**0.5, (torch.float32, BF16)[seed % 2]).to(device)
        x, bias = random((m, k), seed + 50, dtype).to(device), random((n,), seed + 90, dtype).to(device)
        for b in (None, bias):
            y = matvec(step, x, w, bias=b)
            assert y.shape == (m, n) and y.dtype == dtype
            assert rel_l2(y, reference.matvec(x, w.dequantize(torch.float64), b)) <= bound(y), (m, n, k)


@pytest.mark.parametrize("step", ["matvec_fp4/01_lookup_table", STEPS_FP4[-1]])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(0, 16), n=st.integers(1, 90), groups=st.integers(1, 5), dtype=st.sampled_from((BF16, FP16)),
    scale_dtype=st.sampled_from((torch.float32, BF16)), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    step: str, device: torch.device, m: int, n: int, groups: int, dtype: torch.dtype, scale_dtype: torch.dtype,
    bias: bool, seed: int,
) -> None:  # fmt: skip
    skip_unless_it_runs(step, device)
    k = 128 * groups
    w = quantize_fp4(random((n, k), seed) / k**0.5, scale_dtype=scale_dtype).to(device)
    x, b = random((m, k), seed + 1, dtype).to(device), random((n,), seed + 2, dtype).to(device) if bias else None
    y = matvec(step, x, w, bias=b)
    assert y.shape == (m, n) and y.dtype == dtype
    assert not m or rel_l2(y, reference.matvec(x, w.dequantize(torch.float64), b)) <= bound(y)


@pytest.mark.parametrize("step", ["matvec_fp4/15_two_blocks", "matvec_fp4/16_few_instructions"])
@pytest.mark.parametrize("m, n, k", [(1, 250, 1024), (3, 250, 1024), (4, 130, 4096), (1, 40, 15360)])
def test_few_rows_on_columns_that_come_out_even(step: str, m: int, n: int, k: int, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = quantize_fp4(random((n, k), 3) / k**0.5, scale_dtype=(torch.float32, BF16)[m % 2]).to(device)
    x, bias = random((m, k), 4, BF16).to(device), random((n,), 5, BF16).to(device)
    for factor in (1.0, 2.0**100):
        y = matvec(step, x * factor, w, bias=bias)
        assert rel_l2(y, reference.matvec(x * factor, w.dequantize(torch.float64), bias)) <= bound(y)
    assert torch.equal(matvec(step, x, w, chained=True), matvec(step, x, w))
    if device.type == "cpu":
        with build.emulation(check=True, seed=m):
            assert torch.equal(matvec(step, x, w), matvec(step, x, w))


# One round in one straight line, of one, two and four passes; several rounds; groups that do not come out even.
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("n, k", [(90, 1024), (250, 3840), (40, 8192), (130, 8192), (40, 15360), (60, 640)])
def test_x_as_sums_of_eight_bits(m: int, n: int, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = "matvec_fp4/20_fp8_products"
    skip_unless_it_runs(step, device)
    if device.type == "cpu":  # what sm_90 has, or four passes do not fit
        monkeypatch.setattr(linear, "_device_limits", lambda device: (3, 227 * 1024))
    w = quantize_fp4(random((n, k), 3) / k**0.5, scale_dtype=(torch.float32, BF16)[m % 2]).to(device)
    x, bias = random((m, k), 4, BF16), random((n,), 5, BF16).to(device)
    sizes = torch.exp2(torch.randint(-60, 60, (m, k // 128), generator=torch.Generator().manual_seed(6)).float())
    spread = torch.exp2(torch.randint(-10, 1, (m, k), generator=torch.Generator().manual_seed(7)).float())
    for factor in (torch.ones(m, k), sizes.repeat_interleave(128, 1), spread, torch.full((m, k), 2.0**100)):
        some = (x * factor).to(BF16).to(device)
        y = matvec(step, some, w, bias=bias)
        assert rel_l2(y, reference.matvec(some, w.dequantize(torch.float64), bias)) <= bound(y)
    x = x.to(device)
    want = matvec(step, x, w)
    assert torch.equal(matvec(step, x, w, chained=True), want)
    if device.type == "cpu":
        with build.emulation(check=True, seed=m):
            assert torch.equal(matvec(step, x, w), want)


def test_a_step_for_few_rows_is_chosen_for_few_rows() -> None:
    few = steps.step("matvec_fp4/20_fp8_products")
    assert few.most_rows is not None
    for rows, want in ((1, True), (few.most_rows, True), (few.most_rows + 1, False), (None, False)):
        chosen = steps.choose("matvec_fp4", None, lambda s: None, rows)
        assert (chosen.most_rows is not None) == want


@pytest.mark.parametrize("step", STEPS)
def test_check_mode_is_clean_and_seeds_agree(step: str) -> None:
    w, x = quantize(step, random((37, 768), 1)), random((3, 768), 2, BF16)
    want = matvec(step, x, w)
    for seed in range(3):
        with build.emulation(check=True, seed=seed):
            assert torch.equal(matvec(step, x, w), want)


@pytest.mark.parametrize("step", STEPS)
def test_rows_of_x_may_be_strided_and_nothing_between_them_counts(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w, x = quantize(step, random((20, 256), 1)).to(device), random((3, 256), 2, BF16).to(device)
    padded = torch.full((5, 256 + 64), math.nan, dtype=BF16, device=device)
    view = padded[1:4, 32:288]
    view.copy_(x)
    assert torch.equal(matvec(step, view, w), matvec(step, x, w))


@pytest.mark.parametrize("step", STEPS)
def test_rows_of_x_do_not_mix(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = quantize(step, torch.ones(17, 256)).to(device)
    x = torch.zeros(3, 256, dtype=BF16)
    x[1] = 1
    x[2, 0] = 1e4
    x = x.to(device)
    assert matvec(step, x, w).float().tolist() == [
        [0.0] * 17,
        [256.0] * 17,
        [float(torch.tensor(1e4, dtype=BF16))] * 17,
    ]
    x[0] = -0.0
    assert matvec(step, x[:1], w).abs().max() == 0
    nan = x.clone()
    nan[0, 7] = math.nan
    y = matvec(step, nan, w)
    assert bool(torch.isnan(y[0]).all()) and torch.equal(y[1:], matvec(step, x, w)[1:])


@pytest.mark.parametrize("step", [s for s in STEPS if s.startswith("matvec_fp4")])
def test_groups_of_zeros_and_mixed_groups(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = torch.zeros(3, 256)
    w[1, 128:] = 1.5
    w[2] = 1.5
    w[2, 3] = 6e4
    y = matvec(step, torch.ones(1, 256, dtype=BF16, device=device), quantize_fp4(w).to(device))
    assert y[0, :2].tolist() == [0.0, 192.0] and bool(torch.isfinite(y[0, 2]))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "x_size, w_size", [(2.0**100, 1.0), (2.0**40, 2.0**60), (2.0**-60, 2.0**-50), (1.0, 2.0**-110)]
)
def test_far_from_one(step: str, x_size: float, w_size: float, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = quantize(step, random((64, 256), 1).clamp(-3, 3) * w_size).to(device)
    x = (random((2, 256), 2) * x_size).to(BF16).to(device)
    y = matvec(step, x, w)
    assert (
        rel_l2(
            y.double() / (x_size * w_size), reference.matvec(x.double() / x_size, w.dequantize(torch.float64) / w_size)
        )
        < 2e-3
    )


@pytest.mark.parametrize("step", STEPS)
def test_infinity_arrives(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = quantize(step, torch.ones(16, 128)).to(device)
    for dtype in (BF16, FP16):
        x = torch.ones(1, 128, dtype=dtype, device=device)
        x[0, 9] = math.inf
        assert matvec(step, x, w).float().tolist() == [[math.inf] * 16]


@pytest.mark.parametrize("step", TENSOR_CORE_STEPS)
def test_x_that_does_not_fit_shared_memory_comes_in_parts(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w, x = quantize(step, random((16, 8192), 1)).to(device), random((16, 8192), 2, FP16).to(device)
    y = matvec(step, x, w)
    assert rel_l2(y, reference.matvec(x, w.dequantize(torch.float64))) <= bound(y)


# n, k: several tiles a warp in one block each, clusters of two with one round and with two. Emulation
# runs no larger cluster of so many threads.
@pytest.mark.parametrize("step", ["matvec_fp4/13_tile_per_warp", "matvec_fp4/16_few_instructions"])
@pytest.mark.parametrize("n, k", [(1201, 384), (200, 3840), (390, 3840)])
@pytest.mark.parametrize("m, dtype", [(16, BF16), (11, BF16), (7, FP16), (16, FP16)])
def test_many_columns_a_tile_per_warp(step: str, n: int, k: int, m: int, dtype: torch.dtype) -> None:
    w, x = quantize_fp4(random((n, k), 1) / k**0.5, scale_dtype=BF16), random((m, k), 2, dtype)
    want = reference.matvec(x, w.dequantize(torch.float64))
    x[1, 5] = 2.0**40 if dtype == BF16 else 6e4  # too large to be scaled
    y = matvec(step, x, w)
    rest = [i for i in range(m) if i != 1]
    assert rel_l2(y[rest], want[rest]) <= bound(y)
    assert rel_l2(y[1:2], reference.matvec(x[1:2], w.dequantize(torch.float64))) <= bound(y)
    assert torch.equal(y, matvec(step, x, w, chained=True))


@pytest.mark.parametrize("step", ["matvec_fp4/13_tile_per_warp", "matvec_fp4/16_few_instructions"])
@pytest.mark.parametrize("n, k", [(700, 256), (200, 3840)])
def test_many_columns_in_check_mode(step: str, n: int, k: int) -> None:
    w, x = quantize_fp4(random((n, k), 1)), random((16, k), 2, BF16)
    want = matvec(step, x, w)
    with build.emulation(check=True, seed=1):
        assert torch.equal(matvec(step, x, w), want)


# One block with all columns, with more tiles than sums fit and with fewer; clusters of two; FP16 as two terms.
@pytest.mark.parametrize(
    "step",
    [
        "matvec_fp4/17_x_in_registers",
        "matvec_fp4/18_short_sums",
        "matvec_fp4/19_words_in_shared_memory",
        "matvec_fp4/21_second_tile_later",
    ],
)
@pytest.mark.parametrize("n, k", [(600, 3840), (40, 2048), (140, 8192), (820, 2048)])
@pytest.mark.parametrize("m, dtype", [(8, BF16), (16, BF16), (11, BF16), (7, FP16)])
def test_x_in_registers(step: str, n: int, k: int, m: int, dtype: torch.dtype, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w = quantize_fp4(random((n, k), 1) / k**0.5, scale_dtype=(torch.float32, BF16)[m % 2]).to(device)
    x, bias = random((m, k), 2, dtype).to(device), random((n,), 3, dtype).to(device)
    for factor in (1.0, 2.0**100 if dtype == BF16 else 2.0**10):
        y = matvec(step, x * factor, w, bias=bias)
        assert rel_l2(y, reference.matvec(x * factor, w.dequantize(torch.float64), bias)) <= bound(y)
    want = matvec(step, x, w)
    assert torch.equal(matvec(step, x, w, chained=True), want)
    if device.type == "cpu":
        with build.emulation(check=True, seed=m):
            assert torch.equal(matvec(step, x, w), want)


# A warp owns a tile: clusters of 8 in one round, warps without a tile; clusters of 2 in two rounds, the last not whole.
@pytest.mark.parametrize("n, k, multiprocessors", [(50, 15360, 9), (20, 8192, 9), (300, 3840, 2)])
@pytest.mark.parametrize("m", [5, 11, 16])
def test_a_cluster_shares_the_columns_of_its_tiles(
    n: int, k: int, multiprocessors: int, m: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "matvec_fp4/22_wgmma_tiles"
    skip_unless_it_runs(step, device)
    if device.type == "cpu":  # so few that a cluster takes several tiles
        monkeypatch.setattr(linear, "_device_limits", lambda device: (multiprocessors, 227 * 1024))
    w = quantize_fp4(random((n, k), 3) / k**0.5, scale_dtype=(torch.float32, BF16)[m % 2]).to(device)
    x, bias = random((m, k), 4, BF16).to(device), random((n,), 5, BF16).to(device)
    for factor in (1.0, 2.0**100):
        y = matvec(step, x * factor, w, bias=bias)
        assert rel_l2(y, reference.matvec(x * factor, w.dequantize(torch.float64), bias)) <= bound(y)
    want = matvec(step, x, w)
    assert rel_l2(want, reference.matvec(x, w.dequantize(torch.float64))) <= bound(want)
    assert torch.equal(matvec(step, x, w, chained=True), want)
    if device.type == "cpu":
        with build.emulation(check=True, seed=m):
            assert torch.equal(matvec(step, x, w), want)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_the_error_is_no_worse_than_a_librarys_in_bf16(m: int, device: torch.device, large: bool) -> None:
    n, k = (3840, 15360) if large else (48, 3840)
    w, x = quantize_fp4(random((n, k), 1) / k**0.5).to(device), random((m, k), 2, BF16).to(device)
    truth = reference.matvec(x, w.dequantize(torch.float64))
    librarys = rel_l2(torch.nn.functional.linear(x, w.dequantize(BF16)), truth)
    assert rel_l2(linear.matvec_fp4(x, w), truth) <= min(librarys, 2e-3)


@pytest.mark.parametrize("name", ["matvec_fp4", "matvec_fp8"])
def test_every_number_of_rows(name: str, device: torch.device) -> None:
    w = quantize(name, random((32, 256), 1)).to(device)
    whole = random((16, 256), 2, BF16).to(device)
    function = linear.matvec_fp4 if name == "matvec_fp4" else linear.matvec_fp8
    for m in range(17):
        y = function(whole[:m], w)
        assert y.shape == (m, 32)
        if m:
            assert rel_l2(y, reference.matvec(whole[:m], w.dequantize(torch.float64))) < 2.0**-8


def test_shuffling_before_the_call_or_by_it_is_the_same() -> None:
    w, x = quantize_fp4(random((40, 256), 1)), random((1, 256), 2, BF16)
    shuffled = w.shuffle()
    assert shuffled.layout != "rows" and w.shuffle() is shuffled
    assert torch.equal(linear.matvec_fp4(x, shuffled), linear.matvec_fp4(x, w))
    assert w.shuffle("01_lookup_table") is w
    # A weight in one layout serves a step that needs another.
    assert rel_l2(linear.matvec_fp4(x, shuffled, step="01"), reference.matvec(x, w.dequantize(torch.float64))) < 2.0**-8


def test_arguments_are_refused_by_name() -> None:
    w4, w8 = quantize_fp4(torch.ones(16, 256)), quantize_fp8(torch.ones(16, 256))
    x = torch.ones(2, 256, dtype=BF16)
    for function, w in ((linear.matvec_fp4, w4), (linear.matvec_fp8, w8)):
        with pytest.raises(ValueError, match="x: its 255 columns must equal the 256 of w"):
            function(x[:, :255], w)
        with pytest.raises(ValueError, match=r"x: dtype torch.float32"):
            function(x.float(), w)
        with pytest.raises(ValueError, match="x: shape .* 2 dims"):
            function(x[0], w)
        with pytest.raises(ValueError, match="x: 17 rows are more than the 16"):
            function(torch.ones(17, 256, dtype=BF16), w)
        with pytest.raises(ValueError, match="x: the last dim's stride is 2"):
            function(torch.ones(2, 512, dtype=BF16)[:, ::2], w)
        with pytest.raises(ValueError, match=r"bias: shape \(15,\) must be \(16,\)"):
            function(x, w, bias=torch.ones(15, dtype=BF16))
        with pytest.raises(ValueError, match="bias: torch.float32"):
            function(x, w, bias=torch.ones(16))
        with pytest.raises(ValueError, match="x: requires grad"):
            function(x.clone().requires_grad_(), w)
        with pytest.raises(TypeError, match="x: a torch.Tensor"):
            function([1.0], w)
        with pytest.raises(ValueError, match="step: prefill/01_scalar"):
            function(x, w, step="prefill/01_scalar")
        odd = torch.ones(2 * 256 + 8, dtype=BF16)[1:513].view(2, 256)
        with pytest.raises(ValueError, match="x: address and row stride must be multiples of 16 bytes"):
            function(odd, w)
    with pytest.raises(TypeError, match="w: an Fp4Weight .* Fp8Weight"):
        linear.matvec_fp4(x, w8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="w: an Fp8Weight .* Fp4Weight"):
        linear.matvec_fp8(x, w4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="w: group_size 64 must be 128"):
        linear.matvec_fp4(x, quantize_fp4(torch.ones(16, 256), 64))


@pytest.mark.parametrize("name", ["matvec_fp4", "matvec_fp8"])
def test_operation_entry(name: str, device: torch.device) -> None:
    w = linear_workload(name, n=80, k=256, m=2)
    inputs = op(name).make_inputs(w, 3, device)
    again = op(name).make_inputs(w, 3, device)
    assert torch.equal(inputs["x"], again["x"]) and torch.equal(inputs["w"].codes, again["w"].codes)
    (y,), (want,) = op(name).run(**inputs), op(name).reference(**inputs)
    assert want.dtype == torch.float64 and rel_l2(y, want) <= op(name).bound(w)
    assert op(name).flops(w) == 2 * 80 * 256 * 2
    assert op(name).bytes(w) == inputs["w"].nbytes + 2 * 2 * (80 + 256)


def test_under_torch_compile_the_shapes_are_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    w, x = quantize_fp4(torch.ones(40, 256)).shuffle(), torch.ones(3, 256, dtype=FP16)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w.codes, w.scales)]
        y = torch.ops.mila_kernels.matvec_fp4(*fakes, None, 40, w.layout, "any", False)
    assert y.shape == (3, 40) and y.dtype == FP16
