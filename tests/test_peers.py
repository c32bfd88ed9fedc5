"""Peers give what the operation gives: a comparison with something else would mean nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mila_kernels import linear, ops, peers, shapes
from mila_kernels.parity import compare

CASES = {
    "prefill": [
        "b1 q40h4 kv97h1 d64 causal bf16",
        "b2 q33h4 kv33h2 d128 causal bf16",
        "b1 q24h2 kv70h2 d64 w32 causal bf16",
        "b1 q16h2 kv40h1 d64 full bf16",
    ],
    "prefill_ring": ["b1 q24h4 kv70h2 d64 w32 causal bf16"],
    "decode": ["b2 q1h8 kv70h2 d64 bf16 page16", "b2 q1h4 kv90h2 d64 w32 bf16", "b1 q3h4 kv50h4 d128 bf16"],
    "matvec_fp4": ["n48 k384 m1 bf16", "n128 k384 m1 bf16"],
    "matvec_fp8": ["n48 k384 m3 bf16"],
}


@pytest.mark.parametrize(("op", "text"), [(op, text) for op, texts in CASES.items() for text in texts])
def test_peers_compute_the_operation(op: str, text: str, device: torch.device) -> None:
    workload = shapes.parse_shape(op, text)
    inputs = ops.op(op).make_inputs(workload, 3, device)
    found = [p for p in peers.peers(op, workload) if p.runs_on(device)]
    assert found
    for peer in found:
        verdict = compare(peer.prepare(**inputs)(), peer.truth(**inputs), bound=2 * ops.op(op).bound(workload))
        assert verdict.passed, (peer.name, verdict)


@pytest.mark.parametrize(
    "text",
    [
        "b2 q1h8 kv70h2 d64 bf16 page16",
        "b2 q1h4 kv90h2 d64 w32 bf16",
        "b3 q1h4 kv150h2 d64 bf16",
        "b2 q1h4 kv90h2 d64 w32 bf16 kvfp8",
    ],
)
def test_a_cache_in_pages_holds_what_the_newest_token_sees(text: str, device: torch.device) -> None:
    workload = shapes.parse_shape("decode", text)
    inputs = ops.op("decode").make_inputs(workload, 3, device)
    cache, lengths = inputs["cache"], inputs["lengths"]
    pages = peers.pages_of(cache, lengths, inputs.get("window"))
    assert pages.length == min(workload.kv_len, workload.window or workload.kv_len)
    heads = 2 if pages.layout == "NHD" else 1
    for row in range(workload.batch):
        used = pages.table[row].long()
        k, v = (store[used].movedim(heads, 2).flatten(0, 1) for store in (pages.keys, pages.values))
        mine_k, mine_v, first = cache.gather(row, workload.kv_len)
        live = workload.kv_len - pages.length - first
        assert torch.equal(k[: pages.length].double(), mine_k[0, live:])
        assert torch.equal(v[: pages.length].double(), mine_v[0, live:])
        assert len(k) - pages.length < pages.page_size


def test_int4_is_half_a_step_from_the_weight_at_most(device: torch.device) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).to(device)
    weight[3, :128] = 0
    w = linear.quantize_fp4(weight)
    codes, scales = peers.int4_codes(w)
    assert codes.dtype == torch.uint8 and int(codes.min()) >= 1 and int(codes.max()) == 15
    mine = next(p for p in peers.peers("matvec_fp4") if p.name == "torch INT4").own_weight
    assert mine is not None
    step = scales.float().repeat_interleave(128, dim=1)
    assert ((mine(w) - w.dequantize(torch.float32)).abs() <= step * (0.5 + 7 / 256)).all()  # 7: scales are BF16
    assert not mine(w)[3, :128].any()


def test_a_pipeline_whose_scores_do_not_fit_is_not_offered() -> None:
    small, large = (f"b1 q{n}h16 kv{n}h1 d512 causal bf16" for n in (4096, 65536))
    names = [[p.name for p in peers.peers("prefill", shapes.parse_shape("prefill", text))] for text in (small, large)]
    assert "torch three calls" in names[0]
    assert "torch three calls" not in names[1]


def test_what_fits_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 32,768 tokens of 16 heads are 34 GB: no matter to an H200, too much for a card of 48."""
    w = shapes.parse_shape("prefill_ring", "b1 q32768h16 kv32768h8 d256 w1024 causal bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gigabytes, offered in ((141, True), (48, False)):
        memory = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda memory=memory: memory)
        assert ("torch SDPA" in [p.name for p in peers.peers("prefill_ring", w)]) is offered


def test_an_optional_peer_runs_only_where_its_package_is_installed() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    peer = peers.Peer("matvec_fp4", "there", lambda: torch.empty, needs_cuda=True, package="torch")
    assert peer.runs_on(cuda)
    assert not peer.runs_on(cpu)
    assert not replace(peer, package="no_such_package_anywhere").runs_on(cuda)
