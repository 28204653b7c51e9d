"""The first engine: ONNX Runtime over graphs from onnxruntime-genai's model builder.

It implements `edge.engine.model.StepModel`, and is the only module that imports onnxruntime.

The graphs (grouped-query attention with a shared buffer for past and present keys and values) write a step's
keys and values into the memory that they read from. So each `past_key_values.*` input and its `present.*`
output are bound to the same address in the arena (`edge.engine.kv`), and a step moves no KV memory at all.
A row's attention mask is ones up to its own length, which is what lets rows of any lengths share a step.

Invariants
- Inputs and outputs are matched by name: the graphs list all keys before all values.
- Every address bound stays valid until `close`: arena and arrays live as long as the object.
- Logits handed out are valid until the next call.

It knows no requests, no scheduling and no sampling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from edge.engine.genai_config import GenaiConfig, UnsupportedGraphError, check_tensors, read_config
from edge.engine.kv import KvArena
from edge.engine.model import Float32, Int64

Provider = Literal["cpu"]

# Logits buffers up to this many positions are kept between calls; longer ones are made anew and dropped.
_KEPT_POSITIONS = 256


class OrtModel:
    """A loaded graph and its KV arena; see `edge.engine.model.StepModel` for the methods' contract."""

    def __init__(
        self, session: ort.InferenceSession, config: GenaiConfig, *, max_rows: int, context_tokens: int
    ) -> None:
        self._session: ort.InferenceSession | None = session
        self._max_rows = max_rows
        self._context_tokens = context_tokens
        self._vocab_size = _vocab_size(session, config)
        self._inputs = config.model.decoder.inputs
        self._outputs = config.model.decoder.outputs
        self._has_positions = self._inputs.position_ids in {i.name for i in session.get_inputs()}
        tensors = {tensor.name: tensor.type for tensor in (*session.get_inputs(), *session.get_outputs())}
        self._shape, self._logits_dtype = check_tensors(tensors, config)
        self._arena = KvArena(self._shape, max_rows=max_rows, context_tokens=context_tokens)
        self._kv_names = [
            (past % layer, present % layer)
            for layer in range(self._shape.layers)
            for past, present in (
                (self._inputs.past_key_names, self._outputs.present_key_names),
                (self._inputs.past_value_names, self._outputs.present_value_names),
            )
        ]
        # One binding per shape of KV memory: `n` rows from the front, or one row anywhere.
        self._front: dict[int, ort.IOBinding] = {}
        self._single: dict[int, ort.IOBinding] = {}
        self._tokens = np.zeros(max(max_rows, context_tokens), np.int64)
        self._positions = np.zeros(max(max_rows, context_tokens), np.int64)
        self._ones = np.ones(context_tokens, np.int64)
        self._mask = np.ones(max_rows * context_tokens, np.int64)
        self._range = np.arange(context_tokens, dtype=np.int64)
        self._logits = np.empty((max_rows, self._vocab_size), self._logits_dtype)

    @classmethod
    def load(
        cls,
        variant_dir: Path,
        *,
        max_rows: int,
        context_tokens: int,
        threads: int,
        provider: Provider = "cpu",
    ) -> Self:
        """Load `model.onnx` and `genai_config.json`.

        Args:
            variant_dir: What the builder wrote, or a release's `edge/<variant>`.
            max_rows: Most requests in one decode step.
            context_tokens: Most tokens of a row, prompt and answer together.
            threads: CPU threads of one step.
            provider: Where the graph runs. Keys and values of a row move between rows, for which ONNX
                Runtime has no call on an accelerator, so there is only `cpu`; the torch engine has `cuda`.

        Raises:
            UnsupportedGraphError: Files missing or broken, another kind of graph, a context that it cannot
                hold, or an unknown provider.
        """
        if provider not in get_args(Provider):
            raise UnsupportedGraphError(f"the ONNX engine runs on cpu, not on {provider!r}")
        config = read_config(variant_dir)
        if not config.search.past_present_share_buffer:
            raise UnsupportedGraphError(f"{variant_dir.name} keeps past and present in separate buffers")
        if context_tokens > config.model.context_length:
            raise UnsupportedGraphError(
                f"{variant_dir.name} knows {config.model.context_length} positions, not {context_tokens}"
            )
        path = variant_dir / config.model.decoder.filename
        try:
            session = ort.InferenceSession(
                str(path), sess_options=_options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own exceptions have no common base but this
            raise UnsupportedGraphError(f"cannot load {variant_dir.name}/{path.name}: {error}") from error
        return cls(session, config, max_rows=max_rows, context_tokens=context_tokens)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def kv_token_bytes(self) -> int:
        return self._shape.token_bytes

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        count = int(tokens.shape[0])
        end = start + count
        if not 0 <= row < self._max_rows or count < 1 or start < 0 or end > self._context_tokens:
            raise ValueError(f"row {row}, positions {start}…{end} do not lie in the arena")
        binding = self._single.get(row)
        if binding is None:
            binding = self._single[row] = self._bind_kv(row, 1)
        self._tokens[:count] = tokens
        self._bind_input(binding, self._inputs.input_ids, self._tokens, [1, count])
        self._bind_input(binding, self._inputs.attention_mask, self._ones, [1, end])
        if self._has_positions:
            self._positions[:count] = self._range[start:end]
            self._bind_input(binding, str(self._inputs.position_ids), self._positions, [1, count])
        logits = self._logits_for(count)
        self._run(binding, logits, [1, count, self._vocab_size])
        return self._as_float32(logits[:count] if all_logits else logits[count - 1 : count])

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        rows = int(tokens.shape[0])
        if not 1 <= rows <= self._max_rows or lengths.shape != tokens.shape or int(lengths.min()) < 0:
            raise ValueError(f"cannot decode {rows} rows of lengths {lengths.tolist()}")
        total = int(lengths.max()) + 1
        if total > self._context_tokens:
            raise ValueError(f"a row is full: {total} of {self._context_tokens} tokens")
        binding = self._front.get(rows)
        if binding is None:
            binding = self._front[rows] = self._bind_kv(0, rows)
            self._bind_input(binding, self._inputs.input_ids, self._tokens, [rows, 1])
            if self._has_positions:
                self._bind_input(binding, str(self._inputs.position_ids), self._positions, [rows, 1])
        self._tokens[:rows] = tokens
        self._positions[:rows] = lengths
        mask = self._ones  # all that a lone row needs
        if rows > 1:
            mask = self._mask
            ragged = mask[: rows * total].reshape(rows, total)
            np.less_equal(self._range[:total], lengths[:, None], out=ragged)
        self._bind_input(binding, self._inputs.attention_mask, mask, [rows, total])
        self._run(binding, self._logits, [rows, 1, self._vocab_size])
        return self._as_float32(self._logits[:rows])

    def move_row(self, source: int, target: int, length: int) -> None:
        self._arena.move(source, target, length)

    def release_row(self, row: int) -> None:
        self._arena.release(row)

    def close(self) -> None:
        """Drop the graph and the arena. The object cannot be used afterwards."""
        self._front.clear()
        self._single.clear()
        self._session = None
        self._arena.close()

    def _bind_kv(self, row: int, rows: int) -> ort.IOBinding:
        """A binding whose KV memory is `rows` rows from `row` on."""
        assert self._session is not None
        binding = self._session.io_binding()
        shape, dtype = self._arena.row_shape(rows), self._shape.dtype.type
        for index, (past, present) in enumerate(self._kv_names):
            address = self._arena.address(index, row)
            binding.bind_input(past, "cpu", 0, dtype, shape, address)
            binding.bind_output(present, "cpu", 0, dtype, shape, address)
        return binding

    def _bind_input(self, binding: ort.IOBinding, name: str, array: Int64, shape: list[int]) -> None:
        binding.bind_input(name, "cpu", 0, np.int64, shape, array.ctypes.data)

    def _run(self, binding: ort.IOBinding, logits: npt.NDArray[Any], shape: list[int]) -> None:
        assert self._session is not None
        binding.bind_output(
            self._outputs.logits, "cpu", 0, self._logits_dtype.type, shape, logits.ctypes.data
        )
        self._session.run_with_iobinding(binding)

    def _logits_for(self, positions: int) -> npt.NDArray[Any]:
        if positions > len(self._logits):
            logits = np.empty((positions, self._vocab_size), self._logits_dtype)
            if positions > _KEPT_POSITIONS:
                return logits
            self._logits = logits
        return self._logits

    def _as_float32(self, logits: npt.NDArray[Any]) -> Float32:
        return logits.astype(np.float32, copy=False)


def _vocab_size(session: ort.InferenceSession, config: GenaiConfig) -> int:
    """Width of the logits: the graph's own where it says one, since memory is bound by it."""
    shapes = {output.name: output.shape for output in session.get_outputs()}
    width = shapes.get(config.model.decoder.outputs.logits, [None])[-1]
    return width if isinstance(width, int) else config.model.vocab_size


def _options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Masks grow with every step: a memory pattern per shape would be made, kept, and never used again.
    options.enable_mem_pattern = False
    # Spinning between the operators of a step gains a third of the speed. Between steps the cores belong to
    # sampling and to the servicer's process.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options
