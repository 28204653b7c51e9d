"""The second engine: any causal decoder that transformers knows, with torch and bitsandbytes.

It implements `edge.engine.model.StepModel` for architectures that the ONNX builder does not know. Variants:
`llm-int8` (Dettmers et al. 2022, vector-wise int8 with outliers in floating point), `nf4` (Dettmers et al.
2023, 4-bit normal float), `bf16` and `fp32`. The last is the reference that the others are measured against.

Invariants
- Importing this module imports torch and transformers, so it is imported only where a release names it.
- KV memory is bounded: arenas of fixed size (`edge.engine.torch_kv`), given back row by row.
- Rows of one decode step may have any lengths: each writes at its own position, and an additive mask hides
  what lies behind its end.
- Every layer attends to the whole context. A model with recurrent or chunked layers, or with a sliding window
  shorter than the context, is refused at load time rather than answered wrongly.

- A row's logits do not depend on which rows share its step, up to rounding (for LLM.int8 that takes
  `edge.engine.torch_int8`).

It knows no requests, no scheduling and no sampling. The number of threads is a property of the process, and
loading sets it.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
import transformers
from transformers.cache_utils import Cache

from edge.engine.model import Float32, Int64
from edge.engine.torch_int8 import isolate_rows
from edge.engine.torch_kv import ArenaLayer
from protos.errors import ForebayError

TorchVariant = Literal["llm-int8", "nf4", "bf16", "fp32"]
VARIANTS: tuple[TorchVariant, ...] = get_args(TorchVariant)

_FULL_CONTEXT_LAYERS = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModelError(ForebayError):
    """The weights cannot be served by this engine. The message says which property is in the way."""

    reason = "UNSUPPORTED_MODEL"


class TorchModel:
    """A loaded model and its KV arena; see `edge.engine.model.StepModel` for the methods' contract."""

    def __init__(self, model: Any, *, max_rows: int, context_tokens: int) -> None:
        if max_rows < 1 or context_tokens < 1:
            raise ValueError("max_rows and context_tokens must be at least 1")
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._max_rows = max_rows
        self._context_tokens = context_tokens
        layers = int(model.config.get_text_config().num_hidden_layers)
        self._layers = [ArenaLayer(max_rows, context_tokens) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        # One token through row 0 tells every layer's head count and width, whatever the architecture.
        self._vocab_size = int(self.prefill(0, np.zeros(1, np.int64), 0).shape[-1])
        self.release_row(0)

    @classmethod
    def load(
        cls,
        weights_dir: Path,
        *,
        variant: TorchVariant,
        max_rows: int,
        context_tokens: int,
        threads: int,
        device: str = "cpu",
    ) -> Self:
        """Load Hugging Face weights from a local directory and quantize them on the way.

        Args:
            weights_dir: `config.json` and safetensors. Nothing is fetched and no code in it is run.
            variant: How the linear layers are held; embeddings and the output layer stay floating point.
            max_rows: Most requests in one decode step.
            context_tokens: Most tokens of a row, prompt and answer together.
            threads: CPU threads of one operation, for the whole process.
            device: `cpu`, `cuda` or `cuda:<n>`.

        Raises:
            UnsupportedModelError: Unknown variant or architecture, or a context that the model cannot hold.
        """
        if variant not in VARIANTS:
            raise UnsupportedModelError(
                f"the torch engine has no variant {variant!r}, only {', '.join(VARIANTS)}"
            )
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        dtype = _compute_dtype(variant, device)
        try:
            config = transformers.AutoConfig.from_pretrained(
                weights_dir, local_files_only=True, trust_remote_code=False
            )
            _check_architecture(config.get_text_config(), context_tokens)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                weights_dir,
                config=config,
                dtype=dtype,
                quantization_config=_quantization(variant, dtype),
                device_map={"": device},
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedModelError(f"cannot load {weights_dir.name} as {variant}: {error}") from error
        accepted = inspect.signature(model.forward).parameters
        if missing := {"position_ids", "past_key_values", "attention_mask"} - accepted.keys():
            raise UnsupportedModelError(f"{type(model).__name__} takes no {', '.join(sorted(missing))}")
        model.eval()  # type: ignore[no-untyped-call]
        if variant == "llm-int8":
            isolate_rows(model)
        return cls(model, max_rows=max_rows, context_tokens=context_tokens)

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
        return sum(layer.token_bytes for layer in self._layers)

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        count = int(tokens.shape[0])
        if not 0 <= row < self._max_rows or count < 1 or start < 0 or start + count > self._context_tokens:
            raise ValueError(f"row {row}, positions {start}…{start + count} do not lie in the arena")
        positions = torch.arange(start, start + count, device=self._device)
        for layer in self._layers:
            layer.aim(slice(row, row + 1), positions, start + count)
        logits = self._forward(tokens[None, :], positions[None, :], start + count, all_logits=all_logits)
        first: Float32 = logits[0]
        return first

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        rows = int(tokens.shape[0])
        longest = int(lengths.max(initial=-1)) + 1
        if not 1 <= rows <= self._max_rows or lengths.shape != tokens.shape or lengths.min() < 0:
            raise ValueError(f"cannot decode {rows} rows of lengths {lengths.tolist()}")
        if longest > self._context_tokens:
            raise ValueError(f"a row is full: {longest} of {self._context_tokens} tokens")
        positions = torch.from_numpy(lengths.astype(np.int64)).to(self._device)
        for layer in self._layers:
            layer.aim(slice(0, rows), positions, longest)
        logits = self._forward(tokens[:, None], positions[:, None], longest, all_logits=False)
        last: Float32 = logits[:, 0]
        return last

    def move_row(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer.move(source, target, length)

    def release_row(self, row: int) -> None:
        for layer in self._layers:
            layer.release(row)

    def close(self) -> None:
        """Drop weights and arena. The object cannot be used afterwards."""
        self._layers.clear()
        self._cache.layers.clear()
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, tokens: Int64, positions: torch.Tensor, width: int, *, all_logits: bool) -> Float32:
        """Tokens and positions of shape (rows, n); `width` keys are visible to the longest row."""
        with torch.inference_mode():
            keys = torch.arange(width, device=self._device)
            hidden = keys[None, None, None, :] > positions[:, None, :, None]
            # A finite minimum, as transformers itself uses: a fully masked query must not become NaN.
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
            keep = {} if all_logits or not self._keeps_logits else {"logits_to_keep": 1}
            logits = self._model(
                input_ids=torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                **keep,
            ).logits
            if not all_logits:
                logits = logits[:, -1:]
            result: Float32 = logits.float().cpu().numpy()
            return result


def _compute_dtype(variant: TorchVariant, device: str) -> torch.dtype:
    """The type of activations, embeddings and KV memory.

    On the CPU the quantized variants compute in float32: measured, bitsandbytes' products are no slower
    than in bfloat16 there, and prefill is three times faster. LLM.int8 is defined on float16.
    """
    if variant == "fp32" or (variant != "bf16" and device == "cpu"):
        return torch.float32
    return torch.float16 if variant == "llm-int8" else torch.bfloat16


def _quantization(variant: TorchVariant, dtype: torch.dtype) -> Any:
    if variant == "llm-int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    if variant == "nf4":
        return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return None


def _check_architecture(config: Any, context_tokens: int) -> None:
    """Refuse what an arena that sees the whole context would compute wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - _FULL_CONTEXT_LAYERS:
        raise UnsupportedModelError(f"{config.model_type} has layers of kind {', '.join(sorted(unknown))}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < context_tokens and kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"{config.model_type} attends to {window} tokens, less than the context of {context_tokens}"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < context_tokens:
        raise UnsupportedModelError(f"{config.model_type} knows {limit} positions, not {context_tokens}")
