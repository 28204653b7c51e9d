"""Where built things live, and the lock that keeps two builds apart.

    <home>/downloads/            pieces of models on their way, by name and digest of the whole
    <home>/models/gguf/          NAME.gguf, digest checked
    <home>/models/hf/            weights and tokenizer, by recipe
    <home>/models/onnx/          one directory per model, variant and recipe
    <home>/releases/             the release store: <line>/<version>/
    <home>/logs/                 of conversion and quantization

Home is FOREBAY_HOME, else `forebay` in XDG_CACHE_HOME, else in ~/.cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloud.authoring.errors import HomeBusy
from cloud.authoring.files import no_space_is_an_error, sweep_temporaries
from cloud.authoring.stopping import raise_if_stopped

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one home directory."""

    root: Path

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Home:
        """The home that `env` names."""
        if chosen := env.get("FOREBAY_HOME"):
            return cls(Path(chosen).expanduser().absolute())
        cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")).expanduser() / ".cache")
        return cls(Path(cache).absolute() / "forebay")

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"

    @property
    def gguf(self) -> Path:
        return self.root / "models" / "gguf"

    @property
    def hf(self) -> Path:
        return self.root / "models" / "hf"

    @property
    def onnx(self) -> Path:
        return self.root / "models" / "onnx"

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @contextlib.contextmanager
    def lock(
        self,
        *,
        wait_s: float,
        clock: Callable[[], float],
        stop: threading.Event,
        on_wait: Callable[[int], None] = lambda _pid: None,
    ) -> Iterator[None]:
        """Hold the home alone; then sweep what crashed runs left.

        The kernel drops the lock with its process, so a crash never leaves it held.

        Args:
            wait_s: Most seconds to wait for the other process.
            clock: Monotonic seconds.
            stop: Ends the wait early.
            on_wait: Called once with the other's process id when there is something to wait for.

        Raises:
            HomeBusy: Still held after `wait_s`.
            BuildCancelled: `stop` was set meanwhile.
        """
        path = self.root / "lock"
        with no_space_is_an_error(path):
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = clock() + wait_s
            waited = False
            while not _try_lock(descriptor):
                holder = _holder(descriptor)
                if not waited:
                    waited = True
                    on_wait(holder)
                if clock() >= deadline:
                    raise HomeBusy(
                        f"another build (process {holder}) holds {self.root}; wait for it or set FOREBAY_HOME"
                    )
                raise_if_stopped(stop, timeout_s=_POLL_S)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            for directory in (self.downloads, self.gguf, self.hf, self.onnx):
                sweep_temporaries(directory)
            if self.releases.is_dir():
                for line in self.releases.iterdir():
                    sweep_temporaries(line)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.isdigit() else 0
