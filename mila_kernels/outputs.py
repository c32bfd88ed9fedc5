"""Where every output and workspace is allocated, so that a check can put guard zones around it.

Outside :func:`guarding` this is ``new_empty``. Inside, each tensor lies in a larger buffer: 7.0 around it, NaN in it.
So an element that a kernel does not write shows as NaN, and one that it writes outside shows as not 7.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

GUARD = 7.0
GUARD_BYTES = 4096  # on each side; a multiple of every alignment that kernels ask for

_guards: ContextVar[list[Callable[[], int]] | None] = ContextVar("mila_guards", default=None)


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor on ``like``'s device (and of its dtype unless given), not initialised."""
    guards = _guards.get()
    if guards is None:
        return like.new_empty(shape, dtype=dtype)
    view, check = guarded(shape, dtype or like.dtype, like.device)
    guards.append(check)
    return view


@contextmanager
def guarding() -> Iterator[Callable[[], int]]:
    """Within this context outputs are guarded; what it gives counts the guard elements changed so far."""
    guards: list[Callable[[], int]] = []
    token = _guards.set(guards)
    try:
        yield lambda: sum(check() for check in guards)
    finally:
        _guards.reset(token)


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, Callable[[], int]]:
    """A contiguous tensor inside a larger buffer of 7.0, and a call that counts the elements changed around it.

    The tensor itself is NaN (byte 0x7F for FP8, 7 for integers) until it is written.
    """
    count, zone = math.prod(shape), GUARD_BYTES // dtype.itemsize
    buffer = torch.full((count + 2 * zone,), GUARD, device=device).to(dtype)
    before, inside, after = buffer.split([zone, count, zone])
    if dtype.is_floating_point:
        fill_bad(inside)
    reference = before.clone().view(torch.uint8)

    def check() -> int:
        changed = [zone_now.view(torch.uint8) != reference for zone_now in (before, after)]
        return sum(int(c.view(-1, dtype.itemsize).any(dim=1).sum()) for c in changed)

    return inside.view(tuple(shape)), check


def fill_bad(x: torch.Tensor, value: float = math.nan) -> None:
    """Fill with NaN or Inf; FP8 has no Inf here, and its NaN is the byte 0x7F."""
    if x.dtype.itemsize == 1:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(value)
