"""Checks of single fields. Each returns the value that it let through, or raises `InvalidArgument`.

Pure, and free of protobuf, so that HTTP and gRPC borders share them. A refusal names the field, what
came and what is allowed; it never quotes text of the caller beyond its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from protos import limits
from protos.errors import InvalidArgument
from protos.manifest import parse_model_name


def check_int_range(value: int, field: str, *, minimum: int, maximum: int) -> int:
    """Raises InvalidArgument unless minimum ≤ value ≤ maximum."""
    if not minimum <= value <= maximum:
        raise InvalidArgument(f"{field} is {value}; it must be {minimum} to {maximum}", field=field)
    return value


def check_finite_range(
    value: float, field: str, *, minimum: float, maximum: float, minimum_open: bool = False
) -> float:
    """Raises InvalidArgument unless value is a number in [minimum, maximum], or (minimum, maximum]."""
    if not math.isfinite(value):
        raise InvalidArgument(f"{field} is {value}, which is not a finite number", field=field)
    too_small = value <= minimum if minimum_open else value < minimum
    if too_small or value > maximum:
        least = f"over {minimum:g}, at most {maximum:g}" if minimum_open else f"{minimum:g} to {maximum:g}"
        raise InvalidArgument(f"{field} is {value:g}; it must be {least}", field=field)
    # Minus zero would print as -0 and divide to minus infinity.
    return value + 0.0


def check_unit_interval(value: float, field: str) -> float:
    """Raises InvalidArgument unless value is a number in [0, 1]."""
    return check_finite_range(value, field, minimum=0.0, maximum=1.0)


def check_text_bytes(text: str, field: str, *, maximum: int) -> str:
    """Raises InvalidArgument when text is empty or longer than maximum bytes of UTF-8."""
    if not text:
        raise InvalidArgument(f"{field} is empty", field=field)
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > maximum:
        raise InvalidArgument(f"{field} has {size_bytes} bytes; the limit is {maximum}", field=field)
    return text


def check_request_id(request_id: str, *, field: str = "request_id") -> str:
    """An empty id passes: the server makes one.

    Raises:
        InvalidArgument: Longer than 128 characters, or not printable ASCII.
    """
    if len(request_id) > limits.MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument(
            f"{field} has {len(request_id)} characters; the limit is {limits.MAX_REQUEST_ID_CHARACTERS}",
            field=field,
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument(f"{field} must be printable ASCII", field=field)
    return request_id


def check_model_name(name: str, *, field: str = "model") -> tuple[str, int | None]:
    """`line` or `line@version` as (line, version or None).

    Raises:
        InvalidArgument: Empty, or not of that form.
    """
    if not name:
        raise InvalidArgument(f"{field} is empty; name a model line, such as support-bot", field=field)
    parsed = parse_model_name(name) if len(name) <= limits.MAX_MODEL_NAME_CHARACTERS else None
    if parsed is None:
        raise InvalidArgument(
            f"{field} must be LINE or LINE@VERSION: lower case letters, digits and hyphens, "
            "then a version from 1 on",
            field=field,
        )
    return parsed


def check_labels(labels: Sequence[str], *, field: str = "labels") -> tuple[str, ...]:
    """A label set.

    Raises:
        InvalidArgument: Not 2 to 128 labels, one that is empty or over 256 characters, or one twice.
    """
    if not limits.MIN_LABELS <= len(labels) <= limits.MAX_LABELS:
        raise InvalidArgument(
            f"{field} has {len(labels)} labels; there must be {limits.MIN_LABELS} to {limits.MAX_LABELS}",
            field=field,
        )
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):
        path = f"{field}[{index}]"
        if len(label) > limits.MAX_LABEL_CHARACTERS:
            raise InvalidArgument(
                f"{path} has {len(label)} characters; the limit is {limits.MAX_LABEL_CHARACTERS}", field=path
            )
        if not label.strip():
            raise InvalidArgument(f"{path} is empty", field=path)
        if label in seen:
            raise InvalidArgument(f"{path} is the same as {field}[{seen[label]}]", field=path)
        seen[label] = index
    return tuple(labels)


def check_label_kind(kind: str, *, field: str = "label_kind") -> str:
    """What the labels are; empty means the default.

    Raises:
        InvalidArgument: Over 64 characters, or more than one line.
    """
    if len(kind) > limits.MAX_LABEL_KIND_CHARACTERS:
        raise InvalidArgument(
            f"{field} has {len(kind)} characters; the limit is {limits.MAX_LABEL_KIND_CHARACTERS}",
            field=field,
        )
    if not kind:
        return limits.DEFAULT_LABEL_KIND
    if not kind.isprintable():
        raise InvalidArgument(f"{field} must be one line of printable characters", field=field)
    return kind


def check_classify_text(text: str, *, field: str = "text") -> str:
    """Raises InvalidArgument when empty or over 64 KiB."""
    return check_text_bytes(text, field, maximum=limits.MAX_CLASSIFY_TEXT_BYTES)
