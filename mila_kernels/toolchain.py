"""The compilers and ninja: where they are, which version, and what to do where one is missing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from .build_cache import cache_root
from .errors import BuildError
from .files import stamp, write_atomically


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


def ninja_folder() -> str | None:
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
    return _compiler_version(compiler, *stamp(compiler.resolve()))


@functools.lru_cache(maxsize=16)
def _compiler_version(compiler: Path, mtime: int, size: int) -> str:
    key = f"{compiler}\0{compiler.resolve()}\0{mtime}\0{size}".encode(errors="surrogateescape")
    note = cache_root() / f"compiler-{hashlib.sha256(key).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(note.read_text(encoding="utf-8"))["version"])
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} --version does not work: {error}") from error
    version = done.stdout.strip()
    with contextlib.suppress(OSError):
        write_atomically(note, json.dumps({"compiler": str(compiler), "version": version}).encode())
    return version
