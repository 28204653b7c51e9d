"""Finding the served release in a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from cloud.releases import find_release
from cloud.settings import ReleaseSettings
from protos.manifest import encode_manifest, load_manifest
from protos.settings import SettingsError
from protos.values import ReleaseRef


def copy_release(store: Path, version: int, **changes: object) -> None:
    source, target = store / "support-bot" / "1", store / "support-bot" / str(version)
    shutil.copytree(source, target)
    manifest = msgspec.structs.replace(load_manifest(source), **{"version": version, **changes})
    (target / "release.json").write_bytes(encode_manifest(manifest))


def test_the_newest_version_is_taken_by_number_and_a_named_one_by_name(store: Path) -> None:
    for version in (2, 10):
        copy_release(store, version)
    (store / "support-bot" / "half-written").mkdir()
    assert find_release(ReleaseSettings(store=store)).ref == ReleaseRef("support-bot", 10)
    found = find_release(ReleaseSettings(store=store, version=2))
    assert found.ref == ReleaseRef("support-bot", 2)
    assert found.model_dir == store / "support-bot" / "2" / "cloud"


def test_a_release_in_the_wrong_place_is_refused(store: Path) -> None:
    copy_release(store, 4)
    (store / "support-bot" / "4").rename(store / "support-bot" / "3")
    with pytest.raises(SettingsError, match="holds support-bot@4, not support-bot@3"):
        find_release(ReleaseSettings(store=store, version=3))


def test_a_release_without_a_cloud_side_is_refused(store: Path) -> None:
    copy_release(store, 3, cloud=None)
    with pytest.raises(SettingsError, match="has no cloud side"):
        find_release(ReleaseSettings(store=store))


def test_a_manifest_that_cannot_be_read_is_refused(store: Path) -> None:
    (store / "support-bot" / "1" / "release.json").write_text("{")
    with pytest.raises(SettingsError) as caught:
        find_release(ReleaseSettings(store=store))
    assert caught.value.key == "release.store"


def test_a_model_that_is_not_there_is_refused(store: Path) -> None:
    shutil.rmtree(store / "support-bot" / "1" / "cloud")
    with pytest.raises(SettingsError, match="is not at"):
        find_release(ReleaseSettings(store=store))
