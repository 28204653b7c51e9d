"""Which graphs the ONNX engine serves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edge.engine.genai_config import GenaiConfig, UnsupportedGraphError, check_tensors

CONFIG = msgspec.convert(
    {
        "model": {
            "context_length": 128,
            "vocab_size": 16,
            "decoder": {
                "filename": "model.onnx",
                "head_size": 8,
                "num_hidden_layers": 2,
                "num_key_value_heads": 3,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past.%d.key",
                    "past_value_names": "past.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"past_present_share_buffer": True},
    },
    GenaiConfig,
)


def _tensors(kv: str = "tensor(float)", **changes: str) -> dict[str, str]:
    buffers = {
        f"{time}.{layer}.{kind}": kv
        for time in ("past", "present")
        for layer in range(2)
        for kind in ("key", "value")
    }
    tokens = {"input_ids": "tensor(int64)", "attention_mask": "tensor(int64)", "logits": "tensor(float)"}
    return tokens | buffers | changes


@pytest.mark.parametrize(("kv", "dtype"), [("tensor(float)", np.float32), ("tensor(float16)", np.float16)])
def test_the_kv_memory_is_as_the_graph_says(kv: str, dtype: type[np.generic]) -> None:
    shape, logits = check_tensors(_tensors(kv), CONFIG)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (2, 3, 8, np.dtype(dtype))
    assert logits == np.float32


def test_positions_are_an_input_that_a_graph_may_have() -> None:
    check_tensors(_tensors(position_ids="tensor(int64)"), CONFIG)


def test_an_input_that_nobody_would_fill_is_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match="has past_conv, which this engine does not know"):
        check_tensors(_tensors(past_conv="tensor(float)"), CONFIG)


def test_a_missing_layer_is_refused() -> None:
    tensors = _tensors()
    del tensors["present.1.value"]
    with pytest.raises(UnsupportedGraphError, match=r"has no present\.1\.value"):
        check_tensors(tensors, CONFIG)


def test_kv_memory_of_a_type_we_cannot_hold_or_of_two_types_is_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"keys and values as tensor\(bfloat16\)"):
        check_tensors(_tensors("tensor(bfloat16)"), CONFIG)
    with pytest.raises(UnsupportedGraphError, match=r"tensor\(float\), tensor\(float16\)"):
        check_tensors(_tensors() | {"past.0.key": "tensor(float16)"}, CONFIG)


def test_logits_of_a_type_we_cannot_read_are_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"logits as tensor\(bfloat16\)"):
        check_tensors(_tensors(logits="tensor(bfloat16)"), CONFIG)
