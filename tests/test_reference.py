"""The float64 truth, against arithmetic that needs no reference and against a loop over single queries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mila_kernels import reference


def ramp(q_len: int, kv_len: int, *, q_heads: int = 2, kv_heads: int = 1, dim: int = 64, first: float = 0.0):
    """q = 0 and V[j] = first + j: the output is the mean index attended, exp(LSE) the number of keys."""
    q = torch.zeros(1, q_len, q_heads, dim)
    k = torch.randn(1, kv_len, kv_heads, dim)
    v = (first + torch.arange(kv_len, dtype=torch.float32)).view(1, kv_len, 1, 1).expand(1, kv_len, kv_heads, dim)
    return q, k, v


def test_chunk_with_an_offset():
    o, lse = reference.attention(*ramp(3, 8, dim=512))
    assert o[0, :, 0, 0].tolist() == pytest.approx([2.5, 3.0, 3.5], rel=1e-12)
    assert lse[0, 1].tolist() == pytest.approx([math.log(6), math.log(7), math.log(8)], rel=1e-12)


def test_more_queries_than_keys():
    o, lse = reference.attention(*ramp(4, 2, first=1.0))
    assert o[0, :, 0, 0].tolist() == pytest.approx([0, 0, 1.0, 1.5])
    assert lse[0, 0].tolist() == pytest.approx([-math.inf, -math.inf, 0, math.log(2)])


@pytest.mark.parametrize(("window", "count"), [(4, 4), (10, 10), (10**9, 10), (1, 1)])
def test_window_counts_the_current_key(window, count):
    o, lse = reference.attention(*ramp(10, 10), window=window)
    assert o[0, -1, 0, 0].item() == pytest.approx(9 - (count - 1) / 2)
    assert math.exp(lse[0, 0, -1].item()) == pytest.approx(count)


def test_empty_lengths():
    o, lse = reference.attention(*ramp(3, 0))
    assert o.abs().max() == 0 and bool((lse == -math.inf).all())
    o, lse = reference.attention(*ramp(0, 5))
    assert o.shape == (1, 0, 2, 64) and lse.shape == (1, 2, 0)
    o, lse = reference.attention(*ramp(200, 3))
    assert not bool(torch.isnan(o).any()) and int((lse[0, 0] > -math.inf).sum()) == 3


def test_sink_takes_weight_and_has_no_value():
    q, k, v = ramp(4, 2, first=1.0)
    sink = torch.tensor([0.0, math.log(3.0)])
    o, lse = reference.attention(q, k, v, sink=sink)
    assert lse[0, :, 0].tolist() == pytest.approx([0.0, math.log(3.0)], abs=1e-7)
    assert o[0, 0].abs().max() == 0
    assert o[0, 3, :, 0].tolist() == pytest.approx([3 / 3, 3 / 5])
    assert lse[0, 1, 3].item() == pytest.approx(math.log(5))


def by_hand(q, k, v, causal, window, scale, offset):
    """One query and head at a time, over an explicit list of visible keys."""
    batch, q_len, q_heads, dim = q.shape
    o, lse = torch.zeros(batch, q_len, q_heads, dim).double(), torch.full((batch, q_heads, q_len), -math.inf).double()
    group = q_heads // k.shape[2]
    for b in range(batch):
        for i in range(q_len):
            p = offset + i
            keys = [j for j in range(k.shape[1]) if (not causal or j <= p) and (window is None or j >= p - window + 1)]
            for h in range(q_heads if keys else 0):
                s = (k[b, keys, h // group].double() @ q[b, i, h].double()) * scale
                o[b, i, h] = torch.softmax(s, 0) @ v[b, keys, h // group].double()
                lse[b, h, i] = torch.logsumexp(s, 0)
    return o, lse


@settings(max_examples=40, deadline=None)
@given(
    q_len=st.integers(0, 7), kv_len=st.integers(0, 9), kv_heads=st.sampled_from([1, 2]), group=st.sampled_from([1, 3]),
    causal=st.booleans(), window=st.sampled_from([None, 1, 3, 100]), chunk=st.sampled_from([1, 1 << 20]),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_agrees_with_one_query_at_a_time(q_len, kv_len, kv_heads, group, causal, window, chunk, seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, q_len, kv_heads * group, 16, generator=g).bfloat16()
    k, v = (torch.randn(2, kv_len, kv_heads, 16, generator=g).bfloat16() for _ in range(2))
    before, reference.SCORE_BYTES = reference.SCORE_BYTES, chunk
    try:
        o, lse = reference.attention(q, k, v, causal=causal, window=window, scale=0.7)
    finally:
        reference.SCORE_BYTES = before
    o_hand, lse_hand = by_hand(q, k, v, causal, window, 0.7, kv_len - q_len)
    torch.testing.assert_close(o, o_hand, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, lse_hand, rtol=1e-10, atol=1e-12)


def test_bad_values_reach_only_the_rows_that_see_them():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 6, 1, 16, generator=g) for _ in range(3))
    clean, _ = reference.attention(q, k, v)
    v_bad, k_bad = v.clone(), k.clone()
    v_bad[0, 3, 0, 5] = math.nan
    k_bad[0, 4] = math.nan
    o, _ = reference.attention(q, k, v_bad)
    assert bool(torch.isnan(o[0, 3:, 0, 5]).all()) and int(torch.isnan(o).sum()) == 3
    torch.testing.assert_close(o[0, :3], clean[0, :3])
    o, _ = reference.attention(q, k_bad, v)
    assert bool(torch.isnan(o[0, 4:]).all())
    torch.testing.assert_close(o[0, :4], clean[0, :4])


def test_bad_input_names_the_argument():
    q, k, v = ramp(3, 8)
    with pytest.raises(ValueError, match="window must be at least 1 or None, not 0"):
        reference.attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="k and v must have one shape"):
        reference.attention(q, k, v[:, :4])
    with pytest.raises(ValueError, match="sink must have shape"):
        reference.attention(q, k, v, sink=torch.zeros(3))
