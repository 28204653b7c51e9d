"""The releases that an edge node has on disk.

    <store>/<line>/<version>/release.json, see `protos.manifest`

Invariants
- A release is used only if its manifest names the line and version of the directory it lies in.
- Whatever is not named like a line or a version (temporary names, lost files) does not exist.
- Releases are immutable, so a manifest that was read once is not read again.

Every method does file I/O: call them at start or in a thread, not per request. Which release is *active* is
the highest version, unless the caller pins one. Fetching releases is not done here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protos.errors import InvalidArgument, UnknownModel
from protos.manifest import Manifest, ManifestError, Variant, load_manifest, parse_model_name
from protos.values import ReleaseRef

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_LISTED_MODELS = 32  # in an error's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRelease:
    """A release directory and its checked manifest."""

    directory: Path
    manifest: Manifest

    @property
    def ref(self) -> ReleaseRef:
        return self.manifest.ref

    @property
    def tokenizer_dir(self) -> Path:
        return self.directory / self.manifest.edge.tokenizer_directory

    @property
    def cloud_dir(self) -> Path | None:
        """Weights of the cloud's side; None on a node that does not have them."""
        if self.manifest.cloud is None:
            return None
        path = self.directory / self.manifest.cloud.directory
        return path if path.is_dir() else None

    def variant(self, name: str) -> Variant:
        """One variant of the edge model.

        Raises:
            ManifestError: The release has no such variant.
        """
        variant = self.manifest.variant(name)
        if variant is None:
            names = ", ".join(v.name for v in self.manifest.edge.variants)
            raise ManifestError(f"{self.ref} has no variant {name!r}, only {names}")
        return variant

    def variant_dir(self, name: str) -> Path:
        """Where a variant's files are. Raises ManifestError as `variant` does."""
        return self.directory / self.variant(name).directory

    def verify(self, *, digests: bool = True) -> None:
        """Compare every listed file with the manifest.

        Args:
            digests: Also read and hash the files (about a second per gigabyte); otherwise only their sizes.

        Raises:
            ManifestError: Names the first file that is missing or different.
        """
        for entry in self.manifest.files:
            path = self.directory / entry.path
            try:
                size_bytes = path.stat().st_size
                if size_bytes != entry.size_bytes:
                    raise ManifestError(
                        f"{self.ref}: {entry.path} has {size_bytes} bytes, not {entry.size_bytes}"
                    )
                if digests and _sha256(path) != entry.sha256:
                    raise ManifestError(f"{self.ref}: {entry.path} is not the file of its digest")
            except OSError as error:
                raise ManifestError(f"{self.ref}: cannot read {entry.path}: {error.strerror}") from error


class ReleaseStore:
    """A directory of releases.

    Args:
        path: The directory. It may be empty or absent; then there are no models.
        active: Lines that serve another version than their highest.
    """

    def __init__(self, path: Path, *, active: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._active = dict(active or {})
        self._loaded: dict[ReleaseRef, LoadedRelease] = {}

    @property
    def path(self) -> Path:
        return self._path

    def lines(self) -> list[str]:
        """Model lines with at least one release, in alphabetical order."""
        names = [name for name in _directories(self._path) if parse_model_name(name) == (name, None)]
        return sorted(name for name in names if self.versions(name))

    def versions(self, line: str) -> list[int]:
        """Versions of a line, lowest first; empty for a line that is not here."""
        if parse_model_name(line) != (line, None):
            return []
        return sorted(int(name) for name in _directories(self._path / line) if _VERSION.fullmatch(name))

    def releases(self) -> list[ReleaseRef]:
        """Every release, by line and version."""
        return [ReleaseRef(line, version) for line in self.lines() for version in self.versions(line)]

    def active_version(self, line: str) -> int:
        """The version that `line` means by itself.

        Raises:
            UnknownModel: No such line, or the pinned version is not here.
        """
        versions = self.versions(line)
        version = self._active.get(line, versions[-1] if versions else None)
        if version is None or version not in versions:
            raise self._unknown(line if version is None else f"{line}@{version}")
        return version

    def resolve(self, name: str) -> LoadedRelease:
        """The release that a request's `model` names: `line` or `line@version`.

        Raises:
            InvalidArgument: Not a model name at all.
            UnknownModel: Not here; the metadata lists what is.
            ManifestError: Here, but cannot be used.
        """
        parsed = parse_model_name(name)
        if parsed is None:
            raise InvalidArgument("the model must be named `line` or `line@version`", field="model")
        line, version = parsed
        return self.load(ReleaseRef(line, self.active_version(line) if version is None else version))

    def load(self, ref: ReleaseRef) -> LoadedRelease:
        """Read one release's manifest. Raises UnknownModel and ManifestError as `resolve` does."""
        if ref in self._loaded:
            return self._loaded[ref]
        if ref.version not in self.versions(ref.line):
            raise self._unknown(str(ref))
        directory = self._path / ref.line / str(ref.version)
        manifest = load_manifest(directory)
        if manifest.ref != ref:
            raise ManifestError(f"the release in {directory} calls itself {manifest.ref}, not {ref}")
        release = self._loaded[ref] = LoadedRelease(directory=directory, manifest=manifest)
        return release

    def _unknown(self, name: str) -> UnknownModel:
        known = ", ".join(str(ref) for ref in self.releases()[:_LISTED_MODELS])
        return UnknownModel(
            f"there is no model {name} here; there is {known or 'none at all'}", metadata={"models": known}
        )


def _directories(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
