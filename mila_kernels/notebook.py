"""What the notebooks share: which device, which recorded figures, and where the rows of this run go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from .results import RunWriter, TimingRow

_OPEN_CASE = ".open_case.json"


@contextmanager
def open_case(run: RunWriter, failed: TimingRow) -> Iterator[None]:
    """While a case runs, keep the row that it leaves should its process be killed: close_open_case writes it."""
    note = run.folder / _OPEN_CASE
    part = run.folder / f"{_OPEN_CASE}.{os.getpid()}"
    part.write_text(json.dumps(asdict(failed)), encoding="utf-8")
    os.replace(part, note)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def close_open_case(folder: Path, run_id: str, error: str) -> None:
    """Write the failed row of a case whose process died before it could, if there is one."""
    note = folder / _OPEN_CASE
    if not note.exists():
        return
    case = json.loads(note.read_text(encoding="utf-8"))
    RunWriter(folder, run_id).add(TimingRow(**{**case, "status": "failed", "error": error}))
    note.unlink()
