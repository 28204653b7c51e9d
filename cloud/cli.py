"""The `forebay cloud` commands. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The cloud tier: vLLM, admission.")


@app.callback()
def _group() -> None:
    """Keep `serve` a subcommand although it is the only one."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file. Default: built-in values.")] = None,
) -> None:
    """Serve CloudInferenceService until SIGTERM or ctrl-C."""
    import logging

    from cloud.settings import load

    settings = load(config, env=os.environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from cloud.serve import serve as run

    run(settings)
