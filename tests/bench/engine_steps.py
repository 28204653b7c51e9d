"""Raw speed of the engine core, without process border and gRPC, beside onnxruntime-genai on the same graph.

Both decode greedily from the same prompt, with as many threads, and both are timed from the first to the last
token. Rounds of the two alternate, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.engine.core import CoreLimits, EngineCore
from edge.engine.detokenizer import Detokenizes
from edge.engine.ort_model import OrtModel
from edge.engine.protocol import EngineRequest, Tokens
from protos.values import SamplingParams

CONTEXT_TOKENS = 1024
STREAMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """Tokens per second, medians over the rounds."""

    core_one_stream: float
    core_eight_streams: float
    genai_one_stream: float


def measure(
    variant_dir: Path,
    tokenizer: Detokenizes,
    prompt: tuple[int, ...],
    *,
    threads: int = 2,
    tokens: int = 128,
    rounds: int = 5,
) -> StepSpeed:
    """Measure one variant. Needs onnxruntime-genai."""
    generator = _genai(variant_dir, prompt, threads=threads, tokens=tokens)
    model = OrtModel.load(variant_dir, max_rows=STREAMS, context_tokens=CONTEXT_TOKENS, threads=threads)
    core = EngineCore(
        model,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(),  # neither side stops early
        limits=CoreLimits(kv_capacity_tokens=STREAMS * CONTEXT_TOKENS),
        clock=time.monotonic,
    )
    one, eight, peer = [], [], []
    for _ in range(rounds + 1):  # the first round warms up
        peer.append(generator())
        one.append(_core(core, prompt, streams=1, tokens=tokens))
        eight.append(_core(core, prompt, streams=STREAMS, tokens=tokens))
    model.close()
    gc.collect()
    return StepSpeed(
        core_one_stream=statistics.median(one[1:]),
        core_eight_streams=statistics.median(eight[1:]),
        genai_one_stream=statistics.median(peer[1:]),
    )


def _core(core: EngineCore, prompt: tuple[int, ...], *, streams: int, tokens: int) -> float:
    for stream in range(streams):
        sampling = SamplingParams(max_tokens=tokens)
        core.submit(EngineRequest(request_id=str(stream), prompt_tokens=prompt, sampling=sampling))
    counts: dict[str, int] = {}
    began, counted = 0.0, 0
    while core.has_work:
        events = core.step()
        before = len(counts)
        for request_id, event in events:
            if isinstance(event, Tokens):
                counts[request_id] = counts.get(request_id, 0) + len(event.stats)
        if before < streams == len(counts):
            # All prompts are read: from here on every step decodes all streams.
            began, counted = time.perf_counter(), sum(counts.values())
        if max(counts.values(), default=0) == tokens:
            break
    speed = (sum(counts.values()) - counted) / (time.perf_counter() - began)
    for stream in range(streams):
        core.cancel(str(stream))
    return speed


def _genai(variant_dir: Path, prompt: tuple[int, ...], *, threads: int, tokens: int) -> Callable[[], float]:
    import onnxruntime_genai as og

    config: Any = og.Config(str(variant_dir))
    config.overlay(
        '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}' % threads  # noqa: UP031
    )
    model: Any = og.Model(config)

    def run() -> float:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=CONTEXT_TOKENS, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt, np.int32))
        generator.generate_next_token()
        began = time.perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return (tokens - 1) / (time.perf_counter() - began)

    return run
