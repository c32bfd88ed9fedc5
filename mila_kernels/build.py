"""From a step to something that can be called, for CUDA or for the CPU in emulation.

Libraries are kept in :func:`mila_kernels.paths.cache_dir` under a digest of all that they are made of. A build happens
in a folder of its own and only its finished, checksummed library is renamed into the cache, under a lock that the
kernel frees when its holder dies. So a build that is killed leaves nothing that another would load or wait for.

Environment: ``MILA_CACHE`` (the cache), ``MILA_LOCK_TIMEOUT`` (seconds to wait for another build of the same library,
120), ``MILA_EMULATION_CHECK`` and ``MILA_EMULATION_SEED`` (defaults of :func:`emulation`), ``TORCH_CUDA_ARCH_LIST``
(what to compile for; default: the current GPU), ``CXX`` (the host compiler).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from . import paths, steps
from .steps import Step

logger = logging.getLogger("mila_kernels")

Backend = Literal["cuda", "emulation"]

CUDA_FLAGS = ("-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr")
_CUDA_THREADS = ("--split-compile=0",)  # a step has many kernels, which ptxas then compiles on all cores
# Kernels read a vector load's words as other types, as nvcc lets them: no strict aliasing.
_HOST_FLAGS = (
    *("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fvisibility-inlines-hidden", "-Wno-unknown-pragmas"),
    "-gdwarf-4",  # binutils up to 2.40 take a first function of DWARF 5 to lie in the wrong file
)
# The largest steps have dozens of instances: -Og compiles them in 2/3 of the time of -O1, half that of -O2, and what it
# leaves out, hoisting and the like, the emulation's runs do not feel.
FAST_FLAGS = (*_HOST_FLAGS, "-Og", "-g1")
CHECK_FLAGS = (*FAST_FLAGS, "-fsanitize=thread", "-fsanitize=bounds-strict", "-fsanitize=alignment")
RUNTIME_FLAGS = (*_HOST_FLAGS, "-O2", "-g1", "-pthread")
_LINK_FLAGS = ("-Wl,--as-needed", "-Wl,-Bsymbolic", "-Wl,-z,defs")

_CAPABILITIES = frozenset(
    "5.0 5.2 5.3 6.0 6.1 6.2 7.0 7.2 7.5 8.0 8.6 8.7 8.8 8.9 9.0 9.0a 10.0 10.0a 10.0f 10.1 10.1a 10.3 10.3a 10.3f "
    "11.0 11.0a 11.0f 12.0 12.0a 12.0f 12.1 12.1a 12.1f".split()
)
_GENERATIONS = {
    "Maxwell": "5.0;5.2", "Pascal": "6.0;6.1", "Volta": "7.0", "Turing": "7.5", "Ampere": "8.0;8.6", "Ada": "8.9",
    "Hopper": "9.0", "Blackwell": "10.0;10.3;12.0;12.1",
}  # fmt: skip
_EMULATED_SM = 90
_LOCK_NOTICE_S = 2.0
_STALE_S = 3600.0
_UNUSED_S = 60 * 86400.0
_RECHECK_S = 0.5
_CHECKSUM = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """A step could not be built: a tool is missing, or the compiler refused it (its output is the text)."""


class KernelError(RuntimeError):
    """A launch was refused, or the emulation reported a fault. ``step`` is the step's id, ``text`` the reason."""

    def __init__(self, step: str, text: str) -> None:
        super().__init__(step, text)
        self.step = step
        self.text = text

    def __str__(self) -> str:
        return f"{self.step}: {self.text}"


@dataclass(frozen=True)
class Buffer:
    """Memory that a launch may touch, for check mode: name in reports, address, size in bytes, writable or not."""

    name: str
    ptr: int
    nbytes: int
    writable: bool


@dataclass(frozen=True)
class Emulation:
    """How emulated launches run: see :func:`emulation`."""

    check: bool = False
    seed: int = 0
    threads: int | None = None
    architecture: str | None = None


