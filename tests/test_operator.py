"""Operators: straight to the function in plain eager code, through torch wherever something watches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mila_kernels as mk
from mila_kernels import steps
from mila_kernels.operator import operator

called: list[str] = []


@operator("mila_kernels_test::double")
def double(x: torch.Tensor, times: int) -> torch.Tensor:
    called.append("function")
    return x * 2**times


@double.register_fake
def _(x: torch.Tensor, times: int) -> torch.Tensor:
    called.append("fake")
    return torch.empty_like(x)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def _empty() -> None:
    called.clear()


def test_eager_code_goes_straight_to_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double, "_registered", None)
    assert double(torch.ones(2), 3).tolist() == [8.0, 8.0] and called == ["function"]


def test_a_mode_sees_the_operator() -> None:
    with Watch() as watch:
        assert double(torch.ones(2), 1).tolist() == [2.0, 2.0]
    assert "mila_kernels_test.double.default" in watch.seen


def test_fakes_get_the_fake() -> None:
    with FakeTensorMode() as mode:
        y = double(mode.from_tensor(torch.ones(4)), 1)
    assert y.shape == (4,) and called == ["fake"]


def test_a_compiler_sees_the_operator() -> None:
    found: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> Callable:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: double(x, 1) + 1, backend=look, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert any("mila_kernels_test.double" in name for name in found), found


def test_a_profiler_sees_the_operator() -> None:
    with torch.profiler.profile() as profile:
        double(torch.ones(2), 1)
    assert "mila_kernels_test::double" in {event.name for event in profile.events()}


def test_a_subclass_goes_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(double, "_registered", lambda *args: seen.append(type(args[0])))
    double(torch.ones(2).as_subclass(Sub), 1)
    assert seen == [Sub]


def test_attention_works_under_a_compiler() -> None:
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (3, 5, 5))

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = mk.prefill(q, k, v, step="prefill/01")
        assert isinstance(o, torch.Tensor)
        return o * 2

    assert torch.equal(torch.compile(twice, backend="eager")(q, k, v), twice(q, k, v))


def _attention() -> tuple[Callable, tuple]:
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (3, 5, 5))
    return mk.prefill, (q, k, v)


def _decode() -> tuple[Callable, tuple]:
    k, v = (torch.randn(1, 8, 2, 64).bfloat16() for _ in range(2))
    lengths = torch.tensor([5], dtype=torch.int32)
    return mk.decode, (torch.randn(1, 1, 4, 64).bfloat16(), mk.ContiguousCache(k, v), lengths)


def _ring() -> tuple[Callable, tuple]:
    k, v = (torch.randn(1, 8, 2, 64).bfloat16() for _ in range(2))
    lengths = torch.tensor([9], dtype=torch.int32)
    return mk.prefill_ring, (torch.randn(1, 3, 4, 64).bfloat16(), mk.RingCache(k, v), lengths)


def _matvec_fp4() -> tuple[Callable, tuple]:
    return mk.matvec_fp4, (torch.randn(1, 256).bfloat16(), mk.quantize_fp4(torch.randn(32, 256)).shuffle())


def _matvec_fp8() -> tuple[Callable, tuple]:
    return mk.matvec_fp8, (torch.randn(1, 256).bfloat16(), mk.quantize_fp8(torch.randn(32, 256)).shuffle())


def _gemm() -> tuple[Callable, tuple]:
    x, w = torch.randn(16, 256).bfloat16(), mk.quantize_fp4(torch.randn(64, 256))
    mk.gemm_w4a8(x, w)  # shuffles the weight
    return mk.gemm_w4a8, (x, w)


@pytest.mark.parametrize("case", [_attention, _decode, _ring, _matvec_fp4, _matvec_fp8, _gemm])
def test_every_operation_compiles_into_one_graph(case: Callable[[], tuple[Callable, tuple]]) -> None:
    function, args = case()
    whole = torch.compile(lambda *args: function(*args) * 2, backend="eager", fullgraph=True)
    assert torch.equal(whole(*args), function(*args) * 2)


def test_addresses_are_looked_at_when_a_compiled_graph_runs() -> None:
    step = next(step.id for step in reversed(steps.steps("prefill")) if step.alignment == 16 and 64 in step.head_dims)
    compiled = torch.compile(lambda q, k, v: mk.prefill(q, k, v, step=step), backend="eager", fullgraph=True)
    q, k, v = (torch.randn(n * 128 + 1).bfloat16() for n in (3, 5, 5))
    odd = [x[1:].view(1, -1, 2, 64) for x in (q, k, v)]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        compiled(*odd)


def test_a_weight_is_shuffled_beside_a_graph() -> None:
    x, w = torch.randn(1, 256).bfloat16(), mk.quantize_fp4(torch.randn(32, 256))
    assert torch.equal(torch.compile(mk.matvec_fp4, backend="eager")(x, w), mk.matvec_fp4(x, w))
