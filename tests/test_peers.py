"""Peers give what the operation gives: a comparison with something else would mean nothing."""

from __future__ import annotations

import pytest
import torch

from mila_kernels import ops, peers, shapes
from mila_kernels.parity import compare

CASES = {
    "prefill": [
        "b1 q40h4 kv97h1 d64 causal bf16",
        "b2 q33h4 kv33h2 d128 causal bf16",
        "b1 q24h2 kv70h2 d64 w32 causal bf16",
        "b1 q16h2 kv40h1 d64 full bf16",
    ],
    "prefill_ring": ["b1 q24h4 kv70h2 d64 w32 causal bf16"],
}


@pytest.mark.parametrize(("op", "text"), [(op, text) for op, texts in CASES.items() for text in texts])
def test_peers_compute_the_operation(op: str, text: str, device: torch.device) -> None:
    workload = shapes.parse_shape(op, text)
    inputs = ops.op(op).make_inputs(workload, 3, device)
    truth = ops.op(op).reference(**inputs)[0]
    found = [p for p in peers.peers(op, workload) if p.runs_on(device)]
    assert found
    for peer in found:
        verdict = compare(peer.prepare(**inputs)(), truth, bound=2 * ops.op(op).bound(workload))
        assert verdict.passed, (peer.name, verdict)


def test_a_pipeline_whose_scores_do_not_fit_is_not_offered() -> None:
    small, large = (f"b1 q{n}h16 kv{n}h1 d512 causal bf16" for n in (4096, 65536))
    names = [[p.name for p in peers.peers("prefill", shapes.parse_shape("prefill", text))] for text in (small, large)]
    assert "torch three calls" in names[0]
    assert "torch three calls" not in names[1]
