"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _store_path() -> Path:
    if configured := os.environ.get("FOREBAY_TEST_STORE"):
        return Path(configured)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FOREBAY_HOME") or cache / "forebay") / "releases"


@pytest.fixture(scope="session")
def release_store() -> Path:
    """A store that holds `support-bot/1`: SmolLM2-135M at the edge, Qwen2.5-Coder-0.5B in the cloud."""
    store = _store_path()
    if not (store / "support-bot" / "1" / "release.json").is_file():
        pytest.fail(f"no release support-bot@1 under {store}: run `make models` first", pytrace=False)
    return store
