"""What a user would call instead: the same inputs, the same outputs, another implementation.

Timed by :func:`mila_kernels.bench.bench_call` under their own names. What a peer needs that is not part of the
operation (KV heads repeated, a mask) is made by ``prepare``, outside the timed call: a peer never pays for it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from . import ops
from .cache import ContiguousCache, PagedCache, RingCache
from .linear import Fp4Weight, Fp8Weight
from .shapes import Workload

SMALL_BYTES = 24 << 30  # what scores may take, with all that comes of them, where no GPU says what it has


@dataclass(frozen=True)
class Peer:
    """``prepare(**inputs)`` gives the call to time; its result is the op's first output. ``fits`` tells for which
    workloads there is one, ``package`` what must be installed for it (extra ``peers``). ``own_weight``: the weight, in
    floating point, of a peer that rounds it to a format of its own; its product is right if it is that weight's."""

    op: str
    name: str
    prepare: Callable[..., Callable[[], torch.Tensor]]
    fits: Callable[[Workload], bool] = lambda workload: True
    needs_cuda: bool = False
    package: str = ""
    own_weight: Callable[[Fp4Weight], torch.Tensor] | None = None

    def truth(self, **inputs: Any) -> torch.Tensor:
        """What the call should give, in float64."""
        if self.own_weight is None:
            return ops.op(self.op).reference(**inputs)[0]
        y = inputs["x"].double() @ self.own_weight(inputs["w"]).double().T
        return y if inputs.get("bias") is None else y + inputs["bias"].double()

    def runs_on(self, device: torch.device) -> bool:
        """Whether there is an implementation for tensors of that device, and it is installed."""
        installed = not self.package or importlib.util.find_spec(self.package) is not None
        return installed and (device.type == "cuda" or not self.needs_cuda)


def peers(op: str, workload: Workload | None = None) -> list[Peer]:
    """The peers of an operation, of one workload if given."""
    return [p for p in PEERS if p.op == op and (workload is None or p.fits(workload))]


def _heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[batch, heads, tokens, head_dim], each query head with a KV head of its own."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    return q.transpose(1, 2).contiguous(), k, v


def _visible(q_len: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    position = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    key = torch.arange(kv_len, device=device)
    seen = key <= position
    return seen & (key > position - window) if window else seen


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def _three_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int | None = None,
    scale: float | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Matmul, softmax, matmul over scores in memory; scale and mask ride on the first product."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_len = k.shape[1]
    q, k, v = _heads_first(q, k, v)
    q, k, v = (x.reshape(batch * q_heads, -1, head_dim) for x in (q, k, v))
    bias = torch.zeros(1, q_len, kv_len, dtype=q.dtype, device=q.device)
    if causal:
        bias.masked_fill_(~_visible(q_len, kv_len, window, q.device), -math.inf)
    factor = _scale(q.unsqueeze(0), scale)

    def call() -> torch.Tensor:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=factor)
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights, v).view(batch, q_heads, q_len, head_dim).transpose(1, 2)

    return call


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int | None = None,
    scale: float | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """scaled_dot_product_attention with the memory-efficient backend, the only fused one that takes head dim 512."""
    q_len, kv_len, device = q.shape[1], k.shape[1], q.device
    q, k, v = _heads_first(q, k, v)
    mask = None
    if causal and window:
        mask = _visible(q_len, kv_len, window, device)
    elif causal and q_len != kv_len:
        mask = causal_lower_right(q_len, kv_len)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale
            )
        return out.transpose(1, 2)

    return call


def _scores_fit(w: Workload) -> bool:
    """Scores, their softmax and a mask or a copy, in 16 bits, in the GPU's memory; in few GB where there is none."""
    scores = 2 * w.batch * w.q_heads * w.q_len * w.kv_len
    return 3 * scores <= (torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else SMALL_BYTES)


def _one_length(lengths: torch.Tensor) -> int:
    length = int(lengths[0])
    if bool((lengths != length).any()):
        raise ValueError("lengths: a peer takes sequences of one length")
    return length


