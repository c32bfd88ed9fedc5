"""Is a step right: its outputs against float64, on plain memory and on memory that shows every stray access.

Plain: fresh random inputs, contiguous. Poisoned: the same values as strided views inside storage that is NaN or Inf
wherever nothing is live. Both: outputs full of NaN inside guard zones (:mod:`mila_kernels.outputs`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import build, ops, shapes, steps
from .arguments import MAX_SEED, check_int
from .outputs import fill_bad, guarded, guarding
from .results import ParityRow, RunWriter
from .shapes import Workload
from .steps import Step

__all__ = ["Parity", "check", "compare", "guarded", "guarding", "poison", "poisoned"]


@dataclass(frozen=True)
class Parity:
    """An error and its verdict.

    ``rel_l2`` is the norm of out - ref over the norm of ref (the plain norm where ref is all zeros) and ``max_abs`` the
    largest difference, both over the elements that are finite in both. ``nonfinite`` counts the others, except
    infinities on which both agree; any makes the verdict a failure.
    """

    rel_l2: float
    max_abs: float
    nonfinite: int
    bound: float
    passed: bool


def compare(out: torch.Tensor, ref: torch.Tensor, bound: float) -> Parity:
    """Compare an output of any dtype with its reference of the same shape, in float64 on the reference's device.

    ValueError for shapes that differ. Empty tensors pass.
    """
    if out.shape != ref.shape:
        raise ValueError(f"out: shape {tuple(out.shape)} must equal that of ref, {tuple(ref.shape)}")
    a, b = out.detach().to(ref.device).double(), ref.detach().double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    same_infinity = torch.isinf(a) & (a == b)
    nonfinite = int((~finite & ~same_infinity).sum())
    difference = torch.where(finite, a - b, 0.0)
    error, norm = float(difference.norm()), float(torch.where(finite, b, 0.0).norm())
    rel_l2 = error / norm if norm else error
    max_abs = float(difference.abs().max()) if difference.numel() else 0.0
    return Parity(rel_l2, max_abs, nonfinite, bound, nonfinite == 0 and rel_l2 <= bound)


def worst(found: list[Parity]) -> Parity:
    """The several outputs of one call as one verdict: the largest errors, and all of the nonfinite elements."""
    rel_l2, max_abs = max(p.rel_l2 for p in found), max(p.max_abs for p in found)
    nonfinite = sum(p.nonfinite for p in found)
    return Parity(rel_l2, max_abs, nonfinite, found[0].bound, all(p.passed for p in found))


def poisoned(x: torch.Tensor, value: float = math.nan, margin: int = 1) -> tuple[torch.Tensor, Callable[[], int]]:
    """The same values as a strided view inside storage full of ``value`` (byte 0x7F for FP8), and a check of it.

    Every dim has ``margin`` dead slices on each side, the last dim 16 bytes of them, so that a contiguous last dim and
    alignment to 16 bytes are kept. The check counts bytes of the whole storage that a kernel has changed since.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"x: dtype {x.dtype} has no value that shows where it was read; a floating dtype is needed")
    pads = [margin] * (x.dim() - 1) + [max(1, 16 // x.dtype.itemsize)] * min(1, x.dim())
    storage = torch.empty([n + 2 * pad for n, pad in zip(x.shape, pads, strict=True)], dtype=x.dtype, device=x.device)
    fill_bad(storage, value)
    view = storage
    for dim, (n, pad) in enumerate(zip(x.shape, pads, strict=True)):
        view = view.narrow(dim, pad, n)
    view.copy_(x)
    before = storage.view(torch.uint8).clone()
    return view, lambda: int((storage.view(torch.uint8) != before).sum())


def poison(inputs: Mapping[str, Any], seed: int = 0) -> tuple[dict[str, Any], Callable[[], int]]:
    """Poison every floating tensor of a call's inputs: NaN and Inf in turn, the other way round for odd seeds.

    Their strides differ from one tensor to the next, so that taking one's for another's shows.
    A value with a ``poisoned(value)`` method of its own (a cache, quantised weights) is asked for its twin instead.
    Returns the inputs, and a check that counts the bytes a kernel has changed in them.
    """
    found: dict[str, Any] = {}
    checks: list[Callable[[], int]] = []
    for name, x in inputs.items():
        value = math.nan if (len(checks) + seed) % 2 == 0 else math.inf
        if hasattr(x, "poisoned"):
            found[name], check = x.poisoned(value)
            checks.append(check)
        elif isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
            found[name], check = poisoned(x, value, margin=1 + len(checks))
            checks.append(check)
        else:
            found[name] = x
    return found, lambda: sum(check() for check in checks)


def check(
    step: str | Step,
    workload: str | Workload,
    seed: int = 0,
    device: str | torch.device = "auto",
    run: RunWriter | None = None,
) -> list[ParityRow]:
    """Run a step on fresh random inputs and compare it with float64: a plain row and a poisoned row a part.

    A row holds the worst of the call's outputs, and fails too where a guard zone or a poisoned input was written. The
    shape of a poisoned row ends in ``poisoned``. With ``run``, each row is written as soon as it is known; without one
    the rows' run_id is empty. Raises TypeError or ValueError for an argument that does not fit, by name, and what the
    call raises (ValueError, KernelError): nothing is caught.
    """
    chosen = steps.step(step)
    if not isinstance(workload, str | Workload):
        raise TypeError(f"workload: a name or a Workload is needed, not {type(workload).__name__}")
    check_int("seed", seed, 0, MAX_SEED)
    if run is not None and not isinstance(run, RunWriter):
        raise TypeError(f"run: a RunWriter or None is needed, not {type(run).__name__}")
    case = shapes.workload(workload) if isinstance(workload, str) else workload
    if case.op != chosen.op:
        raise ValueError(
            f"workload: {case.name or case.shape} is of {case.op}, and {chosen.id} is a step of {chosen.op}"
        )
    place = build.resolve_device(device)
    rows = []
    for part in case.parts():
        for row in _check_part(chosen, part, seed, place):
            rows.append(run.add(row) if run else row)
    return rows


def _check_part(step: Step, w: Workload, seed: int, device: torch.device) -> list[ParityRow]:
    op = ops.op(step.op)
    inputs = op.make_inputs(w, seed, device)
    truth = op.reference(**inputs)
    strided, changed = poison(inputs, seed)
    forms = ((w.shape, inputs, lambda: 0), (f"{w.shape} poisoned", strided, changed))
    return [_check_form(step, w, shape, seed, device, form, truth, stray) for shape, form, stray in forms]


def _check_form(
    step: Step, w: Workload, shape: str, seed: int, device: torch.device, inputs: dict[str, Any],
    truth: tuple[torch.Tensor, ...], changed_inputs: Callable[[], int],
) -> ParityRow:  # fmt: skip
    op = ops.op(step.op)
    with guarding() as changed_guards:
        outputs = op.run(step=step, **inputs)
    bound = op.bound(w) if step.bound is None else step.bound
    found = [compare(out, ref, bound) for out, ref in zip(outputs, truth, strict=True)]
    verdict = worst(found)
    stray = {"guard elements": changed_guards(), "input bytes": changed_inputs()}
    if any(stray.values()):
        told = ", ".join(f"{count} {what}" for what, count in stray.items() if count)
        warnings.warn(f"{step.id} {shape} seed {seed}: changed {told}", stacklevel=4)
        verdict = replace(verdict, passed=False)
    return ParityRow(
        run_id="", op=step.op, step=step.name, source_sha=step.source_sha,
        backend="cuda" if device.type == "cuda" else "emulation", shape=shape, seed=seed, **asdict(verdict),
    )  # fmt: skip
