"""Text to token ids and back, with the line between a model's control tokens and a caller's words.

Equal to transformers' `apply_chat_template` and `encode` for byte-level vocabularies, with one deliberate
difference: transformers renders the conversation and then looks for control tokens in all of it, so a user
who writes `<|im_end|><|im_start|>system` ends the own turn and speaks as the system. Here, control tokens
come only from the template. Where a message contains the text of one, it is tokenized as the plain characters
that it is.

How: before rendering, each such text inside a message is replaced by a placeholder that occurs in no message;
after rendering, the control tokens that are left are the template's, and the placeholders become text again.
The template sees the same conversation otherwise.

Invariants
- No id of a control token is ever the encoding of untrusted text. If a vocabulary allows no other encoding,
  the request is refused.
- Tokens never merge across a control token, or between prompt and prefix, or between context and label.
- Nothing changes after `load`, so one object may serve several threads; encoding releases the interpreter
  lock. A prompt of a megabyte takes seconds, so servers encode in a thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec
import tokenizers

from edge.text.chat_template import ChatTemplate
from protos.errors import ContextTooLong, ForebayError, InvalidArgument
from protos.labels import label_continuation
from protos.values import ChatMessage

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_NUMBERED = re.compile("\ue000([0-9]{1,8})\ue001")


class TokenizerError(ForebayError):
    """A tokenizer directory that cannot be used. Raised when it is loaded, never by a request."""

    reason = "BAD_TOKENIZER"


class _Content(msgspec.Struct):
    """A special token of `tokenizer_config.json` in its long form."""

    content: str


class _Config(msgspec.Struct):
    """The part of `tokenizer_config.json` that reaches the prompt."""

    bos_token: str | _Content | None = None
    eos_token: str | _Content | None = None
    pad_token: str | _Content | None = None
    unk_token: str | _Content | None = None
    chat_template: str | None = None


class ChatTokenizer:
    """A model's vocabulary and its chat template. Made by `load`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        # From here on `encode` takes control tokens for plain text; this class finds the real ones itself.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        special = [t for t in tokenizer.get_added_tokens_decoder().items() if t[1].special]
        self._control_ids = {token.content: token_id for token_id, token in special}
        self._forbidden = frozenset(self._control_ids.values())
        self._control = _control_pattern([token for _, token in special])
        self._bos = tuple(tokenizer.encode("", add_special_tokens=True).ids)
        self._longest_bytes = max((len(text.encode()) for text in tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, directory: Path, *, now: Callable[[], datetime] = datetime.now) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        The last two may be absent; without a template, `encode_chat` refuses.

        Args:
            directory: Such as a release's `edge/tokenizer`.
            now: The clock for templates that write a date; local time, as in transformers.

        Raises:
            TokenizerError: A file is missing or broken.
            TemplateError: The chat template does not compile.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"cannot use {directory / TOKENIZER_FILE}: {error}") from error
        try:
            config = _read_config(directory / _CONFIG_FILE)
            source = _read_if_there(directory / _TEMPLATE_FILE)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TokenizerError(f"cannot use the tokenizer's files in {directory}: {error}") from error
        if source is None:
            source = config.chat_template
        template = None if source is None else ChatTemplate(source, _special_tokens(config), now)
        return cls(tokenizer, template)

    @property
    def vocab_size(self) -> int:
        """Number of token ids with a text. A model's logits may be wider."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that no caller's text can become."""
        return self._forbidden

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, prefix: str = "", limit_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: The conversation; their texts are untrusted.
            prefix: What the assistant has said of this answer so far; the model goes on from there.
            limit_tokens: As for `encode`.

        Raises:
            InvalidArgument: The template refuses the conversation, or there is none.
            ContextTooLong: The prompt cannot fit `limit_tokens`.
        """
        if self._template is None:
            raise InvalidArgument("this model has no chat template; send a prompt instead", field="messages")
        contents = [m.content for m in messages]
        self._check_can_fit(sum(len(c.encode()) for c in contents) + len(prefix.encode()), limit_tokens)
        placeholder = _Placeholder(contents)
        hidden = [
            ChatMessage(role=m.role, content=self._control.sub(placeholder.hide, m.content)) for m in messages
        ]
        ids: list[int] = []
        for text, control in self._split(self._template.render(hidden)):
            if control is not None:
                ids.append(control)
            else:
                ids += self._encode_plain(placeholder.restore(text), field="messages")
        if prefix:
            ids += self._encode_plain(prefix, field="prefix")
        return tuple(ids)

    def encode(self, text: str, *, special: bool = False, limit_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids of a text, opened as the model expects a text to open (with BOS where it wants one).

        Args:
            text: Any text.
            special: Whether the texts of control tokens in it are control tokens. Only for trusted text.
            limit_tokens: Refuse, before the work of encoding, a text that is certain to have more tokens.

        Raises:
            ContextTooLong: The text cannot fit `limit_tokens`.
        """
        self._check_can_fit(len(text.encode()), limit_tokens)
        ids = list(self._bos)
        for piece, control in self._split(text) if special else [(text, None)]:
            ids += [control] if control is not None else self._encode_plain(piece, field="prompt")
        return tuple(ids)

    def encode_label(self, context: str, label: str) -> tuple[int, ...]:
        """Token ids of a label as it continues a context: these, after `encode(context)`.

        A label is scored by the likelihood of its tokens, so it must be cut as the model would have written
        it there: with a space before it that belongs to its first token (" refund", not " " and "refund").
        The label is therefore encoded behind the context's last character, and that character's tokens are
        taken off again. The context's own tokens do not change, so scores of labels can be compared, and
        prior and likelihood of a label have the same tokens.

        Raises:
            InvalidArgument: The label has no tokens.
        """
        anchor = context[-1:]
        before = self._encode_plain(anchor, field="labels")
        joined = self._encode_plain(anchor + label_continuation(label), field="labels")
        if joined[: len(before)] == before:
            ids = joined[len(before) :]
        else:  # the anchor merged with the space; then the label stands by itself
            ids = self._encode_plain(label_continuation(label), field="labels")
        if not ids:
            raise InvalidArgument(f"the label {label!r} has no tokens", field="labels")
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens; control tokens have none, an unfinished character is U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """How one token is shown by itself; control tokens by their name."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Pieces of a text in order: plain ones with None, control tokens with their id."""
        end = 0
        for match in self._control.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], None
            # Tokens that swallow the white space around them match with it.
            yield match.group(), self._control_ids[match.group(match.lastgroup or 0)]
            end = match.end()
        if end < len(text):
            yield text[end:], None

    def _encode_plain(self, text: str, *, field: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(ids):
            raise InvalidArgument("the text contains a control token of this model", field=field)
        return ids

    def _check_can_fit(self, size_bytes: int, limit_tokens: int | None) -> None:
        if limit_tokens is None or size_bytes <= limit_tokens * self._longest_bytes:
            return
        raise ContextTooLong(
            f"the text has {size_bytes} bytes, which cannot fit the context of {limit_tokens} tokens",
            field="prompt",
            metadata={"limit_tokens": str(limit_tokens)},
        )


class _Placeholder:
    """Stands for texts inside messages while a template is rendered. Occurs in none of them."""

    def __init__(self, texts: Sequence[str]) -> None:
        # Private-use characters around a number that no text has there: nobody can write one, by chance or on
        # purpose. Looked for in one pass, since texts are long and may be written to make this slow.
        taken = {number for text in texts for number in _NUMBERED.findall(text)}
        salt = next(number for number in map(str, itertools.count()) if number not in taken)
        self._mark = f"\ue000{salt}\ue001"
        self._pattern = re.compile(f"{self._mark}(\\d+)\ue002")
        self._hidden: list[str] = []

    def hide(self, match: re.Match[str]) -> str:
        self._hidden.append(match.group())
        return f"{self._mark}{len(self._hidden) - 1}\ue002"

    def restore(self, text: str) -> str:
        return self._pattern.sub(lambda m: self._hidden[int(m.group(1))], text)


def _control_pattern(tokens: Sequence[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Finds control tokens: leftmost first, then longest, as the tokenizers library does."""
    parts = []
    for index, token in enumerate(sorted(tokens, key=lambda t: -len(t.content))):
        before, after = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
        parts.append(f"{before}(?P<t{index}>{re.escape(token.content)}){after}")
    return re.compile("|".join(parts) or r"(?!)")


def _read_if_there(path: Path) -> str | None:
    return path.read_text("utf-8") if path.is_file() else None


def _read_config(path: Path) -> _Config:
    text = _read_if_there(path)
    return _Config() if text is None else msgspec.json.decode(text, type=_Config)


def _special_tokens(config: _Config) -> dict[str, str]:
    texts = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = getattr(config, name)
        if token is not None:
            texts[name] = token if isinstance(token, str) else token.content
    return texts
