"""Where the project's files lie, where compiled steps are cached, and the variable that marks a watched process."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
CSRC = PACKAGE / "csrc"
EMULATION = PACKAGE / "emulation"
DATA = ROOT / "data"
RESULTS = ROOT / "results"
NOTEBOOKS = ROOT / "notebooks"
WATCHED = "MILA_SANITIZER"  # in the environment of what a sanitizer watches: the tool's name


def python_path() -> str:
    """``PYTHONPATH`` of a child process that imports this very package."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def cache_dir() -> Path:
    """The folder of compiled steps: ``$MILA_CACHE``, or ``mila_kernels`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("MILA_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mila_kernels"