class _EmuBuffer(ctypes.Structure):
    """The mirror of ``emulation/cuda_host.h``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
    ]


class _EmuConfig(ctypes.Structure):
    """The mirror of ``emulation/cuda_host.h``."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("check", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("architecture", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_EmuBuffer)),
        ("buffer_count", ctypes.c_uint64),
    ]


# ---- the settings of emulated launches -------------------------------------------------------------------------------

_emulation: ContextVar[Emulation | None] = ContextVar("mila_emulation", default=None)


@contextlib.contextmanager
def emulation(
    check: bool | None = None, seed: int | None = None, threads: int | None = None, architecture: str | None = None
) -> Iterator[Emulation]:
    """Within this context, emulated launches run as said; what is left out stays as it was outside.

    Args:
        check: races, bounds, uninitialised reads and divergence are looked for, and reported with file and line.
        seed: of the order in which warps and lanes run; from 0 to 2^64 - 1.
        threads: OS threads over the blocks of a grid; None: one a core.
        architecture: whose launch limits hold (``sm_80``, ``sm_90a`` ...); None: sm_90, or the step's first.

    Raises:
        ValueError: a seed, a number of threads or an architecture out of range.
    """
    given = {"check": check, "seed": seed, "threads": threads, "architecture": architecture}
    settings = replace(current_emulation(), **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    _check_range("seed", settings.seed, 0, 2**64 - 1)
    _check_range("threads", 1 if settings.threads is None else settings.threads, 1, 1024)
    if settings.architecture is not None:
        steps.parse_architecture(settings.architecture)
    token = _emulation.set(settings)
    try:
        yield settings
    finally:
        _emulation.reset(token)


def current_emulation() -> Emulation:
    """How emulated launches run now: the innermost :func:`emulation`, else the environment's defaults."""
    return _emulation.get() or _environment_emulation(
        os.environ.get("MILA_EMULATION_CHECK", ""), os.environ.get("MILA_EMULATION_SEED", "")
    )


@functools.lru_cache(maxsize=16)
def _environment_emulation(check: str, seed: str) -> Emulation:
    if check.strip() not in ("", "0", "1"):
        raise ValueError(f"MILA_EMULATION_CHECK: {check!r} must be 0 or 1")
    if seed.strip() and not seed.strip().isdecimal():
        raise ValueError(f"MILA_EMULATION_SEED: {seed!r} must be an integer from 0")
    value = int(seed) if seed.strip() else 0
    _check_range("MILA_EMULATION_SEED", value, 0, 2**64 - 1)
    return Emulation(check=check.strip() == "1", seed=value)


def _check_range(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: an int is needed, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} must be from {least} to {most}")


# ---- the device ------------------------------------------------------------------------------------------------------


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
        _said.add(_EMULATED)  # what was asked for needs no notice
        return torch.device("cpu")
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        _say_once(_EMULATED)
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device: {name!r} must be auto, cuda, cuda:N or emulation")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device: {name!r} was asked for and torch {torch.__version__} sees no CUDA device")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: {name!r} is not one of the {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


_EMULATED = "kernels run on the CPU in emulation: for correct results, not for speed"
_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


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


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Kernel:
    """A step that is built and loaded. Call it with the op's argument struct; KernelError where the launch is refused.

    ``library`` is the shared library's path. Calls from several threads at once are fine.
    """

    def __init__(self, step: Step, library: Path, handle: ctypes.CDLL, runtime: _Runtime | None, check: bool) -> None:
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
        configured = _configure(self._runtime, self.step, self.check, buffers) if self._runtime else None
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
    _say_once(_EMULATED)
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
    requested = requested_architectures()
    capability: tuple[int, int] | None = None
    if backend == "cuda":
        check = False
        capability = _capability(torch.cuda.current_device()) if torch.cuda.is_available() else None
    elif check is None:
        check = current_emulation().check
    only = {name: int(getattr(args, name)) for name in step.instances} if args is not None else {}
    key = (step.id, step.path, backend, bool(check), capability, requested, *only.items())
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
        kernel = _load_emulation(step, bool(check), only)
    _loaded[key] = _Loaded(kernel, stamps, now)
    return kernel


def forget() -> None:
    """Drop what this process knows of loaded steps, so that the next call looks at the sources and the cache again."""
    _loaded.clear()
    steps.forget()


def _stamps(step: Step, backend: Backend) -> tuple[tuple[Path, tuple[int, int]], ...]:
    files = [step.path, *steps.headers(step.path)]
    if backend == "emulation":
        files += [_runtime_source(), *steps.headers(_runtime_source())]
    return tuple((path, _stamp(path)) for path in files)


def _stamp(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_mtime_ns, info.st_size


def _load_cuda(step: Step, capability: tuple[int, int] | None, only: Mapping[str, int]) -> Kernel:
    if torch.version.cuda is None:
        raise BuildError(
            f"{step.id}: torch {torch.__version__} is a CPU build; backend cuda needs a CUDA build of torch"
        )
    flags = (*CUDA_FLAGS, *_CUDA_THREADS, *gencode(step, capability))
    recipe = _Recipe(step.path, f"{step.op}-{step.name}-cuda", "cuda", flags, nvcc_path(), cxx_path())
    library, handle = _obtain_instance(recipe, only)
    return Kernel(step, library, handle, None, check=False)


def _load_emulation(step: Step, check: bool, only: Mapping[str, int]) -> Kernel:
    runtime = _runtime()
    kind = "check" if check else "fast"
    flags = CHECK_FLAGS if check else FAST_FLAGS
    recipe = _Recipe(step.path, f"{step.op}-{step.name}-{kind}", "cpp", flags, cxx_path(), links=runtime.library)
    library, handle = _obtain_instance(recipe, only)
    return Kernel(step, library, handle, runtime, check)


# ---- the emulation's runtime -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runtime:
    library: Path
    handle: ctypes.CDLL
    configure: Callable[[Any], bytes | None]


_runtimes: dict[str, ctypes.CDLL] = {}


def _runtime_source() -> Path:
    return paths.EMULATION / "cuda_host.cpp"


def _runtime() -> _Runtime:
    """The emulation, built and loaded. A step's library names it as a dependency, so versions of it can coexist."""
    source = _runtime_source()
    stamps = tuple((path, _stamp(path)) for path in (source, *steps.headers(source)))
    found = _load_runtime(stamps, cxx_path())
    if not found.library.is_file():  # the cache was emptied under a living process
        _load_runtime.cache_clear()
        found = _load_runtime(stamps, cxx_path())
    return found


@functools.lru_cache(maxsize=8)
def _load_runtime(stamps: tuple[tuple[Path, tuple[int, int]], ...], compiler: Path) -> _Runtime:
    recipe = _Recipe(stamps[0][0], "emulation", "cpp", RUNTIME_FLAGS, compiler, link_flags=("-pthread",))
    library, handle = _obtain(recipe)
    # Steps bind to the first library of this name in the process, wherever its file is now.
    handle = _runtimes.setdefault(library.name, handle)
    configure = handle.emu_configure
    configure.argtypes = [ctypes.POINTER(_EmuConfig)]
    configure.restype = ctypes.c_char_p
    return _Runtime(library, handle, configure)


def _configure(runtime: _Runtime, step: Step, check: bool, buffers: Sequence[Buffer] | None) -> _EmuConfig:
    """Sets how the calling thread's next launch runs; what is returned must live until that has ended."""
    settings = current_emulation()
    known = buffers or ()
    array = (_EmuBuffer * max(1, len(known)))(
        *(_EmuBuffer(b.name.encode(), b.ptr, b.nbytes, b.writable) for b in known)
    )
    config = _EmuConfig(
        seed=settings.seed,
        check=check,
        threads=settings.threads or 0,
        architecture=_emulated_sm(step, settings.architecture),
        buffers=None if buffers is None else ctypes.cast(array, ctypes.POINTER(_EmuBuffer)),
        buffer_count=len(known),
    )
    error = runtime.configure(ctypes.byref(config))
    if error is not None:
        raise KernelError(step.id, error.decode("utf-8", "replace"))
    return config


def _emulated_sm(step: Step, architecture: str | None) -> int:
    """The GPU whose launch limits hold, as 10 x major + minor."""
    if architecture is not None:
        major, minor, _ = steps.parse_architecture(architecture)
        if not step.runs_on((major, minor)):
            raise ValueError(f"architecture: {step.id} is for {', '.join(step.architectures)}, not for {architecture}")
        return 10 * major + minor
    if step.runs_on((9, 0)):
        return _EMULATED_SM
    major, minor, _ = steps.parse_architecture(step.architectures[0])
    return 10 * major + minor


_ADDRESS = re.compile(r"@\[(?:[^\[\]\n]*/)?([^\[\]\n/]+)\+(0x[0-9a-fA-F]+)\]")
_library_paths: dict[str, Path] = {}


def locate(text: str) -> str:
    """A report of the emulation with every ``@[library+0x1a2b]`` replaced by ``file:line``, inlined callers after it.

    Without addr2line (package binutils), or where it knows no line, the address stays.
    """
    wanted: dict[Path, list[str]] = {}
    for name, offset in _ADDRESS.findall(text):
        if name in _library_paths:
            wanted.setdefault(_library_paths[name], []).append(offset)
    places = {
        (library.name, offset): place
        for library, offsets in wanted.items()
        for offset, place in _addr2line(library, offsets).items()
    }

    def place(match: re.Match[str]) -> str:
        library = _library_paths.get(match[1])
        return places.get((library.name, match[2]), match[0]) if library else match[0]

    return _ADDRESS.sub(place, text)


def _addr2line(library: Path, offsets: Sequence[str]) -> dict[str, str]:
    tool = shutil.which("addr2line")
    if tool is None:
        _say_once("addr2line is not in PATH (package binutils): reports of the emulation show addresses, not lines")
        return {}
    command = [tool, "-a", "-i", "-e", str(library), *dict.fromkeys(offsets)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found: dict[str, list[str]] = {}
    by_address = {int(offset, 16): offset for offset in offsets}
    current: list[str] = []
    for line in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            current = found.setdefault(by_address.get(int(line, 16), line), [])
        elif not line.startswith("??") and not line.endswith(":?"):
            current.append(short_path(re.sub(r" \(discriminator \d+\)$", "", line)))
    return {offset: _inline_chain(places) for offset, places in found.items() if places}


def _inline_chain(places: list[str]) -> str:
    unique = list(dict.fromkeys(places))
    return unique[0] + (f" (inlined at {', '.join(unique[1:])})" if len(unique) > 1 else "")


def short_path(place: str) -> str:
    """``file:line`` without "./" and "..": the compiler was given the project's files relative to the repository."""
    file, colon, line = place.rpartition(":")
    return f"{os.path.normpath(file)}{colon}{line}"


# ---- tools -----------------------------------------------------------------------------------------------------------


def cxx_path() -> Path:
    """The host compiler: ``$CXX``, else g++ or c++ of PATH. BuildError where there is none."""
    chosen = os.environ.get("CXX", "").strip()
    for name in [chosen] if chosen else ["g++", "c++"]:
        found = shutil.which(name)
        if found:
            return Path(found)
    if chosen:
        raise BuildError(f"CXX: {chosen!r} is not in PATH; set it to a C++20 compiler, or unset it to use g++")
    raise BuildError(
        "g++ is not in PATH and is needed to build kernels: install it "
        "(apt install g++, dnf install gcc-c++, conda install gxx), or set CXX to a C++20 compiler"
    )


def nvcc_path() -> Path:
    """nvcc of ``$CUDA_HOME``, else of PATH, else of /usr/local/cuda; one that has libcudart.so beside it comes first.

    BuildError where there is none.
    """
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    in_path = shutil.which("nvcc")
    homes = [Path(chosen)] if chosen else []
    if in_path:
        homes += [Path(in_path).parent.parent, Path(in_path).resolve().parent.parent]
    homes = [home for home in [*homes, Path("/usr/local/cuda"), Path("/opt/cuda")] if (home / "bin/nvcc").is_file()]
    whole = [home for home in homes if any(list((home / lib).glob("libcudart.so*")) for lib in ("lib64", "lib"))]
    if homes:
        return (whole or homes)[0] / "bin" / "nvcc"
    raise BuildError(
        "nvcc is neither in CUDA_HOME nor in PATH nor in /usr/local/cuda, and is needed to build kernels for CUDA: "
        f"install the CUDA toolkit {torch.version.cuda or ''} (conda install -c nvidia cuda-toolkit, or "
        "developer.nvidia.com/cuda-downloads), or set CUDA_HOME"
    )


def _ninja_folder() -> str | None:
    """The folder that PATH needs for ninja, None where PATH has it."""
    if shutil.which("ninja"):
        return None
    candidates = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    with contextlib.suppress(ImportError):
        import ninja

        candidates.insert(0, ninja.BIN_DIR)
    for folder in candidates:
        if shutil.which("ninja", path=folder):
            return folder
    raise BuildError("ninja is not in PATH and is needed to build kernels: install it (pip install ninja)")


def compiler_version(compiler: Path) -> str:
    """What the compiler says that it is. Asked once, then kept under the executable's path, time and size."""
    return _compiler_version(compiler, *_stamp(compiler.resolve()))


@functools.lru_cache(maxsize=16)
def _compiler_version(compiler: Path, mtime: int, size: int) -> str:
    key = f"{compiler}\0{compiler.resolve()}\0{mtime}\0{size}".encode(errors="surrogateescape")
    note = _cache_root() / f"compiler-{hashlib.sha256(key).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(note.read_text(encoding="utf-8"))["version"])
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} --version does not work: {error}") from error
    version = done.stdout.strip()
    with contextlib.suppress(OSError):
        _write_atomically(note, json.dumps({"compiler": str(compiler), "version": version}).encode())
    return version


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# ---- from a recipe to a library --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """All that a library is made of, beside the headers that its source reaches."""

    source: Path
    label: str
    language: Literal["cuda", "cpp"]
    flags: tuple[str, ...]
    compiler: Path
    host_compiler: Path | None = None
    links: Path | None = None
    link_flags: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", (self.source, *steps.headers(self.source)))

    @property
    def stem(self) -> str:
        """The library's name in the cache: readable, then the digest."""
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part.encode(errors="surrogateescape") + b"\0")
        for path in self.files:
            data = path.read_bytes()
            digest.update(f"{_shown_name(path)}\0{len(data)}\0".encode(errors="surrogateescape") + data)
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self.label)}-{digest.hexdigest()[:20]}"

    def _parts(self) -> list[str]:
        compilers = [c for c in (self.compiler, self.host_compiler) if c]
        return [
            "1",  # the layout of the cache
            self.label,
            self.language,
            *self.flags,
            *_LINK_FLAGS,
            *self.link_flags,
            *(f"{c}\0{compiler_version(c)}" for c in compilers),
            torch.__version__,
            str(torch.version.cuda),
            *(self._cuda_parts() if self.language == "cuda" else ()),
            sysconfig.get_config_var("SOABI") or sys.version,
            platform.machine(),
            self.links.name if self.links else "",
        ]

    def _cuda_parts(self) -> list[str]:
        # The line table names the checkout, and nvcc adds these variables to its command line.
        return [str(paths.ROOT), *(os.environ.get(f"NVCC_{x}_FLAGS", "") for x in ("PREPEND", "APPEND"))]


