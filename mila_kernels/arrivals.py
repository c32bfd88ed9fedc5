"""Counters by which the blocks of a launch learn who is last: zero before it, and zero after it again.

The eager calls of a stream follow one another and share theirs; a captured call may be replayed beside any other, and
has its own for good.
"""

from __future__ import annotations

import functools

import torch

COUNTERS = 1 << 20  # a device


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zero between launches, for captured calls: each gets a part of its own."""
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # a graph may be replayed on any other stream
    return counters


@functools.cache
def _stream_counters(device: torch.device, stream: int) -> torch.Tensor:
    """Zero between launches, for the eager calls of a stream."""
    return torch.zeros(COUNTERS // 16, dtype=torch.int32, device=device)


_captured: dict[torch.device, int] = {}


def arrivals(device: torch.device, count: int) -> torch.Tensor:
    """int32 ``[count]`` or more, all zero, that no call at the same time uses, without a launch to clear them.

    The kernel that takes them leaves zeros behind.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    if not torch.cuda.is_current_stream_capturing():
        own = _stream_counters(device, torch.cuda.current_stream(device).cuda_stream)
        _counters(device)
        _captured.setdefault(device, 0)
        return own if count <= own.numel() else torch.zeros(count, dtype=torch.int32, device=device)
    start = _captured.get(device, COUNTERS)  # no eager call yet: what a capture allocates is the graph's alone
    if start + count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _captured[device] = start + count
    return _counters(device)[start : start + count]
