"""Prefill over a ring: wrap at every offset, only the live band read, no key lost, refusals; every step."""

from __future__ import annotations

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_bugs import Bug

from mila_kernels import build, ops, outputs, parity, reference, shapes, steps
from mila_kernels.attention import prefill
from mila_kernels.attention_ring import largest_chunk, prefill_ring, prefill_through_ring
from mila_kernels.cache import ContiguousCache, RingCache

STEPS = [step.id for step in steps.steps("prefill_ring")]
BOUNDS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAN, INF = math.nan, math.inf

every_step = pytest.mark.parametrize("step", STEPS)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """All steps, both ways, compiled side by side: the tests then find them in the cache."""
    with ThreadPoolExecutor(2) as pool:
        both = [(steps.step(step), check) for step in STEPS for check in (False, True)]
        list(pool.map(lambda one: build.load(one[0], "emulation", check=one[1]), both))


def normal(*shape, dtype=torch.bfloat16, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def prompt(tokens, *, batch=1, q_heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16, seed=0, device="cpu"):
    heads = (q_heads, kv_heads, kv_heads)
    return tuple(
        normal(batch, tokens, n, head_dim, dtype=dtype, seed=seed + i, device=device) for i, n in enumerate(heads)
    )


def ring(capacity, k, fill=NAN):
    """An empty ring for keys like ``k``."""
    shape = (k.shape[0], capacity, *k.shape[2:])
    return RingCache(k.new_full(shape, fill), k.new_full(shape, fill))


def ring_after(capacity, k, v, lengths, live, fill=NAN):
    """A ring that holds the ``live`` newest positions of each sequence, ``fill`` in all other slots."""
    cache = ring(capacity, k, fill)
    for row, length in enumerate(lengths.tolist()):
        positions = torch.arange(max(0, length - live), length, device=k.device)
        cache.k[row, positions % capacity] = k[row, positions]
        cache.v[row, positions % capacity] = v[row, positions]
    return cache


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_right(out, ref, dtype):
    for name, a, b, bound in zip(("O", "LSE"), out, ref, (BOUNDS[dtype], 1e-5), strict=True):
        found = parity.compare(a, b, bound)
        assert found.passed, (name, found)


# ---- any shape ----


@every_step
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_every_head_dim_and_dtype(step, head_dim, dtype, device):
    if head_dim not in steps.step(step).head_dims:
        q = normal(1, 1, 1, head_dim, dtype=dtype)
        with pytest.raises(ValueError, match=rf"q: head_dim {head_dim} must be one of"):
            prefill_ring(q, RingCache(q, q), int32(1), step=step)
        return
    q, k, v = prompt(61, q_heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, device=device)
    cache = ring_after(53, k, v, int32(61), live=53)
    out = prefill_ring(q[:, 40:], cache, int32(61, device=device), window=33, step=step, return_lse=True)
    assert_right(out, reference.attention(q[:, 40:], k, v, window=33), dtype)


@every_step
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.1])
def test_any_finite_scale(step, scale, device):
    q, k, v = prompt(40, device=device)
    out = prefill_through_ring(
        q, k, v, ring(25, k), int32(0, device=device), window=9, scale=scale, step=step, return_lse=True
    )
    assert_right(out, reference.attention(q, k, v, window=9, scale=scale), torch.bfloat16)


@every_step
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 130), window=st.integers(1, 90), spare=st.integers(0, 70), group=st.integers(1, 5),
    kv_heads=st.integers(1, 3), head_dim=st.sampled_from((64, 64, 128, 128, 256, 512)), batch=st.integers(0, 2),
    dtype=st.sampled_from(list(BOUNDS)), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_prompt_through_any_ring(
    step, device, tokens, window, spare, group, kv_heads, head_dim, batch, dtype, seed
):
    head_dim = min(steps.step(step).head_dims, key=lambda taken: abs(taken - head_dim))
    q, k, v = prompt(tokens, batch=batch, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
                     seed=seed, device=device)  # fmt: skip
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    with outputs.guarding() as changed:
        out = prefill_through_ring(q, k, v, ring(window + spare, k), lengths, window=window, step=step, return_lse=True)
    assert_right(out, reference.attention(q, k, v, window=window), dtype)
    assert changed() == 0 and lengths.tolist() == [0] * batch


