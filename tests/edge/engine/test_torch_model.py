"""The torch engine's own promises: architectures, quantization, memory, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch", reason="the torch engine is an extra")
transformers = pytest.importorskip("transformers")

from bitsandbytes.nn.modules import Linear8bitLt  # noqa: E402

from edge.engine.torch_int8 import RowInt8Linear  # noqa: E402
from edge.engine.torch_model import TorchModel, UnsupportedModelError  # noqa: E402

pytestmark = pytest.mark.slow  # importing torch and transformers takes seconds

_TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_TINY, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**_TINY, num_key_value_heads=2),
    "mistral": lambda: transformers.MistralConfig(**_TINY, num_key_value_heads=2, sliding_window=None),
    "gemma2": lambda: transformers.Gemma2Config(
        **_TINY, num_key_value_heads=2, head_dim=16, sliding_window=512
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_TINY),
}


def _save(config: Any, directory: Path) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def _load(directory: Path, variant: Any = "fp32", *, rows: int = 3, context: int = 128) -> TorchModel:
    return TorchModel.load(directory, variant=variant, max_rows=rows, context_tokens=context, threads=2)


@pytest.mark.parametrize("name", _CONFIGS)
def test_ragged_rows_decode_as_transformers_itself_does(name: str, tmp_path: Path) -> None:
    reference = _save(_CONFIGS[name](), tmp_path)
    model = _load(tmp_path)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 211, size) for size in (3, 41, 17)]
    texts = [list(prompt) for prompt in prompts]
    logits = np.stack([model.prefill(row, prompt, 0)[0] for row, prompt in enumerate(prompts)])
    for _ in range(12):
        lengths = np.array([len(text) for text in texts])
        tokens = logits.argmax(axis=-1)
        for text, token in zip(texts, tokens, strict=True):
            text.append(int(token))
        logits = model.decode(tokens, lengths).copy()
    for row, text in enumerate(texts):
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0].numpy()
        start = len(prompts[row])
        assert expected[start - 1 : -1].argmax(axis=-1).tolist() == text[start:]
        np.testing.assert_allclose(logits[row], expected[-1], atol=2e-5)


def test_a_row_of_int8_gets_what_bitsandbytes_gives_it_alone_whoever_shares_the_batch() -> None:
    torch.manual_seed(5)
    plain = torch.nn.Linear(64, 48)
    layer = Linear8bitLt(64, 48, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(plain.state_dict())
    layer = layer.to("cpu").eval()  # moving quantizes; a layer in training multiplies otherwise
    # Numbers that float16 holds exactly: bitsandbytes quantizes from float16.
    rows = torch.randn(9, 64).half().float()
    rows[2, 7], rows[4, 30], rows[4, 31] = 20.0, -11.0, 8.0  # outliers of some rows, in different columns
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in rows])
        shared = layer(rows)
        together = RowInt8Linear(layer)(rows)
    assert (shared - alone).abs().max() > 1e-4, "the case shows nothing: outliers do not spread"
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_released_row_gives_its_memory_back(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**(_TINY | {"max_position_embeddings": 8192}), num_key_value_heads=4)
    _save(config, tmp_path)
    model = _load(tmp_path, rows=4, context=8192)
    process = psutil.Process()
    text = np.ones(2048, np.int64)
    model.prefill(0, text, 0)
    model.release_row(0)
    before = process.memory_info().rss
    for start in range(0, 8192, 2048):
        model.prefill(1, text, start)
    row_bytes = 8192 * model.kv_token_bytes
    full = process.memory_info().rss
    model.release_row(1)
    assert full - process.memory_info().rss >= 0.9 * row_bytes
    assert full - before >= 0.7 * row_bytes


def test_kv_memory_per_token_follows_the_architecture(tmp_path: Path) -> None:
    _save(_CONFIGS["qwen2"](), tmp_path)
    layers, kv_heads, head_dim, float32_bytes = 3, 2, 16, 4
    assert _load(tmp_path).kv_token_bytes == 2 * layers * kv_heads * head_dim * float32_bytes


def test_a_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    _save(transformers.MistralConfig(**_TINY, num_key_value_heads=2, sliding_window=64), tmp_path)
    with pytest.raises(UnsupportedModelError, match="64 tokens, less than the context of 128"):
        _load(tmp_path)
    assert _load(tmp_path, context=64).context_tokens == 64


def test_a_context_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    _save(_CONFIGS["llama"](), tmp_path)
    with pytest.raises(UnsupportedModelError, match="512 positions, not 1024"):
        _load(tmp_path, context=1024)


def test_an_unknown_variant_and_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no variant 'int3'"):
        _load(tmp_path, "int3")
    with pytest.raises(UnsupportedModelError, match="cannot load"):
        _load(tmp_path)


def test_steps_outside_the_arena_are_refused(tmp_path: Path) -> None:
    _save(_CONFIGS["llama"](), tmp_path)
    model = _load(tmp_path)
    with pytest.raises(ValueError, match="do not lie in the arena"):
        model.prefill(0, np.ones(100, np.int64), 60)
    with pytest.raises(ValueError, match="a row is full"):
        model.decode(np.ones(1, np.int64), np.array([128]))
    with pytest.raises(ValueError, match="cannot decode 4 rows"):
        model.decode(np.ones(4, np.int64), np.ones(4, np.int64))
