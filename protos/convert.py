"""Protobuf messages to values and back, and the checks of the border.

Invariants
- What `*_from_pb` returns is within `protos.limits`; everything after the border relies on it.
- A refusal is `InvalidArgument` whose `field` is the path in the caller's message, such as
  `messages[3].role`. Messages quote numbers and names, never prompts or labels.
- `*_from_pb(*_to_pb(value)) == value` for every valid value.

It does not know models: whether a prompt fits a context is the engine's to say. Routing policy is
converted by the edge, with the number checks of `protos.checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from protos import limits
from protos.checks import (
    check_classify_text,
    check_finite_range,
    check_int_range,
    check_label_kind,
    check_labels,
    check_model_name,
    check_request_id,
    check_text_bytes,
    check_unit_interval,
)
from protos.errors import InvalidArgument
from protos.forebay.v1 import common_pb2 as pb
from protos.manifest import parse_model_name
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

# The field checks are part of this border: servicers import all of it from here.
__all__ = [
    "chat_messages_from_pb",
    "chat_messages_to_pb",
    "check_classify_text",
    "check_finite_range",
    "check_input",
    "check_int_range",
    "check_label_kind",
    "check_labels",
    "check_model_name",
    "check_request_id",
    "check_text_bytes",
    "check_unit_interval",
    "finish_reason_from_pb",
    "finish_reason_to_pb",
    "label_score_from_pb",
    "label_score_to_pb",
    "release_from_pb",
    "release_to_pb",
    "sampling_from_pb",
    "sampling_to_pb",
    "token_logprob_from_pb",
    "token_logprob_to_pb",
]

_ROLES: dict[pb.Role.ValueType, Role] = {
    pb.ROLE_SYSTEM: Role.SYSTEM,
    pb.ROLE_USER: Role.USER,
    pb.ROLE_ASSISTANT: Role.ASSISTANT,
}
_ROLES_TO_PB = {role: number for number, role in _ROLES.items()}
_FINISH: dict[pb.FinishReason.ValueType, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_FINISH_TO_PB = {reason: number for number, reason in _FINISH.items()}


def chat_messages_from_pb(
    messages: Sequence[pb.ChatMessage], *, field: str = "messages"
) -> tuple[ChatMessage, ...]:
    """Check and convert a conversation. An empty one is returned empty: `check_input` judges that.

    Raises:
        InvalidArgument: Too many messages, too much text, an unknown role, a system message that is not
            the first, or empty content from anyone but the assistant.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidArgument(
            f"{field} has {len(messages)} messages; the limit is {limits.MAX_MESSAGES}", field=field
        )
    converted: list[ChatMessage] = []
    total_bytes = 0
    for index, message in enumerate(messages):
        path = f"{field}[{index}]"
        role = _ROLES.get(message.role)
        if role is None:
            raise InvalidArgument(
                f"{path}.role is {int(message.role)}, no role of this contract",
                field=f"{path}.role",
            )
        if role is Role.SYSTEM and index != 0:
            raise InvalidArgument(
                f"{path} is a system message; only the first message may be", field=f"{path}.role"
            )
        if not message.content and role is not Role.ASSISTANT:
            raise InvalidArgument(f"{path}.content is empty", field=f"{path}.content")
        total_bytes += len(message.content.encode())
        if total_bytes > limits.MAX_PROMPT_BYTES:
            raise InvalidArgument(
                f"{field} hold more than {limits.MAX_PROMPT_BYTES} bytes of text together", field=field
            )
        converted.append(ChatMessage(role=role, content=message.content))
    return tuple(converted)


def chat_messages_to_pb(messages: Sequence[ChatMessage]) -> list[pb.ChatMessage]:
    return [pb.ChatMessage(role=_ROLES_TO_PB[m.role], content=m.content) for m in messages]


def check_input(messages: Sequence[ChatMessage], prompt: str) -> None:
    """Exactly one of a conversation and a raw prompt, and something to answer in it.

    Raises:
        InvalidArgument: Neither, both, a prompt that is too long, or a conversation of a system message only.
    """
    if messages and prompt:
        raise InvalidArgument("messages and prompt are both set; set exactly one", field="prompt")
    if prompt:
        check_text_bytes(prompt, "prompt", maximum=limits.MAX_PROMPT_BYTES)
        return
    if not messages:
        raise InvalidArgument("neither messages nor prompt is set; set exactly one", field="messages")
    if all(message.role is Role.SYSTEM for message in messages):
        raise InvalidArgument("messages hold nothing to answer, only a system message", field="messages")


