"""What crosses the process border arrives as it was sent, however the bytes are cut."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.frames import (
    MAX_FRAME_BYTES,
    Cancel,
    Command,
    CommandReader,
    ErrorWire,
    Fault,
    FrameError,
    FrameWriter,
    Load,
    Ready,
    Refused,
    Report,
    ReportReader,
    Shutdown,
    Step,
    Submit,
    SubmitLabels,
    TokensWire,
    error_from_wire,
    event_to_wire,
    tokens_from_wire,
)
from edge.engine.protocol import (
    EngineInfo,
    EngineRequest,
    Finished,
    LabelRequest,
    LabelResult,
    Started,
    Tokens,
    TokenStat,
)
from protos.errors import (
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
)
from protos.values import FinishReason, LabelScore, SamplingParams, TokenAlternative
from tests.fakes.moody_worker import moody_spec

TOKENS = Tokens(
    stats=(TokenStat(7, -0.5, 1.25, 0.5), TokenStat(9, -1.5, 2.25, 0.25)),
    text="né",
    alternatives=((TokenAlternative(token_id=7, token="n", logprob=-0.5),), ()),
    pieces=("n", "é"),
)
SCORE = LabelScore(label="refund", probability=1.0, log_likelihood=-3.0, prior_log_likelihood=-4.0)
SAMPLING = SamplingParams(temperature=0.7, seed=2**63 - 1, stop=("\n\n", "é"), logprobs=3)
COMMANDS: list[Command] = [
    Load(moody_spec(), 0.5),
    Submit(EngineRequest(request_id="1", prompt_tokens=(1, 2), sampling=SAMPLING, deadline_s=2.5)),
    SubmitLabels(
        LabelRequest(
            request_id="2", context_tokens=(1,), prior_tokens=(2,), labels=("a",), label_tokens=((3, 4),)
        )
    ),
    Cancel("1"),
    Shutdown(),
]
REPORTS: list[Report] = [
    Ready(
        EngineInfo(
            variant="int4",
            engine="torch",
            context_tokens=10,
            max_batch=2,
            kv_capacity_tokens=20,
            kv_token_bytes=8,
        )
    ),
    Step(
        (
            event_to_wire("1", Started(queue_s=0.1, prefill_s=0.2, prompt_logprob_mean=None)),
            event_to_wire("1", TOKENS),
            event_to_wire("1", Finished(reason=FinishReason.LENGTH, decode_s=1.5)),
            event_to_wire("2", LabelResult(scores=(SCORE,), queue_s=0.1, service_s=0.2)),
            event_to_wire("3", DeadlineExpired("late")),
        ),
        1,
        2,
        3,
    ),
    Refused("no"),
    Fault("RuntimeError: x"),
]


def joined(bodies: list[Command] | list[Report]) -> bytes:
    writer = FrameWriter()
    return b"".join(bytes(writer.frame(body)) for body in bodies)


@given(st.data())
def test_commands_arrive_as_sent_however_they_are_cut(data: st.DataObject) -> None:
    raw = joined(COMMANDS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    reader = CommandReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        received += reader.feed(raw[start:end])
    assert received == COMMANDS


def test_reports_arrive_as_sent_byte_by_byte() -> None:
    reader = ReportReader()
    received = [report for byte in joined(REPORTS) for report in reader.feed(bytes([byte]))]
    assert received == REPORTS


def test_a_short_frame_after_a_long_one_carries_nothing_of_it() -> None:
    writer = FrameWriter()
    writer.frame(Cancel("x" * 10_000))
    assert CommandReader().feed(bytes(writer.frame(Cancel("y")))) == [Cancel("y")]


def test_tokens_come_back_equal() -> None:
    wire = event_to_wire("1", TOKENS)
    assert isinstance(wire, TokensWire)
    assert tokens_from_wire([wire]) == TOKENS


def test_pieces_of_one_answer_join_in_order() -> None:
    wire = event_to_wire("1", TOKENS)
    assert isinstance(wire, TokensWire)
    both = tokens_from_wire([wire, wire])
    assert both == Tokens(
        stats=TOKENS.stats * 2,
        text="néné",
        alternatives=TOKENS.alternatives * 2,
        pieces=TOKENS.pieces * 2,
    )


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("a", field="prompt", metadata={"k": "v"}),
        ContextTooLong("b", field="prompt", metadata={"limit_tokens": "5"}),
        Overloaded("c", retry_after_s=2.5),
        EngineUnavailable("d", retry_after_s=1.5),
        DeadlineExpired("e"),
        InternalFault("f"),
    ],
)
def test_errors_keep_their_class_and_facts(error: ForebayError) -> None:
    wire = event_to_wire("1", error)
    assert isinstance(wire, ErrorWire)
    back = error_from_wire(wire)
    assert type(back) is type(error)
    assert (back.message, back.metadata) == (error.message, error.metadata)
    for name in ("field", "retry_after_s"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_an_error_that_the_engine_should_not_raise_is_our_bug() -> None:
    assert isinstance(error_from_wire(ErrorWire("1", "Unauthenticated", "m", {}, "", 0.0)), InternalFault)


def test_a_frame_over_the_limit_is_neither_sent_nor_awaited() -> None:
    with pytest.raises(FrameError, match="limit"):
        FrameWriter().frame(Cancel("x" * (MAX_FRAME_BYTES + 1)))
    with pytest.raises(FrameError, match="limit"):
        CommandReader().feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "nonsense"}), b"\x90"])
def test_nonsense_is_refused(body: bytes) -> None:
    frame = struct.pack(">I", len(body)) + body
    with pytest.raises(FrameError):
        CommandReader().feed(frame)
    with pytest.raises(FrameError):
        ReportReader().feed(frame)
