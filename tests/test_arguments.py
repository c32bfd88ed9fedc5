"""What is refused, operation by operation: the error names the argument, what came and what is allowed, and nothing has
been launched or written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mila_kernels as mk
from mila_kernels import build, gemm, linear, steps
from mila_kernels.layouts import FP4_LAYOUTS

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
HUGE = 10**400  # no float holds it
TOO_LARGE = 2**31 - 2**16


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps launched, none of them really."""
    found: list[str] = []
    monkeypatch.setattr(build.Kernel, "__call__", lambda self, *args, **kwargs: found.append(self.step.id))
    return found


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def wide(tokens: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """[1, tokens, 1, 64] over memory for one token."""
    return ones(1, 1, 1, 64, dtype=dtype).expand(1, tokens, 1, 64)


def pool(pages: int) -> torch.Tensor:
    """Pages over memory for one."""
    return ones(1, 16, 2, 64).expand(pages, 16, 2, 64)


def grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(**more: Any) -> mk.ContiguousCache:
    return mk.ContiguousCache(ones(2, 16, 2, 64), ones(2, 16, 2, 64), **more)


def fp8(**more: Any) -> mk.ContiguousCache:
    k = ones(2, 16, 2, 64).to(E4M3)
    return mk.ContiguousCache(k, k.clone(), **more)


def ring() -> mk.RingCache:
    return mk.RingCache(ones(2, 16, 2, 64), ones(2, 16, 2, 64))


def paged(**more: Any) -> mk.PagedCache:
    fields = {"k": ones(4, 16, 2, 64), "v": ones(4, 16, 2, 64), "page_table": torch.zeros(2, 3, dtype=torch.int32)}
    return mk.PagedCache(**{**fields, **more})


def call(name: str, **changes: Any) -> Any:
    """The operation on arguments that fit, but for those given."""
    arguments: dict[str, dict[str, Any]] = {
        "prefill": {"q": ones(2, 3, 4, 64), "k": ones(2, 5, 2, 64), "v": ones(2, 5, 2, 64)},
        "decode": {"q": ones(2, 1, 4, 64), "cache": cache(), "lengths": int32(3, 4)},
        "prefill_ring": {"q": ones(2, 3, 4, 64), "cache": ring(), "lengths": int32(3, 4)},
        "prefill_through_ring": {
            "q": ones(2, 3, 4, 64), "k": ones(2, 3, 2, 64), "v": ones(2, 3, 2, 64), "cache": ring(),
            "lengths": int32(0, 0), "window": 8,
        },
        "matvec_fp4": {"x": ones(2, 256), "w": linear.quantize_fp4(ones(16, 256))},
        "matvec_fp8": {"x": ones(2, 256), "w": linear.quantize_fp8(ones(16, 256))},
        "gemm_w4a8": {"x": ones(2, 256), "w": linear.quantize_fp4(ones(16, 256))},
        "quantize_activations": {"x": ones(2, 256)},
    }  # fmt: skip
    given = {**arguments[name], **changes}
    if name == "quantize_activations":
        return mk.quantize_activations(given.pop("x"), **given)
    return getattr(mk, name)(**given)


ATTENTION = ("prefill", "decode", "prefill_ring", "prefill_through_ring")
LINEAR = ("matvec_fp4", "matvec_fp8", "gemm_w4a8", "quantize_activations")

# Operation, what is changed, the error, and how its text begins; what is allowed stands behind the match.
Q_CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q: a torch.Tensor is needed, not list"),
    ({"q": None}, TypeError, "q: a torch.Tensor is needed, not NoneType"),
    ({"q": ones(2, 3, 64)}, ValueError, r"q: shape \(2, 3, 64\) must have 4 dims"),
    ({"q": ones(2, 3, 4, 64, dtype=FP32)}, ValueError, "q: dtype torch.float32 must be torch.bfloat16 or torch.float1"),
    ({"q": ones(2, 3, 4, 64).to_sparse()}, ValueError, "q: layout torch.sparse_coo must be torch.strided"),
    ({"q": ones(2, 3, 4, 64).to("meta")}, ValueError, "q: device meta must be a CUDA device, or cpu"),
    ({"q": ones(2, 3, 4, 128)[..., ::2]}, ValueError, r"q: the last dim's stride is 2 and must be 1; pass q.cont"),
    ({"q": grad(ones(2, 3, 4, 64))}, ValueError, r"q: requires grad, .* use torch.no_grad\(\) or q.detach\(\)"),
    ({"scale": "1"}, TypeError, "scale: a float is needed, not str"),
    ({"scale": True}, TypeError, "scale: a float is needed, not bool"),
    ({"scale": math.nan}, ValueError, r"scale: nan must be finite, from -2\^80 to 2\^80"),
    ({"scale": -math.inf}, ValueError, r"scale: -inf must be finite, from -2\^80 to 2\^80"),
    ({"scale": 1e39}, ValueError, r"scale: 1e\+39 must be finite, from -2\^80 to 2\^80"),
    ({"scale": -3e38}, ValueError, r"scale: -3e\+38 must be finite, from -2\^80 to 2\^80"),
    ({"scale": HUGE}, ValueError, r"scale: an int of 1329 bits must be finite, from -2\^80 to 2\^80"),
    ({"window": 1.5}, TypeError, "window: an int or None is needed, not float"),
    ({"window": True}, TypeError, "window: an int or None is needed, not bool"),
    ({"window": 0}, ValueError, "window: 0 must be positive, or None"),
    ({"window": -HUGE}, ValueError, "window: an int of 1329 bits must be positive, or None"),
    ({"return_lse": 1}, TypeError, "return_lse: True or False is needed, not int"),
    ({"return_lse": "no"}, TypeError, "return_lse: True or False is needed, not str"),
    ({"return_lse": np.True_}, TypeError, "return_lse: True or False is needed, not bool"),
    ({"step": 3}, TypeError, "step: a name or a Step is needed, not int"),
    ({"step": b"01"}, TypeError, "step: a name or a Step is needed, not bytes"),
    ({"step": "99_none"}, ValueError, r"step: '\w+/99_none' is unknown; "),
    ({"step": "matvec_fp8/01"}, ValueError, "step: matvec_fp8/01_row_per_warp is a step of matvec_fp8, not of "),
]
LENGTHS_CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": [3, 4]}, TypeError, "lengths: a torch.Tensor is needed, not list"),
    ({"lengths": int32(3, 4).long()}, ValueError, r"lengths: torch.int64 \(2,\) on cpu must be torch.int32 \[2\]"),
    ({"lengths": int32(3)}, ValueError, r"lengths: torch.int32 \(1,\) on cpu must be torch.int32 \[2\]"),
    ({"lengths": int32(3, 4).to("meta")}, ValueError, r"lengths: .* on meta must be torch.int32 \[2\] on cpu"),
    ({"lengths": int32(3, 4, 5, 6)[::2]}, ValueError, "lengths: the stride is 2 and must be 1"),
    ({"cache": (1, 2)}, TypeError, r"cache: [\w, ]*RingCache[\w, ]* is needed, not tuple"),
]
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *((name, *case) for name in ATTENTION for case in Q_CASES),
    *((name, *case) for name in ("decode", "prefill_ring", "prefill_through_ring") for case in LENGTHS_CASES),
    ("prefill", {"k": 1}, TypeError, "k: a torch.Tensor is needed, not int"),
    ("prefill", {"k": ones(2, 5, 2, 64, dtype=FP16)}, ValueError, "k: dtype torch.float16 must equal that of q, torch"),
    ("prefill", {"v": ones(2, 4, 2, 64)}, ValueError, r"v: shape \(2, 4, 2, 64\) must equal that of k, \(2, 5, 2, 64"),
    ("prefill", {"q": ones(1, 3, 4, 64)}, ValueError, r"k: shape .* must be \[batch, .*\] with q's batch 1"),
    ("prefill", {"q": ones(2, 3, 3, 64)}, ValueError, "q: 3 heads must be a multiple of k's 2"),
    ("prefill", {"q": ones(2, 3, 4, 80), "k": ones(2, 5, 2, 80), "v": ones(2, 5, 2, 80)}, ValueError,
     "prefill: no step fits: q: head_dim 80 must be one of 64, "),
    ("prefill", {"q": ones(1, 1, 1, 64).expand(2**16, 1, 1, 64), "k": ones(1, 1, 1, 64).expand(2**16, 1, 1, 64),
                 "v": ones(1, 1, 1, 64).expand(2**16, 1, 1, 64)}, ValueError, "q: batch 65536 is above 65535"),
    ("prefill", {"q": wide(1), "k": wide(TOO_LARGE), "v": wide(TOO_LARGE)}, ValueError,
     rf"q, k: lengths 1 and {TOO_LARGE} must be below 2\^31 - 2\^16"),
    ("prefill", {"causal": 1}, TypeError, "causal: True or False is needed, not int"),
    ("prefill", {"causal": None}, TypeError, "causal: True or False is needed, not NoneType"),
    ("prefill", {"causal": False, "window": 3}, ValueError, "window: 3 needs causal=True"),
    ("decode", {"q": ones(2, 9, 4, 64)}, ValueError, r"q: q_len 9 must be at most 8; use prefill\(\)"),
    ("decode", {"q": ones(2, 1, 3, 64)}, ValueError, "q: 3 heads must be a multiple of the cache's 2"),
    ("decode", {"q": ones(2, 1, 4, 64, dtype=FP16)}, ValueError, "cache: dtype torch.bfloat16 must be that of q, "),
    ("decode", {"q": ones(1, 1, 4, 64)}, ValueError, "cache: batch 2 and head_dim 64 must equal those of q, 1 and 64"),
    ("decode", {"cache": ring(), "window": 17}, ValueError, "window: 17 is above 16: a ring of 16 slots"),
    ("decode", {"num_splits": 1.0}, TypeError, "num_splits: an int or None is needed, not float"),
    ("decode", {"num_splits": 0}, ValueError, "num_splits: 0 must be between 1 and 1024"),
    ("decode", {"num_splits": HUGE}, ValueError, "num_splits: an int of 1329 bits must be between 1 and 1024"),
    ("decode", {"sink": [0.0] * 4}, TypeError, "sink: a torch.Tensor is needed, not list"),
    ("decode", {"sink": ones(4)}, ValueError, r"sink: torch.bfloat16 \(4,\) on cpu must be torch.float32 \[4\] on cpu"),
    ("decode", {"sink": ones(8, dtype=FP32)[::2]}, ValueError, "sink: the stride is 2 and must be 1"),
    ("decode", {"sink": grad(ones(4, dtype=FP32))}, ValueError, "sink: requires grad, and there is no backward"),
    ("decode", {"lengths": int32(3, 17)}, ValueError, "lengths: row 1 is 17, and must be between 0 and the capacity"),
    ("decode", {"cache": ring(), "lengths": int32(3, 2**31 - 1)}, ValueError,
     f"lengths: row 1 is {2**31 - 1}, and must be between 0 and {TOO_LARGE}, whatever the ring's capacity"),
    ("prefill_ring", {"lengths": int32(3, 2**31 - 1)}, ValueError, f"lengths: row 1 .* between 0 and {TOO_LARGE}"),
    ("prefill_ring", {"cache": cache()}, TypeError, "cache: RingCache is needed, not ContiguousCache"),
    ("prefill_ring", {"q": ones(2, 17, 4, 64)}, ValueError, "q: q_len 17 is above 0|q: q_len 17 is above 16"),
    ("prefill_through_ring", {"window": None}, TypeError, "window: an int is needed, not NoneType"),
    ("prefill_through_ring", {"chunk": 2.0}, TypeError, "chunk: an int or None is needed, not float"),
    ("prefill_through_ring", {"chunk": 10}, ValueError, "chunk: 10 must be between 1 and 9, for 16 slots and window 8"),
    ("prefill_through_ring", {"k": ones(2, 4, 2, 64)}, ValueError, r"k: shape \(2, 4, 2, 64\) must be \(2, 3, 2, 64\)"),
    *((name, {"step": 3}, TypeError, "step: a name or a Step is needed, not int") for name in LINEAR),
    *((name, {"x": 3}, TypeError, "x: a torch.Tensor is needed, not int") for name in LINEAR),
    *((name, {"x": ones(2, 256).to_sparse()}, ValueError, "x: layout torch.sparse_coo must") for name in LINEAR),
    *((name, {"x": grad(ones(2, 256))}, ValueError, "x: requires grad") for name in LINEAR),
    *((name, {"chained": 1}, TypeError, "chained: True or False is needed, not int") for name in LINEAR[:2]),
    *((name, {"w": 3}, TypeError, "w: an Fp[48]Weight is needed .*, not int") for name in LINEAR[:3]),
    ("gemm_w4a8", {"x": (ones(2, 256).to(E4M3), grad(ones(2, dtype=FP32)))}, ValueError, "x scales: requires grad"),
    ("gemm_w4a8", {"x": (grad(ones(2, 256).to(E4M3)), ones(2, dtype=FP32))}, ValueError, "x codes: requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "error", "told"), CASES, ids=[f"{name}-{told[:30]}" for name, _, _, told in CASES]
)
def test_an_operation_refuses(
    name: str, changes: dict[str, Any], error: type[Exception], told: str, launched: list[str]
) -> None:
    with pytest.raises(error, match=f"^(?:{told})"):
        call(name, **changes)
    assert launched == []


