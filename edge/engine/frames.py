"""What the servicer's process and a worker process say to each other, and how it lies on the socket.

A frame is four bytes of length (big endian) and a MessagePack body. Upwards, one frame carries everything
that one engine step gave, for all requests, so a step wakes the reader once. The structs of that frame are
arrays on the wire, not maps: it is the one that is sent for every token.

Invariants
- No frame is longer than `MAX_FRAME_BYTES`; a longer one is a broken peer, and ends the connection.
- Request ids here are the parent's own counters, never a caller's, so a late event cannot meet a reused id.
- Both ends are this same code; there is no version to agree on.

Values only: no socket, no loop.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

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
from edge.engine.spec import EngineSpec
from protos.errors import (
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
)
from protos.values import FinishReason, TokenAlternative

MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEADER = struct.Struct(">I")


class FrameError(Exception):
    """The bytes are no frame of this protocol. The connection cannot go on."""


# Downwards: from the parent to the worker.


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first frame. `heartbeat_s`: the longest silence of a healthy worker between two steps."""

    spec: EngineSpec
    heartbeat_s: float


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: EngineRequest


class SubmitLabels(msgspec.Struct, frozen=True, tag="labels"):
    request: LabelRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End, at once, with status 0."""


Command = Load | Submit | SubmitLabels | Cancel | Shutdown


# Upwards: from the worker to the parent.


class StartedWire(msgspec.Struct, frozen=True, array_like=True, tag=0):
    request_id: str
    queue_s: float
    prefill_s: float
    prompt_logprob_mean: float | None


class TokensWire(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """`stats`: token id, log-probability, entropy, margin. `alternatives`: id, text, log-probability."""

    request_id: str
    text: str
    stats: tuple[tuple[int, float, float, float], ...]
    alternatives: tuple[tuple[tuple[int, str, float], ...], ...]
    pieces: tuple[str, ...]


class FinishedWire(msgspec.Struct, frozen=True, array_like=True, tag=2):
    request_id: str
    reason: FinishReason
    decode_s: float


class LabelsWire(msgspec.Struct, frozen=True, array_like=True, tag=3):
    request_id: str
    result: LabelResult


class ErrorWire(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """`kind` is the name of the error's class."""

    request_id: str
    kind: str
    message: str
    metadata: dict[str, str]
    field: str
    retry_after_s: float


EventWire = StartedWire | TokensWire | FinishedWire | LabelsWire | ErrorWire


class Step(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """What one step gave, and the load after it. Without events it is the heartbeat."""

    events: tuple[EventWire, ...]
    running: int
    waiting: int
    kv_reserved_tokens: int

    def stats(self, restarts: int) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=self.waiting,
            kv_reserved_tokens=self.kv_reserved_tokens,
            restarts=restarts,
        )


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The model is loaded."""

    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The model cannot be served, now or later: a typed error of loading. The worker ends."""

    message: str


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A step raised. The worker ends, since its state is unknown. For the log, not for callers."""

    message: str


Report = Step | Ready | Refused | Fault


class FrameWriter:
    """Encodes frames into one buffer that is reused; not for use by two threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def frame(self, body: Command | Report) -> bytearray:
        """The frame's bytes, valid until the next call.

        Raises:
            FrameError: It would be too long.
        """
        self._encoder.encode_into(body, self._buffer, _HEADER.size)
        size = len(self._buffer) - _HEADER.size
        if size > MAX_FRAME_BYTES:
            self._buffer = bytearray()
            raise FrameError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
        _HEADER.pack_into(self._buffer, 0, size)
        return self._buffer


class FrameSplitter:
    """Cuts a stream of bytes into the bodies of frames. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that these bytes complete, in order.

        Raises:
            FrameError: A frame announces more than `MAX_FRAME_BYTES`.
        """
        if not self._pending and len(data) > _HEADER.size:
            (size,) = _HEADER.unpack_from(data)
            if len(data) == _HEADER.size + size:  # nearly always: one read, one frame
                return [data[_HEADER.size :]]
        self._pending += data
        bodies = []
        start, have = 0, len(self._pending)
        while have - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._pending, start)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + size
            if end > have:
                break
            bodies.append(bytes(self._pending[start + _HEADER.size : end]))
            start = end
        if start:
            del self._pending[:start]
        return bodies


class CommandReader:
    """Bytes to commands, in the worker."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def feed(self, data: bytes) -> list[Command]:
        """Raises FrameError."""
        try:
            return [self._decoder.decode(body) for body in self._splitter.feed(data)]
        except msgspec.MsgspecError as error:
            raise FrameError(f"not a command: {error}") from error


class ReportReader:
    """Bytes to reports, in the parent."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(Report)

    def feed(self, data: bytes) -> list[Report]:
        """Raises FrameError."""
        try:
            return [self._decoder.decode(body) for body in self._splitter.feed(data)]
        except msgspec.MsgspecError as error:
            raise FrameError(f"not a report: {error}") from error


def event_to_wire(request_id: str, event: EngineEvent | LabelResult | ForebayError) -> EventWire:
    """One event of the core, for the socket."""
    if isinstance(event, Tokens):
        return TokensWire(
            request_id,
            event.text,
            tuple((s.token_id, s.logprob, s.entropy, s.margin) for s in event.stats),
            tuple(tuple((a.token_id, a.token, a.logprob) for a in row) for row in event.alternatives),
            event.pieces,
        )
    if isinstance(event, Finished):
        return FinishedWire(request_id, event.reason, event.decode_s)
    if isinstance(event, Started):
        return StartedWire(request_id, event.queue_s, event.prefill_s, event.prompt_logprob_mean)
    if isinstance(event, LabelResult):
        return LabelsWire(request_id, event)
    return ErrorWire(
        request_id,
        type(event).__name__,
        event.message,
        event.metadata,
        event.field if isinstance(event, InvalidArgument) else "",
        getattr(event, "retry_after_s", 0.0),
    )


def tokens_from_wire(parts: Sequence[TokensWire]) -> Tokens:
    """Consecutive pieces of one answer as one event. `parts` is not empty."""
    if len(parts) == 1:
        part = parts[0]
        return Tokens(
            stats=tuple([TokenStat(*s) for s in part.stats]),
            text=part.text,
            alternatives=_alternatives(part) if part.alternatives else (),
            pieces=part.pieces,
        )
    return Tokens(
        stats=tuple(TokenStat(*s) for part in parts for s in part.stats),
        text="".join(part.text for part in parts),
        alternatives=tuple(row for part in parts for row in _alternatives(part)),
        pieces=tuple(piece for part in parts for piece in part.pieces),
    )


def _alternatives(part: TokensWire) -> tuple[tuple[TokenAlternative, ...], ...]:
    return tuple(
        tuple(TokenAlternative(token_id=i, token=token, logprob=logprob) for i, token, logprob in row)
        for row in part.alternatives
    )


def error_from_wire(wire: ErrorWire) -> ForebayError:
    """The error, of its own class where the engine may raise it, else our bug."""
    if wire.kind in ("InvalidArgument", "ContextTooLong"):
        cls = ContextTooLong if wire.kind == "ContextTooLong" else InvalidArgument
        return cls(wire.message, field=wire.field, metadata=wire.metadata)
    if wire.kind in ("Overloaded", "EngineUnavailable"):
        kind = Overloaded if wire.kind == "Overloaded" else EngineUnavailable
        return kind(wire.message, retry_after_s=wire.retry_after_s, metadata=wire.metadata)
    if wire.kind == "DeadlineExpired":
        return DeadlineExpired(wire.message, metadata=wire.metadata)
    return InternalFault(wire.message, metadata=wire.metadata)
