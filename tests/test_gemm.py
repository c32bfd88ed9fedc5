"""The W4A8 product: every step against float64, and the inputs that broke software of this kind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mila_kernels.gemm as gemm
from mila_kernels import build, outputs, paths, reference, steps
from mila_kernels.gemm import gemm_w4a8, quantize_activations
from mila_kernels.linear import Fp4Weight, quantize_fp4
from mila_kernels.ops import op
from mila_kernels.shapes import linear_workload

STEPS = [s.id for s in steps.steps("gemm_w4a8")]
EXACT = [s.id for s in steps.steps("gemm_w4a8") if s.bound is None]  # no weight is rounded
OURS = [s.id for s in steps.steps("gemm_w4a8") if s.order > 3]  # no library multiplies
BF16, FP16 = torch.bfloat16, torch.float16


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(n: int, k: int, seed: int, scale_dtype: torch.dtype = torch.float32) -> Fp4Weight:
    return quantize_fp4(random((n, k), seed) / k**0.5, scale_dtype=scale_dtype)


def rel_l2(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def bound(step: str, y: torch.Tensor) -> float:
    w = linear_workload("gemm_w4a8", n=y.shape[1], k=128, m=y.shape[0])
    return steps.step(step).bound or op("gemm_w4a8").bound(w)


def truth(codes: torch.Tensor, scales: torch.Tensor, w: Fp4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return reference.matvec(codes.double() * scales.double()[:, None], w.dequantize(torch.float64), bias)


def skip_unless_it_runs(step: str, device: torch.device) -> None:
    reason = build.device_misfit(steps.step(step), device)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("step", STEPS)
def test_against_float64(step: str, device: torch.device, large: bool) -> None:
    skip_unless_it_runs(step, device)
    shapes = [(40, 64, 384), (3, 208, 256), (300, 144, 128)]
    if large:
        shapes += [(1024, 30720, 3840), (1000, 3840, 15360), (77, 8192, 3840), (4096, 3840, 4096)]
    for seed, (m, n, k) in enumerate(shapes):
        w = weight(n, k, seed, (torch.float32, BF16)[seed % 2]).to(device)
        codes, scales = (t.to(device) for t in reference.quantize_activations(random((m, k), seed + 50)))
        out_dtype = (BF16, FP16)[seed % 2]
        bias = random((n,), seed + 90, out_dtype).to(device) if seed != 1 else None
        y = gemm_w4a8((codes, scales), w, step=step, bias=bias, out_dtype=out_dtype)
        assert y.shape == (m, n) and y.dtype == out_dtype and y.is_contiguous()
        assert rel_l2(y, truth(codes, scales, w, bias)) <= bound(step, y), (m, n, k)


@pytest.mark.parametrize("step", ["gemm_w4a8/04_fused_mma", STEPS[-1]])
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(0, 150), n=st.integers(1, 150), groups=st.integers(1, 3), out_dtype=st.sampled_from((BF16, FP16)),
    scale_dtype=st.sampled_from((torch.float32, BF16)), bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    step: str, device: torch.device, m: int, n: int, groups: int, out_dtype: torch.dtype, scale_dtype: torch.dtype,
    bias: bool, seed: int,
) -> None:  # fmt: skip
    skip_unless_it_runs(step, device)
    w = weight(n, 128 * groups, seed, scale_dtype).to(device)
    codes, scales = (t.to(device) for t in reference.quantize_activations(random((m, 128 * groups), seed + 1)))
    b = random((n,), seed + 2, out_dtype).to(device) if bias else None
    y = gemm_w4a8((codes, scales), w, step=step, bias=b, out_dtype=out_dtype)
    assert y.shape == (m, n) and y.dtype == out_dtype
    assert not m or rel_l2(y, truth(codes, scales, w, b)) <= bound(step, y)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations_are_quantised_inside(step: str, dtype: torch.dtype, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    x, w = random((33, 256), 1, dtype).to(device), weight(64, 256, 2).to(device)
    y = gemm_w4a8(x, w, step=step)
    if steps.step(step).order == 1:
        assert rel_l2(y, reference.matvec(x, w.dequantize(torch.float64))) <= bound(step, y)
        return
    codes, scales = quantize_activations(x, step=step)
    assert torch.equal(y, gemm_w4a8((codes, scales), w, step=step))
    if scales.shape[0] > 1:
        want_codes, want_scales = reference.quantize_activations(x)
        assert torch.equal(scales, want_scales)
        assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert rel_l2(y, reference.matvec(x, w.dequantize(torch.float64))) < 6e-2


# Tiles of 256, 192 and 128 tokens, by the waves on three SMs; a wave of 256 and one tile, in halves from step 13 on.
@pytest.mark.parametrize("m, n", [(250, 384), (180, 384), (120, 384), (250, 512)])
@pytest.mark.parametrize("k", [128, 384])
@pytest.mark.parametrize("step", [s for s in OURS if int(s.split("/")[1][:2]) > 10])
def test_every_tile_size(m: int, n: int, k: int, step: str) -> None:
    w = weight(n, k, 1)
    codes, scales = reference.quantize_activations(random((m, k), 2))
    with build.emulation(check=True, seed=m):
        y = gemm_w4a8((codes, scales), w, step=step)
    assert rel_l2(y, truth(codes, scales, w)) <= bound(step, y)
    # The sums of a group are exact in FP32 here, and all steps add the groups in their order.
    assert torch.equal(y, gemm_w4a8((codes, scales), w, step="gemm_w4a8/08_warp_specialised"))


# On three SMs: a tile in three parts; two tiles; four of seven, the others whole.
SPLIT = [(40, 64, 100 * 128), (250, 250, 120 * 128), (120, 896, 120 * 128)]


@pytest.mark.parametrize("m, n, k", SPLIT)
@pytest.mark.parametrize("step", [s for s in OURS if "partials" in gemm._code(steps.step(s))])
def test_tiles_cut_along_k(m: int, n: int, k: int, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the parts end, the sums are the same bits; and the counters are left at zero."""
    room = {"partials": torch.full((6, gemm.TILE), torch.nan), "arrivals": torch.zeros(12, dtype=torch.int32)}
    monkeypatch.setattr(gemm._Call, "_parts", lambda call: room)
    w = weight(n, k, 1)
    codes, scales = reference.quantize_activations(random((m, k), 2))
    found = []
    for seed in range(3):
        with build.emulation(check=seed == 0 and m < 200, seed=seed):
            found.append(gemm_w4a8((codes, scales), w, step=step))
        assert room["arrivals"].abs().max() == 0
    assert rel_l2(found[0], truth(codes, scales, w)) <= bound(step, found[0])
    assert all(torch.equal(y, found[0]) for y in found[1:])
    assert not room["partials"].isnan().all()  # a tile was cut


