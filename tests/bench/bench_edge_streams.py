"""Speed through the whole edge: gRPC, process border, scheduling, sampling, statistics, detokenizing.

The edge node is a child process, as users run it; this process is its client. A figure is the new tokens of
whole requests, greedy and `EDGE_ONLY`, over the wall time from sending to the last answer, prompt included.
The peer of one stream is onnxruntime-genai's own loop, timed over the same prompt and as many tokens on the
same graph with as many threads. Rounds of the two alternate, so that other work on the machine hits both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import tokenizers

from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.manifest import load_manifest
from tests.bench.registry import Bench, BenchError, Row
from tests.fakes.edge_process import EdgeProcess, edge_toml
from tests.places import edge_release

ROUNDS = 5
STREAMS = 8
THREADS = os.cpu_count() or 1
TOKENS = 192
VARIANT = "int4"
# Counting goes on: a chat answer may end early.
PROMPT = ", ".join(str(n) for n in range(1, 13)) + ","
_ROOT = Path(__file__).resolve().parents[2]


def edge_single_stream() -> dict[str, Row]:
    """One stream beside onnxruntime-genai; for each edge model that the store has."""
    rows = {"edge_single_stream": _beside_genai(edge_release())}
    qwen = edge_release().parents[1] / "support-bot-qwen" / "1"
    if qwen.is_dir():
        rows["edge_single_stream_qwen"] = _beside_genai(qwen)
    return rows


def edge_eight_streams() -> dict[str, Row]:
    """Eight streams at once beside one stream of the same node."""
    with _edge(edge_release()) as address:
        one, eight = [], []
        for _ in range(ROUNDS + 1):  # the first round warms up
            one.append(asyncio.run(_edge_speed(address, "support-bot", streams=1))[0])
            eight.append(asyncio.run(_edge_speed(address, "support-bot", streams=STREAMS))[0])
    return {"edge_eight_streams": Row(value=_median(eight), unit="tokens/s", peer=_median(one))}


def _beside_genai(release: Path) -> Row:
    variant = load_manifest(release).edge
    chosen = next(v for v in variant.variants if v.name == VARIANT)
    tokenizer = tokenizers.Tokenizer.from_file(str(release / variant.tokenizer_directory / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    genai = _genai(release / chosen.directory, prompt)
    ours, theirs = [], []
    with _edge(release) as address:
        for _ in range(ROUNDS + 1):  # the first round warms up
            speed, tokens = asyncio.run(_edge_speed(address, release.parent.name, streams=1))
            ours.append(speed)
            theirs.append(genai(tokens))
    return Row(value=_median(ours), unit="tokens/s", peer=_median(theirs))


def _median(rounds: list[float]) -> float:
    return statistics.median(rounds[1:])


@contextlib.contextmanager
def _edge(release: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        toml = edge_toml(release.parents[1], line=release.parent.name, variant=VARIANT, threads=THREADS)
        command = [sys.executable, "-m", "deploy.cli"]
        edge = EdgeProcess(Path(directory), toml, command=command, cwd=_ROOT)
        try:
            yield edge.address
        finally:
            edge.close()


async def _edge_speed(address: str, model: str, *, streams: int) -> tuple[float, int]:
    """Tokens per second over all streams, and how many tokens there were."""
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        began = time.perf_counter()
        counts = await asyncio.gather(*(_stream(stub, model) for _ in range(streams)))
        return sum(counts) / (time.perf_counter() - began), sum(counts)


async def _stream(stub: Any, model: str) -> int:
    request = inference_pb2.GenerateRequest(
        model=model,
        prompt=PROMPT,
        sampling=common_pb2.SamplingParams(max_tokens=TOKENS, temperature=0.0),
        policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_EDGE_ONLY),
    )
    tokens = 0
    async for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(request=request), timeout=300):
        if event.HasField("final"):
            tokens = event.final.usage.edge_tokens
    if tokens < TOKENS // 2:
        raise BenchError(f"the answer ended after {tokens} tokens; too short to time")
    return tokens


def _genai(variant_dir: Path, prompt: list[int]) -> Callable[[int], float]:
    import onnxruntime_genai as og

    config: Any = og.Config(str(variant_dir))
    config.overlay(
        '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}' % THREADS  # noqa: UP031
    )
    model: Any = og.Model(config)

    def run(tokens: int) -> float:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + tokens + 1, do_sample=False)
        began = time.perf_counter()
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
        return tokens / (time.perf_counter() - began)

    return run


BENCHES: dict[str, Bench] = {
    "edge_single_stream": edge_single_stream,
    "edge_eight_streams": edge_eight_streams,
}
