"""The edge node: parts put together, started, drained and stopped.

Order of a start: release and tokenizer, engine process, listening, SERVING. Order of a stop: NOT_SERVING and
nobody new; running requests end within the grace; the engine process ends. A second stop waits for the first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Sequence

import grpc.aio

from edge.cascade import CascadeSettings
from edge.engine.process import WORKER_COMMAND, EngineProcess
from edge.engine.spec import engine_spec
from edge.engine.supervision import EngineState, Supervision
from edge.models import LoadedRelease, ReleaseStore
from edge.servicer import SERVICE_NAME, InferenceServicer
from edge.serving import ServedModel, ServedModels
from edge.settings import EdgeSettings
from edge.text.tokenizer import ChatTokenizer
from edge.uplink import RetryPolicy, Uplink
from protos.auth import Authenticator
from protos.channel import ReloadingChannel, listen, server_options
from protos.errors import ForebayError
from protos.forebay.v1 import inference_pb2_grpc
from protos.health import HealthServicer, add_health, enable_reflection
from protos.interceptors import BorderInterceptor
from protos.settings import SettingsError
from protos.values import ReleaseRef
from router.breaker import Breaker, BreakerSettings
from router.confidence import QuantileConfidence
from router.stream_gate import GateSettings

_log = logging.getLogger(__name__)


class EdgeServer:
    """One edge node. `start`, then `stop`.

    Args:
        clock: Monotonic seconds; must be the event loop's clock, on which deadlines are set.
        worker_command: What runs the engine process.
    """

    def __init__(
        self,
        settings: EdgeSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._worker_command = worker_command
        self._address: str | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._engine: EngineProcess | None = None
        self._uplink: Uplink | None = None
        self._health: HealthServicer | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """`host:port`, with the port that was bound. Only after `start`."""
        assert self._address is not None, "the server was not started"
        return self._address

    @property
    def engine(self) -> EngineProcess:
        """The engine of the serving variant. Only after `start`."""
        assert self._engine is not None, "the server was not started"
        return self._engine

    async def start(self) -> None:
        """Load the model and serve.

        Raises:
            SettingsError: Something configured cannot be: release, variant, certificates, address.
            EngineStartError: The model does not load; has the end of the worker's log.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    async def stop(self, grace_s: float | None = None) -> None:
        """Drain and stop. `grace_s` is how long running requests may take; None: as configured."""
        if self._stopping is None:
            grace = self._settings.server.drain_grace_s if grace_s is None else grace_s
            self._stopping = asyncio.create_task(self._stop(grace), name="edge-stop")
        await asyncio.shield(self._stopping)

    async def cut_short(self) -> None:
        """End the grace of a stop: what still runs is cancelled."""
        if self._server is not None:
            await self._server.stop(grace=0)

    async def _start(self) -> None:
        settings = self._settings
        release = await asyncio.to_thread(_find_release, settings)
        name = settings.release.variant or release.manifest.edge.variants[0].name
        if release.manifest.variant(name) is None:
            known = ", ".join(v.name for v in release.manifest.edge.variants)
            raise SettingsError(
                f"{release.ref} has no variant {name!r}; it has {known}", key="release.variant"
            )
        tokenizer = await asyncio.to_thread(ChatTokenizer.load, release.tokenizer_dir)
        self._uplink = self._connect()
        engine = self._engine = await self._start_engine(release, name)
        model = ServedModel(
            release=release,
            variant=release.variant(name),
            engine=engine,
            tokenizer=tokenizer,
            confidence=QuantileConfidence(),
        )
        self._health = await self._listen(model)
        engine.subscribe(self._on_engine_state)
        self._on_engine_state(engine.state)
        _log.info("edge node for %s (%s) on %s", release.ref, name, self.address)

    async def _start_engine(self, release: LoadedRelease, variant: str) -> EngineProcess:
        engine = self._settings.engine
        spec = engine_spec(
            release,
            variant,
            threads=engine.threads or os.cpu_count() or 1,
            device=engine.device,
            max_batch=engine.max_batch,
            max_waiting=engine.max_waiting,
            kv_capacity_tokens=engine.kv_tokens or None,
            context_tokens=engine.context_tokens or None,
        )
        supervision = Supervision(
            start_timeout_s=engine.start_timeout_s, hang_timeout_s=engine.hang_timeout_s
        )
        return await EngineProcess.start(spec, supervision=supervision, command=self._worker_command)

    def _connect(self) -> Uplink | None:
        cloud = self._settings.cloud
        if not cloud.address:
            return None
        channel = ReloadingChannel(
            cloud.address,
            cloud.tls,
            clock=self._clock,
            max_message_bytes=self._settings.server.max_message_bytes,
            key="cloud.tls",
        )
        breaker = Breaker(
            BreakerSettings(
                failures=cloud.breaker_failures,
                pause_s=cloud.breaker_pause_s,
                longest_pause_s=cloud.breaker_longest_pause_s,
            )
        )
        return Uplink(
            channel,
            breaker=breaker,
            retry=RetryPolicy(attempts=cloud.attempts, first_backoff_s=cloud.first_backoff_s),
            clock=self._clock,
            jitter=random.random,
        )

    async def _listen(self, model: ServedModel) -> HealthServicer:
        settings = self._settings
        authenticator = Authenticator(settings.auth, clock=self._clock)
        default_s = settings.server.default_deadline_s
        server = self._server = grpc.aio.server(
            interceptors=[BorderInterceptor(authenticator, default_deadline_s=default_s)],
            maximum_concurrent_rpcs=settings.server.max_concurrent_calls,
            options=server_options(settings.server.max_message_bytes),
        )
        servicer = InferenceServicer(
            ServedModels((model,)),
            uplink=self._uplink,
            settings=_cascade_settings(settings),
            classify_threshold=settings.router.classify_threshold,
            default_deadline_s=default_s,
            clock=self._clock,
            seed=lambda: secrets.randbits(63),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        health = add_health(server, [SERVICE_NAME])
        if settings.server.reflection:
            enable_reflection(server, [SERVICE_NAME])
        self._address = listen(server, settings.server.listen, settings.tls)
        await server.start()
        return health

    def _on_engine_state(self, state: EngineState) -> None:
        """With a cloud behind it, a node whose engine restarts still answers: by forwarding."""
        if self._health is not None and self._stopping is None:
            alive = state is EngineState.READY or self._uplink is not None
            self._health.set_serving(SERVICE_NAME, alive)

    async def _stop(self, grace_s: float) -> None:
        if self._health is not None:
            self._health.shut_down()
        if self._server is not None:
            await self._server.stop(grace=grace_s)
        if self._engine is not None:
            await self._engine.close()
        if self._uplink is not None:
            await self._uplink.close()


async def run(settings: EdgeSettings, *, on_listening: Callable[[EdgeServer], None] | None = None) -> None:
    """Run an edge node until SIGTERM or SIGINT, then drain. A second signal cuts the grace short.

    Args:
        on_listening: Called once the node serves.

    Raises:
        SettingsError, EngineStartError: As `EdgeServer.start`.
    """
    server = EdgeServer(settings)
    stop_asked = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop_asked.is_set() else stop_asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        starting = asyncio.create_task(server.start())
        asked = asyncio.create_task(stop_asked.wait())
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        await starting
        if on_listening is not None:
            on_listening(server)
        await asked
        _log.info("stopping: draining for at most %g s", settings.server.drain_grace_s)
        stopping = asyncio.create_task(server.stop())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not stopping.done():
            await server.cut_short()
        await stopping
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def serve(settings: EdgeSettings, *, on_listening: Callable[[EdgeServer], None] | None = None) -> None:
    """`run` with an event loop of its own: what a command calls."""
    asyncio.run(run(settings, on_listening=on_listening))


def _find_release(settings: EdgeSettings) -> LoadedRelease:
    """The configured release, with the sizes of its files checked.

    Raises:
        SettingsError: It is not there, or not whole.
    """
    wanted = settings.release
    store = ReleaseStore(wanted.store.expanduser())
    try:
        version = wanted.version or store.active_version(wanted.line)
        release = store.load(ReleaseRef(wanted.line, version))
        release.verify(digests=False)
    except ForebayError as error:
        raise SettingsError(f"{error.message} (store: {store.path})", key="release") from error
    return release


def _cascade_settings(settings: EdgeSettings) -> CascadeSettings:
    router = settings.router
    return CascadeSettings(
        quantile=router.quantile,
        gate=GateSettings(
            hold_back_tokens=router.hold_back_tokens,
            min_tokens=router.early_exit_tokens,
            early_exit_ratio=router.early_exit_ratio,
        ),
        flush_interval_s=settings.server.flush_interval_ms / 1000,
        deadline_margin_s=settings.cloud.deadline_margin_s,
    )
