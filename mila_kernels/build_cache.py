"""The folder of built libraries: where it is, locks between processes, and what is swept away.

Environment: ``MILA_CACHE`` (the folder, see :func:`mila_kernels.paths.cache_dir`), ``MILA_LOCK_TIMEOUT`` (seconds to
wait for another build of the same library, 120).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import paths
from .notices import logger, say_once

_LOCK_NOTICE_S = 2.0
_STALE_S = 3600.0
_UNUSED_S = 60 * 86400.0
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP)


def cache_root() -> Path:
    """The cache's folder, which need not be there; of this process alone where there is no home folder."""
    try:
        return paths.cache_dir()
    except RuntimeError:  # no home folder
        return _private_cache()


def writable_cache() -> Path:
    """The cache's folder, made, or one of this process alone where it cannot be written (said once)."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        private = _private_cache()
        say_once(f"the cache {root} cannot be written ({error.strerror}); building in {private} for this process only")
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
def lock(path: Path) -> Iterator[None]:
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


def sweep(root: Path, stem: str) -> None:
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
