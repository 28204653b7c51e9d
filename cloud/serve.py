"""The cloud server: parts put together, started, drained and stopped.

Order of a stop: NOT_SERVING and nobody new; running requests end within the grace; the gRPC server closes;
the engine's child ends. A second stop waits for the first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc.aio

from cloud.admission import AdmissionGate, AdmissionLimits
from cloud.classifier import Classifier
from cloud.dataplane import Dataplane
from cloud.engine import Engine, make_engine, model_name
from cloud.releases import find_release
from cloud.servicer import SERVICE_NAME, CloudServicer
from cloud.settings import CloudSettings
from cloud.text import CloudTokenizer
from cloud.vllm.client import VllmClient
from cloud.vllm.lifecycle import Phase
from cloud.vllm.supervisor import VllmSupervisor
from protos.auth import Authenticator
from protos.channel import listen, server_options
from protos.forebay.v1 import cloud_pb2_grpc
from protos.health import HealthServicer, add_health, enable_reflection
from protos.interceptors import BorderInterceptor, remaining_s
from protos.settings import SettingsError

_log = logging.getLogger(__name__)

# Beside one connection per running request: health checks, tokenization, metrics.
_SPARE_CONNECTIONS = 32
# Calls that hold no place: health watchers, status, and requests that are about to be refused.
_SPARE_CALLS = 2048


class CloudServer:
    """One cloud server. `start`, then `wait_ready` where that matters, then `stop`.

    Args:
        environment: What the engine's child inherits, and where `engine.api_key_env` is looked up.
        clock: Monotonic seconds; must be the event loop's clock, on which deadlines are set.
    """

    def __init__(
        self,
        settings: CloudSettings,
        *,
        environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._clock = clock
        self._address: str | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._socket_dir: Path | None = None
        self._client: VllmClient | None = None
        self._engine: Engine | None = None
        self._health: HealthServicer | None = None
        self._server: grpc.aio.Server | None = None
        self._gate = AdmissionGate(_admission_limits(settings), clock=clock)

    @property
    def address(self) -> str:
        """`host:port`, with the port that was bound. Only after `start`."""
        assert self._address is not None, "the server was not started"
        return self._address

    @property
    def phase(self) -> Phase:
        """Where the engine is."""
        return Phase.STOPPED if self._engine is None else self._engine.phase

    @property
    def draining(self) -> bool:
        """Whether a stop has begun: nobody new is let in."""
        return self._gate.closed

    @property
    def engine_pid(self) -> int | None:
        """Of the process that holds the engine's child; None without a child."""
        return self._engine.pid if isinstance(self._engine, VllmSupervisor) else None

    async def start(self) -> None:
        """Listen and begin to start the engine. Health is NOT_SERVING until the engine is ready.

        Raises:
            SettingsError: Something configured cannot be: release, parallelism, certificates, address.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    async def wait_ready(self) -> None:
        """Return once the engine is ready.

        Raises:
            EngineStartFailed: The first start failed; has the end of the engine's log.
        """
        assert self._engine is not None, "the server was not started"
        await self._engine.wait_ready()

    async def stop(self, grace_s: float | None = None) -> None:
        """Drain and stop. `grace_s` is how long running requests may take; None: as configured."""
        if self._stopping is None:
            grace = self._settings.server.drain_grace_s if grace_s is None else grace_s
            self._stopping = asyncio.create_task(self._stop(grace), name="cloud-stop")
        await asyncio.shield(self._stopping)

    def hurry(self) -> None:
        """Cut the grace of a stop short: what still runs ends in an error."""
        self._hurry.set()

    async def _start(self) -> None:
        settings = self._settings
        release = find_release(settings.release)
        tokenizer = await asyncio.to_thread(CloudTokenizer.load, release.model_dir)
        address = settings.engine.url
        socket_path: Path | None = None
        if not address:
            # Made with mode 0700: the socket in it is ours alone.
            self._socket_dir = Path(tempfile.mkdtemp(prefix="forebay-"))
            socket_path = self._socket_dir / "vllm.sock"
            address = f"unix://{socket_path}"
        client = self._client = VllmClient.connect(
            address,
            model=model_name(settings, release),
            max_connections=settings.admission.max_running + _SPARE_CONNECTIONS,
            connect_timeout_s=settings.engine.connect_timeout_s,
            api_key=self._api_key(),
        )
        dataplane = Dataplane(
            release=release.ref,
            client=client,
            tokenizer=tokenizer,
            classifier=Classifier(client, tokenizer),
            gate=self._gate,
            queue_capacity=settings.admission.max_queued,
            ready=lambda: self.phase is Phase.READY,
            clock=self._clock,
        )

        async def healthy() -> bool:
            return await client.healthy(settings.engine.health_timeout_s)

        engine = self._engine = make_engine(
            settings,
            release,
            dataplane,
            socket_path=socket_path,
            healthy=healthy,
            environment=self._environment,
            clock=self._clock,
            listener=self._on_phase,
        )
        self._health = await self._listen(dataplane)
        engine.start()
        _log.info("cloud server for %s on %s", release.ref, self.address)

    async def _listen(self, dataplane: Dataplane) -> HealthServicer:
        settings = self._settings
        authenticator = Authenticator(settings.auth, clock=self._clock)
        default_s = settings.server.default_deadline_s
        server = self._server = grpc.aio.server(
            interceptors=[BorderInterceptor(authenticator, default_deadline_s=default_s)],
            # The last bound, which answers without details; admission is the one that callers meet.
            maximum_concurrent_rpcs=(
                settings.admission.max_running + settings.admission.max_queued + _SPARE_CALLS
            ),
            options=server_options(settings.server.max_message_bytes),
        )
        servicer = CloudServicer(
            dataplane, remaining=lambda context: remaining_s(context, default_s=default_s)
        )
        cloud_pb2_grpc.add_CloudInferenceServiceServicer_to_server(servicer, server)
        health = add_health(server, [SERVICE_NAME])
        if settings.server.reflection:
            enable_reflection(server, [SERVICE_NAME])
        self._address = listen(server, settings.server.listen, settings.tls)
        await server.start()
        return health

    def _on_phase(self, phase: Phase) -> None:
        if self._health is not None:
            self._health.set_serving(SERVICE_NAME, phase is Phase.READY)

    async def _stop(self, grace_s: float) -> None:
        if self._health is not None:
            self._health.shut_down()
        self._gate.close()
        await self._drain(grace_s)
        if self._server is not None:
            # Requests have had their grace; this is for the last bytes of those that have just ended.
            await self._server.stop(grace=min(1.0, grace_s))
        if self._engine is not None:
            await self._engine.stop()
        if self._client is not None:
            await self._client.aclose()
        if self._socket_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket_dir, ignore_errors=True)

    async def _drain(self, grace_s: float) -> None:
        """Wait until nothing runs, the grace is over, or somebody is in a hurry."""
        waits = [asyncio.create_task(self._gate.wait_idle()), asyncio.create_task(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _api_key(self) -> str | None:
        name = self._settings.engine.api_key_env
        if not name:
            return None
        if name not in self._environment:
            raise SettingsError(f"the environment has no {name}", key="engine.api_key_env")
        return self._environment[name]


async def run(settings: CloudSettings, *, on_listening: Callable[[CloudServer], None] | None = None) -> None:
    """Run a cloud server until SIGTERM or SIGINT, then drain. A second signal cuts the grace short.

    Args:
        on_listening: Called once the address is bound.

    Raises:
        SettingsError: As `CloudServer.start`.
    """
    # It would log every health check.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    server = CloudServer(settings, environment=os.environ)
    stop_asked = asyncio.Event()

    def on_signal() -> None:
        if stop_asked.is_set():
            server.hurry()
        stop_asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await server.start()
        if on_listening is not None:
            on_listening(server)
        await stop_asked.wait()
        _log.info("stopping: draining for at most %g s", settings.server.drain_grace_s)
        await server.stop()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def serve(settings: CloudSettings, *, on_listening: Callable[[CloudServer], None] | None = None) -> None:
    """`run` with an event loop of its own: what a command calls."""
    asyncio.run(run(settings, on_listening=on_listening))


def _admission_limits(settings: CloudSettings) -> AdmissionLimits:
    admission = settings.admission
    return AdmissionLimits(
        max_running=admission.max_running,
        max_queued=admission.max_queued,
        max_wait_s=admission.max_wait_s,
        least_service_s=admission.least_service_s,
    )