def _obtain_instance(recipe: _Recipe, only: Mapping[str, int]) -> tuple[Path, ctypes.CDLL]:
    """The recipe's library: of all instances if it is there, else of one."""
    if not only:
        return _obtain(recipe)
    whole = _open(_cache_root() / f"{recipe.stem}.so")
    if whole:
        return whole
    defines = tuple(f"-DONLY_{name.upper()}={value}" for name, value in only.items())
    label = "-".join([recipe.label, *map(str, only.values())])
    return _obtain(replace(recipe, flags=(*recipe.flags, *defines), label=label))


def _obtain(recipe: _Recipe) -> tuple[Path, ctypes.CDLL]:
    """The recipe's library, loaded: from the cache if it is there and whole, else built."""
    stem = recipe.stem
    found = _open(_cache_root() / f"{stem}.so")
    if found:
        return found
    root = _writable_cache()
    with _lock(root / f"{stem}.lock"):
        found = _open(root / f"{stem}.so")
        if found:
            return found
        _sweep(root, stem)
        return _build(recipe, root, stem)


def _open(library: Path) -> tuple[Path, ctypes.CDLL] | None:
    """The library loaded, or None where it is missing or not whole."""
    if not _is_whole(library):
        return None
    handle = _dlopen(library)
    with contextlib.suppress(OSError):
        os.utime(library)  # the sweep keeps what is in use
    _library_paths[library.name] = library
    return library, handle


