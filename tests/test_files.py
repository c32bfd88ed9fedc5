"""A file is written whole or not at all, and a change of it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mila_kernels.files import stamp, write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_and_its_stamp_changes(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "new" / "table.csv"
    write_atomically(path, b"old", durable=durable)
    before = stamp(path)
    write_atomically(path, b"newer", durable=durable)
    assert path.read_bytes() == b"newer" and stamp(path) != before
    assert path.stat().st_mode & 0o777 == 0o644 and list(path.parent.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    write_atomically(path, b"old")

    def refuse(*names: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
