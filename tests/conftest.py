"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.places import edge_release

# Models come from the release store; a library that looks for a hub would only wait for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def release_store() -> Path:
    """A store that holds `support-bot/1`: SmolLM2-135M at the edge, Qwen2.5-Coder-0.5B in the cloud."""
    release = edge_release()
    if not (release / "release.json").is_file():
        pytest.fail(f"there is no release in {release}: run `make models` first", pytrace=False)
    return release.parents[1]