def _dlopen(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        hint = "; nvcc's CUDA version must be torch's" if "libcudart" in str(error) else ""
        raise BuildError(f"{library} does not load: {error}{hint}") from error


def _is_whole(library: Path) -> bool:
    """Whether a library ends in the checksum that the last act of its build put there."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return len(data) > _CHECKSUM and hashlib.sha256(data[:-_CHECKSUM]).digest() == data[-_CHECKSUM:]


def _build(recipe: _Recipe, root: Path, stem: str) -> tuple[Path, ctypes.CDLL]:
    logger.info("building %s", stem)
    staging = Path(tempfile.mkdtemp(prefix=f"{stem}.", dir=_ensure(root / "building")))
    try:
        with _plain_name(staging) as plain:
            built = _compile(recipe, plain, stem)
        # torch has loaded it where it was built; renaming keeps the file, so loading it again gives the same library.
        built = staging / built.relative_to(plain)
        data = built.read_bytes()
        with open(built, "ab") as file:
            file.write(hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        library = root / f"{stem}.so"
        os.replace(built, library)
        _library_paths[built.name] = _library_paths[library.name] = library
        return library, _dlopen(library)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _ensure(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _shown_name(path: Path) -> str:
    """A source's name in reports: relative to the repository, or absolute where it is not in there."""
    with contextlib.suppress(ValueError):
        return path.relative_to(paths.ROOT).as_posix()
    return path.as_posix()


def _staged_names(files: Sequence[Path]) -> dict[Path, str]:
    """Where each source lies in the build folder, so that "../" in an include leads to the same header.

    The project's as in the repository; others below the folder that they have in common, whatever that is called.
    """
    names = {path: _shown_name(path) for path in files}
    outside = [path for path, name in names.items() if os.path.isabs(name)]
    common = os.path.commonpath([path.parent for path in outside]) if outside else ""
    return {
        path: f"outside/{path.relative_to(common).as_posix()}" if path in outside else names[path] for path in files
    }


def _compile(recipe: _Recipe, staging: Path, stem: str) -> Path:
    """Build in ``staging`` through torch's load_inline; the path of the library, which torch has loaded."""
    top = staging / "files"
    names = _staged_names(recipe.files)
    for path, name in names.items():
        target = top / name
        _ensure(target.parent).joinpath(target.name).write_text(_staged_text(path, recipe), encoding="utf-8")
    folder = (top / names[recipe.source]).parent
    include = os.path.relpath(top / _shown_name(paths.CSRC).lstrip("/"), folder)
    flags = [*recipe.flags, _quoted(f"-I{include}")]
    link_flags = [*_LINK_FLAGS, *recipe.link_flags]
    if recipe.links is not None:
        # By name only: the loader finds what is loaded already under this name, wherever the cache is.
        shutil.copyfile(recipe.links, folder / recipe.links.name)
        link_flags.append(f"./{recipe.links.name}")
    if recipe.language == "cpp":
        link_flags.append(f"-Wl,-soname,{stem}.so")
        if "clang" in compiler_version(recipe.compiler):
            flags = ["-fsanitize=bounds" if flag == "-fsanitize=bounds-strict" else flag for flag in flags]
        else:
            flags.append("-fno-gnu-unique")  # those symbols are one a process, across libraries
        flags.append(_quoted(f"-fdebug-prefix-map={folder}=."))
    source = _staged_text(recipe.source, recipe)
    sources: dict[str, Any] = (
        {"cpp_sources": "", "cuda_sources": source, "extra_cuda_cflags": flags}
        if recipe.language == "cuda"
        else {"cpp_sources": source, "extra_cflags": flags}
    )
    with _BUILDING, _torch_environment(recipe, staging, folder):
        from torch.utils import cpp_extension

        try:
            built = cpp_extension.load_inline(
                name=stem,
                build_directory=str(folder),
                extra_ldflags=link_flags,
                is_python_module=False,
                no_implicit_headers=True,
                verbose=False,
                **sources,
            )
        except RuntimeError as error:
            said = _compiler_output(str(error), recipe)
            raise BuildError(f"{_shown_name(recipe.source)} does not build ({recipe.label}):\n{said}") from None
    return Path(str(built))


def _staged_text(path: Path, recipe: _Recipe) -> str:
    """The source with its name in line tables and reports set, so that no build folder shows there.

    Profilers open the file, so CUDA gets its absolute path; the emulation's reports are for reading.
    """
    shown = path.as_posix() if recipe.language == "cuda" else _shown_name(path)
    name = shown.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{name}"\n{path.read_text(encoding="utf-8")}'


def _quoted(flag: str) -> str:
    """A flag that survives ninja, then the shell."""
    return shlex.quote(flag).replace("$", "$$")


def _compiler_output(text: str, recipe: _Recipe) -> str:
    """Only what the compiler said of ninja's output."""
    tools = "|".join(re.escape(str(tool)) for tool in (recipe.compiler, recipe.host_compiler) if tool)
    noise = re.compile(rf"\[\d+/\d+\]|ninja: |FAILED: |Error building extension|(?:{tools}) ")
    return "\n".join(line for line in text.splitlines() if not noise.match(line)) or text


_BUILDING = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_BUILDING=threading.Lock()))
_SAFE_PATH = re.compile(r"[A-Za-z0-9_/.,+@%=-]+")


