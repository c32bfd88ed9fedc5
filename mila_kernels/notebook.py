"""What the notebooks share: which device, which recorded figures, and where the rows of this run go."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUN_FOLDER_VARIABLE = "MILA_RUN_FOLDER"
RUN_ID_VARIABLE = "MILA_RUN_ID"
_OPEN_CASE = ".open_case.json"


def new_run_id() -> str:
    """A name for a run that sorts by time and that no other run has, e.g. ``20261129T181500Z-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


@contextmanager
def open_case(folder: Path, **case: Any) -> Iterator[None]:
    """Keep a note of the case that runs now, so that a killed process still leaves a failed row: close_open_case."""
    note = folder / _OPEN_CASE
    part = folder / f"{_OPEN_CASE}.{os.getpid()}"
    part.write_text(json.dumps(case), encoding="utf-8")
    os.replace(part, note)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def close_open_case(folder: Path, error: str) -> None:
    """Write the failed row of a case whose process died before it could, if there is one."""
    note = folder / _OPEN_CASE
    if not note.exists():
        return
    case = json.loads(note.read_text(encoding="utf-8"))
    note.unlink()
