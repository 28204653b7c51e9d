"""Fixtures of the engine tests that load real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.places import edge_weights


@pytest.fixture(scope="session")
def edge_reference_weights() -> Path:
    """Hugging Face weights of the edge model, the reference that its variants are measured against."""
    weights = edge_weights()
    if not (weights / "config.json").is_file():
        pytest.fail(f"no reference weights in {weights}: run `make models` first", pytrace=False)
    return weights
