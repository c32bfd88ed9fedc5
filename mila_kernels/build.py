"""From a step to something that can be called, for CUDA or for the CPU in emulation.

What is built lies in a cache: see :mod:`mila_kernels.libraries` and :mod:`mila_kernels.build_cache`. Environment beside
theirs and :mod:`mila_kernels.emulate`'s: ``TORCH_CUDA_ARCH_LIST`` (what to compile for; default: the current GPU),
``CXX`` (the host compiler).
"""

from __future__ import annotations

import ctypes
import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from . import steps
from .architectures import gencode, requested_architectures
from .arguments import check_flag
from .emulate import (
    CHECK_FLAGS,
    FAST_FLAGS,
    Buffer,
    Emulation,
    Runtime,
    configure_launch,
    current_emulation,
    current_runtime,
    emulation,
    locate,
    runtime_source,
)
from .errors import BuildError, KernelError
from .files import stamp
from .libraries import Recipe, obtain_instance
from .notices import said, say_once
from .steps import Step
from .toolchain import cxx_path, nvcc_path

__all__ = [
    "Buffer", "BuildError", "Emulation", "Kernel", "KernelError", "current_emulation", "device_misfit", "emulation",
    "forget", "launch", "load", "resolve_device",
]  # fmt: skip

Backend = Literal["cuda", "emulation"]
CUDA_FLAGS = ("-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr")
_CUDA_THREADS = ("--split-compile=0",)  # a step has many kernels, which ptxas then compiles on all cores
_RECHECK_S = 0.5


# ---- the device ------------------------------------------------------------------------------------------------------

_EMULATED = "kernels run on the CPU in emulation: for correct results, not for speed"


def device_misfit(step: Step, device: torch.device) -> str | None:
    """Why a step is not for a device, or None. All are for the CPU, in emulation."""
    if device.type != "cuda" or step.runs_on(torch.cuda.get_device_capability(device)):
        return None
    return f"{torch.cuda.get_device_name(device)} is not one of {', '.join(step.architectures)}"


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Where to run: ``auto`` is the current CUDA device if there is one, else the CPU in emulation (said once).

    Raises:
        ValueError: an unknown device, or a TORCH_CUDA_ARCH_LIST that names no architecture.
        RuntimeError: ``cuda`` where there is none.
    """
    requested_architectures()
    name = str(device)
    if name in ("emulation", "cpu"):
        said.add(_EMULATED)  # what was asked for needs no notice
        return torch.device("cpu")
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        say_once(_EMULATED)
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device: {name!r} must be auto, cuda, cuda:N or emulation")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device: {name!r} was asked for and torch {torch.__version__} sees no CUDA device")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: {name!r} is not one of the {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Kernel:
    """A step that is built and loaded. Call it with the op's argument struct; KernelError where the launch is refused.

    ``library`` is the shared library's path. Calls from several threads at once are fine.
    """

    def __init__(self, step: Step, library: Path, handle: ctypes.CDLL, runtime: Runtime | None, check: bool) -> None:
        self.step = step
        self.backend: Backend = "emulation" if runtime else "cuda"
        self.library = library
        self.check = check
        self._runtime = runtime
        self._handle = handle
        self._launch = handle.launch_step
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._launch.restype = ctypes.c_char_p

    def __call__(self, args: ctypes.Structure, stream: int = 0, buffers: Sequence[Buffer] | None = None) -> None:
        """Launch.

        Args:
            args: the op's argument struct (``PrefillArgs`` ...).
            stream: a CUDA stream's address; ignored in emulation, which returns when the grid is done.
            buffers: all global memory that the launch may touch, for check mode; None: it is not looked at.

        Raises:
            KernelError: with the launcher's text, code addresses turned into ``file:line``.
        """
        if not isinstance(args, ctypes.Structure):
            raise TypeError(f"args: a ctypes.Structure is needed, not {type(args).__name__}")
        configured = configure_launch(self._runtime, self.step, self.check, buffers) if self._runtime else None
        error = self._launch(ctypes.addressof(args), stream)
        del configured  # the launch reads it
        if error is not None:
            text = error.decode("utf-8", "replace")
            raise KernelError(self.step.id, locate(text) if self._runtime else text)

    def __repr__(self) -> str:
        return f"<Kernel {self.step.id} {self.backend}{' check' if self.check else ''}>"


def launch(
    step: Step,
    args: ctypes.Structure,
    device: torch.device,
    reads: Mapping[str, torch.Tensor],
    writes: Mapping[str, torch.Tensor],
) -> None:
    """Launch a step on tensors: on their CUDA device and its current stream, or in emulation for CPU tensors.

    ``reads`` and ``writes`` name every tensor that the step may touch; one in both is read and written.

    Raises:
        KernelError: the launch was refused, or the emulation found a fault.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            load(step, "cuda", args=args)(args, torch.cuda.current_stream(device).cuda_stream)
        return
    say_once(_EMULATED)
    check = current_emulation().check
    buffers = [*_buffers(reads, False), *_buffers(writes, True)] if check else None
    load(step, "emulation", check=check, args=args)(args, buffers=buffers)


