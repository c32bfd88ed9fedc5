"""What the tests share: the backends that they run on.

``MILA_TEST_DEVICE`` (``make test DEVICE=...``): ``auto`` is emulation, and CUDA too where there is a GPU; ``cuda``
needs one; ``emulation`` never uses one.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def _backends() -> list[Any]:
    wanted = os.environ.get("MILA_TEST_DEVICE", "").strip() or "auto"
    if wanted not in ("auto", "cuda", "emulation"):
        raise pytest.UsageError(f"MILA_TEST_DEVICE: {wanted!r} must be auto, cuda or emulation")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise pytest.UsageError(f"MILA_TEST_DEVICE: cuda was asked for and torch {torch.__version__} sees no GPU")
    cuda = wanted == "cuda" or wanted == "auto" and available
    return ["emulation", *([pytest.param("cuda", marks=pytest.mark.cuda)] if cuda else [])]


@pytest.fixture(autouse=True)
def _by_itself(request: pytest.FixtureRequest) -> Iterator[None]:
    """With several workers, a test marked ``alone`` runs while no other does; who waits for that holds the gate."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if not run:
        yield
        return
    folder = Path(tempfile.gettempdir())
    with (folder / f"mila-gate-{run}").open("w") as gate, (folder / f"mila-tests-{run}").open("w") as tests:
        alone = request.node.get_closest_marker("alone") is not None
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(params=_backends())
def backend(request: pytest.FixtureRequest) -> str:
    """``emulation``, and ``cuda`` where the tests run on a GPU too."""
    return str(request.param)


@pytest.fixture
def device(backend: str) -> torch.device:
    """Where the backend's tensors lie."""
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture
def large(backend: str) -> bool:
    """Whether shapes may be those of real use: on a GPU they cost nothing, in emulation minutes."""
    return backend == "cuda"
