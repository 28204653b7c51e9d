"""What the engine checks of a request before it accepts it. Pure.

The borders of the system have checked fields and ranges; here are the limits that only a loaded model knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge.engine.model import StepModel
from edge.engine.protocol import EngineRequest, LabelRequest
from protos.errors import ContextTooLong, InvalidArgument


def check_text(request: EngineRequest, model: StepModel, kv_capacity_tokens: int) -> int:
    """Check a text to decode; returns the KV positions that it has to be promised.

    Raises:
        ContextTooLong, InvalidArgument: See `EngineCore.submit`.
    """
    sampling = request.sampling
    if sampling.max_tokens < 1:
        raise InvalidArgument("max_tokens must be at least 1", field="sampling.max_tokens")
    if not sampling.greedy and sampling.seed is None:
        raise InvalidArgument("sampling needs a seed", field="sampling.seed")
    _check_tokens(request.prompt_tokens, model.vocab_size, "prompt")
    length = len(request.prompt_tokens)
    needed = length + sampling.max_tokens
    parts = f"{length} of the prompt and {sampling.max_tokens} of the answer"
    _check_room(needed, model, kv_capacity_tokens, parts)
    return needed


def check_labels(request: LabelRequest, model: StepModel, kv_capacity_tokens: int) -> int:
    """Check labels to score; returns the KV positions that they have to be promised.

    Raises:
        ContextTooLong, InvalidArgument: See `EngineCore.submit_labels`.
    """
    if not request.labels or len(request.labels) != len(request.label_tokens):
        raise InvalidArgument("every label needs its tokens", field="labels")
    _check_tokens(request.context_tokens, model.vocab_size, "text")
    _check_tokens(request.prior_tokens, model.vocab_size, "text")
    for tokens in request.label_tokens:
        _check_tokens(tokens, model.vocab_size, "labels")
    text = max(len(request.context_tokens), len(request.prior_tokens))
    label = max(len(tokens) for tokens in request.label_tokens)
    parts = f"{text} of the text and {label} of the longest label"
    _check_room(text + label, model, kv_capacity_tokens, parts)
    return text + label


def _check_tokens(tokens: Iterable[int], vocab_size: int, field: str) -> None:
    least, most = min(tokens, default=None), max(tokens, default=None)
    if least is None or most is None:
        raise InvalidArgument(f"{field} has no tokens", field=field)
    if least < 0 or most >= vocab_size:
        raise InvalidArgument(f"{field} has a token outside the model's {vocab_size}", field=field)


def _check_room(needed: int, model: StepModel, kv_capacity_tokens: int, parts: str) -> None:
    for limit, name in (
        (model.context_tokens, "the model's context"),
        (kv_capacity_tokens, "the engine's KV memory"),
    ):
        if needed > limit:
            raise ContextTooLong(
                f"{needed} tokens ({parts}) do not fit {name} of {limit} tokens",
                field="prompt",
                metadata={"limit_tokens": str(limit), "requested_tokens": str(needed)},
            )