@contextlib.contextmanager
def _plain_name(staging: Path) -> Iterator[Path]:
    """The build folder under a name that needs no quoting: ninja, make rules and shells disagree about the others."""
    if _SAFE_PATH.fullmatch(str(staging)):
        yield staging
        return
    folder = Path(tempfile.mkdtemp(prefix="mila-", dir=_plain_temporary_folder()))
    try:
        (folder / "b").symlink_to(staging.resolve(), target_is_directory=True)
        yield folder / "b"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plain_temporary_folder() -> str:
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if _SAFE_PATH.fullmatch(folder) and os.access(folder, os.W_OK):
            return folder
    return tempfile.gettempdir()


@contextlib.contextmanager
def _torch_environment(recipe: _Recipe, staging: Path, folder: Path) -> Iterator[None]:
    """What load_inline reads from the process: environment and module globals, put back after."""
    from torch.utils import cpp_extension

    host = recipe.host_compiler or recipe.compiler
    # Nothing here links to torch's C++ interface, so the compiler's ABI does not matter; a wrapper adds only risks.
    variables = {"CXX": str(host), "TORCH_DONT_CHECK_COMPILER_ABI": "1", "TORCH_NO_COMPILER_WRAPPER": "1"}
    variables["PWD"] = str(folder)  # the name by which compilers know the folder that they run in
    ninja = _ninja_folder()
    if ninja:
        variables["PATH"] = os.pathsep.join([ninja, os.environ.get("PATH", os.defpath)])
    settings: dict[str, Any] = {"TORCH_LIB_PATH": _linked(staging, "torch_lib", cpp_extension.TORCH_LIB_PATH)}
    if recipe.language == "cuda":
        variables["CC"] = str(host)  # torch passes it to nvcc as -ccbin
        settings["CUDA_HOME"] = _linked(staging, "cuda_home", str(recipe.compiler.parent.parent))
    before = {name: os.environ.get(name) for name in variables}
    previous = {name: getattr(cpp_extension, name) for name in settings}
    try:
        os.environ.update(variables)
        for name, value in settings.items():
            setattr(cpp_extension, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(cpp_extension, name, value)
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def _linked(staging: Path, name: str, folder: str) -> str:
    """The folder itself, or a link to it in the build folder where torch's unquoted use of its name would break."""
    if _SAFE_PATH.fullmatch(folder):
        return folder
    (staging / name).symlink_to(folder, target_is_directory=True)
    return str(staging / name)


# ---- the cache's folder, locks and upkeep ----------------------------------------------------------------------------

_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP)


