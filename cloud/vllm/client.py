"""Talks to one vLLM server, over its private socket or an address.

Invariants
- A stream ends in exactly one `StreamEnd`, or raises exactly one `ForebayError`. A connection that closes
  before the engine's end marker is an error, never a short answer.
- Leaving a stream (`aclose`, cancellation, an error) closes its connection, by which vLLM drops the work.
- Time is bounded by the caller: every call is made inside its deadline.

httpx is imported here and nowhere else in this tier.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from cloud.vllm import wire, wire_chat
from protos.errors import (
    ContextTooLong,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
)
from protos.values import ChatMessage, FinishReason, Role, SamplingParams, TokenLogprob

T = TypeVar("T")

_RETRY_AFTER_S = 1.0
_CONTEXT_PARAMS = frozenset({"input_tokens", "max_tokens", "input_text"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """New tokens. `text` is what they add, whole characters; `logprobs` is empty or one per token."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The end of the text, as the engine counts it."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What one event of a stream says."""

    pieces: list[TextPiece]
    finish_reasons: list[str | None]
    usage: wire.Usage | None
    error: wire.ErrorBody | None


class VllmClient:
    """One engine. Open it with `connect`, close it with `aclose`."""

    def __init__(self, http: httpx.AsyncClient, *, model: str) -> None:
        self._http = http
        self._model = model

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        model: str,
        max_connections: int,
        connect_timeout_s: float,
        api_key: str | None = None,
    ) -> VllmClient:
        """Prepare a client; nothing is sent yet.

        Args:
            address: `http://host:port`, `https://host`, or `unix:///path`.
            model: The model's name in requests.
            max_connections: One per request in flight and a few for health and counts.
        """
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        path = address.removeprefix("unix://")
        transport = httpx.AsyncHTTPTransport(uds=path if path != address else None, limits=limits)
        http = httpx.AsyncClient(
            base_url="http://engine" if path != address else address,
            transport=transport,
            # Reading waits for the model, which only the caller's deadline may bound.
            timeout=httpx.Timeout(None, connect=connect_timeout_s, pool=connect_timeout_s),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            # The engine is named in the settings; a proxy of the environment is not meant for it.
            trust_env=False,
        )
        return cls(http, model=model)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the engine says that it is well, within `timeout_s` seconds.

        A cluster's front may have no `/health`; then the list of models has to do.
        """
        try:
            response = await self._http.get("/health", timeout=timeout_s)
            if response.status_code == httpx.codes.NOT_FOUND:
                response = await self._http.get("/v1/models", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    async def context_tokens(self) -> int | None:
        """Most tokens of prompt and answer together; None when the engine does not say.

        Raises:
            EngineUnavailable: The engine does not answer, or does not serve this client's model.
        """
        models = await self._call("GET", "/v1/models", None, wire.ModelList, field="release")
        for card in models.data:
            if card.id == self._model:
                return card.max_model_len
        raise EngineUnavailable(f"the engine does not serve {self._model}", retry_after_s=_RETRY_AFTER_S)

    async def tokenizes(self) -> bool:
        """Whether the engine renders and tokenizes conversations, as vLLM's own server does."""
        body = wire.tokenize_body(self._model, [ChatMessage(role=Role.USER, content="Hello")])
        with _engine_errors():
            response = await self._http.post("/tokenize", json=body)
        return response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)

    async def chat_tokens(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """A conversation as token ids, by the engine's own chat template, ready for the answer.

        Raises:
            InvalidArgument: The template refuses the conversation.
        """
        body = wire.tokenize_body(self._model, messages)
        answer = await self._call("POST", "/tokenize", body, wire.TokenizeAnswer, field="messages")
        return tuple(answer.tokens)

    async def log_likelihoods(
        self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int], *, field: str
    ) -> list[float]:
        """For each prompt, the log-likelihood (natural logarithm) of its tokens from `start` on.

        Raises:
            ContextTooLong: A prompt does not fit.
        """
        body = wire.score_body(self._model, prompts)
        answer = await self._call("POST", "/v1/completions", body, wire.ScoredAnswer, field=field)
        by_index = {choice.index: choice for choice in answer.choices}
        try:
            return [
                wire.log_likelihood_of(by_index[index], prompt, start)
                for index, (prompt, start) in enumerate(zip(prompts, starts, strict=True))
            ]
        except (KeyError, wire.WireError) as error:
            raise InternalFault(f"the engine's answer cannot be used: {error}") from error

    async def stream(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        field: str,
        token_text: Callable[[int], str],
    ) -> AsyncGenerator[TextPiece | StreamEnd, None]:
        """Decode. `TextPiece`s, then one `StreamEnd`.

        Args:
            field: The request's field that the prompt came from, for error messages.
            token_text: The text of a token id; called only when log-probabilities were asked for.

        Raises:
            ContextTooLong, InvalidArgument, Overloaded, EngineUnavailable, InternalFault
        """
        body = wire.stream_body(self._model, prompt_tokens, sampling)

        def parse(data: str) -> _Parsed:
            chunk = msgspec.json.decode(data, type=wire.StreamChunk)
            pieces = [_piece(choice, sampling.logprobs, token_text) for choice in chunk.choices]
            return _Parsed(pieces, [c.finish_reason for c in chunk.choices], chunk.usage, chunk.error)

        async with aclosing(self._events("/v1/completions", body, parse, field=field)) as events:
            async for event in events:
                yield event

    async def stream_chat(
        self, messages: Sequence[ChatMessage], prefix_text: str, sampling: SamplingParams
    ) -> AsyncGenerator[TextPiece | StreamEnd, None]:
        """As `stream`, for a cluster that renders conversations but does not tokenize them for us.

        Raises:
            InvalidArgument: Log-probabilities were asked for: such a cluster names no token ids.
        """
        if sampling.logprobs is not None:
            raise InvalidArgument(
                "this cloud's engine reports no token ids, so no logprobs", field="sampling.logprobs"
            )
        body = wire_chat.chat_body(self._model, messages, prefix_text, sampling)

        def parse(data: str) -> _Parsed:
            chunk = msgspec.json.decode(data, type=wire_chat.ChatChunk)
            texts = [choice.delta.content or "" for choice in chunk.choices]
            pieces = [TextPiece(text=text, tokens=1) for text in texts if text]
            return _Parsed(pieces, [c.finish_reason for c in chunk.choices], chunk.usage, chunk.error)

        events = self._events("/v1/chat/completions", body, parse, field="messages")
        async with aclosing(events) as stream:
            async for event in stream:
                yield event

    async def _events(
        self, path: str, body: dict[str, Any], parse: Callable[[str], _Parsed], *, field: str
    ) -> AsyncGenerator[TextPiece | StreamEnd, None]:
        """One server-sent event stream, to its end marker."""
        finish: FinishReason | None = None
        usage: wire.Usage | None = None
        with _engine_errors():
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await response.aread(), response.headers, field)
                async for line in response.aiter_lines():
                    data = wire.event_data(line)
                    if data is None:
                        continue
                    if data == wire.DONE:
                        break
                    parsed = parse(data)
                    if parsed.error is not None:
                        raise _broken(f"the engine failed in mid-answer: {parsed.error.message[:200]}")
                    usage = parsed.usage or usage
                    for reason in parsed.finish_reasons:
                        finish = wire.finish_reason_of(reason) if reason is not None else finish
                    for piece in parsed.pieces:
                        yield piece
                else:
                    raise _broken("the engine broke off in mid-answer")
        if finish is None or usage is None:
            raise _broken("the engine ended without saying why")
        yield StreamEnd(
            finish_reason=finish,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or 0,
        )

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, kind: type[T], *, field: str
    ) -> T:
        with _engine_errors():
            response = await self._http.request(method, path, json=body)
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, response.content, response.headers, field)
            return msgspec.json.decode(response.content, type=kind)


