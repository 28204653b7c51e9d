"""The errors page, generated: `docs/errors.md` is `render()`, and a test holds it current.

Write it anew with `python -m protos.error_docs > docs/errors.md`.
"""

from __future__ import annotations

import inspect
import sys

from protos import limits
from protos.errors import ForebayError
from protos.status import ERROR_DOMAIN, TABLE

# What callers and operators get wrong, and what they get for it. The tests of each border run these rows.
BAD_INPUT: tuple[tuple[str, str], ...] = (
    ("an empty request, or neither `messages` nor `prompt`", "`INVALID_ARGUMENT`, field `messages`"),
    ("both `messages` and `prompt`", "`INVALID_ARGUMENT`, field `prompt`"),
    ("an empty `model`, or one that is no `LINE` or `LINE@VERSION`", "`INVALID_ARGUMENT`, field `model`"),
    ("a model line that this node does not have", "`UNKNOWN_MODEL`; the metadata lists what there is"),
    ("a version that this node does not have", "`UNKNOWN_MODEL`; the metadata lists what there is"),
    ("`max_tokens` of 0 or less", "`INVALID_ARGUMENT`, field `sampling.max_tokens`"),
    (
        "a temperature, `top_p` or penalty that is NaN, infinite or out of range",
        "`INVALID_ARGUMENT`, the field's path",
    ),
    (f"a prompt or conversation over {limits.MAX_PROMPT_BYTES:,} bytes", "`INVALID_ARGUMENT`, its field"),
    (
        f"a message over {limits.MAX_MESSAGE_BYTES:,} bytes",
        "`RESOURCE_EXHAUSTED` from gRPC itself, without details; our clients report `INVALID_ARGUMENT`",
    ),
    ("a prompt that does not fit the model's context", "`CONTEXT_TOO_LONG`, with the limit in tokens"),
    ("a role that is unspecified or unknown", "`INVALID_ARGUMENT`, field `messages[i].role`"),
    ("a system message that is not the first", "`INVALID_ARGUMENT`, field `messages[i].role`"),
    (
        f"fewer than {limits.MIN_LABELS} or more than {limits.MAX_LABELS} labels, or one twice",
        "`INVALID_ARGUMENT`, field `labels`",
    ),
    ("a deadline of zero, or one that has passed", "`DEADLINE_EXCEEDED`, often from the caller's own gRPC"),
    ("a port where nobody listens", "`UNAVAILABLE` from the caller's own gRPC"),
    ("a port where another gRPC server listens", "`UNIMPLEMENTED` from that server"),
    ("an API key that is missing or not known", "`UNAUTHENTICATED`"),
    (
        "a settings file that is missing, not UTF-8, not TOML, or has an unknown key or a wrong value",
        "the command ends with 2 and one sentence: file, key, expected, got, nearest known key",
    ),
)


def render() -> str:
    """The whole page, as Markdown."""
    introduction = (
        "Every failed call carries a `google.rpc.Status` in its trailers "
        f"(`grpc-status-details-bin`) with an `ErrorInfo` of domain `{ERROR_DOMAIN}`: match on its `reason`, "
        "not on the message. `UNAVAILABLE` and `RESOURCE_EXHAUSTED` carry `RetryInfo` and the trailer "
        "`grpc-retry-pushback-ms`; `INVALID_ARGUMENT` carries `BadRequest` with the field's path."
    )
    lines = [
        "# Errors",
        "",
        "<!-- Generated: python -m protos.error_docs > docs/errors.md -->",
        "",
        introduction,
        "",
        "| reason | gRPC code | retry? | meaning | what to do |",
        "|---|---|---|---|---|",
    ]
    for cls, row in TABLE.items():
        if cls is not ForebayError:
            retry = "yes" if row.retry else "no"
            lines.append(f"| `{cls.reason}` | `{row.code.name}` | {retry} | {_meaning(cls)} | {row.advice} |")
    lines += ["", "## Bad input and what it gets", "", "| input | error |", "|---|---|"]
    lines += [f"| {given} | {error} |" for given, error in BAD_INPUT]
    return "\n".join(lines) + "\n"


def _meaning(cls: type[ForebayError]) -> str:
    """The class's docstring, first paragraph, in one table cell."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
