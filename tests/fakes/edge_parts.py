"""Stand-ins for the two tiers, true to position: both say the same fixed text, from wherever they begin.

Text that is lost or repeated at a seam is thus seen at once. One word is one token.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from edge.cloud_values import CloudEnd, CloudLabels, CloudQuery, CloudText
from edge.engine.protocol import (
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Finished,
    LabelRequest,
    LabelResult,
    Started,
    Tokens,
    TokenStat,
)
from edge.models import LoadedRelease
from edge.request import LabelQuery
from edge.serving import ServedModel
from edge.text.tokenizer import ChatTokenizer
from edge.uplink import Uplink
from protos.errors import ForebayError
from protos.labels import label_scores
from protos.manifest import CloudSide, EdgeSide, Manifest, Variant
from protos.values import ChatMessage, FinishReason, ReleaseRef
from router.confidence import QuantileConfidence

PROMPT_TOKENS = 3
_SHA = "0" * 64


def true_text(words: int) -> str:
    """`w0 w1é …`: what both tiers answer."""
    return " ".join(f"w{i}é" for i in range(words))


def pieces_from(text: str, prefix: str) -> list[str]:
    """The tokens of `text` behind `prefix`, which must be its beginning."""
    assert text.startswith(prefix), (prefix, text)
    rest = text[len(prefix) :]
    return [p for p in rest.replace(" ", "\0 ").split("\0") if p]


class FakeTokenizer:
    """Keeps what it encodes; an id is a place in its memory."""

    def __init__(self) -> None:
        self.prefixes: list[str] = []

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, prefix: str = "", limit_tokens: int | None = None
    ) -> tuple[int, ...]:
        self.prefixes.append(prefix)
        return (len(self.prefixes) - 1,) * PROMPT_TOKENS

    def encode(self, text: str, *, special: bool = False, limit_tokens: int | None = None) -> tuple[int, ...]:
        self.prefixes.append("")
        return (len(self.prefixes) - 1,) * PROMPT_TOKENS

    def encode_label(self, context: str, label: str) -> tuple[int, ...]:
        return tuple(range(1, 1 + len(label.split())))


@dataclass
class FakeEngine:
    """Speaks `text` with the scripted log-probabilities (the last one goes on).

    Attributes:
        fail_at: Raise `error` before this many tokens. None: never.
        gains: Log-likelihood of each label.
    """

    tokenizer: FakeTokenizer
    text: str
    logprobs: Sequence[float] = (-0.1,)
    fail_at: int | None = None
    error: ForebayError | None = None
    gains: Sequence[float] = (2.0, 0.0)
    live: int = 0
    spoken: int = 0
    asked: list[EngineRequest] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            variant="int4",
            engine="onnxruntime",
            context_tokens=2048,
            max_batch=16,
            kv_capacity_tokens=32768,
            kv_token_bytes=1,
        )

    def stats(self) -> EngineStats:
        return EngineStats(running=self.live, waiting=0, kv_reserved_tokens=0)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.asked.append(request)
        self.live += 1
        try:
            prefix = self.tokenizer.prefixes[request.prompt_tokens[0]]
            if self.fail_at == 0 and self.error is not None:
                raise self.error
            yield Started(queue_s=0.0, prefill_s=0.0)
            pieces = pieces_from(self.text, prefix)
            for index, piece in enumerate(pieces[: request.sampling.max_tokens]):
                if self.error is not None and index == self.fail_at:
                    raise self.error
                logprob = self.logprobs[min(index, len(self.logprobs) - 1)]
                self.spoken += 1
                yield Tokens(stats=(TokenStat(index, logprob, 0.0, 1.0),), text=piece)
            cut = len(pieces) > request.sampling.max_tokens
            yield Finished(reason=FinishReason.LENGTH if cut else FinishReason.STOP, decode_s=0.0)
        finally:
            self.live -= 1

    async def score_labels(self, request: LabelRequest) -> LabelResult:
        if self.error is not None:
            raise self.error
        priors = [0.0] * len(request.labels)
        return LabelResult(
            scores=label_scores(request.labels, self.gains, priors), queue_s=0.0, service_s=0.0
        )

    async def close(self) -> None: ...


@dataclass
class FakeCloud:
    """Speaks `text` from behind the prefix; raises `error` before its `fail_at`-th piece."""

    text: str
    fail_at: int | None = None
    error: ForebayError | None = None
    gains: Sequence[float] = (0.0, 2.0)
    live: int = 0
    asked: list[CloudQuery] = field(default_factory=list)

    def likely(self) -> bool:
        return True

    async def generate(
        self, query: CloudQuery, *, deadline: float
    ) -> AsyncGenerator[CloudText | CloudEnd, None]:
        self.asked.append(query)
        self.live += 1
        try:
            pieces = pieces_from(self.text, query.prefix)
            for index, piece in enumerate(pieces[: query.sampling.max_tokens]):
                if self.error is not None and index == self.fail_at:
                    raise self.error
                yield CloudText(text=piece, tokens=1)
            if self.error is not None and self.fail_at is not None:
                raise self.error
            cut = len(pieces) > query.sampling.max_tokens
            yield CloudEnd(
                release=query.release,
                finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
                prompt_tokens=PROMPT_TOKENS,
                completion_tokens=min(len(pieces), query.sampling.max_tokens),
                queue_s=0.0,
            )
        finally:
            self.live -= 1

    async def classify(self, query: LabelQuery, release: ReleaseRef, *, deadline: float) -> CloudLabels:
        if self.error is not None:
            raise self.error
        priors = [0.0] * len(query.labels)
        return CloudLabels(
            release=release, scores=label_scores(query.labels, self.gains, priors), prompt_tokens=1
        )

    async def close(self) -> None: ...

    def as_uplink(self) -> Uplink:
        return cast("Uplink", self)


def served_model(engine: FakeEngine, *, threshold: float) -> ServedModel:
    """A model named support-bot@1 over the fake engine."""
    variant = Variant(
        name="int4", engine="onnxruntime", directory="edge/int4", size_bytes=1, threshold=threshold
    )
    manifest = Manifest(
        line="support-bot",
        version=1,
        edge=EdgeSide(
            model="fake",
            license="Apache-2.0",
            context_tokens=2048,
            eos_token_ids=[0],
            tokenizer_directory="edge/tokenizer",
            tokenizer_sha256=_SHA,
            variants=[variant],
        ),
        cloud=CloudSide(model="fake", license="Apache-2.0", directory="cloud", tokenizer_sha256=_SHA),
    )
    return ServedModel(
        release=LoadedRelease(directory=Path("nowhere"), manifest=manifest),
        variant=variant,
        engine=engine,
        tokenizer=cast("ChatTokenizer", cast("Any", engine.tokenizer)),
        confidence=QuantileConfidence(),
    )


def logprob_of(confidence: float) -> float:
    """The log-probability that gives this confidence when all tokens have it."""
    return math.log(confidence)
