"""The emulation as a library: its settings, its runtime, and its reports with file and line.

Environment: ``MILA_EMULATION_CHECK`` and ``MILA_EMULATION_SEED`` (defaults of :func:`emulation`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import paths, steps
from .arguments import check_flag, check_int
from .errors import KernelError
from .files import stamp
from .libraries import Recipe, library_paths, obtain
from .notices import say_once
from .steps import Step
from .toolchain import cxx_path

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
_EMULATED_SM = 90


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
        TypeError, ValueError: an argument of the wrong type, or a seed, a number of threads or an architecture out of
            range, by name.
    """
    given = {"check": check, "seed": seed, "threads": threads, "architecture": architecture}
    if check is not None:
        check_flag("check", check)
    settings = replace(current_emulation(), **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    check_int("seed", settings.seed, 0, 2**64 - 1)
    check_int("threads", 1 if settings.threads is None else settings.threads, 1, 1024)
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
    check_int("MILA_EMULATION_SEED", value, 0, 2**64 - 1)
    return Emulation(check=check.strip() == "1", seed=value)


# ---- the runtime -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runtime:
    library: Path
    handle: ctypes.CDLL
    configure: Callable[[Any], bytes | None]


_runtimes: dict[str, ctypes.CDLL] = {}


def runtime_source() -> Path:
    return paths.EMULATION / "cuda_host.cpp"


def current_runtime() -> Runtime:
    """The emulation, built and loaded. A step's library names it as a dependency, so versions of it can coexist."""
    source = runtime_source()
    stamps = tuple((path, stamp(path)) for path in (source, *steps.headers(source)))
    found = _load_runtime(stamps, cxx_path())
    if not found.library.is_file():  # the cache was emptied under a living process
        _load_runtime.cache_clear()
        found = _load_runtime(stamps, cxx_path())
    return found


@functools.lru_cache(maxsize=8)
def _load_runtime(stamps: tuple[tuple[Path, tuple[int, int]], ...], compiler: Path) -> Runtime:
    recipe = Recipe(stamps[0][0], "emulation", "cpp", RUNTIME_FLAGS, compiler, link_flags=("-pthread",))
    library, handle = obtain(recipe)
    # Steps bind to the first library of this name in the process, wherever its file is now.
    handle = _runtimes.setdefault(library.name, handle)
    configure = handle.emu_configure
    configure.argtypes = [ctypes.POINTER(_EmuConfig)]
    configure.restype = ctypes.c_char_p
    return Runtime(library, handle, configure)


def configure_launch(runtime: Runtime, step: Step, check: bool, buffers: Sequence[Buffer] | None) -> _EmuConfig:
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


# ---- reports ---------------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"@\[(?:[^\[\]\n]*/)?([^\[\]\n/]+)\+(0x[0-9a-fA-F]+)\]")


def locate(text: str) -> str:
    """A report of the emulation with every ``@[library+0x1a2b]`` replaced by ``file:line``, inlined callers after it.

    Without addr2line (package binutils), or where it knows no line, the address stays.
    """
    wanted: dict[Path, list[str]] = {}
    for name, offset in _ADDRESS.findall(text):
        if name in library_paths:
            wanted.setdefault(library_paths[name], []).append(offset)
    places = {
        (library.name, offset): place
        for library, offsets in wanted.items()
        for offset, place in _addr2line(library, offsets).items()
    }

    def place(match: re.Match[str]) -> str:
        library = library_paths.get(match[1])
        return places.get((library.name, match[2]), match[0]) if library else match[0]

    return _ADDRESS.sub(place, text)


def _addr2line(library: Path, offsets: Sequence[str]) -> dict[str, str]:
    tool = shutil.which("addr2line")
    if tool is None:
        say_once("addr2line is not in PATH (package binutils): reports of the emulation show addresses, not lines")
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