@pytest.mark.parametrize("name", [*ATTENTION, *LINEAR])
def test_the_arguments_fit_but_for_what_the_table_changes(name: str, launched: list[str]) -> None:
    call(name)
    assert launched


def test_a_refused_chunk_leaves_the_ring_as_it_was() -> None:
    """The first chunk is not appended where its attention would be refused."""
    for changes in ({"scale": HUGE}, {"step": "99"}, {"return_lse": 1}):
        kept = ring()
        with pytest.raises((TypeError, ValueError)):
            call("prefill_through_ring", cache=kept, k=ones(2, 3, 2, 64) * 2, **changes)
        assert bool((kept.k == 1).all())


@pytest.mark.parametrize("scale", [2.0**80, -(2.0**80), 0, 1, 1e-300])
def test_a_scale_of_any_size_that_fp32_products_bear(scale: float, launched: list[str]) -> None:
    for name in ATTENTION:
        call(name, scale=scale)
    assert launched


# ---- caches ----

CACHES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: mk.ContiguousCache(1, ones(1, 1, 1, 64)), TypeError, "k: a torch.Tensor is needed, not int"),
    (lambda: mk.ContiguousCache(ones(1, 1, 64), ones(1, 1, 1, 64)), ValueError, r"k: shape \(1, 1, 64\) must have 4 d"),
    (lambda: mk.ContiguousCache(ones(1, 1, 1, 64, dtype=FP32), ones(1, 1, 1, 64)), ValueError, "k: dtype torch.float3"),
    (lambda: mk.ContiguousCache(ones(1, 2, 1, 64), ones(1, 1, 1, 64)), ValueError, r"v: .* \(1, 1, 1, 64\) .* equal k"),
    (lambda: mk.ContiguousCache(ones(1, 1, 1, 64).to("meta"), ones(1, 1, 1, 64)), ValueError, "k: device meta must be"),
    (lambda: mk.ContiguousCache(grad(ones(1, 1, 1, 64)), ones(1, 1, 1, 64)), ValueError, "k: requires grad"),
    (lambda: cache(layout="NDH"), ValueError, "layout: 'NDH' must be one of NHD, HND"),
    (lambda: cache(k_scale=1.0), ValueError, "k_scale: only an E4M3 cache has scales, this one is torch.bfloat16"),
    *((lambda bad=bad: fp8(k_scale=bad), ValueError, f"k_scale: {re.escape(str(bad))} must be positive and finite")
      for bad in (0.0, -1.0, math.nan, math.inf, 1e-45, 1e39)),
    (lambda: fp8(v_scale=HUGE), ValueError, "v_scale: an int of 1329 bits must be positive and finite in float32"),
    (lambda: fp8(v_scale=torch.tensor([1.0, -2.0])), ValueError, "v_scale: -2.0 must be positive and finite"),
    (lambda: fp8(v_scale=torch.tensor([1.0, math.nan])), ValueError, "v_scale: nan must be positive and finite"),
    (lambda: fp8(v_scale=torch.ones(2).requires_grad_()), ValueError, "v_scale: requires grad"),
    (lambda: fp8(v_scale=torch.ones(2, dtype=torch.int32)), ValueError, "v_scale: dtype torch.int32 must be"),
    (lambda: fp8(v_scale=torch.ones(3)), ValueError, r"v_scale: shape \(3,\) must be a scalar or \[2\]"),
    (lambda: fp8(v_scale="1"), TypeError, "v_scale: a float or a torch.Tensor is needed, not str"),
    (lambda: fp8(k_scale=True), TypeError, "k_scale: a float or a torch.Tensor is needed, not bool"),
    (lambda: paged(page_table=[[0]]), TypeError, "page_table: a torch.Tensor is needed, not list"),
    (lambda: paged(page_table=torch.zeros(2, 3)), ValueError, "page_table: torch.float32 .* must be torch.int32"),
    (lambda: paged(k=ones(4, 10, 2, 64), v=ones(4, 10, 2, 64)), ValueError, "k: page size 10 must be one of 16"),
    (lambda: paged(page_table=int32(0).expand(2, 2**27)), ValueError, "page_table: the last dim's stride is 0"),
    (lambda: mk.ContiguousCache(wide(TOO_LARGE), wide(TOO_LARGE)), ValueError, f"k: its {TOO_LARGE} slots must be"),
    (lambda: mk.RingCache(wide(2**31), wide(2**31)), ValueError, rf"k: its {2**31} slots must be below 2\^31 - 2\^16"),
    (lambda: paged(k=pool(TOO_LARGE), v=pool(TOO_LARGE)), ValueError,
     rf"k: its {TOO_LARGE} pages must be below 2\^31 - 2\^16"),
    (lambda: mk.RingCache(ones(1, 0, 1, 64), ones(1, 0, 1, 64)), ValueError, "k: a ring needs at least one slot"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "told"), CACHES, ids=[told[:40] for _, _, told in CACHES])
