"""The release manifest: one immutable description of both tiers' side of a release.

A release is a directory:

    <store>/<line>/<version>/
        release.json                    this manifest
        edge/tokenizer/                 tokenizer.json, chat_template.jinja
        edge/<variant>/                 model.onnx, model.onnx.data, genai_config.json (engine onnxruntime)
        edge/weights/                   Hugging Face weights (engine torch), shared by its variants
        cloud/                          Hugging Face weights for the cloud tier; absent on edge nodes

Every file of the edge is listed with size and digest. Paths are relative, use `/`, and stay inside.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec

from protos.errors import RequestError
from protos.values import ReleaseRef

MANIFEST_NAME = "release.json"
SCHEMA_VERSION = 1
_LINE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

LineName = Annotated[str, msgspec.Meta(pattern=rf"^{_LINE.pattern}$")]
Version = Annotated[int, msgspec.Meta(ge=1)]
UnitInterval = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ManifestError(RequestError):
    """A manifest that cannot be used: not JSON, a wrong field, an unknown schema, a path that escapes."""

    reason = "BAD_MANIFEST"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. `sha256` is lower-case hexadecimal."""

    path: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Digest


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One quantization of the edge model.

    Attributes:
        name: Such as `int4`, `int8`, `nf4`, `llm-int8`, `fp32`.
        engine: What runs it.
        directory: Where its files are, relative to the release.
        size_bytes: Of all its files.
        threshold: Confidence under which an answer is forwarded.
    """

    name: LineName
    engine: Literal["onnxruntime", "torch"]
    directory: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    threshold: UnitInterval


class EdgeSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The edge model. `context_tokens` bounds prompt and answer together."""

    model: str
    license: str
    context_tokens: Annotated[int, msgspec.Meta(ge=16)]
    eos_token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    tokenizer_directory: str
    tokenizer_sha256: Digest
    variants: Annotated[list[Variant], msgspec.Meta(min_length=1)]


class CloudSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cloud model. Equal `tokenizer_sha256` on both sides means that token ids may cross."""

    model: str
    license: str
    directory: str
    tokenizer_sha256: Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One release."""

    schema: Literal[1] = 1
    line: LineName
    version: Version
    edge: EdgeSide
    cloud: CloudSide | None = None
    files: list[FileEntry] = []

    @property
    def ref(self) -> ReleaseRef:
        return ReleaseRef(self.line, self.version)

    @property
    def shared_tokenizer(self) -> bool:
        return self.cloud is not None and self.cloud.tokenizer_sha256 == self.edge.tokenizer_sha256

    def variant(self, name: str) -> Variant | None:
        return next((v for v in self.edge.variants if v.name == name), None)


def decode_manifest(raw: bytes) -> Manifest:
    """Parse and check a manifest.

    Raises:
        ManifestError: Says which field is wrong.
    """
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestError(f"release.json cannot be used: {error}") from error
    names = [v.name for v in manifest.edge.variants]
    if len(set(names)) != len(names):
        raise ManifestError(f"release.json names a variant twice: {', '.join(names)}")
    paths = [f.path for f in manifest.files]
    paths += [v.directory for v in manifest.edge.variants] + [manifest.edge.tokenizer_directory]
    if manifest.cloud is not None:
        paths.append(manifest.cloud.directory)
    for path in paths:
        pure = PurePosixPath(path)
        if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path:
            raise ManifestError(f"release.json has a path that leaves the release: {path!r}")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as stable, indented JSON: equal manifests give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def load_manifest(release_dir: Path) -> Manifest:
    """Read `<release_dir>/release.json`.

    Raises:
        ManifestError: Missing or unusable.
    """
    path = release_dir / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    return decode_manifest(raw)


def parse_model_name(name: str) -> tuple[str, int | None] | None:
    """Split `line` or `line@version`. None when it is neither."""
    line, at, version = name.partition("@")
    if not _LINE.fullmatch(line):
        return None
    if not at:
        return line, None
    if not re.fullmatch(r"[1-9][0-9]{0,17}", version):
        return None
    return line, int(version)
