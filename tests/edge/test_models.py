"""Which releases are on disk, and which one a name means."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edge.models import ReleaseStore
from protos.errors import InvalidArgument, UnknownModel
from protos.manifest import EdgeSide, FileEntry, Manifest, ManifestError, Variant, encode_manifest
from protos.values import ReleaseRef

CONTENT = b"weights"


def write_release(store: Path, line: str, version: int, *, named: str | None = None) -> Path:
    directory = store / line / str(version)
    (directory / "edge" / "int4").mkdir(parents=True)
    (directory / "edge" / "int4" / "model.onnx").write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    manifest = Manifest(
        line=named or line,
        version=version,
        edge=EdgeSide(
            model="someone/small",
            license="Apache-2.0",
            context_tokens=128,
            eos_token_ids=[2],
            tokenizer_directory="edge/tokenizer",
            tokenizer_sha256=digest,
            variants=[
                Variant(name="int4", engine="onnxruntime", directory="edge/int4", size_bytes=7, threshold=0.5)
            ],
        ),
        files=[FileEntry(path="edge/int4/model.onnx", size_bytes=len(CONTENT), sha256=digest)],
    )
    (directory / "release.json").write_bytes(encode_manifest(manifest))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for line, version in [("support-bot", 2), ("support-bot", 10), ("faq", 1)]:
        write_release(tmp_path, line, version)
    return tmp_path


def test_lines_and_versions_are_listed_in_order_of_number(store: Path) -> None:
    releases = ReleaseStore(store)
    assert releases.lines() == ["faq", "support-bot"]
    assert releases.versions("support-bot") == [2, 10]
    assert [str(ref) for ref in releases.releases()] == ["faq@1", "support-bot@2", "support-bot@10"]


def test_what_is_named_otherwise_does_not_exist(store: Path) -> None:
    for name in ["support-bot/11.partial", "support-bot/007", "support-bot/0", "Upper/1", ".tmp/1"]:
        (store / name).mkdir(parents=True)
    (store / "support-bot" / "99").write_text("a file")
    (store / "empty-line").mkdir()
    releases = ReleaseStore(store)
    assert releases.lines() == ["faq", "support-bot"]
    assert releases.versions("support-bot") == [2, 10]


def test_a_line_means_its_highest_version_unless_one_is_pinned(store: Path) -> None:
    assert ReleaseStore(store).resolve("support-bot").ref == ReleaseRef("support-bot", 10)
    pinned = ReleaseStore(store, active={"support-bot": 2})
    assert pinned.resolve("support-bot").ref.version == 2
    assert pinned.resolve("support-bot@10").ref.version == 10


def test_a_pin_to_a_missing_version_is_not_silently_another(store: Path) -> None:
    with pytest.raises(UnknownModel, match="support-bot@3"):
        ReleaseStore(store, active={"support-bot": 3}).resolve("support-bot")


@pytest.mark.parametrize("name", ["nobody", "support-bot@3", "nobody@1"])
def test_an_unknown_model_lists_what_there_is(store: Path, name: str) -> None:
    with pytest.raises(UnknownModel, match="support-bot@10") as caught:
        ReleaseStore(store).resolve(name)
    assert caught.value.metadata == {"models": "faq@1, support-bot@2, support-bot@10"}


def test_the_list_in_an_error_is_bounded(tmp_path: Path) -> None:
    for version in range(1, 101):
        write_release(tmp_path, "support-bot", version)
    with pytest.raises(UnknownModel) as caught:
        ReleaseStore(tmp_path).resolve("nobody")
    assert len(caught.value.metadata["models"].split(", ")) == 32


@pytest.mark.parametrize(
    "name", ["", "../support-bot", "support-bot@", "support-bot@0", "a/b", "support-bot@x"]
)
def test_a_name_that_is_none_is_the_callers_fault(store: Path, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ReleaseStore(store).resolve(name)
    assert caught.value.field == "model"


def test_an_absent_store_has_no_models(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="none at all"):
        ReleaseStore(tmp_path / "nowhere").resolve("support-bot")


def test_a_manifest_must_name_its_own_directory(tmp_path: Path) -> None:
    write_release(tmp_path, "support-bot", 1, named="other-bot")
    with pytest.raises(ManifestError, match="calls itself other-bot@1"):
        ReleaseStore(tmp_path).resolve("support-bot")


def test_a_release_without_a_manifest_is_an_error_not_a_gap(store: Path) -> None:
    (store / "support-bot" / "11").mkdir()
    with pytest.raises(ManifestError):
        ReleaseStore(store).resolve("support-bot")


def test_directories_of_a_release(store: Path) -> None:
    release = ReleaseStore(store).resolve("support-bot@2")
    assert release.variant_dir("int4") == store / "support-bot" / "2" / "edge" / "int4"
    assert release.tokenizer_dir == store / "support-bot" / "2" / "edge" / "tokenizer"
    assert release.cloud_dir is None
    with pytest.raises(ManifestError, match="only int4"):
        release.variant("int8")


def test_verification_passes_what_the_manifest_says(store: Path) -> None:
    ReleaseStore(store).resolve("support-bot@2").verify()


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"short", "5 bytes"), (b"WEIGHTS", "digest"), (None, "cannot read")]
)
def test_verification_names_the_wrong_file(store: Path, content: bytes | None, complaint: str) -> None:
    release = ReleaseStore(store).resolve("support-bot@2")
    path = release.variant_dir("int4") / "model.onnx"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ManifestError, match=rf"edge/int4/model\.onnx.*{complaint}|{complaint}.*edge/int4"):
        release.verify()


def test_sizes_alone_do_not_see_a_changed_byte(store: Path) -> None:
    release = ReleaseStore(store).resolve("support-bot@2")
    (release.variant_dir("int4") / "model.onnx").write_bytes(b"WEIGHTS")
    release.verify(digests=False)