def sampling_from_pb(message: pb.SamplingParams, *, field: str = "sampling") -> SamplingParams:
    """Check and convert; unset fields take the defaults of `SamplingParams`.

    Raises:
        InvalidArgument: A value that is not a number or lies outside its range; `field` names it.
    """
    default = SamplingParams()
    max_tokens = default.max_tokens
    if message.HasField("max_tokens"):
        max_tokens = check_int_range(
            message.max_tokens, f"{field}.max_tokens", minimum=1, maximum=limits.MAX_MAX_TOKENS
        )
    temperature = default.temperature
    if message.HasField("temperature"):
        temperature = check_finite_range(
            message.temperature, f"{field}.temperature", minimum=0.0, maximum=limits.MAX_TEMPERATURE
        )
    top_p = default.top_p
    if message.HasField("top_p"):
        top_p = check_finite_range(
            message.top_p, f"{field}.top_p", minimum=0.0, maximum=1.0, minimum_open=True
        )
    top_k = default.top_k
    if message.HasField("top_k"):
        top_k = check_int_range(message.top_k, f"{field}.top_k", minimum=0, maximum=limits.MAX_TOP_K)
    penalty = default.repetition_penalty
    if message.HasField("repetition_penalty"):
        penalty = check_finite_range(
            message.repetition_penalty,
            f"{field}.repetition_penalty",
            minimum=limits.MIN_REPETITION_PENALTY,
            maximum=limits.MAX_REPETITION_PENALTY,
        )
    logprobs = default.logprobs
    if message.HasField("logprobs"):
        logprobs = check_int_range(
            message.logprobs, f"{field}.logprobs", minimum=0, maximum=limits.MAX_LOGPROBS
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=_check_stops(message.stop, f"{field}.stop"),
        repetition_penalty=penalty,
        logprobs=logprobs,
    )


def _check_stops(stops: Sequence[str], field: str) -> tuple[str, ...]:
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"{field} has {len(stops)} strings; the limit is {limits.MAX_STOP_STRINGS}", field=field
        )
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= limits.MAX_STOP_CHARACTERS:
            raise InvalidArgument(
                f"{field}[{index}] has {len(stop)} characters; it must have "
                f"1 to {limits.MAX_STOP_CHARACTERS}",
                field=f"{field}[{index}]",
            )
    return tuple(stops)


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Every field set, so that both tiers mean the same whatever their defaults become."""
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop=params.stop,
        repetition_penalty=params.repetition_penalty,
        logprobs=params.logprobs,
    )


def release_from_pb(message: pb.ReleaseRef, *, field: str = "release") -> ReleaseRef:
    """Check and convert.

    Raises:
        InvalidArgument: A line that is not a line's name, or a version under 1.
    """
    parsed = parse_model_name(message.line)
    if parsed is None or parsed[1] is not None:
        raise InvalidArgument(
            f"{field}.line must be lower case letters, digits and hyphens, 1 to "
            f"{limits.MAX_LINE_CHARACTERS} of them",
            field=f"{field}.line",
        )
    version = check_int_range(message.version, f"{field}.version", minimum=1, maximum=10**18 - 1)
    return ReleaseRef(message.line, version)


def release_to_pb(release: ReleaseRef) -> pb.ReleaseRef:
    return pb.ReleaseRef(line=release.line, version=release.version)


def finish_reason_from_pb(number: pb.FinishReason.ValueType, *, field: str = "finish_reason") -> FinishReason:
    """Convert what a peer reports.

    Raises:
        InvalidArgument: Unspecified, or a number that this version does not know.
    """
    reason = _FINISH.get(number)
    if reason is None:
        raise InvalidArgument(f"{field} is {int(number)}, which is no finish reason", field=field)
    return reason


def finish_reason_to_pb(reason: FinishReason) -> pb.FinishReason.ValueType:
    return _FINISH_TO_PB[reason]


def token_logprob_to_pb(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token.token_id,
        token=token.token,
        logprob=token.logprob,
        top=[pb.TokenAlternative(token_id=a.token_id, token=a.token, logprob=a.logprob) for a in token.top],
    )


def token_logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        token=message.token,
        logprob=message.logprob,
        top=tuple(
            TokenAlternative(token_id=a.token_id, token=a.token, logprob=a.logprob) for a in message.top
        ),
    )


def label_score_to_pb(score: LabelScore) -> pb.LabelScore:
    return pb.LabelScore(
        label=score.label,
        probability=score.probability,
        log_likelihood=score.log_likelihood,
        prior_log_likelihood=score.prior_log_likelihood,
    )


def label_score_from_pb(message: pb.LabelScore) -> LabelScore:
    return LabelScore(
        label=message.label,
        probability=message.probability,
        log_likelihood=message.log_likelihood,
        prior_log_likelihood=message.prior_log_likelihood,
    )
