"""Binding built parts into a release directory, as `protos.manifest` lays it out.

The directory appears whole, by one rename; its files are hard links to the built parts where the file system
allows, so a release costs no space. Equal parts give equal bytes, manifest included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cloud.authoring.catalog import Catalog, Pair
from cloud.authoring.errors import ReleaseInvalid
from cloud.authoring.files import atomic_directory, link_or_copy, sha256_of
from cloud.authoring.quantize import GRAPH_FILES, ONNX_VARIANTS
from cloud.authoring.tokenizer_facts import add_tokenizer, eos_token_ids
from protos.manifest import (
    MANIFEST_NAME,
    CloudSide,
    EdgeSide,
    FileEntry,
    Manifest,
    ManifestError,
    Variant,
    encode_manifest,
    load_manifest,
)

TORCH_VARIANTS = ("nf4", "llm-int8")
VARIANTS = (*ONNX_VARIANTS, *TORCH_VARIANTS)
_TOKENIZER = "edge/tokenizer"
_WEIGHTS = "edge/weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a release is made of.

    Attributes:
        edge_weights: Hugging Face weights and tokenizer of the edge model.
        cloud_weights: The same of the cloud model.
        graphs: Directory of each ONNX variant, in the order of preference.
        torch_variants: Variants of the torch engine; they share `edge_weights`.
    """

    edge_weights: Path
    cloud_weights: Path
    graphs: Mapping[str, Path]
    torch_variants: tuple[str, ...] = ()


def release_directory(store: Path, pair: Pair) -> Path:
    """Where the pair's release is or will be."""
    return store / pair.line / str(pair.version)


def existing_variants(store: Path, pair: Pair) -> tuple[str, ...]:
    """Variants of a finished release that says what the pair says, in order; empty when there is none."""
    directory = release_directory(store, pair)
    try:
        manifest = load_manifest(directory)
    except ManifestError:
        return ()
    edge = manifest.edge
    current = edge.context_tokens == pair.context_tokens
    current = current and all(pair.thresholds.get(v.name) == v.threshold for v in edge.variants)
    whole = all((directory / f.path).is_file() for f in manifest.files)
    whole = whole and (directory / "cloud" / "config.json").is_file()
    return tuple(v.name for v in edge.variants) if whole and current else ()


def assemble(pair: Pair, catalog: Catalog, parts: Parts, *, store: Path) -> Path:
    """Make the release directory and return it. An older one of the same version is replaced.

    Raises:
        ReleaseInvalid: A part lacks a file, or a variant has no threshold.
        DiskFull: No space left.
    """
    target = release_directory(store, pair)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(target) as root:
        add_tokenizer(parts.edge_weights, root / _TOKENIZER)
        variants = []
        for name, graph in parts.graphs.items():
            _add(graph, root / "edge" / name, GRAPH_FILES)
            variants.append(_variant(pair, root, name, "onnxruntime", f"edge/{name}"))
        if parts.torch_variants:
            _add_all(parts.edge_weights, root / _WEIGHTS)
            variants += [_variant(pair, root, name, "torch", _WEIGHTS) for name in parts.torch_variants]
        _add_all(parts.cloud_weights, root / "cloud")
        add_missing_template(parts.cloud_weights, root / "cloud")
        files = [
            FileEntry(
                path=path.relative_to(root).as_posix(),
                size_bytes=path.stat().st_size,
                sha256=sha256_of(path),
            )
            for path in sorted((root / "edge").rglob("*"))
            if path.is_file()
        ]
        edge, cloud = catalog.model(pair.edge), catalog.model(pair.cloud)
        manifest = Manifest(
            line=pair.line,
            version=pair.version,
            edge=EdgeSide(
                model=edge.hub,
                license=edge.license,
                context_tokens=pair.context_tokens,
                eos_token_ids=eos_token_ids(parts.edge_weights),
                tokenizer_directory=_TOKENIZER,
                tokenizer_sha256=sha256_of(root / _TOKENIZER / "tokenizer.json"),
                variants=variants,
            ),
            cloud=CloudSide(
                model=cloud.hub,
                license=cloud.license,
                directory="cloud",
                tokenizer_sha256=sha256_of(root / "cloud" / "tokenizer.json"),
            ),
            files=files,
        )
        (root / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return target


def add_missing_template(weights: Path, directory: Path) -> None:
    """Give `directory` its tokenizer's files and template where linking the weights has not."""
    if not (directory / "chat_template.jinja").is_file():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).unlink(missing_ok=True)
        add_tokenizer(weights, directory)


def _variant(
    pair: Pair, root: Path, name: str, engine: Literal["onnxruntime", "torch"], directory: str
) -> Variant:
    threshold = pair.thresholds.get(name)
    if threshold is None:
        raise ReleaseInvalid(f"the pair of {pair.line} has no threshold for the variant {name}")
    size = sum(path.stat().st_size for path in (root / directory).rglob("*") if path.is_file())
    return Variant(name=name, engine=engine, directory=directory, size_bytes=size, threshold=threshold)


def _add(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if not (source / name).is_file():
            raise ReleaseInvalid(f"{source} has no {name}")
        link_or_copy(source / name, target / name)


def _add_all(source: Path, target: Path) -> None:
    names = tuple(path.name for path in sorted(source.iterdir()) if path.is_file())
    if "config.json" not in names:
        raise ReleaseInvalid(f"{source} has no config.json")
    _add(source, target, names)
