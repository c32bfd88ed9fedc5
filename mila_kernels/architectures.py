"""Which GPU architectures to compile for: TORCH_CUDA_ARCH_LIST, a step's own list, and the GPU that is there."""

from __future__ import annotations

import functools
import os
import re

from . import steps
from .steps import Step

_CAPABILITIES = frozenset(
    "5.0 5.2 5.3 6.0 6.1 6.2 7.0 7.2 7.5 8.0 8.6 8.7 8.8 8.9 9.0 9.0a 10.0 10.0a 10.0f 10.1 10.1a 10.3 10.3a 10.3f "
    "11.0 11.0a 11.0f 12.0 12.0a 12.0f 12.1 12.1a 12.1f".split()
)
_GENERATIONS = {
    "Maxwell": "5.0;5.2", "Pascal": "6.0;6.1", "Volta": "7.0", "Turing": "7.5", "Ampere": "8.0;8.6", "Ada": "8.9",
    "Hopper": "9.0", "Blackwell": "10.0;10.3;12.0;12.1",
}  # fmt: skip


def requested_architectures() -> tuple[str, ...] | None:
    """The entries of TORCH_CUDA_ARCH_LIST ("8.9", "9.0a", "8.0+PTX"), or None where it is unset, empty or "native".

    Raises:
        ValueError: an entry that is no architecture; the text names the variable.
    """
    return _parse_architecture_list(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))


@functools.lru_cache(maxsize=16)
def _parse_architecture_list(text: str) -> tuple[str, ...] | None:
    entries: list[str] = []
    for entry in re.split(r"[;,\s]+", text.strip()):
        if not entry or entry == "native":
            continue
        name, plus, ptx = entry.partition("+")
        expanded = _GENERATIONS.get(name, name).split(";")
        if not all(e in _CAPABILITIES for e in expanded) or plus and ptx.upper() != "PTX":
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} in {text!r} is no CUDA architecture; "
                "unset it, or list such as '8.9' or '9.0;10.0+PTX'"
            )
        entries += [f"{e}+PTX" if plus and e == expanded[-1] else e for e in expanded]
    return tuple(dict.fromkeys(entries)) or None


def gencode(step: Step, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """nvcc's ``-gencode`` flags for a step: those of TORCH_CUDA_ARCH_LIST that it allows, else the given GPU's own.

    Raises:
        ValueError: nothing to compile for, or the GPU would not run it; the text names both.
    """
    requested = requested_architectures()
    if capability is not None and not step.runs_on(capability):
        raise ValueError(f"step: {step.id} is for {', '.join(step.architectures)}, not for {_sm(capability)}")
    if requested is None:
        if capability is None:
            raise ValueError("TORCH_CUDA_ARCH_LIST: must name an architecture where there is no GPU to compile for")
        return _gencode_flags([(_need(step, capability), "sm")])
    wanted: list[tuple[str, str]] = []
    covered = capability is None
    for entry in requested:
        major, minor = (int(re.sub(r"\D", "", x)) for x in entry.removesuffix("+PTX").split("."))
        own = steps.target(step.architectures, (major, minor))
        if own is None:
            continue
        wanted.append((own, "sm"))
        if entry.endswith("+PTX") and own.isdecimal():
            wanted.append((own, "compute"))
        covered = covered or _covers((major, minor), own, entry.endswith("+PTX"), capability)
    if not wanted:
        raise ValueError(
            f"TORCH_CUDA_ARCH_LIST: {';'.join(requested)} has none of {', '.join(step.architectures)}, "
            f"for which {step.id} is written"
        )
    if not covered and capability is not None:
        raise ValueError(
            f"TORCH_CUDA_ARCH_LIST: {';'.join(requested)} leaves out {_sm(capability)}, the GPU for {step.id}"
        )
    return _gencode_flags(list(dict.fromkeys(wanted)))


def _covers(listed: tuple[int, int], compiled: str, ptx: bool, capability: tuple[int, int] | None) -> bool:
    if capability is None or listed == capability:
        return True
    if not compiled.isdecimal():
        return False  # sm_90a runs on 9.0 alone
    return listed <= capability and (ptx or listed[0] == capability[0])


def _need(step: Step, capability: tuple[int, int]) -> str:
    name = steps.target(step.architectures, capability)
    assert name is not None
    return name


def _gencode_flags(wanted: list[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"-gencode=arch=compute_{name},code={kind}_{name}" for name, kind in wanted)


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
