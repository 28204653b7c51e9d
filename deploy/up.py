"""`forebay up`: both tiers on this machine, the demo through them, and everything stopped again.

Steps: build the pair's release where it is missing, start cloud and edge as children with generated
configurations on loopback, wait for both, run the demo or stay. Whatever ends it, no child is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cloud.authoring.build import DEFAULT_VARIANTS
from cloud.authoring.catalog import load_catalog
from cloud.authoring.home import Home
from deploy.client import EdgeClient
from deploy.command import CommandError
from deploy.configs import CLOUD_PORT, EDGE_PORT, cloud_config, edge_config
from deploy.demo import Outcome, Summary, ask_one, load_prompts, summarize
from deploy.local import LocalError, Server, ServerSpec, first_to_end, free_port, quote, running, wait_ready
from deploy.models import build_release, sigterm_interrupts
from deploy.progress import show_steps

EDGE_SERVICE = "forebay.v1.InferenceService"
CLOUD_SERVICE = "forebay.v1.CloudInferenceService"
_CLOUD_READY_S = 300.0
_EDGE_READY_S = 90.0
_RUNS_KEPT = 5


class DemoFailed(CommandError):
    """The demo ran, but not every prompt was answered, or one tier was silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The two servers of one run."""

    edge: ServerSpec
    cloud: ServerSpec
    run_directory: Path
    model: str


def up(*, pair: str, variant: str, keep: bool, console: Console) -> None:
    """Do what the module says.

    Raises:
        AuthoringError: The release could not be built.
        LocalError: A server did not come up or went away.
        DemoFailed: The demo did not show both tiers.
    """
    with sigterm_interrupts():
        build_release(console, pair=pair, variants=tuple(dict.fromkeys((*DEFAULT_VARIANTS, variant))))
        stack = prepare(pair, variant=variant, home=Home.from_environment(os.environ))
    asyncio.run(_run(stack, keep=keep, console=console))


def prepare(pair_name: str, *, variant: str, home: Home) -> Stack:
    """Write both configurations into a fresh run directory."""
    pair = load_catalog().pair(pair_name)
    runs = home.root / "run"
    run_directory = runs / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    run_directory.mkdir(parents=True)
    for old in sorted(runs.iterdir())[:-_RUNS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    edge_address = f"127.0.0.1:{free_port(EDGE_PORT)}"
    cloud_address = f"127.0.0.1:{free_port(CLOUD_PORT)}"
    cores = len(os.sched_getaffinity(0))
    (run_directory / "cloud.toml").write_text(
        cloud_config(
            address=cloud_address,
            store=home.releases,
            line=pair.line,
            run_directory=run_directory,
            tensor_parallel=2 if cores >= 2 else 1,
        )
    )
    (run_directory / "edge.toml").write_text(
        edge_config(
            address=edge_address,
            store=home.releases,
            line=pair.line,
            variant=variant,
            cloud_address=cloud_address,
        )
    )

    def spec(name: str, address: str, service: str, ready_s: float) -> ServerSpec:
        config = str(run_directory / f"{name}.toml")
        return ServerSpec(
            name=name,
            arguments=(name, "serve", "--config", config),
            address=address,
            service=service,
            ready_s=ready_s,
        )

    return Stack(
        edge=spec("edge", edge_address, EDGE_SERVICE, _EDGE_READY_S),
        cloud=spec("cloud", cloud_address, CLOUD_SERVICE, _CLOUD_READY_S),
        run_directory=run_directory,
        model=pair.line,
    )


async def _run(stack: Stack, *, keep: bool, console: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with running(
            (stack.cloud, stack.edge), run_directory=stack.run_directory, env=os.environ
        ) as servers:
            try:
                await _until_ready(servers, console)
                if keep:
                    await _serve_on(stack, servers, console)
                else:
                    await _demo(stack, servers, console)
            finally:
                console.print("stopping ...", style="dim")
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _until_ready(servers: Sequence[Server], console: Console) -> None:
    with show_steps(console) as steps:

        async def one(server: Server) -> None:
            step = f"start {server.spec.name} at {server.spec.address}"
            steps.start(step)
            await wait_ready(server)
            steps.finish(step, "serving")

        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    group.create_task(one(server))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def _serve_on(stack: Stack, servers: Sequence[Server], console: Console) -> None:
    address = stack.edge.address
    message = '"messages": [{"role": "ROLE_USER", "content": "Hello"}]'
    question = f'{{"request": {{"model": "{stack.model}", {message}}}}}'
    lines = [
        f"serving {stack.model}; logs are in {stack.run_directory}; ctrl-C stops all",
        f"  forebay ask --address {address} --model {stack.model} 'How do I return a parcel?'",
        f"  forebay chat --address {address} --model {stack.model}",
        f"  grpcurl -plaintext -d '{question}' {address} {EDGE_SERVICE}/StreamGenerate",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    ended = await first_to_end(servers)
    raise LocalError(f"the {ended.spec.name} ended by itself; {quote(ended)}")


async def _demo(stack: Stack, servers: Sequence[Server], console: Console) -> None:
    started = time.monotonic()
    watch = asyncio.create_task(first_to_end(servers))
    talk = asyncio.create_task(_talk(stack, console))
    try:
        await asyncio.wait((watch, talk), return_when=asyncio.FIRST_COMPLETED)
        if not talk.done():
            ended = watch.result()
            raise LocalError(f"the {ended.spec.name} ended in mid-demo; {quote(ended)}")
        summary = talk.result()
    finally:
        for task in (watch, talk):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
    show_summary(summary, console)
    console.print(f"{summary.asked} prompts took {time.monotonic() - started:.0f} s", highlight=False)
    if summary.failure is not None:
        raise DemoFailed(f"the demo did not succeed: {summary.failure}")


async def _talk(stack: Stack, console: Console) -> Summary:
    asked = load_prompts()
    outcomes: list[Outcome] = []

    def say(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    async with EdgeClient(stack.edge.address) as client:
        for number, prompt in enumerate(asked.prompts, start=1):
            title = f"\n[{number}/{len(asked.prompts)}] {prompt.text}"
            console.print(title, style="bold", markup=False, highlight=False)
            outcome = await ask_one(
                client,
                prompt,
                system=asked.system,
                model=stack.model,
                clock=time.monotonic,
                on_text=say,
            )
            outcomes.append(outcome)
            console.print()
            style = "cyan" if outcome.error is None else "red"
            console.print(describe(outcome), style=style, markup=False, highlight=False)
    return summarize(outcomes)


def describe(outcome: Outcome) -> str:
    """One line about an outcome."""
    if outcome.error is not None:
        return f"  -> no answer: {outcome.error}"
    confidence = "none" if outcome.confidence is None else f"{outcome.confidence:.2f}"
    degraded = ", degraded" if outcome.degraded else ""
    return (
        f"  -> {outcome.tier} ({outcome.reason}{degraded}), confidence {confidence}, "
        f"first token {outcome.time_to_first_token_s:.2f} s, total {outcome.total_s:.2f} s"
    )


def show_summary(summary: Summary, console: Console) -> None:
    """The table at the end."""
    table = Table(
        title=f"{summary.answered} of {summary.asked} answered, {summary.edge_share:.0%} kept at the edge"
    )
    for heading in ("tier", "answers", "mean s", "p50 s", "p95 s"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for row in summary.latencies:
        table.add_row(row.tier, str(row.answers), f"{row.mean_s:.2f}", f"{row.p50_s:.2f}", f"{row.p95_s:.2f}")
    console.print()
    console.print(table)
