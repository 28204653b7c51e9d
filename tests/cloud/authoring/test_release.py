"""A release directory is whole, complete in its manifest, and equal for equal parts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx
import onnxruntime
import pytest

from cloud.authoring.catalog import Catalog, Pair
from cloud.authoring.errors import ReleaseInvalid
from cloud.authoring.files import sha256_of
from cloud.authoring.release import Parts, assemble, existing_variants
from cloud.authoring.tokenizer_facts import eos_token_ids
from protos.manifest import load_manifest
from tests.fakes.authoring import make_graph, make_weights, model_of

PAIR = Pair(
    line="tiny-bot",
    version=1,
    edge="small",
    cloud="large",
    context_tokens=64,
    thresholds={"int4": 0.3, "int8": 0.4, "nf4": 0.5},
)
CATALOG = Catalog(models={"small": model_of([b"s"]), "large": model_of([b"l"])}, pairs={"tiny": PAIR})


def parts(root: Path, variants: tuple[str, ...] = ("int4", "int8"), torch: tuple[str, ...] = ()) -> Parts:
    return Parts(
        edge_weights=make_weights(root / "edge-weights"),
        cloud_weights=make_weights(root / "cloud-weights", template_in_config=True),
        graphs={name: make_graph(root / name) for name in variants},
        torch_variants=torch,
    )


def test_the_manifest_lists_every_edge_file_with_its_digest(tmp_path: Path) -> None:
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=tmp_path / "store")
    manifest = load_manifest(release)
    on_disk = {p.relative_to(release).as_posix() for p in (release / "edge").rglob("*") if p.is_file()}
    assert {entry.path for entry in manifest.files} == on_disk
    for entry in manifest.files:
        assert entry.sha256 == sha256_of(release / entry.path)
        assert entry.size_bytes == (release / entry.path).stat().st_size
    assert [(v.name, v.threshold) for v in manifest.edge.variants] == [("int4", 0.3), ("int8", 0.4)]
    assert manifest.edge.eos_token_ids == [2, 0]


def test_the_builders_own_tokenizer_copy_stays_out(tmp_path: Path) -> None:
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=tmp_path / "store")
    assert not (release / "edge" / "int4" / "tokenizer.json").exists()


def test_both_sides_have_a_chat_template_wherever_the_publisher_keeps_it(tmp_path: Path) -> None:
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=tmp_path / "store")
    assert (release / "edge" / "tokenizer" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (release / "cloud" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "parts" / "cloud-weights" / "chat_template.jinja").exists()


def test_torch_variants_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts", torch=("nf4",)), store=tmp_path / "store")
    nf4 = load_manifest(release).variant("nf4")
    assert nf4 is not None
    assert (nf4.engine, nf4.directory) == ("torch", "edge/weights")
    assert (release / "edge" / "weights" / "model.safetensors").is_file()


def test_equal_parts_give_equal_manifests(tmp_path: Path) -> None:
    built = parts(tmp_path / "parts")
    first = assemble(PAIR, CATALOG, built, store=tmp_path / "one")
    second = assemble(PAIR, CATALOG, built, store=tmp_path / "two")
    assert (first / "release.json").read_bytes() == (second / "release.json").read_bytes()


def test_a_part_that_lacks_a_file_leaves_the_old_release_in_place(tmp_path: Path) -> None:
    store = tmp_path / "store"
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=store)
    before = (release / "release.json").read_bytes()
    broken = parts(tmp_path / "broken")
    (tmp_path / "broken" / "int8" / "model.onnx").unlink()
    with pytest.raises(ReleaseInvalid, match=r"no model\.onnx"):
        assemble(PAIR, CATALOG, broken, store=store)
    assert (release / "release.json").read_bytes() == before
    assert [path.name for path in release.parent.iterdir()] == ["1"]


def test_a_variant_without_a_threshold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseInvalid, match="no threshold for the variant fp32"):
        assemble(PAIR, CATALOG, parts(tmp_path / "parts", ("fp32",)), store=tmp_path / "store")


def test_a_release_with_a_missing_file_does_not_count_as_built(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert existing_variants(store, PAIR) == ()
    release = assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=store)
    assert existing_variants(store, PAIR) == ("int4", "int8")
    (release / "edge" / "int4" / "model.onnx").unlink()
    assert existing_variants(store, PAIR) == ()


def test_a_release_with_other_thresholds_does_not_count_as_built(tmp_path: Path) -> None:
    assemble(PAIR, CATALOG, parts(tmp_path / "parts"), store=tmp_path)
    other = msgspec.structs.replace(PAIR, thresholds={**PAIR.thresholds, "int8": 0.9})
    assert existing_variants(tmp_path, other) == ()


def test_the_configured_end_comes_first_and_known_names_follow(tmp_path: Path) -> None:
    assert eos_token_ids(make_weights(tmp_path / "w")) == [2, 0]


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    weights = make_weights(tmp_path / "w")
    (weights / "config.json").write_text("{}")
    (weights / "tokenizer.json").write_text("{}")
    (weights / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ReleaseInvalid, match="no end-of-text token"):
        eos_token_ids(weights)


@pytest.mark.model
def test_a_built_release_is_whole(release_store: Path) -> None:
    release = release_store / "support-bot" / "1"
    manifest = load_manifest(release)
    assert manifest.edge.eos_token_ids == [2, 0]
    assert {"int4", "int8"} <= {v.name for v in manifest.edge.variants}
    for entry in manifest.files:
        assert sha256_of(release / entry.path) == entry.sha256
    assert (release / "cloud" / "config.json").is_file()


@pytest.mark.model
@pytest.mark.parametrize("variant", ["int4", "int8"])
def test_a_built_graph_loads_and_its_embedding_is_not_float32(release_store: Path, variant: str) -> None:
    path = release_store / "support-bot" / "1" / "edge" / variant / "model.onnx"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert "logits" in {output.name for output in session.get_outputs()}
    nodes = {node.name: node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert "GatherBlockQuantized" in {op for name, op in nodes.items() if "embed_tokens" in name}