def _piece(choice: wire.StreamChoice, logprobs: int | None, token_text: Callable[[int], str]) -> TextPiece:
    if choice.logprobs is None or logprobs is None:
        scored: tuple[TokenLogprob, ...] = ()
    else:
        scored = wire.token_logprobs_of(choice.logprobs, count=logprobs, token_text=token_text)
    return TextPiece(text=choice.text, tokens=len(choice.token_ids or ()), logprobs=scored)


class _engine_errors:  # noqa: N801 - used as a context manager
    """Turns what httpx and the decoder raise into this tier's errors."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, httpx.HTTPError | httpx.StreamError):
            raise _broken(f"the engine cannot be reached: {type(error).__name__}") from error
        if isinstance(error, msgspec.MsgspecError | wire.WireError | UnicodeDecodeError):
            raise InternalFault(f"the engine's answer cannot be used: {error}") from error


def _broken(message: str) -> EngineUnavailable:
    return EngineUnavailable(message, retry_after_s=_RETRY_AFTER_S)


def _refusal(status: int, content: bytes, headers: httpx.Headers, field: str) -> ForebayError:
    """What an HTTP error status means to the caller."""
    try:
        body = msgspec.json.decode(content, type=wire.ErrorAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        body = wire.ErrorBody()
    if status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
        if body.param in _CONTEXT_PARAMS or body.code == "context_length_exceeded":
            return ContextTooLong(f"the engine refused: {body.message[:300]}", field=field)
        return InvalidArgument(f"the engine refused: {body.message[:300]}", field=field)
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return Overloaded("the engine is too busy", retry_after_s=_retry_after_s(headers))
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return _broken(f"the engine failed with HTTP status {status}")
    # A wrong key or a model that is not there: the operator's to mend, and nothing the caller did.
    return _broken(f"the engine refused this tier with HTTP status {status}: {body.message[:200]}")


def _retry_after_s(headers: httpx.Headers) -> float:
    try:
        return min(max(float(headers.get("retry-after", "")), 0.1), 60.0)
    except ValueError:
        return _RETRY_AFTER_S
