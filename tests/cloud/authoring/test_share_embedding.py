"""The int8 graph computes the same after its embedding reads the output matrix's codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from cloud.authoring.share_embedding import share_embedding

ROWS, HIDDEN, BLOCK = 96, 64, 32


def make_graph(path: Path, *, tied: bool) -> None:
    """Embedding, then an int8 output matrix: the builder's names, nothing in between."""
    random = np.random.default_rng(7)
    codes = random.integers(1, 256, (ROWS, HIDDEN // BLOCK, BLOCK), dtype=np.uint8)
    scales = random.uniform(0.01, 0.02, (ROWS, HIDDEN // BLOCK)).astype(np.float32)
    matrix = ((codes.astype(np.float32) - 128) * scales[..., None]).reshape(ROWS, HIDDEN)
    if not tied:
        matrix = random.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    gather = helper.make_node("Gather", ["embed", "input_ids"], ["hidden"], name="/model/embed_tokens/Gather")
    head = helper.make_node(
        "MatMulNBits",
        ["hidden", "codes", "scales"],
        ["logits"],
        name="/lm_head/MatMul_Q8",
        domain="com.microsoft",
        bits=8,
        block_size=BLOCK,
        K=HIDDEN,
        N=ROWS,
    )
    graph = helper.make_graph(
        [gather, head],
        "tiny",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", ROWS])],
        [
            numpy_helper.from_array(matrix, "embed"),
            numpy_helper.from_array(codes, "codes"),
            numpy_helper.from_array(scales, "scales"),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)


def logits(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], {"input_ids": np.arange(ROWS, dtype=np.int64)[None]})[0])


def test_logits_stay_and_the_float_matrix_goes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    make_graph(path, tied=True)
    before, size = logits(path), (tmp_path / "model.onnx.data").stat().st_size
    assert share_embedding(path)
    np.testing.assert_allclose(logits(path), before, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "model.onnx.data").stat().st_size <= size - ROWS * HIDDEN * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


@pytest.mark.parametrize("again", [False, True])
def test_what_must_not_be_shared_is_left_as_it_is(tmp_path: Path, again: bool) -> None:
    path = tmp_path / "model.onnx"
    make_graph(path, tied=again)
    if again:
        share_embedding(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert not share_embedding(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
