"""`forebay models`: build releases out of the catalogue."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Build releases out of models.")


@app.callback()
def _group() -> None:
    """Keep the commands subcommands."""


@app.command()
def build(
    pair: Annotated[str, typer.Option(help="Which pair of models, see `forebay models list`.")] = "smol",
    variants: Annotated[
        str, typer.Option(help="Comma-separated: int4, int8, fp32, nf4, llm-int8.")
    ] = "int4,int8",
    force: Annotated[
        bool, typer.Option(help="Assemble the release anew even when nothing is missing.")
    ] = False,
) -> None:
    """Fetch, convert, quantize and assemble a pair's release. What is there already is used."""
    from rich.console import Console

    console = Console()
    names = tuple(name.strip() for name in variants.split(",") if name.strip())
    with sigterm_interrupts():
        directory = build_release(console, pair=pair, variants=names, force=force)
    console.print(str(directory), markup=False, highlight=False, soft_wrap=True)


@app.command("list")
def list_() -> None:
    """The pairs that can be built."""
    from cloud.authoring.catalog import load_catalog

    for name, pair in sorted(load_catalog().pairs.items()):
        typer.echo(f"{name}: {pair.line}@{pair.version}, edge {pair.edge}, cloud {pair.cloud}")


def build_release(
    console: Console, *, pair: str, variants: tuple[str, ...] | None = None, force: bool = False
) -> Path:
    """Build a pair's release with progress on `console`, and return its directory.

    Raises:
        AuthoringError: As its tree says.
        KeyboardInterrupt: Interrupted; every child is gone.
    """
    from cloud.authoring.build import DEFAULT_VARIANTS, Builder
    from cloud.authoring.catalog import load_catalog
    from cloud.authoring.home import Home
    from deploy.progress import show_steps

    with show_steps(console) as steps:
        builder = Builder(
            home=Home.from_environment(os.environ),
            catalog=load_catalog(),
            env=os.environ,
            progress=steps,
            stop=threading.Event(),
        )
        return builder.build(
            pair,
            variants=DEFAULT_VARIANTS if variants is None else variants,
            force=force,
            on_wait=lambda pid: console.print(f"waiting for another build (process {pid}) ..."),
        )


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as ctrl-C does, so that it cleans up too."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