def test_a_cache_refuses(make: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^(?:{told})"):
        make()


def test_the_largest_caches_that_kernels_can_count() -> None:
    assert mk.ContiguousCache(wide(TOO_LARGE - 1), wide(TOO_LARGE - 1)).capacity == TOO_LARGE - 1
    assert mk.RingCache(wide(TOO_LARGE - 1), wide(TOO_LARGE - 1)).capacity == TOO_LARGE - 1


# Set again after the cache was made: what does not fit must not reach a kernel.
SWAPPED: list[tuple[Callable[[], Any], str, Any, type[Exception], str]] = [
    (cache, "v", ones(2, 8, 2, 64), ValueError, r"v: torch.bfloat16 \(2, 8, 2, 64\) on cpu must equal k"),
    (cache, "v", ones(2, 16, 2, 64, dtype=FP16), ValueError, "v: torch.float16 .* must equal k, torch.bfloat16"),
    (cache, "v", None, TypeError, "v: a torch.Tensor is needed, not NoneType"),
    (cache, "k", ones(2, 16, 2, 128)[..., ::2], ValueError, "k: the last dim's stride is 2 and must be 1"),
    (cache, "layout", "HDN", ValueError, "layout: 'HDN' must be one of"),
    (cache, "k_scale", 2.0, ValueError, "k_scale: only an E4M3 cache"),
    (fp8, "v_scale", -2.0, ValueError, "v_scale: -2.0 must be positive"),
    (paged, "page_table", torch.zeros(2, 3), ValueError, "page_table: torch.float32"),
    (ring, "v", ones(2, 8, 2, 64), ValueError, r"v: torch.bfloat16 \(2, 8, 2, 64\) on cpu must equal k"),
]


@pytest.mark.parametrize(("make", "field", "value", "error", "told"), SWAPPED, ids=[case[4][:40] for case in SWAPPED])
def test_a_field_that_is_set_again_is_looked_at(
    make: Callable[[], Any], field: str, value: Any, error: type[Exception], told: str, launched: list[str]
) -> None:
    changed = make()
    setattr(changed, field, value)
    name = "prefill_ring" if isinstance(changed, mk.RingCache) else "decode"
    for use in (
        lambda: call(name, cache=changed),
        lambda: changed.append(ones(2, 1, 2, 64), ones(2, 1, 2, 64), int32(3, 4)),
        lambda: changed.check(int32(3, 4)),
    ):
        with pytest.raises(error, match=f"^{told}"):
            use()
    assert launched == []


def test_a_scale_that_is_set_again_is_used(launched: list[str]) -> None:
    changed = fp8()
    changed.k_scale = 2.0
    call("decode", cache=changed)
    assert isinstance(changed.k_scale, torch.Tensor) and changed.k_scale.tolist() == [2.0, 2.0]


def test_a_scale_that_is_written_over_is_noticed() -> None:
    """On a GPU by cache.check() alone, which waits."""
    changed = fp8(k_scale=torch.tensor([1.0, 2.0]))
    assert isinstance(changed.k_scale, torch.Tensor)
    changed.k_scale[1] = math.nan
    with pytest.raises(ValueError, match="k_scale: nan must be positive"):
        call("decode", cache=changed)


def test_a_cache_that_requires_grad_by_now(launched: list[str]) -> None:
    changed = cache()
    changed.v.requires_grad_()
    with pytest.raises(ValueError, match="cache: k or v requires grad, and there is no backward"):
        call("decode", cache=changed)
    assert launched == []
    with torch.no_grad():
        call("decode", cache=changed)
    assert launched


APPENDED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": [1.0]}, TypeError, "k: a torch.Tensor is needed, not list"),
    ({"v": 1}, TypeError, "v: a torch.Tensor is needed, not int"),
    ({"k": ones(2, 2, 64)}, ValueError, r"k: shape \(2, 2, 64\) must be \[2, n, 2, 64\]"),
    ({"v": ones(2, 2, 2, 64)}, ValueError, r"v: shape \(2, 2, 2, 64\) must be \[2, n, 2, 64\]"),
    ({"k": ones(2, 1, 2, 64).long()}, ValueError, "k: dtype torch.int64 must be one of torch.bfloat16, "),
    ({"v": ones(2, 1, 2, 64).to(torch.complex64)}, ValueError, "v: dtype torch.complex64 must be one of"),
    ({"v": ones(2, 1, 2, 64).to("meta")}, ValueError, "v: device meta must equal that of the cache, cpu"),
    ({"k": grad(ones(2, 1, 2, 64))}, ValueError, "k: requires grad, and there is no backward"),
    ({"k": ones(2, 1, 2, 64).to_sparse()}, ValueError, "k: layout torch.sparse_coo must be torch.strided"),
    ({"lengths": [1, 1]}, TypeError, "lengths: a torch.Tensor is needed, not list"),
    ({"lengths": int32(1, 17)}, ValueError, "lengths: row 1 is 17"),
    ({"k": ones(2, 17, 2, 64), "v": ones(2, 17, 2, 64)}, ValueError, "k: 17 tokens are more than the capacity, 16"),
]


