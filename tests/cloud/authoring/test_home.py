"""The home directory is found as documented and held by one build at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cloud.authoring.errors import BuildCancelled, HomeBusy
from cloud.authoring.files import TEMPORARY_MARK
from cloud.authoring.home import Home


class Clock:
    """Seconds that pass by being looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({"FOREBAY_HOME": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/forebay"),
        ({"HOME": "/h"}, "/h/.cache/forebay"),
        ({"FOREBAY_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/forebay"),
    ],
)
def test_home_follows_the_environment(env: dict[str, str], wanted: str) -> None:
    assert Home.from_environment(env).root == Path(wanted)


def test_a_second_build_waits_and_then_names_the_first(tmp_path: Path) -> None:
    home = Home(tmp_path)
    told: list[int] = []
    stop = threading.Event()
    with (
        home.lock(wait_s=0, clock=Clock(), stop=stop),
        pytest.raises(HomeBusy, match=f"process {os.getpid()}"),
        home.lock(wait_s=15, clock=Clock(), stop=stop, on_wait=told.append),
    ):
        pytest.fail("two builds hold one home")
    assert told == [os.getpid()]


def test_the_lock_is_free_again_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with Home(tmp_path).lock(wait_s=0, clock=Clock(), stop=threading.Event()):
            pass


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stop = threading.Event()
    with Home(tmp_path).lock(wait_s=0, clock=Clock(), stop=stop):
        stop.set()
        with (
            pytest.raises(BuildCancelled),
            Home(tmp_path).lock(wait_s=1e9, clock=Clock(), stop=stop),
        ):
            pytest.fail("two builds hold one home")


def test_taking_the_lock_sweeps_what_a_crash_left(tmp_path: Path) -> None:
    home = Home(tmp_path)
    left = home.releases / "support-bot" / f"{TEMPORARY_MARK}0-1"
    left.mkdir(parents=True)
    with home.lock(wait_s=0, clock=Clock(), stop=threading.Event()):
        assert not left.exists()
