"""Checks of arguments that several operations share: an error names the argument, what came, and what is allowed."""

from __future__ import annotations

from typing import Any

import torch

LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
MAX_SEED = 2**63 - 1  # torch's generators take it, and the emulation
SMALLEST_FLOAT = 2.0**-126  # the smallest normal of FP32 and BF16


def check_flag(name: str, value: Any) -> bool:
    """The value, if it is True or False; what is merely true, such as a string, is more likely a mistake."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{name}: True or False is needed, not {type(value).__name__}")


def check_int(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """The value, if it is an int from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: an int is needed, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {shown(value)} must be from {least} to {most}")
    return value


def check_tensor(name: str, value: Any) -> torch.Tensor:
    """The value, if it is a tensor with storage."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor is needed, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: layout {value.layout} must be torch.strided; pass {name}.to_dense()")
    return value


def check_no_grad(name: str, x: torch.Tensor) -> None:
    """ValueError for a tensor whose gradient would be lost."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires grad, and there is no backward; use torch.no_grad() or {name}.detach()")


def shown(value: float) -> str:
    """A number as an error may print it: Python refuses to write very large ints out."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    return str(value)
