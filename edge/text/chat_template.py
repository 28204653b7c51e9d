"""Chat templates: the conversation as the model saw conversations in training.

A template is a Jinja program that comes with a model (`chat_template.jinja`). It runs in Jinja's immutable
sandbox with the same switches and helpers that transformers gives it, so equal input gives equal text.

It renders text and nothing else. That a caller's words must not become control tokens is the business of
`edge.text.tokenizer`; this module does not know what a token is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protos.errors import ForebayError, InvalidArgument
from protos.values import ChatMessage

_MESSAGE_CHARACTERS = 300  # of a template's own complaint that go into ours


class TemplateError(ForebayError):
    """The template itself is broken. Raised when it is loaded, never by a request."""

    reason = "BAD_CHAT_TEMPLATE"


class ChatTemplate:
    """A compiled template. Rendering is pure and safe from several threads.

    Args:
        source: The Jinja program.
        special_tokens: Names that the program may use, such as `bos_token`, and their texts.
        now: The clock behind `strftime_now`; some templates write today's date into the prompt.

    Raises:
        TemplateError: The program does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text.

        Args:
            messages: The conversation so far.
            add_generation_prompt: End with the opening of the assistant's turn.

        Raises:
            InvalidArgument: The template refuses the conversation, for example two user messages in a row.
        """
        try:
            return self._template.render(
                messages=[{"role": m.role.value, "content": m.content} for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            said = str(error)[:_MESSAGE_CHARACTERS]
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {said}", field="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