@pytest.mark.parametrize(("changes", "error", "told"), APPENDED, ids=[told[:40] for _, _, told in APPENDED])
def test_append_refuses(changes: dict[str, Any], error: type[Exception], told: str) -> None:
    for kept in (cache(), ring(), fp8()):
        before = [store.clone() for store in (kept.k, kept.v)]
        given = {"k": ones(2, 1, 2, 64) * 2, "v": ones(2, 1, 2, 64) * 2, "lengths": int32(3, 4), **changes}
        if isinstance(kept, mk.RingCache) and "17" in told and "lengths" in changes:
            continue  # a ring counts further
        with pytest.raises(error, match=f"^{told}"):
            kept.append(**given)
        for store, was in zip((kept.k, kept.v), before, strict=True):
            assert torch.equal(store.float(), was.float())


# ---- weights ----


def test_a_weight_of_each_layout_is_made() -> None:
    for scale_dtype in (FP32, BF16):
        w = linear.quantize_fp4(ones(40, 384), scale_dtype=scale_dtype)
        for layout in ("rows", *FP4_LAYOUTS):
            replace(w.in_layout(layout), _shuffled={})
    for layout in ("rows", "fragments"):
        replace(linear.quantize_fp8(ones(40, 384)).in_layout(layout), _shuffled={})


