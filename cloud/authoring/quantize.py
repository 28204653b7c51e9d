"""Hugging Face weights to one ONNX graph per variant, by onnxruntime-genai's model builder.

The builder runs in a child process. For `int8` a second child lets the embedding read the output matrix's
int8 codes: the builder leaves a float32 copy there, 43 % of SmolLM2's file.

| variant | builder | notes |
|---|---|---|
| int4 | `-p int4`, accuracy_level=4 | a tied embedding shares the output's codes |
| int8 | `-p int8` | as above, shared by `share_embedding` |
| fp32 | `-p fp32` | the reference for tests |
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from cloud.authoring.children import run_child
from cloud.authoring.errors import ReleaseInvalid

RECIPE = 1
TIMEOUT_S = 1200.0
ONNX_VARIANTS = ("int4", "int8", "fp32")
GRAPH_FILES = ("model.onnx", "model.onnx.data", "genai_config.json")
_OPTIONS = {"int4": ("accuracy_level=4",), "int8": (), "fp32": ()}


def quantize(
    weights: Path,
    directory: Path,
    *,
    variant: str,
    cache: Path,
    log: Path,
    stop: threading.Event,
    env: Mapping[str, str],
) -> None:
    """Build one variant's graph into `directory`, which must exist.

    Args:
        weights: Directory of Hugging Face weights.
        variant: One of `ONNX_VARIANTS`.
        cache: Scratch of the builder.

    Raises:
        ChildFailed: The builder broke; the message names the log.
        ReleaseInvalid: The builder ended well but a file is missing.
        BuildCancelled: `stop` was set.
    """
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(weights), "-o", str(directory), "-p", variant, "-e", "cpu", "-c", str(cache)]
    if _OPTIONS[variant]:
        command += ["--extra_options", *_OPTIONS[variant]]
    run_child(
        command,
        what=f"quantizing {weights.name} to {variant}",
        log=log,
        timeout_s=TIMEOUT_S,
        stop=stop,
        env={**env, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    if variant == "int8":
        run_child(
            [sys.executable, "-m", "cloud.authoring.share_embedding", str(directory / "model.onnx")],
            what=f"sharing the embedding of {weights.name}",
            log=log.with_suffix(".share.log"),
            timeout_s=TIMEOUT_S,
            stop=stop,
            env=env,
        )
    missing = [name for name in GRAPH_FILES if not (directory / name).is_file()]
    if missing:
        raise ReleaseInvalid(f"the builder made no {', '.join(missing)} for {variant}; see {log}")
