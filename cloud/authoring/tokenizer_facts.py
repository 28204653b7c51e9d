"""What a release must know of a model's tokenizer: its files, its digest, its end-of-text tokens.

Read from the model's own files. GGUF conversion keeps one end-of-text token (the chat turn's end), and a
model may also end with its base end-of-text, so both are looked for by name in the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cloud.authoring.errors import ReleaseInvalid
from cloud.authoring.files import link_or_copy

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_KNOWN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
    "<end_of_turn>",
)


def eos_token_ids(weights: Path) -> list[int]:
    """Every token id that ends an answer: the configured ones first, then the known names in the vocabulary.

    Args:
        weights: Directory with config.json, generation_config.json, tokenizer.json, tokenizer_config.json.

    Raises:
        ReleaseInvalid: None is found, or a file is missing or not JSON.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (weights / name).is_file():
            configured = _read(weights / name).get("eos_token_id")
            ids += [configured] if isinstance(configured, int) else list(configured or [])
    special = {
        token["content"]: int(token["id"])
        for token in _read(weights / "tokenizer.json").get("added_tokens", [])
        if token.get("special")
    }
    named = _read(weights / "tokenizer_config.json").get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    ids += [special[name] for name in (named, *_KNOWN_ENDS) if name in special]
    unique = list(dict.fromkeys(ids))
    if not unique:
        raise ReleaseInvalid(f"no end-of-text token in {weights}")
    return unique


def add_tokenizer(weights: Path, directory: Path) -> None:
    """Put the tokenizer's files into `directory`, the chat template in a file of its own.

    Publishers keep the template in `chat_template.jinja` or inside `tokenizer_config.json`.

    Raises:
        ReleaseInvalid: No tokenizer.json or no chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (weights / name).is_file():
            link_or_copy(weights / name, directory / name)
    if not (directory / "tokenizer.json").is_file():
        raise ReleaseInvalid(f"no tokenizer.json in {weights}")
    if not (directory / "chat_template.jinja").is_file():
        template = _read(weights / "tokenizer_config.json").get("chat_template")
        if not isinstance(template, str):
            raise ReleaseInvalid(f"no chat template in {weights}")
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ReleaseInvalid(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ReleaseInvalid(f"{path} is not a JSON object")
    return value