def fp4_fields(**changes: Any) -> dict[str, Any]:
    fields = {"codes": torch.zeros(16, 128, dtype=torch.uint8), "scales": torch.ones(16, 2), "n": 16, "k": 256}
    return {**fields, **changes}


def fp8_fields(**changes: Any) -> dict[str, Any]:
    fields = {"codes": torch.zeros(16, 256, dtype=torch.uint8), "scales": torch.ones(16), "n": 16, "k": 256}
    return {**fields, **changes}


COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"codes": None}, TypeError, "codes: a torch.Tensor is needed, not NoneType"),
    ({"scales": [1.0]}, TypeError, "scales: a torch.Tensor is needed, not list"),
    ({"codes": torch.zeros(16, 128)}, ValueError, "codes: dtype torch.float32 must be torch.uint8"),
    ({"scales": torch.ones(16, 2, dtype=FP16)}, ValueError, "scales: dtype torch.float16 must be torch."),
    ({"codes": torch.zeros(15, 128, dtype=torch.uint8)}, ValueError, r"codes: shape \(15, 128\) must be \(16, "),
    ({"scales": torch.ones(3)}, ValueError, r"scales: shape \(3,\) must be \(16,"),
    ({"n": 16.0}, TypeError, "n: an int is needed, not float"),
    ({"n": 0}, ValueError, "n: 0 must be from 1 to 2147483647"),
    ({"k": True}, TypeError, "k: an int is needed, not bool"),
    ({"k": 200}, ValueError, "k: 200 must be a multiple of"),
    ({"k": 2**31}, ValueError, "k: 2147483648 must be from 1 to 2147483647"),
    ({"layout": "columns"}, ValueError, "layout: 'columns' is none of rows, "),
    ({"layout": 3}, TypeError, "layout: a str is needed, not int"),
    ({"layout": "fragments"}, ValueError, r"codes: shape \(16, \d+\) must be \(1, 2, \d+\) in layout 'fragments'"),
]
FP4_ONLY: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"group_size": 100}, ValueError, "group_size: 100 must be 32, 64, 128 or 256"),
    ({"group_size": 64}, ValueError, r"scales: shape \(16, 2\) must be \(16, 4\)"),
    ({"group_size": 64, "layout": "folded"}, ValueError, "group_size: 64 must be 128 in layout 'folded'"),
    ({"group_size": "128"}, TypeError, "group_size: an int is needed, not str"),
    ({"codes": torch.zeros(128, 16, dtype=torch.uint8).T}, ValueError, r"codes: strides \(1, 16\) must be those of a"),
    ({"scales": torch.ones(2, 16).T}, ValueError, "scales: strides .* pass scales.contiguous"),
    ({"scales": torch.ones(16, 2).requires_grad_()}, ValueError, "scales: requires grad"),
    ({"scales": torch.ones(16, 2, device="meta")}, ValueError, "scales: device meta must be a CUDA device, or cpu"),
    ({"codes": torch.zeros(16 * 128 + 1, dtype=torch.uint8)[1:].view(16, 128)}, ValueError,
     "codes: its address must be a multiple of 16 bytes; pass codes.clone"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "told"), [*COMMON, *FP4_ONLY], ids=lambda x: str(x)[:40])
