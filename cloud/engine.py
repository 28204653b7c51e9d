"""The engine of this tier as configured: a vLLM child of our own, or a cluster at an address."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from cloud.dataplane import Dataplane
from cloud.releases import CloudRelease
from cloud.settings import CloudSettings
from cloud.vllm.command import build_command, check_parallelism, detect_device, read_model_shape
from cloud.vllm.external import ExternalEngine
from cloud.vllm.lifecycle import RestartPolicy
from cloud.vllm.process import LogSpec
from cloud.vllm.supervisor import PhaseListener, VllmSupervisor

Engine = VllmSupervisor | ExternalEngine


def model_name(settings: CloudSettings, release: CloudRelease) -> str:
    """The model's name in requests to the engine."""
    return settings.engine.model_name or str(release.ref)


def make_engine(
    settings: CloudSettings,
    release: CloudRelease,
    dataplane: Dataplane,
    *,
    socket_path: Path | None,
    healthy: Callable[[], Awaitable[bool]],
    environment: Mapping[str, str],
    clock: Callable[[], float],
    listener: PhaseListener,
) -> Engine:
    """Build it; nothing is started.

    Args:
        socket_path: Where the child shall listen. None: the engine is at `engine.url`.
        environment: What the child inherits.
        clock: Monotonic seconds.

    Raises:
        SettingsError: vLLM is not installed, or the parallelism does not fit the model.
    """
    engine, vllm = settings.engine, settings.vllm
    if socket_path is None:
        return ExternalEngine(
            engine.url,
            healthy=healthy,
            # It is warm already, and its time is somebody else's.
            warm_up=dataplane.learn,
            health_interval_s=engine.health_interval_s,
            unhealthy_limit=engine.unhealthy_limit,
            startup_timeout_s=vllm.startup_timeout_s,
            listener=listener,
        )
    device = detect_device(vllm.device)
    check_parallelism(read_model_shape(release.model_dir), vllm)
    command = build_command(
        vllm,
        python=sys.executable,
        model_dir=release.model_dir,
        served_name=model_name(settings, release),
        socket_path=socket_path,
        max_running=settings.admission.max_running,
        device=device,
        cores=_cores(),
        environment=environment,
    )
    return VllmSupervisor(
        command,
        socket_path=socket_path,
        log=LogSpec(
            path=vllm.log_dir.expanduser() / "vllm.log", max_bytes=vllm.log_max_bytes, keep=vllm.log_keep
        ),
        policy=RestartPolicy(
            startup_timeout_s=vllm.startup_timeout_s,
            stop_grace_s=vllm.stop_grace_s,
            first_backoff_s=vllm.first_backoff_s,
            max_backoff_s=vllm.max_backoff_s,
            unhealthy_limit=engine.unhealthy_limit,
        ),
        healthy=healthy,
        warm_up=dataplane.warm_up,
        health_interval_s=engine.health_interval_s,
        clock=clock,
        random=random.random,
        listener=listener,
    )


def _cores() -> list[int]:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
