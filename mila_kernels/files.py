"""Files: when one changed, and how one is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def stamp(path: Path) -> tuple[int, int]:
    """Time of the last change (ns) and size (bytes): what differs when a file has been written again."""
    info = path.stat()
    return info.st_mtime_ns, info.st_size


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Others see the old file or the whole new one; with ``durable`` that holds across a power failure, too.

    Raises:
        OSError: the folder cannot be made or written; the old file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
