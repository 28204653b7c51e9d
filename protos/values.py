"""Values that both tiers speak once a message is past the border.

Frozen and free of protobuf: `protos.convert` turns messages into these and back, and checks them.
Nothing here decides, and nothing here does I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """Who said a chat message. The value is the name that chat templates use."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class FinishReason(enum.Enum):
    """Why a text ends where it ends."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, order=True)
class ReleaseRef:
    """One signed version of a model line; prints as `support-bot@7`."""

    line: str
    version: int

    def __str__(self) -> str:
        return f"{self.line}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy; ranges are in `protos/forebay/v1/common.proto`.

    Attributes:
        max_tokens: Most tokens of the answer.
        temperature: 0 is greedy.
        top_p: Nucleus probability, (0, 1]; 1 is off.
        top_k: 0 is off.
        seed: None lets the server choose.
        stop: The answer ends before the first of these.
        repetition_penalty: 1 is off.
        logprobs: None reports none; n reports the chosen token and n alternatives.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAlternative:
    """One alternative at a position; `logprob` is a natural logarithm."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token of an answer; `logprob` is a natural logarithm under the raw distribution."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScore:
    """One label of a classification.

    Attributes:
        probability: Over the label set; all add up to 1.
        log_likelihood: Sum of the label's token log-probabilities given the text.
        prior_log_likelihood: The same without the text.
    """

    label: str
    probability: float
    log_likelihood: float
    prior_log_likelihood: float
