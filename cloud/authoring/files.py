"""Crash-safe files and directories: a temporary name beside the target, synced, then renamed.

Whatever has its final name is whole. What a crash leaves behind has a temporary name and is swept by the
next run. Running out of space becomes `DiskFull`, and the half-written file goes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cloud.authoring.errors import AuthoringError, DiskFull

TEMPORARY_MARK = ".partial-"
_CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def no_space_is_an_error(where: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into `DiskFull`, and other OS errors into an `AuthoringError` with the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left for {where}; free some, then run this again") from error
        raise AuthoringError(f"cannot write {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Write `target` whole or not at all.

    Raises:
        DiskFull: No space left.
    """
    temporary = _temporary(target)
    with no_space_is_an_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            _sync_directory(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Fill a fresh directory, then give it the name `target`, replacing what has that name.

    A directory cannot be exchanged in one step everywhere, so a replaced one is renamed away first; a crash
    in between leaves no `target`, which the next run rebuilds from its parts.
    """
    temporary = _temporary(target)
    with no_space_is_an_error(target):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    path.chmod(0o644)  # some libraries write weights for their own user only
                    _sync_file(path)
            if target.exists():
                retired = _temporary(target)
                target.rename(retired)
                temporary.rename(target)
                shutil.rmtree(retired, ignore_errors=True)
            else:
                temporary.rename(target)
            _sync_directory(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def sweep_temporaries(directory: Path) -> None:
    """Delete what crashed runs left directly in `directory`. Only under the home's lock."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if TEMPORARY_MARK in path.name:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Lower-case hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same bytes as `source`: a hard link where the file system allows, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
            raise
        shutil.copyfile(source, target)


def copy_stream(source: BinaryIO, *targets: BinaryIO, digest: hashlib._Hash | None = None) -> Iterator[int]:
    """Copy in pieces, yielding the size of each so that the caller can report progress or stop."""
    while chunk := source.read(_CHUNK_BYTES):
        for target in targets:
            target.write(chunk)
        if digest is not None:
            digest.update(chunk)
        yield len(chunk)


def tree_bytes(directory: Path) -> int:
    """Bytes of all files under a directory; files that vanish meanwhile count 0."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_size
    return total


def _temporary(target: Path) -> Path:
    return target.with_name(f"{TEMPORARY_MARK}{uuid.uuid4().hex[:12]}-{target.name}")


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
