"""Finds the release that this tier serves, in the store of `protos.manifest`'s layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cloud.settings import ReleaseSettings
from protos.manifest import Manifest, ManifestError, load_manifest
from protos.settings import SettingsError
from protos.values import ReleaseRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRelease:
    """A release whose cloud side is here. `model_dir` holds its weights and tokenizer."""

    ref: ReleaseRef
    manifest: Manifest
    model_dir: Path


def find_release(settings: ReleaseSettings) -> CloudRelease:
    """Open the configured release.

    Raises:
        SettingsError: It is not in the store, its manifest is unusable or belongs elsewhere, or it has no
            cloud side.
    """
    line_dir = settings.store.expanduser() / settings.line
    versions = _versions(line_dir)
    version = settings.version or max(versions, default=0)
    if version not in versions:
        found = ", ".join(f"{settings.line}@{v}" for v in versions) or "none of that line"
        wanted = f"{settings.line}@{settings.version}" if settings.version else settings.line
        raise SettingsError(
            f"no release {wanted} in {line_dir.parent}; there is {found}", key="release.version"
        )
    release_dir = line_dir / str(version)
    try:
        manifest = load_manifest(release_dir)
    except ManifestError as error:
        raise SettingsError(error.message, key="release.store") from error
    ref = ReleaseRef(settings.line, version)
    if manifest.ref != ref:
        raise SettingsError(f"{release_dir} holds {manifest.ref}, not {ref}", key="release.store")
    if manifest.cloud is None:
        raise SettingsError(f"{ref} has no cloud side", key="release.version")
    model_dir = release_dir / manifest.cloud.directory
    if not model_dir.is_dir():
        raise SettingsError(f"the cloud model of {ref} is not at {model_dir}", key="release.store")
    return CloudRelease(ref=ref, manifest=manifest, model_dir=model_dir)


def _versions(line_dir: Path) -> list[int]:
    if not line_dir.is_dir():
        return []
    names = [entry.name for entry in line_dir.iterdir() if (entry / "release.json").is_file()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name[0] != "0")