@every_step
def test_a_long_prompt(step, device, large):
    tokens, window, capacity, heads = (5000, 1024, 1500, 8) if large else (150, 33, 50, 2)
    head_dim = 256 if 256 in steps.step(step).head_dims else steps.step(step).head_dims[-1]
    q, k, v = prompt(tokens, q_heads=heads, head_dim=head_dim, device=device)
    lengths = int32(0, device=device)
    out = prefill_through_ring(q, k, v, ring(capacity, k), lengths, window=window, step=step, return_lse=True)
    assert_right(out, reference.attention(q, k, v, window=window), torch.bfloat16)


@every_step
def test_ragged_lengths(step, device):
    lengths = int32(0, 3, 20, 64, 200, device=device)
    q, k, v = prompt(200, batch=5, device=device)
    queries = normal(5, 20, 2, 64, seed=9, device=device)
    cache = ring_after(50, k, v, lengths, live=50)
    o, lse = prefill_ring(queries, cache, lengths, window=31, step=step, return_lse=True)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        ref = reference.attention(queries[one], k[one, :length], v[one, :length], window=31)
        assert_right((o[one], lse[one]), ref, torch.bfloat16)


@every_step
def test_strided_cache(step, device):
    """[batch, heads, capacity, head_dim] in memory (HND), poison between what is used."""
    q, k, v = prompt(90, kv_heads=2, q_heads=4, device=device)
    plain = ring_after(70, k, v, int32(90), live=70)
    views, changed = parity.poison({"q": q[:, 60:], "k": plain.k.transpose(1, 2), "v": plain.v.transpose(1, 2)})
    cache = RingCache(views["k"], views["v"], layout="HND")
    out = prefill_ring(views["q"], cache, int32(90, device=device), window=40, step=step, return_lse=True)
    assert_right(out, reference.attention(q[:, 60:], k, v, window=40), torch.bfloat16)
    assert changed() == 0


# ---- the ring ----


@every_step
def test_wrap_at_every_offset(step, device):
    """The same 24 tokens, however far round the ring they lie: the same bits."""
    capacity, live, window, chunk = 40, 24, 17, 8
    q, k, v = prompt(live, device=device)
    expected = None
    for length in range(live, live + capacity + 1):
        cache = ring(capacity, k)
        slots = torch.arange(length - live, length, device=device) % capacity
        cache.k[:, slots], cache.v[:, slots] = k, v
        out = prefill_ring(
            q[:, -chunk:], cache, int32(length, device=device), window=window, step=step, return_lse=True
        )
        if expected is None:
            expected = out
            assert_right(out, reference.attention(q[:, -chunk:], k, v, window=window), torch.bfloat16)
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1]), length


@every_step
@pytest.mark.parametrize("value", [NAN, INF])
def test_slots_outside_the_band_are_not_read(step, value, device):
    window, chunk, length = 40, 25, 333
    q, k, v = prompt(length, head_dim=128, device=device)
    lengths, queries = int32(length, device=device), q[:, -chunk:]
    clean = ring_after(90, k, v, lengths, live=chunk + window - 1, fill=0.0)
    expected = prefill_ring(queries, clean, lengths, window=window, step=step, return_lse=True)
    assert_right(expected, reference.attention(queries, k, v, window=window), torch.bfloat16)
    dirty = ring_after(90, k, v, lengths, live=chunk + window - 1, fill=value)
    for cache in (dirty, RingCache(dirty.k, clean.v), RingCache(clean.k, dirty.v)):
        out = prefill_ring(queries, cache, lengths, window=window, step=step, return_lse=True)
        assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])


@every_step
def test_nan_in_a_live_slot_is_not_hidden(step, device):
    for spoiled in ("k", "v"):
        q, k, v = prompt(64, device=device)
        cache = ring_after(50, k, v, int32(64), live=50)
        getattr(cache, spoiled)[0, 60 % 50] = NAN
        o = prefill_ring(q[:, -3:], cache, int32(64, device=device), window=20, step=step)
        assert bool(o.isnan().all()), spoiled


