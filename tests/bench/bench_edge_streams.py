"""The whole edge beside onnxruntime-genai: gRPC, process border, sampling and statistics against a bare loop.

The node runs as in production, in a process of its own; the client streams over loopback. Both sides decode
greedily from the same prompt on the same graph with as many threads, in alternating rounds; medians count.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc.aio

from deploy.local import free_port
from edge.models import LoadedRelease, ReleaseStore
from edge.text.tokenizer import ChatTokenizer
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.values import ChatMessage, Role
from tests.bench.engine_steps import genai_loop
from tests.bench.registry import Row
from tests.places import edge_release

ASKED = "Write a long story about a parcel that travels around the world."
TOKENS = 128
ROUNDS = 5
STREAMS = 8
LINES = {"": "support-bot", "_qwen": "support-bot-qwen"}


def edge_single_stream() -> Mapping[str, Row]:
    """One stream through the whole edge; the peer is genai's own Generator loop."""
    rows = {}
    for suffix, release in _releases().items():
        genai = _generator(release)

        async def measure(speed: Callable[[int], object], genai: Callable[[], float] = genai) -> Row:
            ours, peer = [], []
            for _ in range(ROUNDS + 1):
                peer.append(await asyncio.to_thread(genai))
                ours.append(await speed(1))  # type: ignore[misc]
            return Row(value=statistics.median(ours[1:]), unit="token/s", peer=statistics.median(peer[1:]))

        rows[f"edge_single_stream{suffix}"] = _with_node(release, measure)
    return rows


def edge_eight_streams() -> Mapping[str, Row]:
    """Eight streams at once; the peer is one stream through the same node."""
    rows = {}
    for suffix, release in _releases().items():

        async def measure(speed: Callable[[int], object]) -> Row:
            eight, one = [], []
            for _ in range(ROUNDS + 1):
                one.append(await speed(1))  # type: ignore[misc]
                eight.append(await speed(STREAMS))  # type: ignore[misc]
            return Row(value=statistics.median(eight[1:]), unit="token/s", peer=statistics.median(one[1:]))

        rows[f"edge_eight_streams{suffix}"] = _with_node(release, measure)
    return rows


def _releases() -> dict[str, LoadedRelease]:
    """The lines that the store has, by the suffix of their rows."""
    store = ReleaseStore(edge_release().parents[1])
    return {suffix: store.resolve(line) for suffix, line in LINES.items() if store.versions(line)}


def _generator(release: LoadedRelease) -> Callable[[], float]:
    prompt = ChatTokenizer.load(release.tokenizer_dir).encode_chat(
        [ChatMessage(role=Role.USER, content=ASKED)]
    )
    return genai_loop(release.variant_dir("int4"), prompt, threads=os.cpu_count() or 1, tokens=TOKENS)


def _with_node(release: LoadedRelease, measure: Callable[[Callable[[int], object]], object]) -> Row:
    """Run `measure` with a function that streams n answers at once and gives tokens per second."""
    port = free_port(0)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "edge.toml"
        config.write_text(
            f'[server]\nlisten = "127.0.0.1:{port}"\n'
            f'[release]\nstore = "{release.directory.parents[1]}"\nline = "{release.ref.line}"\n'
            'variant = "int4"\n[engine]\ncontext_tokens = 1024\n'
        )
        node = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "edge", "serve", "--config", str(config)]
        )
        try:

            async def run() -> Row:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    await asyncio.wait_for(channel.channel_ready(), 120)
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)

                    async def speed(streams: int) -> float:
                        began = time.perf_counter()
                        spans = await asyncio.gather(
                            *(_stream(stub, release.ref.line) for _ in range(streams))
                        )
                        if streams == 1:
                            # As the peer: from the first token to the last.
                            first, last, tokens = spans[0]
                            return (tokens - 1) / (last - first)
                        return sum(tokens for _, _, tokens in spans) / (time.perf_counter() - began)

                    return await measure(speed)  # type: ignore[misc,no-any-return]

            return asyncio.run(run())
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(30)


async def _stream(stub: inference_pb2_grpc.InferenceServiceAsyncStub, line: str) -> tuple[float, float, int]:
    """Times of the first and the last message, and how many tokens the answer has."""
    request = inference_pb2.GenerateRequest(
        model=line,
        messages=[common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content=ASKED)],
        sampling=common_pb2.SamplingParams(max_tokens=TOKENS),
        policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_EDGE_ONLY),
    )
    first = 0.0
    call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(request=request), timeout=300)
    try:
        async for event in call:
            first = first or time.perf_counter()
            if event.HasField("final"):
                return first, time.perf_counter(), event.final.usage.edge_tokens
    finally:
        call.cancel()
    raise RuntimeError("the stream ended without its last message")


BENCHES = {"edge_single_stream": edge_single_stream, "edge_eight_streams": edge_eight_streams}
