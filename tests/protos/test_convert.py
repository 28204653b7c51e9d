"""The border: every row of bad input has its field, and valid values survive the way there and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import limits
from protos.convert import (
    chat_messages_from_pb,
    chat_messages_to_pb,
    check_classify_text,
    check_input,
    check_label_kind,
    check_labels,
    check_model_name,
    check_request_id,
    check_unit_interval,
    finish_reason_from_pb,
    finish_reason_to_pb,
    label_score_from_pb,
    label_score_to_pb,
    release_from_pb,
    release_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    token_logprob_from_pb,
    token_logprob_to_pb,
)
from protos.errors import InvalidArgument
from protos.forebay.v1 import common_pb2 as pb
from protos.values import (
    ChatMessage,
    FinishReason,
    LabelScore,
    ReleaseRef,
    Role,
    SamplingParams,
    TokenAlternative,
    TokenLogprob,
)

USER = pb.ChatMessage(role=pb.ROLE_USER, content="hi")
SYSTEM = pb.ChatMessage(role=pb.ROLE_SYSTEM, content="be brief")
ASSISTANT = pb.ChatMessage(role=pb.ROLE_ASSISTANT, content="")
NUMBERS_OF_NO_USE = (math.nan, math.inf, -math.inf)


def refused(check: Callable[..., object], *arguments: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        check(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (-1, 0, -(2**31), 2**31 - 1)),
        *(("temperature", value) for value in (*NUMBERS_OF_NO_USE, -0.1, 2.01, 1e308)),
        *(("top_p", value) for value in (*NUMBERS_OF_NO_USE, 0.0, -0.5, 1.01)),
        *(("top_k", value) for value in (-1, 1001, 2**31 - 1)),
        *(("repetition_penalty", value) for value in (*NUMBERS_OF_NO_USE, 0.0, 0.49, 2.01, -1.0)),
        *(("logprobs", value) for value in (-1, 9, 2**31 - 1)),
        ("stop", ["x"] * 9),
    ],
)
def test_sampling_out_of_range_names_the_field(name: str, value: Any) -> None:
    error = refused(sampling_from_pb, pb.SamplingParams(**{name: value}))
    assert error.field == f"sampling.{name}"
    assert error.field in error.message


@pytest.mark.parametrize("stop", ["", "x" * 65])
def test_a_stop_string_of_no_use_names_its_place(stop: str) -> None:
    assert refused(sampling_from_pb, pb.SamplingParams(stop=["ok", stop])).field == "sampling.stop[1]"


def test_unset_sampling_is_the_documented_default() -> None:
    assert sampling_from_pb(pb.SamplingParams()) == SamplingParams()
    assert SamplingParams().max_tokens == limits.DEFAULT_MAX_TOKENS


def test_limits_themselves_are_allowed() -> None:
    params = sampling_from_pb(
        pb.SamplingParams(
            max_tokens=1, temperature=2, top_p=1, top_k=1000, seed=2**64 - 1, stop=["x" * 64] * 8,
            repetition_penalty=0.5, logprobs=8,
        )
    )  # fmt: skip
    assert (params.temperature, params.seed, params.logprobs) == (2.0, 2**64 - 1, 8)
    assert sampling_from_pb(pb.SamplingParams(logprobs=0, seed=0)).logprobs == 0
    assert sampling_from_pb(pb.SamplingParams(seed=0)).seed == 0
    assert math.copysign(1, sampling_from_pb(pb.SamplingParams(temperature=-0.0)).temperature) == 1


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, limits.MAX_MAX_TOKENS),
        temperature=st.floats(0, 2).map(abs),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 1000),
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=64), max_size=8).map(tuple),
        repetition_penalty=st.floats(0.5, 2),
        logprobs=st.none() | st.integers(0, 8),
    )
)
def test_sampling_survives_the_wire(params: SamplingParams) -> None:
    wire = sampling_to_pb(params).SerializeToString()
    assert sampling_from_pb(pb.SamplingParams.FromString(wire)) == params


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([pb.ChatMessage(role=pb.ROLE_UNSPECIFIED, content="x")], "messages[0].role"),
        ([pb.ChatMessage(content="x")], "messages[0].role"),
        ([USER, pb.ChatMessage(role=99, content="x")], "messages[1].role"),  # type: ignore[arg-type]
        ([pb.ChatMessage(role=-7, content="x")], "messages[0].role"),  # type: ignore[arg-type]
        ([USER, SYSTEM], "messages[1].role"),
        ([SYSTEM, SYSTEM, USER], "messages[1].role"),
        ([pb.ChatMessage(role=pb.ROLE_USER)], "messages[0].content"),
        ([pb.ChatMessage(role=pb.ROLE_SYSTEM), USER], "messages[0].content"),
        ([USER] * 257, "messages"),
        ([pb.ChatMessage(role=pb.ROLE_USER, content="x" * (1024 * 1024 + 1))], "messages"),
        ([pb.ChatMessage(role=pb.ROLE_USER, content="ü" * 300_000)] * 2, "messages"),
    ],
)
def test_bad_conversations_name_the_field(messages: list[pb.ChatMessage], field: str) -> None:
    assert refused(chat_messages_from_pb, messages).field == field


def test_refusals_do_not_quote_the_prompt() -> None:
    secret = "my card is 4111"
    for error in (
        refused(chat_messages_from_pb, [pb.ChatMessage(content=secret)]),
        refused(chat_messages_from_pb, [USER, pb.ChatMessage(role=pb.ROLE_SYSTEM, content=secret)]),
        refused(check_labels, [secret, secret]),
        refused(check_request_id, secret + "\n"),
        refused(check_model_name, secret),
        refused(release_from_pb, pb.ReleaseRef(line=secret, version=1)),
    ):
        assert secret not in error.message


def test_a_conversation_of_every_role_survives_the_wire() -> None:
    messages = (
        ChatMessage(role=Role.SYSTEM, content="be brief"),
        ChatMessage(role=Role.USER, content="hi"),
        ChatMessage(role=Role.ASSISTANT, content=""),
        ChatMessage(role=Role.USER, content="más"),
    )
    assert chat_messages_from_pb(chat_messages_to_pb(messages)) == messages
    assert set(Role) == {message.role for message in messages}


@pytest.mark.parametrize(
    ("messages", "prompt", "field"),
    [
        ([], "", "messages"),
        ([USER], "x", "prompt"),
        ([SYSTEM], "", "messages"),
        ([], "x" * (1024 * 1024 + 1), "prompt"),
        ([], "ü" * (512 * 1024 + 1), "prompt"),
    ],
)
def test_input_is_exactly_one_of_messages_and_prompt(
    messages: list[pb.ChatMessage], prompt: str, field: str
) -> None:
    assert refused(check_input, chat_messages_from_pb(messages), prompt).field == field


def test_input_at_the_limits_passes() -> None:
    check_input((), "x" * (1024 * 1024))
    check_input(chat_messages_from_pb([SYSTEM, USER, ASSISTANT] + [USER] * 253), "")


@pytest.mark.parametrize(
    ("labels", "field"),
    [
        ([], "labels"),
        (["one"], "labels"),
        ([f"l{i}" for i in range(300)], "labels"),
        ([f"l{i}" for i in range(129)], "labels"),
        (["a", ""], "labels[1]"),
        (["a", " \t"], "labels[1]"),
        (["a", "b", "a"], "labels[2]"),
        (["a", "x" * 257], "labels[1]"),
    ],
)
def test_bad_label_sets_name_the_field(labels: list[str], field: str) -> None:
    assert refused(check_labels, labels).field == field


def test_300_labels_are_told_the_limit() -> None:
    message = refused(check_labels, [f"l{i}" for i in range(300)]).message
    assert "300" in message
    assert "128" in message


def test_label_sets_at_the_limits_pass() -> None:
    labels = [f"{i:0256d}" for i in range(128)]
    assert check_labels(labels) == tuple(labels)
    assert check_labels(["a", "b"]) == ("a", "b")


def test_label_kind_defaults_and_is_one_short_line() -> None:
    assert check_label_kind("") == "Topic"
    assert check_label_kind("Intención") == "Intención"
    for bad in ("x" * 65, "a\nb"):
        assert refused(check_label_kind, bad).field == "label_kind"


def test_classify_text_is_not_empty_and_at_most_64_kib() -> None:
    assert check_classify_text("x" * 65536)
    for bad in ("", "x" * 65537, "ü" * 32769):
        assert refused(check_classify_text, bad).field == "text"


def test_request_ids_are_short_printable_ascii() -> None:
    assert check_request_id("") == ""
    assert check_request_id("x" * 128) == "x" * 128
    for bad in ("x" * 129, "a\nb", "é", "\x7f", "\x00"):
        assert refused(check_request_id, bad).field == "request_id"


@pytest.mark.parametrize(
    "name", ["", "@1", "Bot", "bot@0", "bot@-1", "bot@x", "bot@", "-bot", "b" * 64, "a@1@2"]
)
def test_bad_model_names_are_refused(name: str) -> None:
    assert refused(check_model_name, name).field == "model"


def test_model_names_split_into_line_and_version() -> None:
    assert check_model_name("support-bot") == ("support-bot", None)
    assert check_model_name("b" * 63 + "@" + "9" * 18) == ("b" * 63, 10**18 - 1)


@pytest.mark.parametrize("value", [*NUMBERS_OF_NO_USE, -0.001, 1.001])
def test_confidence_is_in_the_unit_interval(value: float) -> None:
    assert refused(check_unit_interval, value, "policy.min_confidence").field == "policy.min_confidence"


def test_the_ends_of_the_unit_interval_are_in_it() -> None:
    assert [check_unit_interval(value, "x") for value in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]


def test_releases_survive_and_bad_ones_name_the_field() -> None:
    release = ReleaseRef("support-bot", 7)
    assert release_from_pb(release_to_pb(release)) == release
    for message, field in (
        (pb.ReleaseRef(), "release.line"),
        (pb.ReleaseRef(line="a@1", version=1), "release.line"),
        (pb.ReleaseRef(line="a"), "release.version"),
        (pb.ReleaseRef(line="a", version=-3), "release.version"),
        (pb.ReleaseRef(line="a", version=2**63 - 1), "release.version"),
    ):
        assert refused(release_from_pb, message).field == field


def test_finish_reasons_survive_and_unknown_ones_are_refused() -> None:
    for reason in FinishReason:
        assert finish_reason_from_pb(finish_reason_to_pb(reason)) is reason
    for number in (0, 3, -1):
        assert refused(finish_reason_from_pb, number).field == "finish_reason"


def test_logprobs_and_label_scores_survive() -> None:
    top = (TokenAlternative(token_id=1, token="a", logprob=-0.1),)
    token = TokenLogprob(token_id=1, token="a", logprob=-0.1, top=top)
    assert token_logprob_from_pb(token_logprob_to_pb(token)) == token
    score = LabelScore(label="a", probability=0.25, log_likelihood=-3.5, prior_log_likelihood=-2.0)
    assert label_score_from_pb(label_score_to_pb(score)) == score


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("common", f"Default {limits.DEFAULT_MAX_TOKENS}."),
        ("common", f"Range 0 to {limits.MAX_TEMPERATURE:g}. Default 0."),
        ("common", f"Range 0 to {limits.MAX_TOP_K:,}."),
        ("common", f"At most {limits.MAX_STOP_STRINGS}, each 1 to {limits.MAX_STOP_CHARACTERS} characters."),
        ("common", f"Range {limits.MIN_REPETITION_PENALTY:g} to {limits.MAX_REPETITION_PENALTY:g}."),
        ("common", f"Range 0 to {limits.MAX_LOGPROBS}."),
        ("common", f"hyphens, at most {limits.MAX_LINE_CHARACTERS}."),
        ("inference", f"At most {limits.MAX_MESSAGES} messages, {limits.MAX_PROMPT_BYTES // 2**20} MiB"),
        ("inference", f"At most {limits.MAX_CLASSIFY_TEXT_BYTES // 1024} KiB."),
        ("inference", f"{limits.MIN_LABELS} to {limits.MAX_LABELS} distinct labels"),
        ("inference", f"labels of 1 to {limits.MAX_LABEL_CHARACTERS} characters."),
        ("inference", f"At most {limits.MAX_LABEL_KIND_CHARACTERS} characters."),
        ("inference", f'Default "{limits.DEFAULT_LABEL_KIND}".'),
        ("inference", f"at most {limits.MAX_REQUEST_ID_CHARACTERS} printable ASCII characters."),
        ("inference", f"({limits.DEFAULT_DEADLINE_S:g} s by default)"),
    ],
)
def test_the_contract_s_comments_state_these_limits(file: str, sentence: str) -> None:
    source = Path(__file__).parents[2] / "protos" / "forebay" / "v1" / f"{file}.proto"
    prose = re.sub(r"\s*//\s*", " ", source.read_text())
    assert sentence in re.sub(r"\s+", " ", prose)
