"""The text of one answer: what the edge decoded, what may be shown of it, and what has been shown.

Invariants
- `shown` only grows. It is the beginning of the final text, whoever continues it.
- Until the cloud adds to it, `shown` is a beginning of `edge_text`, and ends at what was released.

Texts, token counts and the edge's log-probabilities only; no clock, no tiers, no decisions.
"""

from __future__ import annotations

from edge.engine.protocol import Tokens
from protos.errors import InternalFault
from protos.values import TokenLogprob


class Ledger:
    """Books of one answer. Counts are tokens.

    Attributes:
        shown: What the caller has, or, where nobody reads deltas, what the answer certainly begins with.
        edge_text: What the edge has decoded, from the answer's beginning on.
        edge_logprobs: Of the edge's tokens; those of text that was thrown away are left out.
        by_cloud: Whether some of `shown` is the cloud's.
    """

    def __init__(self) -> None:
        self.shown = ""
        self.shown_tokens = 0
        self.edge_text = ""
        self.edge_tokens = 0
        self.edge_logprobs: list[TokenLogprob] = []
        self.by_cloud = False
        self._released = 0
        self._released_tokens = 0

    @property
    def has_unreleased(self) -> bool:
        """Whether the edge's text goes on behind what may be shown."""
        return self._released < len(self.edge_text)

    def decoded(self, piece: Tokens, *, logprobs: bool) -> None:
        """The edge's next piece. `logprobs`: whether they are wanted."""
        self.edge_text += piece.text
        self.edge_tokens += len(piece.stats)
        if not logprobs:
            return
        for index, stat in enumerate(piece.stats):
            self.edge_logprobs.append(
                TokenLogprob(
                    token_id=stat.token_id,
                    token=piece.pieces[index] if piece.pieces else "",
                    logprob=stat.logprob,
                    top=piece.alternatives[index] if piece.alternatives else (),
                )
            )

    def release(self) -> None:
        """All that the edge has decoded so far may be shown."""
        self._released = len(self.edge_text)
        self._released_tokens = self.edge_tokens

    def take(self) -> str:
        """What was released and not yet shown; it counts as shown from here on."""
        text = self.edge_text[len(self.shown) : self._released]
        if text:
            self.shown += text
            self.shown_tokens = self._released_tokens
        return text

    def continued(self, text: str, tokens: int) -> None:
        """The cloud's next piece, which was shown."""
        self.shown += text
        self.shown_tokens += tokens
        self.by_cloud = self.by_cloud or bool(text)

    def resume(self) -> tuple[str, int]:
        """The edge is to go on: from the shown text where the cloud added to it, else from its own.

        Returns:
            The text to go on from and its tokens; `edge_text` is that text now.
        """
        if self.by_cloud:
            self.edge_text, self.edge_tokens = self.shown, self.shown_tokens
            del self.edge_logprobs[self._released_tokens :]
        if not self.edge_text.startswith(self.shown):
            raise InternalFault("an answer was about to contradict what had been shown")
        return self.edge_text, self.edge_tokens