def _of_ring(prepare: Callable[..., Callable[[], torch.Tensor]]) -> Callable[..., Callable[[], torch.Tensor]]:
    """The same peer on the live keys of a ring, put in order beforehand: peers know no rings."""

    def prepare_ring(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: torch.Tensor, window: int
    ) -> Callable[[], torch.Tensor]:
        length = _one_length(lengths)
        first = max(0, length - q.shape[1] - window + 1)
        slots = torch.arange(first, length, device=k.device) % k.shape[1]
        return prepare(q, k[:, slots], v[:, slots], causal=True, window=window)

    return prepare_ring


def _bf16_product(x_codes: torch.Tensor, x_scales: torch.Tensor, w: Fp4Weight) -> Callable[[], torch.Tensor]:
    """The library's product of both matrices in BF16, which they were brought to beforehand."""
    x = (x_codes.float() * x_scales[:, None]).to(torch.bfloat16)
    weight = w.dequantize(torch.bfloat16)
    return lambda: torch.nn.functional.linear(x, weight)


def _fp8_product(x_codes: torch.Tensor, x_scales: torch.Tensor, w: Fp4Weight) -> Callable[[], torch.Tensor]:
    """torch._scaled_mm in E4M3 with one scale a side, its fastest form; both were rounded to that beforehand."""
    weight = w.dequantize(torch.float32)
    scale = (weight.abs().amax() / 448).view(1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    token_scale = x_scales.amax().view(1)
    x = (x_codes.float() * (x_scales / token_scale)[:, None]).to(torch.float8_e4m3fn)
    return lambda: torch._scaled_mm(
        x, codes.T, scale_a=token_scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _live(
    cache: ContiguousCache | RingCache | PagedCache, first: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions ``first`` to ``length - 1``, in order and in one piece, [batch, n, kv_heads,
    head_dim]."""
    outer, inner = cache.slots(torch.arange(first, length, device=device).expand(cache.batch, -1))
    return cache.keys[outer, inner], cache.values[outer, inner]


def _first_live(length: int, q_len: int, window: int | None) -> int:
    return max(0, length - q_len - window + 1) if window else 0


def _decode_sdpa(
    q: torch.Tensor, cache: ContiguousCache | RingCache | PagedCache, lengths: torch.Tensor, *,
    window: int | None = None, scale: float | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """scaled_dot_product_attention on the live keys and values in one piece: it knows neither pages nor rings."""
    length = _one_length(lengths)
    first = _first_live(length, q.shape[1], window)
    k, v = (x.transpose(1, 2).contiguous() for x in _live(cache, first, length, q.device))
    rows = q.transpose(1, 2).contiguous()
    mask = _visible(q.shape[1], length - first, window, q.device) if q.shape[1] > 1 else None

    def call() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != k.shape[1]
        )
        return out.transpose(1, 2)

    return call


PEER_PAGE = 64


@dataclass(frozen=True)
class Pages:
    """``keys`` and ``values`` [pages, kv_heads, page_size, head_dim] in the layout ``HND``, heads third in ``NHD``;
    ``table`` int32 [batch, pages of a sequence]; ``length`` keys a sequence."""

    keys: torch.Tensor
    values: torch.Tensor
    layout: str
    page_size: int
    table: torch.Tensor
    length: int


def pages_of(cache: ContiguousCache | RingCache | PagedCache, lengths: torch.Tensor, window: int | None) -> Pages:
    """A cache as a library has it that knows pages and no rings: a paged one as it is, else the keys that the newest
    token sees, in order, in pages of 64."""
    length = _one_length(lengths)
    if isinstance(cache, PagedCache):
        table = cache.page_table[:, : -(-length // cache.page_size)].contiguous()
        return Pages(cache.k, cache.v, cache.layout, cache.page_size, table, length)
    first = _first_live(length, 1, window)
    used = -(-(length - first) // PEER_PAGE)
    missing = used * PEER_PAGE - (length - first)
    keys, values = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (used, PEER_PAGE)).flatten(0, 1)
        for x in _live(cache, first, length, lengths.device)
    )
    table = torch.arange(cache.batch * used, dtype=torch.int32, device=lengths.device).view(cache.batch, used)
    keys, values = (x.transpose(1, 2).contiguous() for x in (keys, values))
    return Pages(keys, values, "HND", PEER_PAGE, table, length - first)


def _flashinfer(tensor_cores: bool) -> Callable[..., Callable[[], torch.Tensor]]:
    """FlashInfer's batch decode on pages, planned beforehand: on CUDA cores, or on tensor cores (TC) as its prefill."""

    def prepare(
        q: torch.Tensor, cache: ContiguousCache | RingCache | PagedCache, lengths: torch.Tensor, *,
        window: int | None = None, scale: float | None = None,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if cache.k_scale is not None or cache.v_scale is not None:
            raise ValueError("cache: FlashInfer's decode takes no scale a head; this cache has scales")
        pages = pages_of(cache, lengths, window)
        batch, used = pages.table.shape
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=q.device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, pages.layout, use_tensor_cores=tensor_cores)
        wrapper.plan(
            torch.arange(0, (batch + 1) * used, used, dtype=torch.int32, device=q.device),
            pages.table.flatten(),
            torch.full((batch,), pages.length - (used - 1) * pages.page_size, dtype=torch.int32, device=q.device),
            q.shape[2], cache.kv_heads, cache.head_dim, pages.page_size,
            window_left=window - 1 if window and pages.length > window else -1,
            q_data_type=q.dtype, kv_data_type=pages.keys.dtype, sm_scale=scale,
        )  # fmt: skip
        rows = q[:, 0].contiguous()
        return lambda: wrapper.run(rows, (pages.keys, pages.values)).unsqueeze(1)

    return prepare


def _fits_flashinfer_tc(w: Workload) -> bool:
    """One token a sequence; E4M3 up to head dim 256, beyond which 0.6.18 refuses it on GPUs before Blackwell."""
    return w.q_len == 1 and (w.kv_dtype in ("", w.dtype) or w.kv_dtype == "fp8" and w.head_dim <= 256)


def _fits_flashinfer(w: Workload) -> bool:
    return _fits_flashinfer_tc(w) and w.q_heads // w.kv_heads in (1, 2, 3, 4, 8)  # its kernels' group sizes


def _fits_flash(w: Workload) -> bool:
    """Where torch has a fused backend: others compute in FP32 over scores in memory."""
    return w.head_dim <= 256 and w.kv_dtype in ("", w.dtype)


def _bf16_matvec(
    w: Fp4Weight | Fp8Weight, x: torch.Tensor, bias: torch.Tensor | None = None
) -> Callable[[], torch.Tensor]:
    """cuBLAS on the weight brought to the activations' type beforehand: four, or two, times the bytes."""
    weight = w.dequantize(x.dtype)
    return lambda: torch.nn.functional.linear(x, weight, bias)


def _humming(w: Fp4Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """Humming's layer with E2M1 weights and a scale for 128 columns; it quantises the dequantised weight itself."""
    from humming.layer import HummingLayer

    config = {"dtype": "float4e2m1", "group_size": w.group_size}
    layer = HummingLayer(shape_n=w.n, shape_k=w.k, weight_config=config, torch_dtype=x.dtype).to(x.device)
    layer.load_from_unquantized(w.dequantize(x.dtype))
    layer.transform()
    return lambda: layer(x) if bias is None else layer(x) + bias


def _bnb_codes(w: Fp4Weight) -> tuple[torch.Tensor, Any]:
    from bitsandbytes import functional

    return functional.quantize_fp4(w.dequantize(torch.bfloat16), blocksize=128)  # type: ignore[no-any-return]


def _bnb(w: Fp4Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """bitsandbytes' FP4 in blocks of 128, on its own quantisation of the dequantised weight."""
    from bitsandbytes import matmul_4bit

    codes, state = _bnb_codes(w)
    return lambda: matmul_4bit(x, codes.t(), quant_state=state, bias=bias)


def _bnb_weight(w: Fp4Weight) -> torch.Tensor:
    from bitsandbytes import functional

    weight: torch.Tensor = functional.dequantize_4bit(*_bnb_codes(w))
    return weight


INT4_GROUP = 128


def int4_codes(w: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantised weight in symmetric INT4: uint8 codes [N, K] from 1 to 15, which stand for code - 8, and BF16
    scales [N, K / 128]."""
    groups = w.dequantize(torch.float32).unflatten(1, (-1, INT4_GROUP))
    scales = (groups.abs().amax(2) / 7).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    codes = (groups / scales.float()[:, :, None]).round().clamp(-7, 7) + 8
    return codes.flatten(1).to(torch.uint8), scales


def _int4_weight(w: Fp4Weight) -> torch.Tensor:
    codes, scales = int4_codes(w)
    return (codes.float() - 8) * scales.float().repeat_interleave(INT4_GROUP, dim=1)


def _is_bf16(w: Workload) -> bool:
    return w.dtype == "bf16"


def _fits_int4(w: Workload) -> bool:
    """Whole groups, and rows in multiples of Gemlite's smallest size, 32 (torch's is 8)."""
    return w.n % 32 == 0 and w.k % INT4_GROUP == 0 and _is_bf16(w)


def _tinygemm(w: Fp4Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """torch's own product with INT4 weights in groups of 128."""
    codes, scales = int4_codes(w)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), dim=2).transpose(0, 1).contiguous()

    def call() -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, INT4_GROUP, scales_and_zeros)
        return y if bias is None else y + bias

    return call


def _gemlite(w: Fp4Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """Gemlite's product with INT4 weights in groups of 128; its first call on a shape chooses among some 20 kernels."""
    from gemlite.helper import A16Wn

    codes, scales = int4_codes(w)
    layer = A16Wn(device=x.device, dtype=x.dtype).from_weights(
        codes, scales, torch.full_like(scales, 8), W_nbits=4, group_size=INT4_GROUP, bias=bias
    )
    return lambda: layer(x)  # type: ignore[no-any-return]


PEERS: list[Peer] = [
    Peer("prefill", "torch three calls", _three_calls, _scores_fit),
    Peer("prefill", "torch SDPA", _sdpa, lambda w: not w.window or _scores_fit(w), needs_cuda=True),
    Peer("gemm_w4a8", "torch BF16", _bf16_product, needs_cuda=True),
    Peer("gemm_w4a8", "torch _scaled_mm FP8", _fp8_product, needs_cuda=True),
    Peer("decode", "torch SDPA", _decode_sdpa, _fits_flash),
    Peer("decode", "FlashInfer", _flashinfer(False), _fits_flashinfer, needs_cuda=True, package="flashinfer"),
    Peer("decode", "FlashInfer TC", _flashinfer(True), _fits_flashinfer_tc, needs_cuda=True, package="flashinfer"),
    Peer("matvec_fp4", "torch BF16", _bf16_matvec),
    Peer("matvec_fp4", "Humming W4A16", _humming, lambda w: w.n % 64 == 0, needs_cuda=True, package="humming"),
    Peer("matvec_fp4", "torch INT4", _tinygemm, _fits_int4, needs_cuda=True, own_weight=_int4_weight),
    Peer(
        "matvec_fp4", "Gemlite INT4", _gemlite, _fits_int4, needs_cuda=True, package="gemlite", own_weight=_int4_weight
    ),
    Peer(
        "matvec_fp4",
        "bitsandbytes FP4",
        _bnb,
        _is_bf16,
        needs_cuda=True,
        package="bitsandbytes",
        own_weight=_bnb_weight,
    ),
    Peer("matvec_fp8", "torch BF16", _bf16_matvec),
    Peer("prefill_ring", "torch three calls", _of_ring(_three_calls), _scores_fit),
    Peer("prefill_ring", "torch SDPA", _of_ring(_sdpa), _scores_fit, needs_cuda=True),
]
