"""The worker's loop, spoken to over its bare socket."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from edge.engine.frames import (
    Cancel,
    Command,
    ErrorWire,
    Fault,
    FinishedWire,
    FrameWriter,
    Load,
    Ready,
    Refused,
    Report,
    ReportReader,
    Shutdown,
    Step,
    Submit,
    TokensWire,
)
from edge.engine.protocol import EngineRequest
from edge.engine.worker import EXIT_FAULT, EXIT_REFUSED
from protos.values import SamplingParams
from tests.fakes.moody_worker import COMMAND, RAISE, moody_spec
from tests.fakes.waiting import eventually


@dataclass
class Peer:
    """The parent's end."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    def __post_init__(self) -> None:
        self._reader = ReportReader()
        self._received: list[Report] = []

    def send(self, *commands: Command) -> None:
        self.sock.sendall(b"".join(bytes(FrameWriter().frame(command)) for command in commands))

    def receive(self) -> Report:
        while not self._received:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self._received += self._reader.feed(data)
        return self._received.pop(0)

    def wait(self) -> int:
        return self.process.wait(timeout=20)


@pytest.fixture
def peer() -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    process = subprocess.Popen(
        [*COMMAND, "--fd", str(theirs.fileno())], pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL
    )
    theirs.close()
    yield Peer(process, ours)
    ours.close()
    process.kill()
    process.wait()


def submit(name: str, *, mood: int = 0, tokens: int = 5) -> Submit:
    sampling = SamplingParams(max_tokens=tokens, seed=0)
    return Submit(EngineRequest(request_id=name, prompt_tokens=(mood, 1), sampling=sampling))


def test_it_loads_answers_and_ends_when_told(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 5.0))
    assert isinstance(peer.receive(), Ready)
    peer.send(submit("a"))
    events = []
    while not any(isinstance(event, FinishedWire) for event in events):
        report = peer.receive()
        assert isinstance(report, Step)
        events += report.events
    assert sum(len(event.stats) for event in events if isinstance(event, TokensWire)) == 5
    peer.send(Shutdown())
    assert peer.wait() == 0


def test_one_frame_carries_a_step_of_all_requests(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 5.0))
    peer.receive()
    peer.send(*(submit(name, tokens=50) for name in "abcd"))
    most = 0
    for _ in range(30):
        report = peer.receive()
        assert isinstance(report, Step)
        most = max(most, len({e.request_id for e in report.events if isinstance(e, TokensWire)}))
    assert most == 4


def test_an_idle_worker_beats(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 0.02))
    peer.receive()
    assert [peer.receive() for _ in range(3)] == [Step((), 0, 0, 0)] * 3


def test_a_refused_request_gets_one_error_and_a_cancelled_one_nothing(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 5.0))
    peer.receive()
    peer.send(submit("long", tokens=10_000), submit("left", mood=1, tokens=100), Cancel("left"))
    report = peer.receive()
    assert isinstance(report, Step)
    assert [(e.request_id, type(e)) for e in report.events] == [("long", ErrorWire)]
    assert (report.running, report.waiting) == (0, 0)


def test_a_model_that_cannot_be_served_is_refused(peer: Peer) -> None:
    peer.send(Load(moody_spec("refuse"), 5.0))
    assert peer.receive() == Refused("the graph has an unknown input")
    assert peer.wait() == EXIT_REFUSED


def test_a_fault_in_a_step_is_reported_before_the_end(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 5.0))
    peer.receive()
    peer.send(submit("a", mood=RAISE))
    assert peer.receive() == Fault("RuntimeError: a step went wrong")
    assert peer.wait() == EXIT_FAULT


def test_it_ends_when_the_other_end_is_closed(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 60.0))
    peer.receive()
    peer.sock.close()
    assert peer.wait() == 0


def test_nonsense_ends_it(peer: Peer) -> None:
    peer.sock.sendall(b"\x00\x00\x00\x01\xc1")
    assert peer.wait() not in (0, EXIT_REFUSED)


def test_ctrl_c_is_the_parents_business_and_sigterm_is_not(peer: Peer) -> None:
    peer.send(Load(moody_spec(), 5.0))
    peer.receive()
    peer.process.send_signal(signal.SIGINT)
    peer.send(submit("a"))
    assert isinstance(peer.receive(), Step)
    peer.process.send_signal(signal.SIGTERM)
    assert peer.wait() == -signal.SIGTERM


async def test_a_parent_that_does_not_read_stops_the_decoding_and_loses_nothing(peer: Peer) -> None:
    peer.send(Load(moody_spec(max_batch=16, context_tokens=2048), 60.0))
    peer.receive()
    worker = psutil.Process(peer.process.pid)
    before = worker.memory_info().rss
    peer.send(*(submit(f"r{n}", tokens=2000) for n in range(16)))
    used = [worker.cpu_times().user]

    def stands_still() -> bool:
        used.append(worker.cpu_times().user)
        return len(used) > 100 and used[-1] - used[-60] < 0.01 and used[-1] > used[0]

    await eventually(stands_still)
    assert worker.memory_info().rss - before < 32 * 1024 * 1024
    tokens = finished = 0
    while finished < 16:
        report = peer.receive()
        assert isinstance(report, Step)
        tokens += sum(len(event.stats) for event in report.events if isinstance(event, TokensWire))
        finished += sum(isinstance(event, FinishedWire) for event in report.events)
    assert tokens == 16 * 2000
