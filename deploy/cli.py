"""The `forebay` command: mounts the commands of the edge, the cloud and the deployment.

Commands import what they need when they run, so that the help is quick and a base install can run
everything that an edge node needs.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

import cloud.cli
import edge.cli
from deploy import admin, evaluate, models
from deploy.command import Group

DEFAULT_ADDRESS = "127.0.0.1:7050"
DEFAULT_MODEL = "support-bot"

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Forebay: a small model at the edge, a large one behind it.",
)
app.add_typer(edge.cli.app, name="edge")
app.add_typer(cloud.cli.app, name="cloud")
app.add_typer(models.app, name="models")
app.add_typer(admin.certs_app, name="certs")
app.add_typer(admin.keys_app, name="keys")
app.add_typer(admin.config_app, name="config")
app.command()(evaluate.evaluate)


class Tier(enum.StrEnum):
    """Where an answer may come from."""

    AUTO = "auto"
    EDGE = "edge"
    CLOUD = "cloud"


Address = Annotated[str, typer.Option(help="host:port of the edge node.")]
Model = Annotated[str, typer.Option(help="Model line, or line@version.")]
TierOption = Annotated[Tier, typer.Option(help="Where the answer may come from.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
TimeoutS = Annotated[float, typer.Option(min=0.1, help="Seconds until an answer must be complete.")]
Ca = Annotated[Path | None, typer.Option(help="PEM file of the authority to trust; switches TLS on.")]


@app.command()
def up(
    pair: Annotated[str, typer.Option(help="Which pair of models: smol or qwen.")] = "smol",
    variant: Annotated[str, typer.Option(help="Quantization that the edge serves.")] = "int8",
    keep: Annotated[
        bool, typer.Option("--keep", help="Serve until ctrl-C instead of running the demo.")
    ] = False,
) -> None:
    """Run both tiers on this machine, and the demo through them."""
    from rich.console import Console

    from deploy.up import up as run

    run(pair=pair, variant=variant, keep=keep, console=Console())


@app.command()
def ask(
    text: Annotated[str, typer.Argument(help="What to ask.")],
    address: Address = DEFAULT_ADDRESS,
    model: Model = DEFAULT_MODEL,
    tier: TierOption = Tier.AUTO,
    max_tokens: MaxTokens = 256,
    timeout_s: TimeoutS = 60.0,
    ca: Ca = None,
) -> None:
    """Ask an edge node one question; the answer streams. An API key is taken from FOREBAY_API_KEY."""
    import asyncio

    from deploy import talk

    async def run() -> None:
        async with talk.connect(address, ca=ca) as client:
            await talk.ask(
                client,
                [("user", text)],
                model=model,
                tier=tier.value,
                max_tokens=max_tokens,
                timeout_s=timeout_s,
                facts=True,
            )

    asyncio.run(run())


@app.command()
def chat(
    address: Address = DEFAULT_ADDRESS,
    model: Model = DEFAULT_MODEL,
    tier: TierOption = Tier.AUTO,
    max_tokens: MaxTokens = 256,
    timeout_s: TimeoutS = 60.0,
    ca: Ca = None,
) -> None:
    """Talk with an edge node, line by line."""
    import asyncio

    from deploy import talk

    async def run() -> None:
        async with talk.connect(address, ca=ca) as client:
            await talk.chat(client, model=model, tier=tier.value, max_tokens=max_tokens, timeout_s=timeout_s)

    asyncio.run(run())


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
