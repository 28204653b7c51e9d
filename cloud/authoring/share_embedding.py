"""Let a tied int8 graph read its embedding out of the output matrix's codes.

onnxruntime-genai's builder quantizes the output matrix to int8 but keeps a float32 copy for the embedding,
since its own sharing knows 4 bits only. ONNX Runtime's GatherBlockQuantized takes 8 bits too, so the float32
`Gather` is replaced and its matrix dropped. Only for models whose two matrices are one: checked numerically
on sampled rows, not taken from a flag. A graph of another shape is left as it is.

Runs as a child: `python -m cloud.authoring.share_embedding model.onnx`. The only importer of `onnx` here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_GATHER = "/model/embed_tokens/Gather"
_HEAD = "/lm_head/MatMul_Q8"
_ZERO_POINT = 128
_SAMPLED_ROWS = 64


def share_embedding(path: Path) -> bool:
    """Rewrite the graph at `path` and its external data in place.

    Returns:
        Whether anything was changed: False for a graph without that pattern, or with two different matrices.
    """
    model = onnx.load(path)
    graph = model.graph
    nodes = {node.name: node for node in graph.node}
    gather, head = nodes.get(_GATHER), nodes.get(_HEAD)
    if gather is None or head is None or len(head.input) != 3:
        return False
    attributes = {a.name: helper.get_attribute_value(a) for a in head.attribute}
    if attributes["bits"] != 8 or attributes["K"] % attributes["block_size"]:
        return False
    initializers = {item.name: item for item in graph.initializer}
    float_rows, codes, scales = (
        initializers[name] for name in (gather.input[0], head.input[1], head.input[2])
    )
    if not _equal_on_sample(float_rows, codes, scales):
        return False
    base = "/model/embed_tokens"
    shape_name, flat = f"{base}/shared_shape", f"{base}/Reshape/output_0"
    rows, hidden = float_rows.dims
    graph.initializer.append(numpy_helper.from_array(np.array([rows, hidden], dtype=np.int64), shape_name))
    reshape = helper.make_node("Reshape", [codes.name, shape_name], [flat], name=f"{base}/Reshape")
    lookup = helper.make_node(
        "GatherBlockQuantized",
        [flat, gather.input[1], scales.name],
        list(gather.output),
        name=f"{base}/GatherBlockQuantized",
        domain="com.microsoft",
        bits=8,
        block_size=attributes["block_size"],
        gather_axis=0,
        quantize_axis=1,
    )
    position = next(i for i, node in enumerate(graph.node) if node.name == _GATHER)
    del graph.node[position]
    graph.node.insert(position, reshape)
    graph.node.insert(position + 1, lookup)
    graph.initializer.remove(float_rows)
    _save(model, path)
    return True


def _equal_on_sample(float_rows: Any, codes: Any, scales: Any) -> bool:
    """Whether the codes are the float32 rows, to within one quantization step."""
    matrix = numpy_helper.to_array(float_rows)
    picked = np.linspace(0, matrix.shape[0] - 1, _SAMPLED_ROWS, dtype=np.int64)
    blocks = numpy_helper.to_array(codes)[picked].astype(np.float32) - _ZERO_POINT
    steps = numpy_helper.to_array(scales).reshape(matrix.shape[0], -1)[picked][..., None]
    wanted = matrix[picked].reshape(blocks.shape)
    return bool(np.all(np.abs(blocks * steps - wanted) <= np.abs(steps)))


def _save(model: Any, path: Path) -> None:
    data = path.with_name(path.name + ".data")
    fresh = path.with_name("shared-" + path.name)
    onnx.save(
        model,
        fresh,
        save_as_external_data=True,
        location="shared.data",
        size_threshold=1024,
        convert_attribute=False,
    )
    os.replace(path.with_name("shared.data"), data)
    # The file name of the external data is written in the graph; set the final one without loading the data.
    graph = onnx.load(fresh, load_external_data=False)
    for item in graph.graph.initializer:
        for entry in item.external_data:
            if entry.key == "location":
                entry.value = data.name
    onnx.save(graph, path)
    fresh.unlink()


if __name__ == "__main__":
    changed = share_embedding(Path(sys.argv[1]))
    sys.stdout.write("shared\n" if changed else "left as it is\n")