def _cache_root() -> Path:
    try:
        return paths.cache_dir()
    except RuntimeError:  # no home folder
        return _private_cache()


def _writable_cache() -> Path:
    root = _cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        private = _private_cache()
        _say_once(f"the cache {root} cannot be written ({error.strerror}); building in {private} for this process only")
        return private


@functools.lru_cache(maxsize=1)
def _private_cache() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mila_kernels-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def lock_timeout() -> float:
    """Seconds to wait for another process's build: MILA_LOCK_TIMEOUT, default 120."""
    text = os.environ.get("MILA_LOCK_TIMEOUT", "").strip() or "120"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"MILA_LOCK_TIMEOUT: {text!r} must be a number of seconds from 0")
    return seconds


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an flock on ``path``, which the kernel frees when the holder ends, however it ends."""
    limit = lock_timeout()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for(handle, path, limit)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
            # Closing is not enough: a process forked meanwhile has the handle too.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _wait_for(handle: int, path: Path, limit: float) -> None:
    start = time.monotonic()
    said = False
    while not _try_flock(handle):
        waited = time.monotonic() - start
        if waited >= limit:
            raise TimeoutError(
                f"{path} is held by {_holder(handle)} for more than {limit:g} s (MILA_LOCK_TIMEOUT): wait for that "
                "build, or end that process; the lock goes with it"
            )
        if waited >= _LOCK_NOTICE_S and not said:
            said = True
            logger.warning("waiting for %s, held by %s, up to %g s", path, _holder(handle), limit)
        time.sleep(min(0.05, max(0.0, limit - waited)))


def _try_flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            return True  # no locks on this file system: at worst two processes build the same library
        raise
    return True


def _holder(handle: int) -> str:
    text = os.pread(handle, 200, 0).decode(errors="replace").strip()
    if text:
        return text
    inode = os.fstat(handle).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            match = re.match(r"\d+: FLOCK .* (\d+) \S+:(\d+) ", line)
            if match and int(match[2]) == inode:
                return f"pid {match[1]}"
    return "an unknown process"


def _sweep(root: Path, stem: str) -> None:
    """Removes what killed builds left, and libraries that nothing has loaded for two months. Holds ``stem``'s lock."""
    now = time.time()
    for folder in _listed(root / "building"):
        owner = folder.name.rpartition(".")[0]
        if owner == stem or _age(folder, now) > _STALE_S and _is_free(root / f"{owner}.lock"):
            shutil.rmtree(folder, ignore_errors=True)
    for path in _listed(root):
        if path.suffix == ".so" and _age(path, now) > _UNUSED_S:
            path.unlink(missing_ok=True)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_free(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return _try_flock(handle)
    finally:
        os.close(handle)
