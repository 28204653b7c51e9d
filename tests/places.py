"""Where tests and benchmarks find real models. Nothing here downloads or builds."""

from __future__ import annotations

import os
from pathlib import Path

SAMPLE_TEXTS = Path(__file__).parent / "data" / "sample_prompts.jsonl"


def _home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FOREBAY_HOME") or cache / "forebay")


def edge_release() -> Path:
    """The directory of `support-bot@1`: `FOREBAY_TEST_STORE`, else the store of `make models`."""
    store = Path(os.environ.get("FOREBAY_TEST_STORE") or _home() / "releases")
    return store / "support-bot" / "1"


def edge_weights() -> Path:
    """Hugging Face weights of that release's edge model: `FOREBAY_TEST_WEIGHTS`, else of `make models`."""
    configured = os.environ.get("FOREBAY_TEST_WEIGHTS")
    return Path(configured) if configured else edge_release() / "edge" / "weights"
