"""Files and directories appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud.authoring.files import (
    TEMPORARY_MARK,
    atomic_directory,
    atomic_file,
    link_or_copy,
    sweep_temporaries,
)


class BrokenOffError(Exception):
    """Stands for whatever ends a write."""


def test_a_file_that_broke_off_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(BrokenOffError), atomic_file(target) as sink:  # noqa: PT012
        sink.write(b"new")
        raise BrokenOffError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_is_not_there_before_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "release"
    with atomic_directory(target) as root:
        (root / "a").write_text("a")
        assert not target.exists()
    assert (target / "a").read_text() == "a"


def test_a_directory_that_broke_off_keeps_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "release"
    with atomic_directory(target) as root:
        (root / "a").write_text("old")
    with pytest.raises(BrokenOffError), atomic_directory(target) as root:  # noqa: PT012
        (root / "a").write_text("new")
        raise BrokenOffError
    assert (target / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_replaced_directory_has_nothing_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "release"
    for name in ("a", "b"):
        with atomic_directory(target) as root:
            (root / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_sweep_takes_temporaries_only(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY_MARK}0-x").mkdir()
    (tmp_path / f"{TEMPORARY_MARK}1-y").write_text("")
    (tmp_path / "kept").write_text("")
    sweep_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_linking_takes_no_space_where_the_file_system_allows_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    link_or_copy(source, tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target").stat().st_ino == source.stat().st_ino