# On five SMs: a wave of tiles of 256 tokens, and the rest in narrow tiles of 32, 64, 96, 128 and 192.
@pytest.mark.parametrize("m, n", [(129, 768), (164, 768), (129, 896), (500, 384), (650, 256)])
@pytest.mark.parametrize("step", [s for s in OURS if int(s.split("/")[1][:2]) > 16])
def test_narrow_tiles_after_the_wide_ones(m: int, n: int, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_sm_count", lambda device: 5)
    w, bias = weight(n, 384, 1), random((n,), 3, BF16)
    codes, scales = reference.quantize_activations(random((m, 384), 2))
    found = []
    for seed in range(2):
        with build.emulation(check=True, seed=seed):
            found.append(gemm_w4a8((codes, scales), w, step=step, bias=bias))
    assert rel_l2(found[0], truth(codes, scales, w, bias)) <= bound(step, found[0])
    assert torch.equal(found[0], found[1])
    want = gemm_w4a8((codes, scales), w, step="gemm_w4a8/08_warp_specialised", bias=bias)
    assert torch.equal(found[0], want)


@pytest.mark.parametrize("step", [s for s in OURS if int(s.split("/")[1][:2]) > 4])
def test_stages_are_used_again_within_a_tile(step: str) -> None:
    """More groups of columns than there are stages, and than are one piece of code."""
    w = weight(200, 13 * 128, 1)
    codes, scales = reference.quantize_activations(random((70, 13 * 128), 2))
    with build.emulation(check=True, seed=3):
        y = gemm_w4a8((codes, scales), w, step=step)
    assert rel_l2(y, truth(codes, scales, w)) <= bound(step, y)


@pytest.mark.parametrize("step", OURS)
def test_any_number_of_rows_of_the_weight(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    codes, scales = (t.to(device) for t in reference.quantize_activations(random((5, 256), 3)))
    for n in (1, 3, 63, 130):
        w = weight(n, 256, n).to(device)
        y = gemm_w4a8((codes, scales), w, step=step)
        assert y.shape == (5, n) and rel_l2(y, truth(codes, scales, w)) <= max(bound(step, y), 2**-8)


@pytest.mark.parametrize("step", OURS)
def test_check_mode_is_clean_and_seeds_agree(step: str) -> None:
    codes, scales = reference.quantize_activations(random((70, 384), 3))
    w, bias = weight(136, 384, 2), random((136,), 4, BF16)
    want = gemm_w4a8((codes, scales), w, step=step, bias=bias)
    for seed in range(2):
        with build.emulation(check=True, seed=seed):
            assert torch.equal(gemm_w4a8((codes, scales), w, step=step, bias=bias), want)


@pytest.mark.parametrize("step", [s for s in STEPS if s != "gemm_w4a8/01_bf16_scratch"][:3])
def test_check_mode_of_the_quantisers(step: str) -> None:
    x, w = random((5, 4224), 1, BF16), weight(16, 4224, 2)
    want = gemm_w4a8(x, w, step=step)
    with build.emulation(check=True, seed=7):
        assert torch.equal(gemm_w4a8(x, w, step=step), want)


@pytest.mark.parametrize("step", STEPS)
def test_rows_of_zeros_and_rows_that_differ(step: str, device: torch.device) -> None:
    """Case 8: a row of zeros, minus zero, all zeros; and a large element leaves other rows alone."""
    skip_unless_it_runs(step, device)
    w = quantize_fp4(torch.ones(16, 256)).to(device)
    x = torch.zeros(2, 256, dtype=BF16)
    x[1] = 1
    for zero in (0.0, -0.0):
        x[0] = zero
        y = gemm_w4a8(x.to(device), w, step=step)
        assert y.float().tolist() == [[0.0] * 16, [256.0] * 16]
    assert gemm_w4a8(torch.full((3, 256), zero, dtype=BF16, device=device), w, step=step).abs().max() == 0
    if step != "gemm_w4a8/02_tensor_scale":  # where one scale for all tokens is the fault
        x = torch.ones(2, 256, dtype=BF16)
        x[1, 0] = 1e4
        assert gemm_w4a8(x.to(device), w, step=step)[0].float().tolist() == [256.0] * 16


@pytest.mark.parametrize("step", EXACT)
def test_groups_of_zeros_and_mixed_groups(step: str, device: torch.device) -> None:
    """Case 9."""
    skip_unless_it_runs(step, device)
    values = torch.zeros(3, 256)
    values[1, 128:] = 1.5
    values[2] = 1.5
    values[2, 3] = 6e4
    y = gemm_w4a8(torch.ones(1, 256, dtype=BF16, device=device), quantize_fp4(values).to(device), step=step)
    assert y[0, :2].tolist() == [0.0, 192.0] and bool(torch.isfinite(y[0, 2]))


@pytest.mark.parametrize("step", EXACT)
def test_the_error_does_not_grow_with_the_columns(step: str, device: torch.device, large: bool) -> None:
    skip_unless_it_runs(step, device)
    for k in (16384, 65536, 131072) if large else (8192,):
        w = weight(64, k, k, BF16).to(device)
        codes, scales = (t.to(device) for t in reference.quantize_activations(random((16, k), 1)))
        # Rounding to BF16 is about 1.65e-3 of it.
        assert rel_l2(gemm_w4a8((codes, scales), w, step=step), truth(codes, scales, w)) <= 1.8e-3, k


@pytest.mark.parametrize("step", EXACT)
def test_a_long_sum_of_ones(step: str, device: torch.device, large: bool) -> None:
    """Case 6: unpromoted FP8 sums stop growing."""
    skip_unless_it_runs(step, device)
    for k in (1024, 65536, 131072) if large else (4096,):
        w, x = quantize_fp4(torch.ones(8, k)).to(device), torch.ones(2, k, dtype=BF16, device=device)
        assert gemm_w4a8(x, w, step=step).float().unique().tolist() == [float(k)]


@pytest.mark.parametrize("step", [s for s in STEPS if s != "gemm_w4a8/01_bf16_scratch"])
def test_a_nan_stays_in_its_token(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    if step == "gemm_w4a8/02_tensor_scale":
        pytest.skip("one scale for all tokens")
    w, x = weight(16, 256, 1).to(device), random((4, 256), 2, BF16).to(device)
    want = gemm_w4a8(x, w, step=step)
    for bad in (math.nan, math.inf):
        x[1, 77] = bad
        y = gemm_w4a8(x, w, step=step)
        assert bool(torch.isnan(y[1]).all()) and torch.equal(y[[0, 2, 3]], want[[0, 2, 3]])


@pytest.mark.parametrize("step", EXACT)
def test_tokens_of_any_magnitude(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    sizes = torch.logspace(-8, 7, 16)
    x = (random((16, 256), 1) * sizes[:, None]).to(BF16).to(device)
    w = weight(128, 256, 2).to(device)
    y, want = gemm_w4a8(x, w, step=step).double(), reference.matvec(x, w.dequantize(torch.float64))
    assert ((y - want).norm(dim=1) / want.norm(dim=1)).max() < 5e-2


@pytest.mark.parametrize("step", STEPS)
def test_scratch_is_not_stale_and_guards_stay(step: str, device: torch.device) -> None:
    """Other activations in the same buffers, more rows after fewer, no rows; nothing outside outputs and scratch."""
    skip_unless_it_runs(step, device)
    w, buffer = weight(64, 256, 1).to(device), torch.empty(50, 256, dtype=BF16, device=device)
    for m, seed in ((20, 1), (20, 2), (50, 3), (0, 4), (7, 5)):
        x = buffer[:m]
        x.copy_(random((m, 256), seed))
        with outputs.guarding() as changed:
            y = gemm_w4a8(x, w, step=step)
        assert y.shape == (m, 64) and changed() == 0
        if m:
            assert rel_l2(y, reference.matvec(x, w.dequantize(torch.float64))) < 6e-2


@pytest.mark.parametrize("step", STEPS)
def test_rows_may_be_strided_and_nothing_between_them_counts(step: str, device: torch.device) -> None:
    skip_unless_it_runs(step, device)
    w, x = weight(32, 256, 1).to(device), random((9, 256), 2, BF16).to(device)
    padded = torch.full((11, 256 + 64), math.nan, dtype=BF16, device=device)
    view = padded[1:10, 32:288]
    view.copy_(x)
    assert torch.equal(gemm_w4a8(view, w, step=step), gemm_w4a8(x, w, step=step))
    codes, scales = (t.to(device) for t in reference.quantize_activations(x))
    wide = torch.full((9, 384), 0x7F, dtype=torch.uint8, device=device)
    wide[:, 64:320] = codes.view(torch.uint8)
    strided = wide[:, 64:320].view(torch.float8_e4m3fn)
    assert torch.equal(gemm_w4a8((strided, scales), w, step=step), gemm_w4a8((codes, scales), w, step=step))
    one = codes[:1].as_strided((1, 256), (1, 1))  # the stride of a single row means nothing
    assert torch.equal(gemm_w4a8((one, scales[:1]), w, step=step), gemm_w4a8((codes[:1], scales[:1]), w, step=step))


def test_blocks_hold_what_the_kernels_unfold() -> None:
    """The five operations that the kernels decode a word by, on every word of a shuffled weight."""
    w = weight(100, 256, 1)
    blocks, _ = gemm._laid_out(w, "blocks")
    words = blocks[:, :, : 64 * 64].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    first = words & 0x9C9C9C9C
    second = (((words << 2) & 0x8C8C8C8C) | ((words >> 2) & ~0x8C8C8C8C)) & 0x9C9C9C9C
    values = torch.stack((first, second), -1)  # group, unit, (2, warp, g, t, k-step, columns from 16), row
    values = torch.stack([values >> 8 * i & 255 for i in range(4)], -1).to(torch.uint8).view(torch.float8_e4m3fn)
    values = values.float().view(2, 2, 2, 4, 8, 4, 2, 2, 2, 4)  # group unit half warp g t step from16 row byte
    rows = values.permute(1, 3, 8, 4, 0, 2, 6, 7, 5, 9).reshape(128, 256)[:100] * 64
    scales = blocks[:, :, 64 * 64 :].contiguous().view(torch.float32).permute(1, 2, 0).reshape(128, 2)
    assert torch.equal(rows.view(100, 2, 128) * scales[:100, :, None], w.dequantize().view(100, 2, 128))
    assert scales[100:].abs().max() == 0
    assert gemm._laid_out(w, "blocks")[0] is blocks  # made once


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.ones(2, 200, dtype=BF16)}, "x: its 200 columns must equal the 256 of w"),
        ({"x": torch.ones(256, 2, dtype=BF16).T}, "x: the last dim's stride is 2"),
        ({"x": torch.ones(2, 256)}, "x: dtype torch.float32"),
        ({"x": torch.ones(256, dtype=BF16)}, "x: shape"),
        ({"x": (torch.ones(2, 256, dtype=BF16), torch.ones(2))}, "x codes: dtype"),
        ({"x": (torch.ones(2, 256).to(torch.float8_e4m3fn), torch.ones(3))}, "x scales: shape"),
        ({"bias": torch.ones(3, dtype=BF16)}, "bias: shape"),
        ({"bias": torch.ones(64, dtype=FP16)}, "bias: torch.float16"),
        ({"out_dtype": torch.float64}, "out_dtype: torch.float64"),
        ({"step": "gemm_w4a8/99"}, "step: 'gemm_w4a8/99' is unknown"),
        ({"step": "matvec_fp4/01"}, "step: matvec_fp4/01_lookup_table is a step of matvec_fp4"),
        ({"w": quantize_fp4(torch.ones(64, 256), group_size=64)}, "w: group_size 64 must be 128"),
        (
            {"w": quantize_fp4(torch.ones(65, 256)), "step": "02_tensor_scale"},
            "w: its 65 rows must be a multiple of 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, words: str) -> None:
    call = {"x": torch.ones(2, 256, dtype=BF16), "w": quantize_fp4(torch.ones(64, 256)), **change}
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        gemm_w4a8(**call)


def test_columns_that_are_no_multiple_of_the_group_are_refused() -> None:
    """Case 10."""
    with pytest.raises(ValueError, match="200 columns must be a multiple of the group size 128"):
        quantize_fp4(torch.full((3, 200), 1.5))
    with pytest.raises(ValueError, match="200 columns must be a multiple of 128"):
        quantize_activations(torch.ones(3, 200, dtype=BF16))


@pytest.mark.parametrize("step", STEPS[:1] + STEPS[-1:])
def test_the_operator_has_a_schema_and_a_fake(step: str) -> None:
    w, x = weight(20, 256, 1) if step in OURS else weight(32, 256, 1), random((3, 256), 2, BF16)
    codes, scales = gemm._laid_out(w, gemm.step_layout(steps.step(step)))
    call = (x, None, codes, scales, None, w.n, step, BF16)
    torch.library.opcheck(torch.ops.mila_kernels.gemm_w4a8.default, call, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("step", [s.id for s in steps.steps("gemm_w4a8") if s.order <= 3])
def test_under_a_sanitizer_the_product_is_not_the_librarys(
    step: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is the same, to the rounding of both outputs to BF16 (1.65e-3 each) and of the library's FP8 sums."""
    skip_unless_it_runs(step, device)
    x, w = random((40, 256), 2).to(device, BF16), quantize_fp4(random((64, 256), 1).to(device))
    assert gemm._has_library(device) == (device.type == "cuda")
    usual = gemm_w4a8(x, w, step=step)
    monkeypatch.setenv(paths.WATCHED, "memcheck")
    assert not gemm._has_library(device)
    assert rel_l2(gemm_w4a8(x, w, step=step), usual.double()) <= 4e-3
