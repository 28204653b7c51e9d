"""Everything a worker process needs to know to load one variant. It crosses the border once, at start."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edge.models import LoadedRelease

Positive = Annotated[int, msgspec.Meta(ge=1)]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how large to make it.

    Attributes:
        name: For logs, such as `support-bot@7/int4`.
        variant: The quantization.
        engine: What runs it; torch is imported only for `torch`.
        model_dir: The variant's files.
        tokenizer_json: The tokenizer's file.
        eos_token_ids: Tokens that end a text.
        context_tokens: Most tokens of prompt and answer together.
        threads: CPU threads of one step.
        device: `cpu`; for torch also `cuda` or `cuda:<n>`.
        max_batch: Most requests decoded in one step.
        max_waiting: Most requests that wait for a place; further ones are `Overloaded`.
        kv_capacity_tokens: KV memory over all requests. None: every place of the batch may be full.
        prefill_slice_s: Seconds that reading prompts may delay other requests' tokens and cancellations.
    """

    name: str
    variant: str
    engine: Literal["onnxruntime", "torch"]
    model_dir: str
    tokenizer_json: str
    eos_token_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    context_tokens: Positive
    threads: Positive
    device: str = "cpu"
    max_batch: Positive = 16
    max_waiting: Annotated[int, msgspec.Meta(ge=0)] = 64
    kv_capacity_tokens: Positive | None = None
    prefill_slice_s: Annotated[float, msgspec.Meta(gt=0)] = 0.05

    @property
    def kv_tokens(self) -> int:
        """The KV memory in tokens, decided."""
        return self.kv_capacity_tokens or self.max_batch * self.context_tokens


def engine_spec(
    release: LoadedRelease,
    variant: str,
    *,
    threads: int,
    device: str = "cpu",
    max_batch: int = 16,
    max_waiting: int = 64,
    kv_capacity_tokens: int | None = None,
    context_tokens: int | None = None,
) -> EngineSpec:
    """The spec of one variant of a release on disk. `context_tokens` may only shorten the release's.

    Raises:
        ManifestError: The release has no such variant.
    """
    edge = release.manifest.edge
    longest = edge.context_tokens
    return EngineSpec(
        name=f"{release.ref}/{variant}",
        variant=variant,
        engine=release.variant(variant).engine,
        model_dir=str(release.variant_dir(variant)),
        tokenizer_json=str(release.tokenizer_dir / "tokenizer.json"),
        eos_token_ids=tuple(edge.eos_token_ids),
        context_tokens=longest if context_tokens is None else min(context_tokens, longest),
        threads=threads,
        device=device,
        max_batch=max_batch,
        max_waiting=max_waiting,
        kv_capacity_tokens=kv_capacity_tokens,
    )