@every_step
@pytest.mark.parametrize("chunk", [1, 7, 33, None])
def test_the_largest_chunk_loses_no_key(step, chunk, device):
    """MASK: V[j] = one-hot(j) shows every key that a query saw, while chunks overwrite slots of the ring."""
    tokens, window, capacity = 128, 31, 63
    q = torch.zeros(1, tokens, 1, 128, dtype=torch.bfloat16, device=device)
    k = normal(1, tokens, 1, 128, device=device)
    v = torch.eye(tokens, dtype=torch.bfloat16, device=device).view(1, tokens, 1, 128)
    o, lse = prefill_through_ring(
        q, k, v, ring(capacity, k), int32(0, device=device), window=window, chunk=chunk, step=step, return_lse=True
    )
    position, key = torch.arange(tokens).view(-1, 1), torch.arange(tokens).view(1, -1)
    seen = (key <= position) & (key > position - window)
    assert torch.equal(o[0, :, 0].cpu() != 0, seen)
    torch.testing.assert_close(lse[0, 0].cpu(), seen.sum(1).float().log(), atol=2e-6, rtol=1e-6)


def test_one_token_more_than_the_largest_chunk_would_lose_a_key():
    window, capacity = 31, 63
    assert largest_chunk(capacity, window) == 33 and largest_chunk(30, 31) == 0
    assert [largest_chunk(8, window) for window in (0, 1, 2, 8, 9, 10**9)] == [8, 8, 7, 1, 0, 0]
    first_of_chunk_sees_from = -(window - 1)
    for chunk, kept in ((33, True), (34, False)):
        overwritten = range(
            chunk - 1 - capacity, -1 - capacity, -1
        )  # positions before the chunk, in whose slots it lies
        assert (first_of_chunk_sees_from > max(overwritten)) is kept


@every_step
def test_the_same_as_prefill(step, device):
    q, k, v = prompt(150, q_heads=4, kv_heads=2, head_dim=128, device=device)
    o = prefill_through_ring(q, k, v, ring(100, k), int32(0, device=device), window=64, step=step)
    assert parity.compare(o, prefill(q, k, v, window=64).double(), 2.0**-8).passed


@every_step
@pytest.mark.parametrize("window", [5, 64])
def test_windows_count_the_current_key(step, window, device):
    """COUNT and MEAN at every position of a prompt."""
    tokens = 100
    q = torch.zeros(1, tokens, 1, 64, dtype=torch.bfloat16, device=device)
    k = normal(1, tokens, 1, 64, device=device)
    v = (
        torch.arange(tokens, dtype=torch.bfloat16, device=device)
        .view(1, tokens, 1, 1)
        .expand(1, tokens, 1, 64)
        .contiguous()
    )
    o, lse = prefill_through_ring(
        q, k, v, ring(window + 20, k), int32(0, device=device), window=window, step=step, return_lse=True
    )
    counts = torch.arange(1, tokens + 1).clamp(max=window).float()
    torch.testing.assert_close(lse[0, 0].cpu().exp(), counts, rtol=1e-5, atol=0)
    means = torch.arange(tokens) - (counts - 1) / 2
    assert torch.equal(o[0, :, 0].cpu(), means.bfloat16().view(-1, 1).expand(tokens, 64))


@every_step
def test_no_window_is_the_whole_text_where_the_ring_has_room(step, device):
    q, k, v = prompt(33, device=device)
    cache = ring_after(33 + 20 - 1, k, v, int32(33), live=33)
    out = prefill_ring(q[:, -20:], cache, int32(33, device=device), step=step, return_lse=True)
    assert_right(out, reference.attention(q[:, -20:], k, v), torch.bfloat16)


@every_step
def test_a_sequence_goes_on(step, device):
    """Two prompts one after the other, with different chunks, are one."""
    q, k, v = prompt(140, device=device)
    cache = ring(60, k)
    first = prefill_through_ring(
        q[:, :75], k[:, :75], v[:, :75], cache, int32(0, device=device), window=40, chunk=10, step=step
    )
    second = prefill_through_ring(
        q[:, 75:], k[:, 75:], v[:, 75:], cache, int32(75, device=device), window=40, step=step
    )
    ref, _ = reference.attention(q, k, v, window=40)
    assert parity.compare(torch.cat((first, second), dim=1), ref, 2.0**-8).passed


