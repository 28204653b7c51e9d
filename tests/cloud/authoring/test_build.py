"""A build does only what is missing, goes on where it stopped, and fails as a whole."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud.authoring import convert, quantize
from cloud.authoring.build import Builder
from cloud.authoring.catalog import Catalog, Pair
from cloud.authoring.errors import BuildCancelled, CatalogError, ChildFailed, DownloadFailed
from cloud.authoring.home import Home
from protos.manifest import load_manifest
from tests.fakes.authoring import Steps, WheelIndex, make_graph, make_weights, model_of

PAIR = Pair(
    line="tiny-bot",
    version=1,
    edge="small",
    cloud="large",
    context_tokens=64,
    thresholds={"int4": 0.3, "int8": 0.4, "fp32": 0.5, "nf4": 0.6},
)
PIECES = [b"first" * 10, b"second" * 10]
CATALOG = Catalog(models={"small": model_of(PIECES), "large": model_of(PIECES)}, pairs={"tiny": PAIR})


@dataclass
class Heavy:
    """Conversion and quantization without torch. Steps named in `broken` fail."""

    broken: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)

    def convert(self, source: Path, directory: Path, **_options: Any) -> None:
        self._do(f"convert {source.stem}", directory, make_weights)

    def quantize(self, weights: Path, directory: Path, *, variant: str, **_options: Any) -> None:
        self._do(f"quantize {variant}", directory, make_graph)

    def _do(self, step: str, directory: Path, make: Any) -> None:
        if step in self.broken:
            raise ChildFailed(f"{step} broke")
        directory.rmdir()
        make(directory)
        self.done.append(step)


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> Heavy:
    fake = Heavy()
    monkeypatch.setattr(convert, "convert_gguf", fake.convert)
    monkeypatch.setattr(quantize, "quantize", fake.quantize)
    return fake


def builder(root: Path, *, index: WheelIndex | None = None, steps: Steps | None = None) -> Builder:
    return Builder(
        home=Home(root),
        catalog=CATALOG,
        env={"FOREBAY_HUB": "off"},
        progress=steps or Steps(),
        stop=threading.Event(),
        source=index or WheelIndex(PIECES),
    )


def test_a_release_with_both_sides_comes_out(tmp_path: Path, heavy: Heavy) -> None:
    steps = Steps()
    release = builder(tmp_path, steps=steps).build("tiny")
    manifest = load_manifest(release)
    assert release == tmp_path / "releases" / "tiny-bot" / "1"
    assert [v.name for v in manifest.edge.variants] == ["int4", "int8"]
    assert manifest.cloud is not None
    assert set(steps.started) == set(steps.finished)


def test_a_second_build_does_nothing(tmp_path: Path, heavy: Heavy) -> None:
    builder(tmp_path).build("tiny")
    before, index = list(heavy.done), WheelIndex(PIECES)
    builder(tmp_path, index=index).build("tiny", variants=("int8",))
    assert heavy.done == before
    assert index.asked == []


def test_a_new_variant_is_added_and_the_old_ones_stay(tmp_path: Path, heavy: Heavy) -> None:
    builder(tmp_path).build("tiny")
    heavy.done.clear()
    release = builder(tmp_path).build("tiny", variants=("fp32", "nf4"))
    assert heavy.done == ["quantize fp32"]
    assert {v.name for v in load_manifest(release).edge.variants} == {"fp32", "int4", "int8", "nf4"}


def test_a_failed_step_names_itself_and_the_next_build_goes_on_from_there(
    tmp_path: Path, heavy: Heavy
) -> None:
    heavy.broken.add("quantize int8")
    with pytest.raises(ChildFailed, match="quantize int8 broke"):
        builder(tmp_path).build("tiny")
    assert not (tmp_path / "releases" / "tiny-bot").exists()
    heavy.broken.clear()
    heavy.done.clear()
    builder(tmp_path).build("tiny")
    assert "quantize int8" in heavy.done
    assert "quantize int4" not in heavy.done


def test_a_download_that_fails_ends_the_build_with_its_own_error(tmp_path: Path, heavy: Heavy) -> None:
    with pytest.raises(DownloadFailed, match="tiny-part2"):
        builder(tmp_path, index=WheelIndex(PIECES, broken={"tiny-part2==1.0"})).build("tiny")


def test_a_stop_before_the_start_builds_nothing(tmp_path: Path, heavy: Heavy) -> None:
    stopped = builder(tmp_path)
    stopped.stop.set()
    with pytest.raises(BuildCancelled):
        stopped.build("tiny")
    assert heavy.done == []


@pytest.mark.parametrize(("pair", "variants"), [("none", ("int4",)), ("tiny", ("int3",)), ("tiny", ())])
def test_what_is_not_in_the_catalogue_is_refused_before_any_work(
    tmp_path: Path, heavy: Heavy, pair: str, variants: tuple[str, ...]
) -> None:
    with pytest.raises(CatalogError):
        builder(tmp_path).build(pair, variants=variants)
    assert not (tmp_path / "lock").exists()
