"""The worker process: one loaded variant behind one socket. `python -m edge.engine.worker --fd N`.

It is started with one end of a socket pair, reads a `Load`, answers `Ready` (or `Refused`, and ends), and
then steps the engine as long as there is work, taking in commands between steps and sending one frame per
step.

Invariants
- It ends when its parent does: at end of file on the socket, and on Linux by the kernel's signal.
- Its memory does not grow when nobody reads: sending blocks, and then nothing is decoded.
- An exception in a step ends it, after a `Fault`: native state is not trusted after an error.
- SIGINT is ignored (ctrl-C reaches the whole terminal; the parent decides), SIGTERM ends it at once.

No asyncio, no gRPC and no threads of its own: the engine's threads are onnxruntime's or torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge.engine.core import CoreEvent, CoreLimits, EngineCore
from edge.engine.detokenizer import TokenizerText
from edge.engine.frames import (
    Cancel,
    Command,
    CommandReader,
    Fault,
    FrameError,
    FrameWriter,
    Load,
    Ready,
    Refused,
    Report,
    Shutdown,
    Step,
    Submit,
    SubmitLabels,
    event_to_wire,
)
from edge.engine.model import StepModel
from edge.engine.protocol import EngineInfo, EngineRequest, EngineStats, LabelRequest
from edge.engine.spec import EngineSpec
from protos.errors import ForebayError

EXIT_REFUSED = 3
EXIT_FAULT = 70
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 256 * 1024


class Core(Protocol):
    """The part of `EngineCore` that the loop drives."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: EngineRequest) -> None: ...

    def submit_labels(self, request: LabelRequest) -> None: ...

    def cancel(self, request_id: str) -> bool: ...

    def step(self) -> list[tuple[str, CoreEvent]]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """A core that is ready to step."""

    core: Core
    info: EngineInfo


class _ParentGoneError(Exception):
    """End of file, or a reset, on the socket."""


def load_engine(spec: EngineSpec) -> LoadedEngine:
    """Load the model that the spec names.

    Raises:
        ForebayError: It cannot be served: `UnsupportedGraphError`, `UnsupportedModelError`.
    """
    model = _load_model(spec)
    core = EngineCore(
        model,
        tokenizer=TokenizerText.load(Path(spec.tokenizer_json)),
        eos_token_ids=frozenset(spec.eos_token_ids),
        limits=CoreLimits(
            kv_capacity_tokens=spec.kv_tokens,
            max_waiting=spec.max_waiting,
            prefill_slice_s=spec.prefill_slice_s,
        ),
        clock=time.monotonic,
    )
    return LoadedEngine(core=core, info=engine_info(spec, model))


def engine_info(spec: EngineSpec, model: StepModel) -> EngineInfo:
    """Facts about a loaded model under a spec."""
    return EngineInfo(
        variant=spec.variant,
        engine=spec.engine,
        context_tokens=model.context_tokens,
        max_batch=model.max_rows,
        kv_capacity_tokens=spec.kv_tokens,
        kv_token_bytes=model.kv_token_bytes,
    )


def _load_model(spec: EngineSpec) -> StepModel:
    # Each engine's library is imported only where a release names it.
    if spec.engine == "torch":
        from edge.engine.torch_model import TorchModel

        return TorchModel.load(
            Path(spec.model_dir),
            variant=spec.variant,  # type: ignore[arg-type]  # load checks the name
            max_rows=spec.max_batch,
            context_tokens=spec.context_tokens,
            threads=spec.threads,
            device=spec.device,
        )
    from edge.engine.ort_model import OrtModel

    return OrtModel.load(
        Path(spec.model_dir),
        max_rows=spec.max_batch,
        context_tokens=spec.context_tokens,
        threads=spec.threads,
        provider=spec.device,  # type: ignore[arg-type]  # load checks the name
    )


def run(fd: int, *, load: Callable[[EngineSpec], LoadedEngine] = load_engine) -> int:
    """Serve the parent at the other end of `fd` until it goes or says so. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    link = _Link(socket.socket(fileno=fd))
    try:
        first = link.receive_first()
        try:
            loaded = load(first.spec)
        except ForebayError as error:
            link.send(Refused(error.message))
            return EXIT_REFUSED
        # What loading made stays; the collector need not look at it again during a step.
        gc.collect()
        gc.freeze()
        link.send(Ready(loaded.info))
        return _serve(link, loaded.core, first.heartbeat_s)
    except _ParentGoneError:
        return 0


def _serve(link: _Link, core: Core, heartbeat_s: float) -> int:
    silent_since = time.monotonic()
    while True:
        commands = link.receive(0.0 if core.has_work else heartbeat_s)
        if any(isinstance(command, Shutdown) for command in commands):
            return 0
        refusals = [refusal for command in commands for refusal in _obey(core, command)]
        if refusals or any(isinstance(command, Cancel) for command in commands):
            # Before the step, so that refusals and freed places are known without waiting for it.
            link.send(_report(core, refusals))
        try:
            events = core.step() if core.has_work else []
        except Exception as error:  # whatever it is, this process is done
            traceback.print_exc()
            link.send(Fault(f"{type(error).__name__}: {error}"))
            return EXIT_FAULT
        now = time.monotonic()
        if events or now - silent_since >= heartbeat_s:
            link.send(_report(core, events))
            silent_since = now


def _report(core: Core, events: list[tuple[str, CoreEvent]]) -> Step:
    stats = core.stats()
    wires = tuple([event_to_wire(request_id, event) for request_id, event in events])
    return Step(wires, stats.running, stats.waiting, stats.kv_reserved_tokens)


def _obey(core: Core, command: Command) -> list[tuple[str, CoreEvent]]:
    """Carry out a command; a refusal is the request's only event."""
    if isinstance(command, Cancel):
        core.cancel(command.request_id)
        return []
    if isinstance(command, Submit | SubmitLabels):
        try:
            if isinstance(command, Submit):
                core.submit(command.request)
            else:
                core.submit_labels(command.request)
        except ForebayError as error:
            return [(command.request.request_id, error)]
    return []


class _Link:
    """The worker's end of the socket. Blocking to send, never longer than asked to receive."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._reader = CommandReader()
        self._writer = FrameWriter()

    def receive_first(self) -> Load:
        """Wait for the `Load`. Raises _ParentGoneError, FrameError."""
        while True:
            commands = self._read()
            if commands:
                if len(commands) != 1 or not isinstance(commands[0], Load):
                    raise FrameError("the first frame must be the only one, and a Load")
                return commands[0]

    def receive(self, wait_s: float) -> list[Command]:
        """The commands that are there, waiting at most `wait_s` for the first."""
        return self._read() if self._poll.poll(wait_s * 1000) else []

    def send(self, report: Report) -> None:
        """Raises _ParentGoneError."""
        try:
            self._sock.sendall(self._writer.frame(report))
        except OSError as error:
            raise _ParentGoneError from error

    def _read(self) -> list[Command]:
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise _ParentGoneError from error
        if not data:
            raise _ParentGoneError
        return self._reader.feed(data)


def _die_with_parent() -> None:
    """Linux: be killed when the thread that started this process ends, even while native code runs."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call above leaves an end of file, which the first receive sees.


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="Engine worker; started by an edge node, not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    status = run(parser.parse_args().fd)
    # Not through the interpreter's end: native thread pools may hang or crash there, and all is said.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
