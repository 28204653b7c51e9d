"""One answer being written: logits in, events out. Knows no rows, no queue and no clock.

Tokens that end the text (end-of-text ids) are no part of it: they have neither statistics nor text. Tokens
of a stop string were decoded, so they keep their statistics; their text is never shown.
"""

from __future__ import annotations

from edge.engine.detokenizer import Detokenizes, IncrementalText
from edge.engine.model import Float32
from edge.engine.protocol import EngineRequest, Tokens, TokenStat
from edge.engine.sampler import RequestSampler, RowMeter, alternatives
from edge.engine.stops import StopMatcher
from protos.errors import InternalFault
from protos.values import FinishReason, TokenAlternative


class Answer:
    """The text of one request."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        tokenizer: Detokenizes,
        eos_token_ids: frozenset[int],
        meter: RowMeter,
        vocab_size: int,
    ) -> None:
        self._sampling = request.sampling
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._meter = meter
        self._sampler = RequestSampler(request.sampling, request.prompt_tokens, vocab_size=vocab_size)
        self._text = IncrementalText(tokenizer)
        self._stops = StopMatcher(request.sampling.stop)
        self._count = 0
        self._last_token = -1
        self._finished: FinishReason | None = None

    @property
    def count(self) -> int:
        """Tokens of the text so far."""
        return self._count

    @property
    def last_token(self) -> int:
        """The newest token, which the next step runs."""
        return self._last_token

    @property
    def finished(self) -> FinishReason | None:
        """Why the text is over; None while it is not."""
        return self._finished

    def push(self, logits: Float32) -> Tokens | None:
        """Choose the next token from a row of logits, shape (vocab,).

        Returns:
            What that adds to the answer; None when it adds nothing, which happens only at its end.

        Raises:
            InternalFault: The model computed something that is not a distribution.
        """
        facts = self._meter.measure(logits)
        # NaN and infinite logits all end up here.
        if not abs(facts.log_normalizer) < float("inf"):
            raise InternalFault("the model's output is not a number")
        token = self._sampler.choose(logits, facts.best)
        if token in self._eos_token_ids:
            self._finished = FinishReason.STOP
            held = self._stops.flush()
            return Tokens(stats=(), text=held) if held else None
        self._count += 1
        self._last_token = token
        text = self._stops.feed(self._text.feed(token))
        if self._stops.stopped:
            self._finished = FinishReason.STOP
        elif self._count >= self._sampling.max_tokens:
            self._finished = FinishReason.LENGTH
            text += self._stops.flush()
        stat = TokenStat(token, float(logits[token]) - facts.log_normalizer, facts.entropy, facts.margin)
        if self._sampling.logprobs is None:
            return Tokens(stats=(stat,), text=text)
        ranked = tuple(
            TokenAlternative(token_id=other, token=self._tokenizer.token_text(other), logprob=logprob)
            for other, logprob in alternatives(logits, self._sampling.logprobs, facts.log_normalizer)
        )
        piece = self._tokenizer.token_text(token)
        return Tokens(stats=(stat,), text=text, alternatives=(ranked,), pieces=(piece,))
