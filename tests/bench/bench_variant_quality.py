"""How far each variant of the edge model is from the float32 reference.

The reference (transformers, float32) answers the sample prompts greedily. Every variant then reads the same
conversations, and at each position its distribution over the next token is compared with the reference's:
the KL divergence, KL(reference ‖ variant) in nats, and whether the most probable token is the same. Positions
inside the answers say what decoding meets; those inside the messages say what label scoring meets.

The peer of an ONNX variant is the published method of the same width: LLM.int8 for int8, NF4 for int4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import tokenizers

from edge.engine.model import Float32, Int64, StepModel
from protos.manifest import load_manifest
from tests.bench.registry import Bench, Row
from tests.places import SAMPLE_TEXTS, edge_release, edge_weights

ANSWER_TOKENS = 64
CHUNK_TOKENS = 128
CONTEXT_TOKENS = 512
THREADS = 2
_PEERS = {"int8": "llm-int8", "int4": "nf4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and the reference's answer, n tokens, and the reference's logits (n, vocab) at each."""

    tokens: Int64
    answer_start: int
    logits: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """From the reference, over many positions: mean KL divergence in nats, share of equal first choices."""

    kl: float
    top1: float
    positions: int


def variant_quality() -> dict[str, Row]:
    """KL divergence and top-1 agreement of int8, int4, llm-int8 and nf4, on answers and on prompts."""
    texts = _reference_texts()
    measured = {}
    for name, load in _variants().items():
        print(f"  {name}", flush=True)
        measured[name] = _measure(load, texts)
    rows: dict[str, Row] = {}
    for name, parts in measured.items():
        peer = measured.get(_PEERS.get(name, ""))
        for part, distance in parts.items():
            against = peer[part] if peer else None
            label = f"variant_quality.{name}.{part}"
            rows[f"{label}_kl"] = Row(value=distance.kl, unit="nats", peer=against.kl if against else None)
            rows[f"{label}_top1"] = Row(
                value=distance.top1, unit="share", peer=against.top1 if against else None
            )
    for part in ("answer", "prompt"):
        count = next(iter(measured.values()))[part].positions
        rows[f"variant_quality.{part}_positions"] = Row(value=count, unit="tokens")
    return rows


def _variants() -> dict[str, Callable[[], StepModel]]:
    """The variants to measure. fp32 is the control: the same weights through ONNX Runtime."""
    release = edge_release()
    ours = {v.name: v for v in load_manifest(release).edge.variants if v.engine == "onnxruntime"}
    return {
        "fp32": lambda: _load_ort(release / ours["fp32"].directory),
        "int8": lambda: _load_ort(release / ours["int8"].directory),
        "int4": lambda: _load_ort(release / ours["int4"].directory),
        "llm-int8": lambda: _load_torch("llm-int8", rows=1),
        "nf4": lambda: _load_torch("nf4", rows=1),
    }


def _load_ort(directory: Any) -> StepModel:
    from edge.engine.ort_model import OrtModel

    return OrtModel.load(directory, max_rows=1, context_tokens=CONTEXT_TOKENS, threads=THREADS)


def _load_torch(variant: Any, *, rows: int) -> StepModel:
    from edge.engine.torch_model import TorchModel

    return TorchModel.load(
        edge_weights(), variant=variant, max_rows=rows, context_tokens=CONTEXT_TOKENS, threads=THREADS
    )


def _reference_texts() -> list[Text]:
    release = edge_release()
    edge = load_manifest(release).edge
    directory = release / edge.tokenizer_directory
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = jinja2.Environment(autoescape=False).from_string(  # noqa: S701 (a prompt, not HTML)
        (directory / "chat_template.jinja").read_text()
    )
    prompts = []
    for line in SAMPLE_TEXTS.read_text().splitlines():
        messages = [{"role": "user", "content": json.loads(line)["text"]}]
        prompt = template.render(messages=messages, add_generation_prompt=True)
        prompts.append(np.array(tokenizer.encode(prompt, add_special_tokens=False).ids))
    reference = _load_torch("fp32", rows=len(prompts))
    answers = _greedy(reference, prompts, frozenset(edge.eos_token_ids))
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = np.concatenate([prompt, np.array(answer, np.int64)])
        texts.append(
            Text(
                tokens=tokens, answer_start=len(prompt), logits=np.concatenate(list(_read(reference, tokens)))
            )
        )
    reference.close()
    return texts


def _greedy(model: StepModel, prompts: list[Int64], ends: frozenset[int]) -> list[list[int]]:
    """The most probable continuation of each prompt, through its end-of-text token or `ANSWER_TOKENS`."""
    logits = np.stack([model.prefill(row, prompt, 0)[0] for row, prompt in enumerate(prompts)])
    lengths = np.array([len(prompt) for prompt in prompts])
    chosen = []
    for _ in range(ANSWER_TOKENS):
        chosen.append(logits.argmax(axis=-1))
        logits = model.decode(chosen[-1], lengths)
        lengths = lengths + 1
    answers = []
    for row in np.stack(chosen, axis=1).tolist():
        end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


def _read(model: StepModel, tokens: Int64) -> Iterator[Float32]:
    """Logits at each token of a text, in chunks."""
    for at in range(0, len(tokens), CHUNK_TOKENS):
        yield model.prefill(0, tokens[at : at + CHUNK_TOKENS], at, all_logits=True).copy()


def _measure(load: Callable[[], StepModel], texts: list[Text]) -> dict[str, Distance]:
    model = load()
    parts: dict[str, list[tuple[Float32, Any]]] = {"answer": [], "prompt": []}
    for text in texts:
        logits = np.concatenate(list(_read(model, text.tokens)))
        model.release_row(0)
        divergence = _divergence(text.logits, logits)
        same = text.logits.argmax(axis=-1) == logits.argmax(axis=-1)
        # The logits at position i speak about token i + 1; nothing follows the last one.
        first = text.answer_start - 1
        parts["prompt"].append((divergence[:first], same[:first]))
        parts["answer"].append((divergence[first:-1], same[first:-1]))
    model.close()
    distances = {}
    for part, pairs in parts.items():
        kl, equal = (np.concatenate(column) for column in zip(*pairs, strict=True))
        distances[part] = Distance(kl=float(kl.mean()), top1=float(equal.mean()), positions=len(kl))
    return distances


def _divergence(reference: Float32, variant: Float32) -> Float32:
    """KL(reference ‖ variant) of each row, in nats; both of shape (n, vocab)."""
    kl = np.empty(len(reference), np.float32)
    for at, pair in enumerate(zip(reference, variant, strict=True)):
        p, q = (_log_softmax(row.astype(np.float64)) for row in pair)
        kl[at] = np.sum(np.exp(p) * (p - q))
    return kl


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalized


BENCHES: dict[str, Bench] = {"variant_quality": variant_quality}