def test_an_fp4_weight_refuses(changes: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{told}"):
        mk.Fp4Weight(**fp4_fields(**changes))


@pytest.mark.parametrize(("changes", "error", "told"), COMMON, ids=lambda x: str(x)[:40])
def test_an_fp8_weight_refuses(changes: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{told}"):
        mk.Fp8Weight(**fp8_fields(**changes))


def test_a_products_blocks_are_no_layout_of_the_weight() -> None:
    w = linear.quantize_fp4(ones(64, 256))
    gemm._laid_out(w, "blocks")
    with pytest.raises(ValueError, match="layout: 'blocks' is none of rows"):
        w.in_layout("blocks")


def test_a_parameter_is_quantised_without_its_gradient() -> None:
    w = torch.nn.Parameter(torch.ones(16, 256))
    assert not linear.quantize_fp4(w).scales.requires_grad and not linear.quantize_fp8(w).scales.requires_grad


# ---- steps, flags and settings ----


def test_a_step_of_another_type_under_a_compiler() -> None:
    for name in ("prefill", "matvec_fp4", "gemm_w4a8"):
        with pytest.raises(TypeError, match="^step: a name or a Step is needed, not int"):
            torch.compile(lambda name=name: call(name, step=3), backend="eager")()


def test_other_flags() -> None:
    with pytest.raises(TypeError, match="^check: True or False is needed, not int"), mk.emulation(check=1):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="^check: True or False is needed, not str"):
        build.load(steps.step("prefill/01"), "emulation", check="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^architecture: a str such as sm_90a is needed, not int"):
        with mk.emulation(architecture=90):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("partials", "error", "told"),
    [
        (3, TypeError, "partials: a list of .* pairs is needed, not int"),
        ([], ValueError, r"partials: at least one \(O, LSE\) pair"),
        ([3], TypeError, r"partials: pair 0 must be two tensors, \(O, LSE\), not int"),
        ([(ones(1, 1, 1, 64), 1.0)], TypeError, "partials: pair 0 must be two tensors"),
        ([(ones(1, 64), ones(1, 1, 1))], ValueError, r"partials: O of pair 0 is torch.bfloat16 \(1, 64\) and must be"),
        (
            [(ones(1, 1, 1, 64), ones(1, 1, 1))],
            ValueError,
            "partials: LSE of pair 0 is torch.bfloat16 and must be",
        ),
        ([(ones(1, 1, 1, 64), torch.ones(1, 1, 2))], ValueError, "partials: pair 0 has shapes"),
    ],
)
def test_merge_refuses(partials: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{told}"):
        mk.merge(partials)


def test_the_largest_chunk_of_what_is_no_number() -> None:
    with pytest.raises(TypeError, match="^capacity: an int is needed, not str"):
        mk.largest_chunk("a", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^window: -1 must be from 0"):
        mk.largest_chunk(1, -1)


# ---- the operators, called directly ----

MATVEC = (linear.quantize_fp4(ones(16, 256)), linear.quantize_fp8(ones(16, 256)))


def operator_arguments(name: str) -> dict[str, Any]:
    """The arguments, in order, that fit an operator of torch.ops.mila_kernels."""
    q, k, more = ones(2, 3, 4, 64), ones(2, 5, 2, 64), {"window": 0, "scale": 0.125, "with_lse": False}
    qkv = {"q": q, "k": k, "v": k.clone()}
    if name == "prefill":
        return {**qkv, "step": "prefill/01_scalar", "causal": True, **more}
    if name == "prefill_ring":
        return {**qkv, "lengths": int32(3, 4), "step": "prefill_ring/01_hs_split", **more, "window": 3}
    if name == "decode":
        none = dict.fromkeys(("page_table", "sink", "k_scale", "v_scale"))
        step = {"step": "decode/01_one_block", "ring": False, "window": 0, "splits": 0, "scale": 0.1, "with_lse": False}
        return {**qkv, "lengths": int32(3, 4), **none, "fault": int32(0, 0, 0), **step}
    if name == "gemm_w4a8":
        w = MATVEC[0]
        product = {"x": ones(2, 256), "x_scales": None, "w_codes": w.codes, "w_scales": w.scales, "bias": None}
        return {**product, "n": 16, "step": "gemm_w4a8/04_fused_mma", "out_dtype": BF16}
    if name == "quantize_activations":
        return {"x": ones(2, 256), "step": "gemm_w4a8/04_fused_mma"}
    w8 = MATVEC[name == "matvec_fp8"]
    first = {"matvec_fp4": "matvec_fp4/01_lookup_table", "matvec_fp8": "matvec_fp8/01_row_per_warp"}[name]
    product = {"x": ones(2, 256), "codes": w8.codes, "scales": w8.scales, "bias": None, "n": 16, "layout": "rows"}
    return {**product, "step": first, "chained": False}


OPERATORS = ("prefill", "decode", "prefill_ring", "matvec_fp4", "matvec_fp8", "gemm_w4a8", "quantize_activations")
DIRECT: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"step": "decode/01_one_block" if name != "decode" else "prefill/01_scalar"}, "step: .* is a step of ")
      for name in OPERATORS),
    *((name, {"scale": math.nan}, "scale: nan must be finite") for name in OPERATORS[:3]),
    *((name, {"window": -1}, "window: -1 must be from ") for name in OPERATORS[:3]),
    *((name, {"v": ones(2, 4, 2, 64)}, "v: ") for name in OPERATORS[:3]),
    *((name, {"q": ones(2, 3, 3, 64)}, "q: 3 heads must be a multiple") for name in OPERATORS[:3]),
    *((name, {"lengths": int32(3)}, "lengths: torch.int32") for name in OPERATORS[1:3]),
    ("prefill", {"k": ones(2, 5, 2, 64, dtype=FP16)}, "k: dtype torch.float16 must equal that of q"),
    ("prefill_ring", {"window": 4}, "q: q_len 3 is above 2"),
    ("decode", {"ring": True, "window": 4}, "window: 4 is above 3"),
    ("decode", {"splits": 5000}, "splits: 5000 must be from 0 to 1024"),
    ("decode", {"fault": int32(0)}, r"fault: torch.int32 \(1,\) on cpu must be torch.int32 \[3\]"),
    ("decode", {"k_scale": torch.ones(2)}, "k_scale: only an E4M3 cache"),
    ("decode", {"k": ones(2, 5, 2, 64).to(E4M3), "v": ones(2, 5, 2, 64).to(E4M3), "k_scale": torch.ones(1)},
     r"k_scale: torch.float32 \(1,\) on cpu must be torch.float32 \[2\]"),
    ("decode", {"page_table": int32(0)}, "page_table: torch.int32"),
    ("decode", {"sink": torch.ones(3)}, "sink: torch.float32"),
    *((name, {"n": 17}, r"codes: shape \(16, \d+\) must be \(17, ") for name in OPERATORS[3:5]),
    *((name, {"layout": "fragments"}, "codes: shape") for name in OPERATORS[3:5]),
    *((name, {"layout": "columns"}, "layout: 'columns' is none of") for name in OPERATORS[3:5]),
    *((name, {"step": f"{name}/03"}, "layout: 'rows' must be ") for name in OPERATORS[4:5]),
    *((name, {"bias": ones(3)}, r"bias: shape \(3,\) must be \(16,\)") for name in OPERATORS[3:6]),
    *((name, {"x": ones(2, 128)}, "codes: shape|w_codes: shape") for name in OPERATORS[3:6]),
    *((name, {"x": ones(2, 256, dtype=FP32)}, "x: dtype torch.float32") for name in OPERATORS[3:]),
    ("gemm_w4a8", {"n": 17}, "w_codes: shape"),
    ("gemm_w4a8", {"step": "gemm_w4a8/07_shuffled"}, "w_codes: shape"),
    ("gemm_w4a8", {"out_dtype": FP32}, "out_dtype: torch.float32 must be"),
    ("gemm_w4a8", {"x_scales": torch.ones(2)}, "x codes: dtype torch.bfloat16"),
    ("gemm_w4a8", {"x": ones(2, 200)}, "x: its 200 columns must be a multiple of 128"),
    ("quantize_activations", {"x": ones(2, 200)}, "x: its 200 columns must be a multiple of 128"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "told"), DIRECT, ids=[f"{name}-{told[:30]}" for name, _, told in DIRECT])
def test_an_operator_called_directly_refuses(
    name: str, changes: dict[str, Any], told: str, launched: list[str]
) -> None:
    given = operator_arguments(name)
    assert not changes.keys() - given.keys()
    with pytest.raises(ValueError, match=f"^(?:{told})"):
        getattr(torch.ops.mila_kernels, name)(*{**given, **changes}.values())
    assert launched == []


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_called_directly_runs(name: str, launched: list[str]) -> None:
    getattr(torch.ops.mila_kernels, name)(*operator_arguments(name).values())
    assert launched
