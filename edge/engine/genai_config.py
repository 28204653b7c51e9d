"""What onnxruntime-genai's model builder says of a graph, and which graphs this engine can serve. Pure.

The builder writes `genai_config.json` beside the graph: names of inputs and outputs, layers, heads. What the
engine needs is checked here, without ONNX Runtime: grouped-query attention whose past and present share a
buffer, and no input beyond tokens, mask, positions and that buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.engine.kv import KvShape
from protos.errors import ForebayError

_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
}


class UnsupportedGraphError(ForebayError):
    """The graph cannot be served by this engine. The message says which property is in the way."""

    reason = "UNSUPPORTED_MODEL"


class _Names(msgspec.Struct):
    input_ids: str
    attention_mask: str
    past_key_names: str
    past_value_names: str
    position_ids: str | None = None


class _OutputNames(msgspec.Struct):
    logits: str
    present_key_names: str
    present_value_names: str


class _Decoder(msgspec.Struct):
    filename: str
    head_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    inputs: _Names
    outputs: _OutputNames


class _Model(msgspec.Struct):
    context_length: int
    vocab_size: int
    decoder: _Decoder


class _Search(msgspec.Struct):
    past_present_share_buffer: bool = False


class GenaiConfig(msgspec.Struct):
    """The part of `genai_config.json` that says how the graph is called and laid out."""

    model: _Model
    search: _Search


def read_config(variant_dir: Path) -> GenaiConfig:
    """Raises `UnsupportedGraphError` when it is not there or not what the builder writes."""
    try:
        raw = (variant_dir / "genai_config.json").read_bytes()
        return msgspec.json.decode(raw, type=GenaiConfig)
    except OSError as error:
        raise UnsupportedGraphError(f"cannot read genai_config.json: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UnsupportedGraphError(f"cannot use genai_config.json: {error}") from error


def check_tensors(types: Mapping[str, str], config: GenaiConfig) -> tuple[KvShape, np.dtype[np.generic]]:
    """The graph's KV memory, and its type of logits.

    Args:
        types: ONNX types of all inputs and outputs by name, such as `tensor(float)`.
        config: What the builder says of the graph.

    Raises:
        UnsupportedGraphError: It has other inputs or outputs than this engine serves.
    """
    decoder = config.model.decoder
    inputs, outputs = decoder.inputs, decoder.outputs
    layers = range(decoder.num_hidden_layers)
    patterns = (inputs.past_key_names, inputs.past_value_names)
    past = {pattern % layer for pattern in patterns for layer in layers}
    patterns = (outputs.present_key_names, outputs.present_value_names)
    present = {pattern % layer for pattern in patterns for layer in layers}
    needed = past | present | {inputs.input_ids, inputs.attention_mask, outputs.logits}
    if unknown := types.keys() - needed - {inputs.position_ids}:
        raise UnsupportedGraphError(f"the graph has {min(unknown)}, which this engine does not know")
    if missing := needed - types.keys():
        raise UnsupportedGraphError(f"the graph has no {min(missing)}")
    kinds = {types[name] for name in past | present}
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        raise UnsupportedGraphError(f"the graph holds keys and values as {', '.join(sorted(kinds))}")
    if types[outputs.logits] not in _DTYPES:
        raise UnsupportedGraphError(f"the graph gives logits as {types[outputs.logits]}")
    shape = KvShape(
        layers=decoder.num_hidden_layers,
        kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_size,
        dtype=_DTYPES[kinds.pop()],
    )
    return shape, _DTYPES[types[outputs.logits]]
