"""decode(), its caches and merge(): arithmetic that can be said in closed form, dead memory, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mila_kernels import build, knobs, notebook, outputs, parity, reference, shapes, steps
from mila_kernels.attention_decode import decode, merge
from mila_kernels.cache import Cache, ContiguousCache, PagedCache, RingCache

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
STEPS = [s.id for s in steps.steps("decode")]
FEW = ["decode/01_one_block", "decode/04_tile_rescale", STEPS[-1]]  # where a property belongs to the caches, not a step
KINDS = ("contiguous", "ring", "paged-NHD", "paged-HND")
LN2 = math.log(2.0)


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest, backend: str) -> str:
    return _fitting(str(request.param), backend)


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest, backend: str) -> str:
    return _fitting(str(request.param), backend)


def _fitting(step: str, backend: str) -> str:
    if backend == "cuda" and not steps.step(step).runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step} is not for this GPU")
    return step


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def fill(x: torch.Tensor, value: float) -> None:
    if x.dtype == E4M3:
        x.view(torch.uint8).fill_(0x7F if not math.isfinite(value) else 0)
    else:
        x.fill_(value)


def make_cache(
    kind: str, k: torch.Tensor, v: torch.Tensor, lengths: list[int], dead: tuple[float, float] = (math.nan, math.nan),
    page: int = 64, capacity: int | None = None,
) -> Cache:  # fmt: skip
    """A cache of that kind with the tokens k, v [batch, n, heads, dim] in it, and `dead` wherever there is none."""
    batch, n, heads, dim = k.shape
    layout = kind.removeprefix("paged-") if kind.startswith("paged") else "NHD"
    columns = -(-n // page) + 1
    slots = capacity or n + 3
    pages = batch * columns + 2
    shape = (pages, page, heads, dim) if kind.startswith("paged") else (batch, slots, heads, dim)
    stores = [torch.empty(shape, dtype=k.dtype, device=k.device) for _ in range(2)]
    for store, value in zip(stores, dead, strict=True):
        fill(store, value)
    if kind.startswith("paged"):
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(n)).int().to(k.device)
        table = order[: batch * columns].view(batch, columns).clone()
    for row, length in enumerate(lengths):
        for position in range(max(0, length - slots) if kind == "ring" else 0, length):
            for store, source in zip(stores, (k, v), strict=True):
                if kind.startswith("paged"):
                    store[int(table[row, position // page]), position % page] = source[row, position]
                else:
                    store[row, position % slots] = source[row, position]
    if kind.startswith("paged"):
        for row, length in enumerate(lengths):
            table[row, -(-length // page) :] = 2**31 - 1 if row % 2 else -1  # unused entries may hold anything
        if layout == "HND":
            stores = [store.transpose(1, 2).contiguous() for store in stores]
        return PagedCache(*stores, table, layout=layout)
    return RingCache(*stores) if kind == "ring" else ContiguousCache(*stores)


def normal(*shape: int, dtype: torch.dtype = BF16, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def close(out: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor], bound: float) -> None:
    for got, want in zip(out, truth, strict=True):
        verdict = parity.compare(got, want, bound)
        assert verdict.passed, verdict


# ---- what follows from arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 8, None])
def test_the_mean_of_ragged_lengths_is_exact_whatever_the_splits(
    step: str, splits: int | None, device: torch.device
) -> None:
    lengths = [1, 16, 63, 64, 65, 129]
    index = torch.arange(max(lengths), dtype=torch.float32, device=device).to(BF16)
    k = normal(len(lengths), max(lengths), 1, 512, device=device)
    v = index.view(1, -1, 1, 1).expand(len(lengths), -1, 1, 512)
    cache = make_cache("paged-NHD", k, v, lengths, dead=(0.0, 0.0))
    q = torch.zeros(len(lengths), 1, 16, 512, dtype=BF16, device=device)
    o, lse = decode(q, cache, ints(lengths, device), step=step, num_splits=splits, return_lse=True)
    for row, length in enumerate(lengths):
        assert (o[row] == (length - 1) / 2).all()
        assert lse[row].flatten().tolist() == pytest.approx([math.log(length)] * 16, abs=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
def test_dead_memory_is_not_seen(few: str, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    lengths, window = [70, 0, 33], 20
    q_dtype = BF16 if dtype == E4M3 else dtype
    k, v = (normal(3, 70, 2, 64, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    q = normal(3, 1, 4, 64, dtype=q_dtype, device=device)
    found = []
    for dead in ((0.0, 0.0), (math.nan, math.nan), (math.inf, 0.0), (0.0, math.inf)):
        hidden_k, hidden_v = k.clone(), v.clone()
        for row, length in enumerate(lengths):  # before the window is as dead as after the end
            fill(hidden_k[row, : max(0, length - window)], dead[0])
            fill(hidden_v[row, : max(0, length - window)], dead[1])
        cache = make_cache(kind, hidden_k, hidden_v, lengths, dead, capacity=29 if kind == "ring" else None, page=16)
        found.append(decode(q, cache, ints(lengths, device), step=few, window=window, num_splits=3, return_lse=True))
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1])
    assert found[0][0].isfinite().all() and not found[0][0][1].any()


def test_a_live_nan_shows(step: str, device: torch.device) -> None:
    for dtype in (BF16, E4M3):
        for which in (0, 1):
            stores = [normal(1, 90, 1, 64, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
            fill(stores[which][0, 70], math.nan)
            q = normal(1, 1, 4, 64, device=device)
            cache = make_cache("contiguous", *stores, [90])
            assert decode(q, cache, ints([90], device), step=step).isnan().all()
            assert decode(q, cache, ints([90], device), step=step, window=19).isfinite().all()


@pytest.mark.parametrize(("window", "lengths"), [(1024, [5, 1023, 1024, 1025]), (10**9, [5, 60]), (60, [5, 60])])
def test_the_window_counts_the_current_key(few: str, window: int, lengths: list[int], device: torch.device) -> None:
    q = torch.zeros(len(lengths), 1, 2, 64, dtype=BF16, device=device)
    k = torch.ones(len(lengths), max(lengths), 1, 64, dtype=BF16, device=device)
    cache = ContiguousCache(k, k)
    o, lse = decode(q, cache, ints(lengths, device), step=few, window=window, return_lse=True)
    counts = lse.exp()[:, 0, 0].tolist()
    assert counts == pytest.approx([min(window, length) for length in lengths], rel=1e-5)
    assert (o == 1.0).all()


def test_a_window_of_four_over_ten_tokens(step: str, device: torch.device) -> None:
    v = torch.arange(10.0, device=device).to(BF16).view(1, 10, 1, 1).expand(1, 10, 1, 256).contiguous()
    q = torch.zeros(1, 1, 2, 256, dtype=BF16, device=device)
    for cache in (ContiguousCache(v, v), make_cache("ring", v, v, [10], capacity=4)):
        o, lse = decode(q, cache, ints([10], device), step=step, window=4, return_lse=True)
        assert (o == 7.5).all() and lse.flatten().tolist() == pytest.approx([2 * LN2] * 2)


def test_more_queries_than_keys(step: str, device: torch.device) -> None:
    k = torch.ones(2, 4, 1, 512, dtype=BF16, device=device)
    v = (
        torch.tensor([1.0, 2.0, math.nan, math.nan], device=device)
        .to(BF16)
        .view(1, 4, 1, 1)
        .expand(2, 4, 1, 512)
        .contiguous()
    )
    q = torch.zeros(2, 4, 1, 512, dtype=BF16, device=device)
    o, lse = decode(q, ContiguousCache(k, v), ints([2, 0], device), step=step, return_lse=True)
    assert o[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.5]
    assert lse[0, 0].tolist() == pytest.approx([-math.inf, -math.inf, 0.0, LN2])
    assert not o[1].any() and (lse[1] == -math.inf).all()


def test_a_sink_takes_weight_once(step: str, device: torch.device) -> None:
    lengths = [0, 40]
    k, v = (normal(2, 40, 1, 64, device=device, seed=seed) for seed in (1, 2))
    q, sink = normal(2, 1, 4, 64, device=device), normal(4, dtype=torch.float32, device=device, seed=3)
    cache = ContiguousCache(k, v)
    for splits in (1, 5, None):
        out = decode(q, cache, ints(lengths, device), step=step, sink=sink, num_splits=splits, return_lse=True)
        assert not out[0][0].any() and out[1][0, :, 0].tolist() == pytest.approx(sink.tolist(), rel=1e-6)
        close(out, reference.decode(q, cache, ints(lengths, device), sink=sink), 2.0**-8)


def test_sums_of_many_ones_are_exact(step: str, device: torch.device, large: bool) -> None:
    for length in (4096, 16384, 32768, 131072) if large else (600,):
        for dtype in (BF16, E4M3):
            k = torch.ones(1, length, 1, 64, device=device).to(dtype)
            q = torch.zeros(1, 1, 16, 64, dtype=BF16, device=device)
            for splits in (1, None):
                o, lse = decode(
                    q, ContiguousCache(k, k), ints([length], device), step=step, num_splits=splits, return_lse=True
                )
                assert (o == 1.0).all()
                assert lse.flatten().tolist() == pytest.approx([math.log(length)] * 16, abs=2e-6)


@pytest.mark.parametrize("logit", [12.0, 13.0])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_the_softmax_tail_counts(
    step: str, logit: float, dtype: torch.dtype, device: torch.device, large: bool
) -> None:
    length = 131072 if large else 1200
    q = torch.zeros(1, 1, 4, 64, dtype=BF16, device=device)
    q[..., 0] = 1.0
    expected = (length - 1) / (length - 1 + math.exp(logit))
    for strong in (0, length // 2, length - 1):
        k = torch.zeros(1, length, 1, 64, device=device)
        k[0, strong, 0, 0] = logit
        v = torch.ones(1, length, 1, 64, device=device)
        ones = ContiguousCache(k.to(dtype), v.to(dtype))
        assert (decode(q, ones, ints([length], device), step=step, scale=1.0) == 1.0).all()
        v[0, strong] = 0.0
        cache = ContiguousCache(k.to(dtype), v.to(dtype))
        o = decode(q, cache, ints([length], device), step=step, scale=1.0)
        assert o.float().flatten().tolist() == pytest.approx([expected] * o.numel(), rel=1e-2)


# ---- against float64 -------------------------------------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {"q_heads": 16, "kv_heads": 1, "head_dim": 512, "q_len": 1, "kv_len": 130, "page": 64},
    {"q_heads": 8, "kv_heads": 4, "head_dim": 512, "q_len": 1, "kv_len": 99, "page": 64, "kv_dtype": "fp8"},
    {"q_heads": 6, "kv_heads": 2, "head_dim": 256, "q_len": 3, "kv_len": 70, "window": 40, "dtype": "fp16"},
    {"q_heads": 4, "kv_heads": 4, "head_dim": 128, "q_len": 8, "kv_len": 50, "page": 16, "kv_dtype": "fp8"},
    {"q_heads": 32, "kv_heads": 1, "head_dim": 64, "q_len": 2, "kv_len": 81},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['q_heads']}:{s['kv_heads']}-d{s['head_dim']}")
def test_parity_on_plain_and_on_poisoned_memory(step: str, shape: dict[str, Any], device: torch.device) -> None:
    workload = shapes.attention_workload("decode", batch=2, mask="", **shape)
    for row in parity.check(step, workload, seed=1, device=device):
        assert row.passed, row


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4), kind=st.sampled_from(KINDS), q_len=st.integers(1, 8),
    group=st.integers(1, 5), kv_heads=st.integers(1, 3), window=st.none() | st.integers(1, 40),
    splits=st.none() | st.integers(1, 9), dtype=st.sampled_from((BF16, E4M3)), page=st.sampled_from((16, 32, 64)),
    scale=st.none() | st.floats(-2, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    few: str, device: torch.device, lengths: list[int], kind: str, q_len: int, group: int, kv_heads: int,
    window: int | None, splits: int | None, dtype: torch.dtype, page: int, scale: float | None, seed: int,
) -> None:  # fmt: skip
    batch = len(lengths)
    k, v = (normal(batch, 90, kv_heads, 64, dtype=dtype, device=device, seed=seed + i) for i in (1, 2))
    q = normal(batch, q_len, group * kv_heads, 64, device=device, seed=seed)
    cache = make_cache(kind, k, v, lengths, page=page, capacity=50 if kind == "ring" else None)
    call = {"window": window or (43 if kind == "ring" else None), "scale": scale}
    with outputs.guarding() as changed:
        out = decode(q, cache, ints(lengths, device), step=few, num_splits=splits, return_lse=True, **call)
    close(out, reference.decode(q, cache, ints(lengths, device), **call), 2.0**-8)
    assert changed() == 0


def test_turned_knobs_change_nothing(few: str, backend: str) -> None:
    session = notebook.start(backend)
    workload = shapes.parse_shape("decode", "b2 q1h4 kv100h1 d64 bf16 page16")
    found = knobs.differences(session, few, workload, knobs.capacities([112, 1024, 65536]))
    assert found["repeats"].all() and set(found["relative difference"]) == {"0.0e+00"}
    assert knobs.differences(session, few, workload, knobs.splits([1, 3, 20]))["repeats"].all()
    with pytest.raises(ValueError, match="tokens: 96"):
        knobs.differences(session, few, workload, knobs.capacities([96]))
    flat = shapes.parse_shape("decode", "b1 q1h4 kv100h1 d64 bf16")
    with pytest.raises(ValueError, match="must be paged"):
        knobs.differences(session, few, flat, knobs.capacities([128]))


@pytest.mark.parametrize("kind", KINDS)
def test_splits_agree_and_repeat(step: str, kind: str, device: torch.device) -> None:
    lengths = [200, 3]
    k, v = (normal(2, 200, 2, 64, device=device, seed=seed) for seed in (1, 2))
    q = normal(2, 2, 6, 64, device=device)
    cache = make_cache(kind, k, v, lengths, capacity=61 if kind == "ring" else None, page=32)
    truth = reference.decode(q, cache, ints(lengths, device), window=50)
    for splits in (1, 2, 7, 40, None):
        with outputs.guarding() as changed:
            found = [
                decode(q, cache, ints(lengths, device), step=step, window=50, num_splits=splits, return_lse=True)
                for _ in range(2)
            ]
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        close(found[0], truth, 2.0**-8)
        assert changed() == 0


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_a_pool_may_pass_2_31_elements(step: str, dtype: torch.dtype, device: torch.device) -> None:
    """Its first and last pages; of those between, which are never touched, a CPU makes no memory."""
    page, dim = 16, 64
    pages = 2**31 // (page * dim) + 3
    k, v = (normal(1, 40, 1, dim, device=device, seed=seed).to(dtype) for seed in (1, 2))
    stores = [torch.empty(pages, page, 1, dim, dtype=dtype, device=device) for _ in range(2)]
    table = ints([0, pages - 1, pages - 2], device)[None]
    for store, source in zip(stores, (k, v), strict=True):
        for column, number in enumerate(table[0].tolist()):
            part = source[0, column * page : (column + 1) * page]
            store[number, : len(part)] = part
    q = normal(1, 1, 4, dim, device=device)
    truth = reference.decode(q, ContiguousCache(k, v), ints([40], device))
    close(decode(q, PagedCache(*stores, table), ints([40], device), step=step, return_lse=True), truth, 2.0**-8)


def test_ragged_batches_use_every_block(step: str, device: torch.device) -> None:
    lengths = [0, 1, 300, 0, 17, 64, 2, 0, 129] * 4 + [0]
    k, v = (normal(len(lengths), 300, 1, 64, device=device, seed=seed) for seed in (1, 2))
    q = normal(len(lengths), 1, 2, 64, device=device)
    cache = ContiguousCache(k, v)
    out = decode(q, cache, ints(lengths, device), step=step, return_lse=True)
    close(out, reference.decode(q, cache, ints(lengths, device)), 2.0**-8)


def test_the_ring_wraps_at_every_offset(few: str, device: torch.device) -> None:
    k, v = (normal(1, 60, 1, 64, device=device, seed=seed) for seed in (1, 2))
    q = normal(1, 2, 2, 64, device=device)
    for length in range(1, 60, 4):
        ring = make_cache("ring", k, v, [length], capacity=17)
        flat = make_cache("contiguous", k, v, [length])
        close(
            decode(q, ring, ints([length], device), step=few, window=16, return_lse=True),
            reference.decode(q, flat, ints([length], device), window=16),
            2.0**-8,
        )


@pytest.mark.parametrize("scales", [(0.5, 3.0), ([0.25, 2.0], [1.5, 0.5])])
def test_scales_of_e4m3(few: str, scales: tuple[Any, Any], device: torch.device) -> None:
    k, v = (normal(1, 80, 2, 128, dtype=E4M3, device=device, seed=seed) for seed in (1, 2))
    k_scale, v_scale = (torch.tensor(scale, device=device) for scale in scales)
    cache = ContiguousCache(k, v, k_scale=k_scale, v_scale=v_scale)
    q = normal(1, 1, 4, 128, device=device)
    out = decode(q, cache, ints([80], device), step=few, return_lse=True)
    close(out, reference.decode(q, cache, ints([80], device)), 2e-3)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 2048.0, 1e20])
def test_queries_of_any_magnitude_meet_e4m3_keys(few: str, magnitude: float, device: torch.device) -> None:
    k, v = (normal(1, 80, 1, 128, dtype=E4M3, device=device, seed=seed) for seed in (1, 2))
    q = (normal(1, 1, 2, 128, dtype=torch.float32, device=device) * magnitude).to(BF16)
    cache = ContiguousCache(k, v)
    out = decode(q, cache, ints([80], device), step=few, scale=0.3 / magnitude, return_lse=True)
    close(out, reference.decode(q, cache, ints([80], device), scale=0.3 / magnitude), 2e-3)


def test_strides_of_a_larger_storage(few: str, device: torch.device) -> None:
    store = normal(2, 64, 6, 192, device=device)
    cache = ContiguousCache(store[:, :, 1:3, 64:128], store[:, :, 3:5, 128:])
    q = normal(2, 3, 4, 128, device=device)[:, 1:2, :, :64]
    out = decode(q, cache, ints([64, 20], device), step=few, return_lse=True)
    close(out, reference.decode(q, cache, ints([64, 20], device)), 2.0**-8)


# ---- check mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", ["decode/02_split_k", "decode/03_cp_async", STEPS[-1]])
def test_check_mode_finds_nothing(checked: str) -> None:
    device = torch.device("cpu")
    lengths = [75, 0]
    for dtype, kind, dim in ((BF16, "paged-NHD", 64), (E4M3, "ring", 128)):
        k, v = (normal(2, 75, 1, dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
        cache = make_cache(kind, k, v, lengths, page=16, capacity=50 if kind == "ring" else None)
        q = normal(2, 1, 3, dim, device=device)
        for seed in range(3):
            with build.emulation(check=True, seed=seed):
                out = decode(
                    q, cache, ints(lengths, device), step=checked, window=48, num_splits=[2, 1, None][seed],
                    return_lse=True,
                )  # fmt: skip
            close(out, reference.decode(q, cache, ints(lengths, device), window=48), 2.0**-8)


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_append_is_what_decode_reads(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    lengths, new = [30, 2, 0], 4
    k, v = (normal(3, 30, 2, 64, device=device, seed=seed) for seed in (1, 2))
    full = make_cache(kind, k.to(dtype), v.to(dtype), lengths, page=16, capacity=20 if kind == "ring" else None)
    short = [max(0, length - new) for length in lengths]
    cache = make_cache(kind, k.to(dtype), v.to(dtype), short, page=16, capacity=20 if kind == "ring" else None)
    if isinstance(cache, PagedCache) and isinstance(full, PagedCache):
        cache.page_table.copy_(full.page_table)
    tokens = [torch.zeros(3, new, 2, 64, dtype=BF16, device=device) for _ in range(2)]
    for row, length in enumerate(lengths):
        for i in range(new):
            if length - new + i >= 0:
                tokens[0][row, i], tokens[1][row, i] = k[row, length - new + i], v[row, length - new + i]
    cache.append(*tokens, ints(lengths, device))
    for row, length in enumerate(lengths):
        for got, want in zip(cache.gather(row, length)[:2], full.gather(row, length)[:2], strict=True):
            assert torch.equal(got, want)
    dead = sum(int(x.float().isnan().sum()) for x in (cache.k, cache.v))
    assert dead == sum(int(x.float().isnan().sum()) for x in (full.k, full.v)), "a dead slot was written"


def test_append_scales_and_saturates(device: torch.device) -> None:
    store = torch.zeros(1, 4, 1, 64, device=device).to(E4M3)
    cache = ContiguousCache(store, store.clone(), k_scale=0.5, v_scale=2.0)
    x = torch.full((1, 1, 1, 64), 3.0, dtype=BF16, device=device)
    cache.append(x, x * 1000, ints([2], device))
    k, v, _ = cache.gather(0, 2)
    assert (k[0, 1] == 3.0).all() and (v[0, 1] == 896.0).all() and not k[0, 0].any()


def test_what_is_wrong_in_a_page_table_is_named(few: str, backend: str, device: torch.device) -> None:
    k = normal(2, 70, 1, 64, device=device)
    cache = make_cache("paged-NHD", k, k, [70, 40], page=16)
    assert isinstance(cache, PagedCache)
    q, lengths = normal(2, 1, 2, 64, device=device), ints([70, 40], device)
    good = decode(q, cache, lengths, step=few)
    for value in (-1, cache.pages, 2**31 - 1):
        kept = int(cache.page_table[1, 2])
        cache.page_table[1, 2] = value
        if backend == "cuda":
            out = decode(q, cache, lengths, step=few)
            assert torch.equal(out[0], good[0]) and out[1].isnan().all()
        with pytest.raises(ValueError, match="page_table: row 1, column 2"):
            cache.check(lengths) if backend == "cuda" else decode(q, cache, lengths, step=few)
        assert decode(q, cache, ints([70, 32], device), step=few).isfinite().all()  # not in use: not followed
        cache.page_table[1, 2] = kept
    too_long = ints([70, cache.capacity + 1], device)
    if backend == "cuda":
        decode(q, cache, too_long, step=few)
    with pytest.raises(ValueError, match=f"lengths: row 1 is {cache.capacity + 1}"):
        cache.check(too_long) if backend == "cuda" else decode(q, cache, too_long, step=few)
    assert torch.equal(decode(q, cache, lengths, step=few), good)


def test_caches_refuse_what_they_cannot_be(device: torch.device) -> None:
    k = torch.zeros(4, 16, 2, 64, dtype=BF16, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    for make, told in (
        (lambda: ContiguousCache(k, k[:, :8]), "v: "),
        (lambda: ContiguousCache(k.float(), k.float()), "k: dtype torch.float32"),
        (lambda: ContiguousCache(k, k, layout="NDH"), "layout: 'NDH'"),
        (lambda: ContiguousCache(k, k, k_scale=1.0), "k_scale: only an E4M3"),
        (lambda: ContiguousCache(k.transpose(1, 3), k.transpose(1, 3)), "stride"),
        (lambda: PagedCache(k, k, table.long()), "page_table: torch.int64"),
        (lambda: PagedCache(k[:, :10], k[:, :10], table), "page size 10"),
        (lambda: RingCache(k[:, :0], k[:, :0]), "at least one slot"),
        (lambda: ContiguousCache(k.to(E4M3), k.to(E4M3), v_scale=torch.ones(3)), "v_scale: shape"),
    ):
        with pytest.raises(ValueError, match=told):
            make()
    with pytest.raises(TypeError, match="page_table"):
        PagedCache(k, k, [[0]])  # type: ignore[arg-type]


def test_decode_refuses_by_name(device: torch.device) -> None:
    k = torch.zeros(2, 16, 2, 64, dtype=BF16, device=device)
    cache, ring, lengths = ContiguousCache(k, k), RingCache(k, k), ints([3, 4], device)
    q = torch.zeros(2, 1, 4, 64, dtype=BF16, device=device)
    for call, told in (
        (lambda: decode(q.half(), cache, lengths), "cache: dtype"),
        (lambda: decode(q[:1], cache, lengths), "cache: batch 2"),
        (lambda: decode(q[:, :, :3], cache, lengths), "q: 3 heads"),
        (lambda: decode(q.expand(2, 9, 4, 64), cache, lengths), "q: q_len 9"),
        (lambda: decode(q, cache, lengths.long()), "lengths: torch.int64"),
        (lambda: decode(q, cache, lengths, window=0), "window: 0"),
        (lambda: decode(q, ring, lengths, window=17), "window: 17 is above 16"),
        (lambda: decode(q, cache, lengths, num_splits=0), "num_splits: 0"),
        (lambda: decode(q, cache, lengths, num_splits=5000), "num_splits: 5000"),
        (lambda: decode(q, cache, lengths, sink=torch.zeros(3, device=device)), "sink: "),
        (lambda: decode(q, cache, lengths, scale=math.nan), "scale: "),
        (lambda: decode(q, cache, lengths, step="prefill/01_scalar"), "prefill"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    with pytest.raises(TypeError, match="cache: "):
        decode(q, (k, k), lengths)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lengths: "):
        decode(q, cache, [3, 4])  # type: ignore[arg-type]
    assert decode(q[:0], ContiguousCache(k[:0], k[:0]), ints([], device)).shape == (0, 1, 4, 64)
    assert decode(q[:, :0], cache, lengths).shape == (2, 0, 4, 64)


def test_the_default_depends_on_the_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("not every GPU has them")
    chosen: list[str] = []
    real = build.launch
    monkeypatch.setattr(build, "launch", lambda step, *rest: (chosen.append(step.id), real(step, *rest)))
    k = normal(1, 20, 1, 64, device=device)
    every = steps.steps

    def default(heads: int, tokens: int) -> steps.Step:
        decode(normal(1, tokens, heads, 64, device=device), ContiguousCache(k, k), ints([20], device))
        return steps.step(chosen[-1])

    for heads, tokens in ((8, 1), (9, 1), (4, 2), (4, 3)):
        step = default(heads, tokens)
        assert step.order == max(s.order for s in steps.steps("decode") if s.kept and s.rows <= heads * tokens)
    last = steps.step("decode/11_one_launch")  # as it was while there was no step for both
    monkeypatch.setattr(steps, "steps", lambda op=None: [s for s in every(op) if s.order <= last.order])
    monkeypatch.setattr(steps, "_known", {})  # nor the order in which all of them were tried
    for heads, tokens, expected in ((8, 1, False), (9, 1, True), (4, 2, False), (4, 3, True)):
        step = default(heads, tokens)
        assert step.kept and (step == last) == expected


# ---- merge -----------------------------------------------------------------------------------------------------------


def test_merge_of_disjoint_windows_is_the_whole(few: str, device: torch.device) -> None:
    k, v = (normal(1, 90, 1, 64, device=device, seed=seed) for seed in (1, 2))
    q = normal(1, 1, 4, 64, device=device)
    parts = [
        decode(q, ContiguousCache(k[:, a:b], v[:, a:b]), ints([b - a], device), step=few, return_lse=True)
        for a, b in ((0, 30), (30, 31), (31, 90))
    ]
    whole = reference.decode(q, ContiguousCache(k, v), ints([90], device))
    close(merge(parts), whole, 2.0**-7)
    neutral = (torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -math.inf))
    o, lse = merge([neutral, parts[0], neutral])
    assert torch.equal(o, parts[0][0]) and torch.allclose(lse, parts[0][1])
    o, lse = merge([neutral, neutral])
    assert not o.any() and (lse == -math.inf).all()
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    with pytest.raises(ValueError, match="pair 1"):
        merge([parts[0], (parts[0][0][:, :, :2], parts[0][1])])


def test_the_operator_has_a_schema_and_a_fake(device: torch.device) -> None:
    k = normal(1, 20, 1, 64, device=device)
    q = normal(1, 1, 2, 64, device=device)
    cache = ContiguousCache(k, k)
    lengths = ints([20], device)
    args = (
        q, cache.keys, cache.values, lengths, None, None, None, None, cache.fault, "decode/02_split_k", False, 0, 2,
        0.125, True,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.mila_kernels.decode.default, args, test_utils=("test_schema", "test_faketensor"))


def test_a_captured_call_replays_at_other_lengths(step: str, backend: str, device: torch.device) -> None:
    if backend != "cuda":
        pytest.skip("graphs are captured on a GPU")
    k, v = (normal(2, 500, 1, 64, device=device, seed=seed) for seed in (1, 2))
    q, lengths = normal(2, 1, 4, 64, device=device), ints([500, 500], device)
    cache = ContiguousCache(k, v)
    decode(q, cache, lengths, step=step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, cache, lengths, step=step, return_lse=True)
    for values in ([1, 499], [0, 64], [500, 3]):
        lengths.copy_(ints(values, device))
        for _ in range(2):
            graph.replay()
            close(out, reference.decode(q, cache, lengths), 2.0**-8)


def test_a_call_reads_what_the_one_before_has_written(step: str, backend: str, device: torch.device) -> None:
    # Queries, keys and values are outputs of the calls before, which may still run as the next one starts.
    q, k, v = (normal(1, 8, 16, 64, device=device, seed=seed) for seed in (1, 2, 3))
    lengths = ints([8], device)
    wait = torch.cuda.synchronize if backend == "cuda" else int

    def walk(between: Any) -> list[torch.Tensor]:
        found = [decode(q, ContiguousCache(k, v), lengths, step=step)]
        for i in range(6):
            between()
            x = found[-1]
            found.append(decode(x if i % 2 else q, ContiguousCache(x, v if i % 3 else x), lengths, step=step))
        wait()
        return found

    alone = walk(wait)
    for _ in range(5 if backend == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(alone, walk(int), strict=True))