# ---- nothing to see ----


@every_step
def test_no_queries_no_tokens_no_batch(step, device):
    q, k, _ = prompt(4, device=device)
    o, lse = prefill_ring(q[:, :0], ring(8, k), int32(4, device=device), step=step, return_lse=True)
    assert o.shape == (1, 0, 2, 64) and lse.shape == (1, 2, 0)
    o, lse = prefill_ring(q, ring(8, k), int32(0, device=device), step=step, return_lse=True)
    assert bool((o == 0).all()) and bool((lse == -INF).all())
    none = prefill_ring(q[:0], ring(8, k[:0]), int32(device=device), step=step)
    assert none.shape == (0, 4, 2, 64)


@every_step
def test_more_queries_than_tokens(step, device):
    v = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device).view(1, 2, 1, 1).expand(1, 2, 1, 256)
    cache = ring(9, v)
    cache.k[:, :2], cache.v[:, :2] = normal(1, 2, 1, 256, device=device), v
    q = torch.zeros(1, 4, 1, 256, dtype=torch.bfloat16, device=device)
    o, lse = prefill_ring(q, cache, int32(2, device=device), window=3, step=step, return_lse=True)
    assert torch.equal(o.cpu().float(), torch.tensor([0.0, 0.0, 1.0, 1.5]).view(1, 4, 1, 1).expand(1, 4, 1, 256))
    assert lse[0, 0, :2].tolist() == [-INF, -INF]
    assert lse[0, 0, 2:].tolist() == pytest.approx([0.0, 0.693147], abs=1e-6)


# ---- refusals ----


def test_what_does_not_fit_is_refused_by_name():
    q, k, v = prompt(20)
    cache, lengths = ring(40, k, 0.0), int32(20)
    with pytest.raises(
        ValueError, match="q: q_len 20 is above 9, the largest chunk of a ring of 40 slots with a window of 32"
    ):
        prefill_ring(q, cache, lengths, window=32)
    with pytest.raises(ValueError, match="q: q_len 20 is above 0, the largest chunk of a ring of 40"):
        prefill_ring(q, cache, lengths, window=41)
    with pytest.raises(ValueError, match="q: q_len 1 is above 0, the largest chunk of a ring of 40 .* of 1000000000"):
        prefill_ring(q[:, :1], cache, lengths, window=10**9)
    for q_len in (9, 10):
        with pytest.raises(ValueError, match=f"q: q_len {q_len} is above 8, the ring's capacity"):
            prefill_ring(q[:, :q_len], ring(8, k, 0.0), lengths)
    with pytest.raises(ValueError, match="chunk: 10 must be between 1 and 9, for 40 slots and window 32"):
        prefill_through_ring(q, k, v, cache, int32(0), window=32, chunk=10)
    with pytest.raises(ValueError, match="window: 0 must be positive"):
        prefill_ring(q, cache, lengths, window=0)
    with pytest.raises(TypeError, match="cache: RingCache is needed, not ContiguousCache"):
        prefill_ring(q, ContiguousCache(k, v), lengths)
    with pytest.raises(ValueError, match="cache: dtype torch.float16 must be that of q, torch.bfloat16"):
        prefill_ring(q, ring(40, k.half()), lengths)
    with pytest.raises(ValueError, match="cache: batch 1 and head_dim 128 must equal those of q, 1 and 64"):
        prefill_ring(q, ring(40, normal(1, 1, 1, 128)), lengths)
    with pytest.raises(ValueError, match="q: 3 heads must be a multiple of the cache's 2"):
        prefill_ring(normal(1, 2, 3, 64), ring(40, normal(1, 1, 2, 64)), lengths)
    with pytest.raises(ValueError, match="lengths: row 0 is -1"):
        prefill_ring(q, cache, int32(-1))
    with pytest.raises(TypeError, match="lengths: a torch.Tensor is needed, not int"):
        prefill_ring(q, cache, 20)
    with pytest.raises(ValueError, match="v: shape"):
        prefill_through_ring(q, k, v[:, :-1], cache, int32(0), window=32)


