"""`forebay ask` and `forebay chat`: one question, or a conversation, with an edge node."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from deploy.client import EdgeClient, chat_request
from deploy.command import UsageProblem
from protos.forebay.v1 import common_pb2, inference_pb2

API_KEY_VARIABLE = "FOREBAY_API_KEY"


def connect(address: str, *, ca: Path | None) -> EdgeClient:
    """A client for `address`; with `ca`, over TLS trusting that PEM file. Sends FOREBAY_API_KEY."""
    credentials = None
    if ca is not None:
        try:
            credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        except OSError as error:
            raise UsageProblem(f"cannot read {ca}: {error.strerror}") from error
    return EdgeClient(address, credentials=credentials, api_key=os.environ.get(API_KEY_VARIABLE))


async def ask(
    client: EdgeClient,
    messages: Sequence[tuple[str, str]],
    *,
    model: str,
    tier: str,
    max_tokens: int,
    timeout_s: float,
    facts: bool,
) -> str:
    """Stream one answer to stdout, its facts to stderr, and return the text.

    Raises:
        ForebayError: As the server says.
    """
    request = chat_request(messages, model=model, tier=tier, max_tokens=max_tokens)
    text = ""
    async for event in client.stream(request, timeout_s=timeout_s):
        if event.HasField("delta"):
            sys.stdout.write(event.delta.text)
            sys.stdout.flush()
        elif event.HasField("final"):
            text = event.final.text
            sys.stdout.write("\n")
            sys.stdout.flush()
            if facts:
                sys.stderr.write(f"  -> {describe_final(event.final)}\n")
    return text


async def chat(client: EdgeClient, *, model: str, tier: str, max_tokens: int, timeout_s: float) -> None:
    """Read lines until `/quit` or the end of input; the whole conversation goes along each time."""
    messages: list[tuple[str, str]] = []
    sys.stderr.write("/quit or ctrl-D ends\n")
    while (line := await asyncio.to_thread(_read_line)) is not None and line != "/quit":
        if not line:
            continue
        messages.append(("user", line))
        answer = await ask(
            client, messages, model=model, tier=tier, max_tokens=max_tokens, timeout_s=timeout_s, facts=True
        )
        messages.append(("assistant", answer))


def describe_final(final: inference_pb2.GenerateResponse) -> str:
    """Tier, reason, confidence, release and times in one line."""
    decision, timings = final.decision, final.timings
    tier = common_pb2.Tier.Name(decision.tier).removeprefix("TIER_").lower()
    reason = common_pb2.Reason.Name(decision.reason).removeprefix("REASON_").lower()
    confidence = f", confidence {decision.confidence:.2f}" if decision.HasField("confidence") else ""
    degraded = ", degraded" if decision.degraded else ""
    return (
        f"{tier} ({reason}{degraded}){confidence}, {final.model}, "
        f"first token {timings.time_to_first_token_s:.2f} s, total {timings.total_s:.2f} s"
    )


def _read_line() -> str | None:
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    return line.strip() if line else None