def _buffers(tensors: Mapping[str, torch.Tensor], writable: bool) -> list[Buffer]:
    found = []
    for name, x in tensors.items():
        if x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            found.append(Buffer(name, x.data_ptr(), (last + 1) * x.element_size(), writable))
    return found


@dataclass
class _Loaded:
    kernel: Kernel
    stamps: tuple[tuple[Path, tuple[int, int]], ...]
    checked: float


_loaded: dict[tuple[Any, ...], _Loaded] = {}


def load(step: Step, backend: Backend, *, check: bool | None = None, args: ctypes.Structure | None = None) -> Kernel:
    """The step as a callable, built if need be.

    A step whose source or headers changed since is built again (looked at most twice a second).

    Args:
        step: from :func:`mila_kernels.steps.step`.
        backend: ``cuda`` (for the current device) or ``emulation``.
        check: emulation only: with the hooks of check mode; None: as :func:`emulation` says.
        args: of the launch that it is for. What then has to be built is built for their ``Step.instances`` alone; a
            library of all that lies in the cache is taken as it is.

    Raises:
        BuildError: a missing tool, or the compiler's errors.
        ValueError: an unknown backend, TORCH_CUDA_ARCH_LIST, an architecture that the step is not for.
        TimeoutError: another process holds the build's lock for longer than MILA_LOCK_TIMEOUT; the text names both.
    """
    if backend not in ("cuda", "emulation"):
        raise ValueError(f"backend: {backend!r} must be cuda or emulation")
    if not isinstance(step, Step):
        raise TypeError(f"step: a Step is needed, not {type(step).__name__}; see mila_kernels.steps.step")
    if check is not None:
        check_flag("check", check)
    requested = requested_architectures()
    capability: tuple[int, int] | None = None
    if backend == "cuda":
        check = False
        capability = _capability(torch.cuda.current_device()) if torch.cuda.is_available() else None
    elif check is None:
        check = current_emulation().check
    only = {name: int(getattr(args, name)) for name in step.instances} if args is not None else {}
    key = (step.id, step.path, backend, check, capability, requested, *only.items())
    entry = _loaded.get(key)
    now = time.monotonic()
    if entry is not None:
        if now - entry.checked < _RECHECK_S:
            return entry.kernel
        if _stamps(step, backend) == entry.stamps:
            entry.checked = now
            return entry.kernel
    stamps = _stamps(step, backend)
    if backend == "cuda":
        kernel = _load_cuda(step, capability, only)
    else:
        kernel = _load_emulation(step, check, only)
    _loaded[key] = _Loaded(kernel, stamps, now)
    return kernel


def forget() -> None:
    """Drop what this process knows of loaded steps, so that the next call looks at the sources and the cache again."""
    _loaded.clear()
    steps.forget()


def _stamps(step: Step, backend: Backend) -> tuple[tuple[Path, tuple[int, int]], ...]:
    files = [step.path, *steps.headers(step.path)]
    if backend == "emulation":
        files += [runtime_source(), *steps.headers(runtime_source())]
    return tuple((path, stamp(path)) for path in files)


def _load_cuda(step: Step, capability: tuple[int, int] | None, only: Mapping[str, int]) -> Kernel:
    if torch.version.cuda is None:
        raise BuildError(
            f"{step.id}: torch {torch.__version__} is a CPU build; backend cuda needs a CUDA build of torch"
        )
    flags = (*CUDA_FLAGS, *_CUDA_THREADS, *gencode(step, capability))
    recipe = Recipe(step.path, f"{step.op}-{step.name}-cuda", "cuda", flags, nvcc_path(), cxx_path())
    library, handle = obtain_instance(recipe, only)
    return Kernel(step, library, handle, None, check=False)


def _load_emulation(step: Step, check: bool, only: Mapping[str, int]) -> Kernel:
    runtime = current_runtime()
    kind = "check" if check else "fast"
    flags = CHECK_FLAGS if check else FAST_FLAGS
    recipe = Recipe(step.path, f"{step.op}-{step.name}-{kind}", "cpp", flags, cxx_path(), links=runtime.library)
    library, handle = obtain_instance(recipe, only)
    return Kernel(step, library, handle, runtime, check)
