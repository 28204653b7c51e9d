"""Templates render as in transformers, inside the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from edge.text.chat_template import ChatTemplate, TemplateError
from protos.errors import InvalidArgument
from protos.values import ChatMessage, Role

HELLO = [ChatMessage(role=Role.USER, content="hello")]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 3, 4))  # noqa: DTZ001


def test_block_tags_leave_no_lines_behind() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert template(source).render(HELLO) == "user: hello\n"


def test_special_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = "{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}"
    assert template(source).render(HELLO) == "<s>A:"
    assert template(source).render(HELLO, add_generation_prompt=False) == "<s>"


def test_json_is_not_escaped_for_html() -> None:
    assert template("{{ '<a & ü>' | tojson }}").render(HELLO) == '"<a & ü>"'


def test_dates_come_from_the_clock_given() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(HELLO) == "04 Mar 2026"


def test_loop_controls_are_known() -> None:
    assert template("{% for m in messages %}{% break %}{% endfor %}x").render(HELLO) == "x"


def test_a_refusal_of_the_template_is_the_callers_fault_and_says_why() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].content + 'x' }}", "{{ 1 / 0 }}", "{{ nothing() }}"])
def test_a_template_that_fails_on_these_messages_is_no_crash(source: str) -> None:
    with pytest.raises(InvalidArgument):
        template(source).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
    ],
)
def test_the_sandbox_lets_nothing_out_and_nothing_change(source: str) -> None:
    with pytest.raises(InvalidArgument):
        template(source).render(HELLO)


def test_a_broken_template_fails_when_it_is_loaded() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        template("{% for %}")
