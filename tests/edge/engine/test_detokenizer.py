"""Whole characters only, and in the end the text that decoding everything at once gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from edge.engine.detokenizer import IncrementalText, TokenizerText
from tests.fakes.letters import ByteTokenizer


def _pieces(tokenizer: object, ids: Sequence[int]) -> list[str]:
    text = IncrementalText(tokenizer)  # type: ignore[arg-type]
    return [text.feed(token_id) for token_id in ids]


@given(st.text(max_size=30))
def test_a_text_cut_into_single_bytes_comes_out_whole(text: str) -> None:
    pieces = _pieces(ByteTokenizer(), text.encode())
    assert "".join(pieces) == text.rstrip("\ufffd") or "".join(pieces) == text
    if "\ufffd" not in text:
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=24))
def test_bytes_that_are_no_text_lose_at_most_an_unfinished_character(raw: bytes) -> None:
    shown = "".join(_pieces(ByteTokenizer(), raw))
    whole = raw.decode("utf-8", errors="replace")
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {"\ufffd"}
    assert len(whole) - len(shown) <= 3


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert _pieces(ByteTokenizer(), "ok 👍".encode()[:-1]) == ["o", "k", " ", "", "", ""]


def test_special_tokens_have_no_text_and_do_not_split_a_character() -> None:
    first, second = "é".encode()
    assert _pieces(ByteTokenizer(), [97, 300, first, 301, second, 98]) == ["a", "", "", "", "é", "b"]


@pytest.fixture(scope="module")
def byte_level() -> tokenizers.Tokenizer:
    """A real byte-level BPE, trained on a few sentences: emoji and kana are cut inside characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["where is my parcel", "私の注文 👍 👎"], trainer)
    return tokenizer


@given(text=st.text(alphabet=st.sampled_from("ab 私の注文👍🏽é\n"), max_size=20))
def test_a_byte_level_vocabulary_gives_what_decoding_at_once_gives(
    byte_level: tokenizers.Tokenizer, text: str
) -> None:
    ids = byte_level.encode(text).ids
    pieces = _pieces(TokenizerText(byte_level), ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_vocabulary_with_word_marks_keeps_its_spaces() -> None:
    """SentencePiece style: the mark before a word is a space, except at the beginning of a text."""
    vocabulary = {"▁Hello": 0, "▁world": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "!": 5, "<unk>": 6}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    pieces = _pieces(TokenizerText(tokenizer), [0, 1, 2, 3, 4, 2, 3, 4, 5])
    assert pieces == ["Hello", " world", "", "", "€", "", "", "€", "!"]


def test_a_token_by_itself_is_shown_with_the_name_of_a_special_one(
    byte_level: tokenizers.Tokenizer,
) -> None:
    byte_level.add_special_tokens([AddedToken("<|end|>", special=True)])
    text = TokenizerText(byte_level)
    end = byte_level.token_to_id("<|end|>")
    assert text.token_text(end) == "<|end|>"
    assert text.decode([end]) == ""