# ---- check mode, and the operation's own inputs ----


@every_step
@pytest.mark.parametrize("seed", range(3))
def test_check_mode_finds_nothing(step, seed):
    tokens, head_dim, window, capacity, dtype = [
        (70, 64, 33, 57, torch.bfloat16), (90, 128, 20, 40, torch.float16), (40, 256, 24, 40, torch.bfloat16)
    ][seed]  # fmt: skip
    q, k, v = prompt(tokens, q_heads=3, head_dim=head_dim, dtype=dtype, seed=seed)
    with build.emulation(check=True, seed=seed):
        out = prefill_through_ring(q, k, v, ring(capacity, k), int32(0), window=window, step=step, return_lse=True)
    assert_right(out, reference.attention(q, k, v, window=window), dtype)


BUGS = [  # of 04_wgmma: name, a part of its text, what takes its place, what check mode says, or None: O is wrong
    ("values of nobody are not zeroed", " || (is_v && live < Bc)", "", None),
    ("the ring has no end", "slot + live > static_cast<uint32_t>(args.capacity) || ", "", None),
    ("the maximum stays", "o[i / 2 * 4 + 2 * h + i % 2] *= factor[h];", ";", None),
    ("a tile of K not waited for", "          mbarrier_wait(smem_u32(&smem.full[0][stage_of(at)]), parity_of(at));\n",
     "", "in flight: .*reads by wgmma|uninitialised|race: "),
    ("values given back while they are read", "    wgmma_wait_group<0>();\n    if (any) release",
     "    if (any) release", "in flight: .*registers|in flight: .*overwrites"),
    ("no barrier after rows are copied", "live);\n          bar_sync(PRODUCER_BARRIER, WARPGROUP);\n", "live);\n",
     "in flight: .*cp.async|race: .*reads by wgmma|uninitialised"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "find", "replace", "says"), BUGS, ids=[bug[0] for bug in BUGS])
def test_planted_bug_is_found(name, find, replace, says, tmp_path, monkeypatch):
    original = steps.step("prefill_ring/04_wgmma")
    assert original.source.count(find) == 1
    bug = Bug(name, original.id, find, replace, says or "", ())
    planted = dataclasses.replace(original, path=bug.plant(tmp_path).path)  # a step of the ring still, of one instance
    monkeypatch.setattr(steps, "step", lambda _: planted)
    tokens, window = 400, 300
    q, k, v = prompt(tokens, q_heads=2)
    capacity = 500 if "zeroed" in name else 350  # the last tile ends within the ring, or crosses its end
    cache = ring_after(capacity, k, v, int32(tokens), live=50 + window - 1)
    with build.emulation(check=True, seed=0):
        run = functools.partial(
            prefill_ring, q[:, 350:], cache, int32(tokens), window=window, step="prefill_ring/04_wgmma"
        )
        if says:
            with pytest.raises(build.KernelError, match=says):
                run()
        else:
            found = parity.compare(run(), reference.attention(q[:, 350:], k, v, window=window)[0], 2.0**-8)
            assert not found.passed, name


@every_step
@pytest.mark.parametrize("text", ["b2 q21h4 kv90h2 d64 w33 causal bf16", "b1 q20h2 kv9h1 d128 causal fp16"])
def test_parity_of_the_operation(step, text, backend):
    rows = parity.check(step, shapes.parse_shape("prefill_ring", text), seed=1, device=backend)
    assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_the_operation_s_rings_wrap_and_are_poisoned():
    inputs = ops.op("prefill_ring").make_inputs(
        shapes.parse_shape("prefill_ring", "b1 q21h2 kv90h1 d64 w33 causal bf16"), 0, torch.device("cpu")
    )
    capacity = inputs["k"].shape[1]
    assert capacity == 21 + 33 - 1 and (90 - capacity) % capacity != 0
    assert not bool(inputs["k"].isnan().any())
    short = ops.op("prefill_ring").make_inputs(
        shapes.parse_shape("prefill_ring", "b1 q21h2 kv40h1 d64 w33 causal bf16"), 0, torch.device("cpu")
    )
    assert bool(short["k"][:, 40:].isnan().all()) and bool(short["v"][:, 40:].isnan().all())
