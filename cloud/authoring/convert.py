"""GGUF to Hugging Face weights in bfloat16, with tokenizer and chat template.

The work runs in a child process, so that torch and its memory are gone afterwards. Run as a module, this
file is that child: `python -m cloud.authoring.convert GGUF DIRECTORY [--tied]`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloud.authoring.children import run_child

RECIPE = 1
TIMEOUT_S = 900.0


def convert_gguf(
    source: Path,
    directory: Path,
    *,
    tied_embeddings: bool,
    log: Path,
    stop: threading.Event,
    env: Mapping[str, str],
) -> None:
    """Write weights and tokenizer of `source` into `directory`, which must exist.

    Args:
        tied_embeddings: Use the output matrix for the embedding too. A GGUF file of a tied model may carry
            both, rounded differently (the output finer); one matrix is what the publisher trained.

    Raises:
        ChildFailed: Conversion broke; the message names the log.
        BuildCancelled: `stop` was set.
    """
    command = [sys.executable, "-m", __name__, str(source), str(directory)]
    run_child(
        command + (["--tied"] if tied_embeddings else []),
        what=f"converting {source.name}",
        log=log,
        timeout_s=TIMEOUT_S,
        stop=stop,
        env={**env, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def _tie(model: Any) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        embedding.weight = head.weight
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _main(arguments: list[str]) -> int:
    source, directory = Path(arguments[0]), Path(arguments[1])
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Configuration, weights and tokenizer would each parse the whole file, 150,000 strings in pure Python.
    # The reader is read-only, so one parse serves all three: a third of the conversion's time.
    setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # noqa: B010 - mypy forbids the plain form
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if "--tied" in arguments:
        _tie(model)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(_main(sys.argv[1:]))
