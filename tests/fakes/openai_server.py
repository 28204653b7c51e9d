"""A small OpenAI-compatible server over asyncio streams, with vLLM's extensions that the cloud tier uses.

In a test: `async with FakeOpenAIServer(socket) as server`. As a child of the supervisor: run this file with
`--uds PATH`. Standard library only, so that a child starts in a moment.

Tokens are bytes: token id 65 is "A". A conversation is tokenized as its contents, joined. What it answers,
and how it misbehaves, is set by `Script`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass
class Script:
    """How the server behaves.

    Attributes:
        reply: Text pieces of every completion, one token each.
        finish_reason: As the last piece says.
        stop_after: Close the connection after so many pieces, without an end.
        error_after: Send an error event after so many pieces.
        hold_after: After so many pieces, wait for `FakeOpenAIServer.release`.
        refuse: (status, param, message) for every completion.
        healthy: What /health says.
        score_none: Leave out `prompt_logprobs`.
        plain: Know only OpenAI's own paths: no /health, no /tokenize.
    """

    reply: list[str] = field(default_factory=lambda: ["Hello", " there", "."])
    finish_reason: str | None = "stop"
    stop_after: int | None = None
    error_after: int | None = None
    hold_after: int | None = None
    refuse: tuple[int, str | None, str] | None = None
    healthy: bool = True
    max_model_len: int = 256
    score_none: bool = False
    plain: bool = False


class FakeOpenAIServer:
    """Serves on a Unix socket until closed."""

    def __init__(
        self, socket_path: Path, *, model: str = "support-bot@1", script: Script | None = None
    ) -> None:
        self.socket_path = socket_path
        self.model = model
        self.script = script or Script()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.running = 0
        self.aborted = 0
        self.release = asyncio.Event()
        self.holding = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket_path))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """What clients see when the engine is killed."""
        for writer in list(self._connections):
            writer.transport.abort()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.requests if seen == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                path, body = request
                self.requests.append((path, body))
                await self._answer(path, body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        script = self.script
        if script.plain and path in ("/health", "/tokenize"):
            await _send_json(writer, {"detail": "Not Found"}, 404)
        elif path == "/health":
            await _send(writer, 200 if script.healthy else 503, b"")
        elif path == "/v1/models":
            await _send_json(writer, {"data": [{"id": self.model, "max_model_len": script.max_model_len}]})
        elif path == "/tokenize":
            text = "".join(message["content"] for message in body["messages"])
            await _send_json(writer, {"tokens": list(text.encode()), "count": len(text)})
        elif path == "/v1/completions" and script.refuse is not None:
            status, param, message = script.refuse
            await _send_json(writer, {"error": {"message": message, "param": param, "code": status}}, status)
        elif body.get("stream"):
            await self._stream(body, reader, writer)
        elif path == "/v1/completions":
            await _send_json(writer, self._scored(body))
        else:
            await _send_json(writer, {"error": {"message": "no such path", "code": 404}}, 404)

    async def _stream(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.running += 1
        # Nothing more comes from a client that waits for its answer; an end of file is its leaving.
        gone = asyncio.create_task(reader.read(1))
        work = asyncio.create_task(self._write_stream(body, writer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.aborted += 1
                raise ConnectionResetError
            work.result()
        finally:
            self.running -= 1
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _write_stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        script = self.script
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        pieces = script.reply[: body["max_tokens"]]
        for number, text in enumerate(pieces):
            if script.hold_after == number:
                self.holding.set()
                await self.release.wait()
            if script.stop_after == number:
                await writer.drain()
                writer.transport.abort()
                raise ConnectionResetError
            if script.error_after == number:
                await _send_event(writer, {"error": {"message": "EngineDeadError", "code": 500}})
                break
            cut = len(pieces) < len(script.reply)
            end = ("length" if cut else script.finish_reason) if number == len(pieces) - 1 else None
            token = text.encode()[0]
            choice: dict[str, Any] = {"index": 0, "text": text, "token_ids": [token], "finish_reason": end}
            if "messages" in body:
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
            if (count := body.get("logprobs")) is not None:
                top = {f"token_id:{token + i}": -0.5 - i for i in range(max(count, 1))}
                choice["logprobs"] = {
                    "tokens": [f"token_id:{token}"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [top],
                }
            await _send_event(writer, {"choices": [choice]})
        usage = {
            "prompt_tokens": len(body.get("prompt") or body["messages"]),
            "completion_tokens": len(pieces),
        }
        await _send_event(writer, {"choices": [], "usage": usage})
        await _send_chunk(writer, b"data: [DONE]\n\n")
        await _send_chunk(writer, b"")

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        """A token's log-probability here is minus its id over 100, halved when it occurred before."""
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            scored: list[dict[str, Any] | None] | None = [None]
            for position in range(1, len(prompt)):
                token = prompt[position]
                seen = token in prompt[:position]
                scored.append({str(token): {"logprob": -token / (200 if seen else 100), "rank": 1}})
            if self.script.score_none:
                scored = None
            choices.append({"index": index, "text": "x", "prompt_logprobs": scored})
        # vLLM does not promise an order.
        return {"choices": choices[::-1]}


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]] | None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return lines[0].split(" ")[1], json.loads(body) if body else {}


async def _send(writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()


async def _send_json(writer: asyncio.StreamWriter, value: object, status: int = 200) -> None:
    await _send(writer, status, json.dumps(value).encode())


async def _send_event(writer: asyncio.StreamWriter, value: object) -> None:
    await _send_chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


async def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


# Its segment is known to no resource tracker, as some of vLLM's are not.
_MEMORY_HOLDER = """
import pathlib, sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister("/" + memory.name, "shared_memory")
pathlib.Path(sys.argv[1]).write_text(memory.name)
time.sleep(600)
"""


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--say", default="fake engine up")
    parser.add_argument(
        "--with-worker", type=Path, help="start a child that outlives this, and write its pid here"
    )
    parser.add_argument(
        "--with-memory", type=Path, help="start a child with shared memory, and write its name here"
    )
    arguments = parser.parse_args()
    print(arguments.say, flush=True)  # noqa: T201 - the supervisor's log test reads it
    if arguments.with_worker is not None:
        worker = await asyncio.create_subprocess_exec("sleep", "600")
        arguments.with_worker.write_text(str(worker.pid))
    if arguments.with_memory is not None:
        await asyncio.create_subprocess_exec(sys.executable, "-c", _MEMORY_HOLDER, str(arguments.with_memory))
    async with FakeOpenAIServer(arguments.uds):
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
