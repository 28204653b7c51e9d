"""What this node serves: a release, the variant that answers, its engine, and how to read its confidence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from edge.engine.protocol import Engine
from edge.models import LoadedRelease
from edge.text.tokenizer import ChatTokenizer
from protos.errors import UnknownModel
from protos.manifest import Variant
from protos.values import ChatMessage
from router.confidence import ConfidenceModel

# Encoding this many characters takes about a millisecond; more is done in a thread: the loop stays free.
_INLINE_CHARACTERS = 2048
# What a message or a label costs beside its text, in characters.
_PIECE_CHARACTERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One line, served by one variant of one release."""

    release: LoadedRelease
    variant: Variant
    engine: Engine
    tokenizer: ChatTokenizer
    confidence: ConfidenceModel

    @property
    def context_tokens(self) -> int:
        return self.engine.info.context_tokens

    async def encode(
        self, messages: tuple[ChatMessage, ...], prompt: str, *, prefix: str = ""
    ) -> tuple[int, ...]:
        """Token ids of a prompt and of the answer so far. Never holds the event loop for long.

        Raises:
            ContextTooLong: It cannot fit.
            InvalidArgument: The chat template refuses the conversation.
        """

        def work() -> tuple[int, ...]:
            if messages:
                return self.tokenizer.encode_chat(messages, prefix=prefix, limit_tokens=self.context_tokens)
            return self.tokenizer.encode(prompt + prefix, limit_tokens=self.context_tokens)

        size = len(prompt) + len(prefix) + sum(len(m.content) + _PIECE_CHARACTERS for m in messages)
        return work() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(work)

    async def encode_labels(self, context: str, labels: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each label as it continues the context. Never holds the event loop for long.

        Raises:
            InvalidArgument: A label has no tokens.
        """

        def work() -> tuple[tuple[int, ...], ...]:
            return tuple(self.tokenizer.encode_label(context, label) for label in labels)

        size = sum(len(label) + _PIECE_CHARACTERS for label in labels)
        return work() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


class ServedModels:
    """The models of this node by line."""

    def __init__(self, models: tuple[ServedModel, ...]) -> None:
        self._by_line = {model.release.ref.line: model for model in models}

    def all(self) -> tuple[ServedModel, ...]:
        return tuple(self._by_line.values())

    def resolve(self, line: str, version: int | None) -> ServedModel:
        """The model that a request names.

        Raises:
            UnknownModel: Not served here; the metadata lists what is.
        """
        model = self._by_line.get(line)
        if model is None or version not in (None, model.release.ref.version):
            known = ", ".join(str(m.release.ref) for m in self._by_line.values())
            name = line if version is None else f"{line}@{version}"
            raise UnknownModel(
                f"{name} is not served here; {known or 'nothing'} is", metadata={"models": known}
            )
        return model
