"""What every kernel is compared with: the same operation in float64 over the same (already rounded) inputs.

Written to be read: no tiling tricks, only a loop over queries so that memory stays small. Runs on the inputs' device.
"""

from __future__ import annotations

import math

import torch

from .cache import Cache, RingCache

SCORE_BYTES = 128 << 20  # one float64 block of scores; bounds the memory that the reference takes


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    offset: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64: O = softmax(scale * q k^T + mask) v, and the log of each row's sum.

    q is [B, Tq, Hq, D], k and v are [B, Tk, Hkv, D] of any floating dtype with Hq a multiple of Hkv (query head h
    reads KV head h // (Hq / Hkv)). Query i sits at position p = offset + i, where offset is Tk - Tq unless given.
    With ``causal`` it sees the keys up to p; with a ``window`` of W keys none before p - W + 1. ``scale`` is
    1/sqrt(D) unless given. ``sink`` [Hq] is a logit per head that takes weight but has no value.

    Returns O [B, Tq, Hq, D] and LSE [B, Hq, Tq] (natural log), both float64. A row that sees no key has O = 0, and
    LSE = -inf or its sink. A NaN or Inf that a row does not see does not reach it.
    """
    _check(q, k, v, window, sink)
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1], k.shape[2]
    group = q_heads // kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    offset = kv_len - q_len if offset is None else offset
    o = torch.zeros(batch, q_len, q_heads, head_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, q_heads, q_len), -math.inf, dtype=torch.float64, device=q.device)
    sinks = None if sink is None else sink.double().view(kv_heads, group, 1)
    rows = max(1, SCORE_BYTES // (8 * q_heads * max(1, kv_len)))

    for b in range(batch):
        for start in range(0, q_len, rows):
            stop = min(start + rows, q_len)
            position = torch.arange(offset + start, offset + stop, device=q.device)
            # Keys that no row of this block sees are left out: it saves work and keeps them from being touched.
            low = 0 if window is None else min(kv_len, max(0, offset + start - window + 1))
            high = min(kv_len, max(low, offset + stop)) if causal else kv_len
            visible = _visible(position, low, high, causal, window)

            q_block = q[b, start:stop].double().view(stop - start, kv_heads, group, head_dim)
            k_block, v_block = k[b, low:high].double(), v[b, low:high].double()
            scores = torch.einsum("ihgd,jhd->hgij", q_block, k_block) * scale
            scores = scores.masked_fill(~visible, -math.inf)

            weights, log_sum = _softmax(scores, sinks)
            out = _weighted_sum(weights, v_block, visible)
            o[b, start:stop] = out.permute(2, 0, 1, 3).reshape(stop - start, q_heads, head_dim)
            lse[b, :, start:stop] = log_sum.reshape(q_heads, stop - start)
    return o, lse


def _visible(position: torch.Tensor, low: int, high: int, causal: bool, window: int | None) -> torch.Tensor:
    """[rows, high - low]: which keys low..high-1 the query at each position sees."""
    key = torch.arange(low, high, device=position.device)
    seen = torch.ones(len(position), len(key), dtype=torch.bool, device=position.device)
    if causal:
        seen &= key <= position[:, None]
    if window is not None:
        seen &= key > position[:, None] - window
    return seen


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [h, g, i, j] and log of the sum [h, g, i] of scores [h, g, i, j]; sinks [h, g, 1] join the sum."""
    terms = scores if sinks is None else torch.cat([scores, sinks.expand(scores.shape[:3]).unsqueeze(-1)], dim=-1)
    if terms.shape[-1] == 0:
        return scores, torch.full(scores.shape[:3], -math.inf, dtype=scores.dtype, device=scores.device)
    log_sum = torch.logsumexp(terms, dim=-1)
    # A row without any term has log_sum -inf; its scores are -inf too, and exp(-inf - 0) is the 0 wanted there.
    shift = log_sum.masked_fill(log_sum == -math.inf, 0.0)
    return torch.exp(scores - shift.unsqueeze(-1)), log_sum


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Sum over j of weights [h, g, i, j] times v [j, h, d], in which 0 times an unseen NaN or Inf is 0."""
    finite = torch.isfinite(v)
    out = torch.einsum("hgij,jhd->hgid", weights, torch.where(finite, v, 0.0))
    if bool(finite.all()):
        return out
    seen = visible.double()
    for bad, value in ((v == math.inf, math.inf), (v == -math.inf, -math.inf), (torch.isnan(v), math.nan)):
        reached = torch.einsum("ij,jhd->hid", seen, bad.double()).unsqueeze(1) > 0
        out = torch.where(reached, out + value, out)
    return out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sink: torch.Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, T, H, D], not shape {tuple(tensor.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim, not {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q heads must be a multiple of kv heads, not {q.shape[2]} and {k.shape[2]}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 or None, not {window}")
    if sink is not None and tuple(sink.shape) != (q.shape[2],):
        raise ValueError(f"sink must have shape [{q.shape[2]}], not {tuple(sink.shape)}")


def matvec(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, chunk_bytes: int = SCORE_BYTES
) -> torch.Tensor:
    """y = x w^T + bias in float64, x [M, K] and w [N, K] of any floating dtype (a quantised weight dequantised)."""
    rows = max(1, chunk_bytes // (8 * max(1, w.shape[1])))
    y = torch.cat([x.double() @ w[n : n + rows].double().T for n in range(0, w.shape[0], rows)], dim=1)
    return y if bias is None else y + bias.double()


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, K] to E4M3 [M, K] with an FP32 scale a token, absmax / 448 and never below 2^-126."""
    absmax = x.float().abs().amax(1)
    scales = (absmax / absmax.new_full((), 448)).clamp_min(2.0**-126)  # by a number, CUDA multiplies with its inverse
    codes = (x.float() * (1 / scales)[:, None]).clamp(-448, 448)
    return codes.to(torch.float8_e4m3fn), scales


def decode(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    *,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """decode() in float64: each sequence's live keys in order, then attention() with the queries at the end of them.

    Arguments as of :func:`mila_kernels.decode`. Returns O [B, Tq, Hq, D] and LSE [B, Hq, Tq], both float64.
    """
    q_len = q.shape[1]
    if isinstance(cache, RingCache) and window is None:
        window = cache.capacity - q_len + 1
    o = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[0], q.shape[2], q_len, dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        k, v, first = cache.gather(row, length)
        offset = length - q_len - first  # of the queries among the keys gathered
        one = attention(q[row : row + 1], k, v, window=window, scale=scale, sink=sink, offset=offset)
        o[row], lse[row] = one[0][0], one[1][0]
    return o, lse
