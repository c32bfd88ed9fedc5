"""Operators of torch: registered with it, and called past its dispatcher where nobody would notice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

Function = Callable[..., Any]


class Operator:
    """A function that torch knows as an operator, with a schema and a fake: ``torch.compile`` and graphs see it.

    Calling it in plain eager code goes straight to the function. The dispatcher's layers in Python take 60 to 120 us
    a call, several times what a short kernel does.
    """

    def __init__(self, name: str, function: Function, mutates_args: Iterable[str], check: Function | None) -> None:
        self._function = function
        known = function if check is None else _checked(function, check)
        self.register_fake = torch.library.custom_op(name, known, mutates_args=mutates_args).register_fake
        namespace, _, short = name.partition("::")
        self._registered = getattr(getattr(torch.ops, namespace), short)

    def __call__(self, *args: Any) -> Any:
        return self._registered(*args) if _watched(args) else self._function(*args)


def operator(
    name: str, mutates_args: Iterable[str] = (), check: Function | None = None
) -> Callable[[Function], Operator]:
    """Decorator: the function becomes the operator ``name`` (``mila_kernels::prefill``).

    ``check`` takes the same arguments and raises for what its callers could not know while they were compiled, such as
    addresses. In plain eager code they have looked at that themselves.
    """
    return lambda function: Operator(name, function, mutates_args, check)


def _checked(function: Function, check: Function) -> Function:
    @functools.wraps(function)
    def both(*args: Any) -> Any:
        check(*args)
        return function(*args)

    return both


# What operators take. A tensor of a subclass has another type.
_PLAIN = frozenset({torch.Tensor, torch.dtype, str, bool, int, float, type(None)})


def _watched(args: Iterable[Any]) -> bool:
    """Whether anything must see the call as an operator: a compiler, a mode, a transform, a profiler, a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or not _PLAIN.issuperset(map(type, args))
    )
