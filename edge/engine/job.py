"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

from edge.engine.answer import Answer
from edge.engine.labels import LabelWork
from edge.engine.prefill import PromptWork


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A text to decode (with an `answer`) or labels to score (without). A `scheduler.Job`.

    Attributes:
        reserve_tokens: KV positions promised to it.
        arrived_at, deadline_at, started_at, first_token_at: On the engine's clock, in seconds.
    """

    request_id: str
    reserve_tokens: int
    arrived_at: float
    deadline_at: float | None
    work: PromptWork | LabelWork
    answer: Answer | None = None
    started_at: float = 0.0
    first_token_at: float | None = None

    @property
    def last_token(self) -> int:
        """The newest token of the answer. Only for a text whose prompt is read."""
        assert self.answer is not None
        return self.answer.last_token

    @property
    def kv_length(self) -> int:
        """Positions of its row in use. The newest token is not among them: the next step writes it."""
        written = max(self.answer.count - 1, 0) if self.answer is not None else 0
        return self.work.kv_length + written
