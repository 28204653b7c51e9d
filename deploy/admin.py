"""`forebay certs`, `forebay keys` and `forebay config`: what an operator prepares before serving."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import msgspec

certs_app = typer.Typer(no_args_is_help=True, help="Certificates.")
keys_app = typer.Typer(no_args_is_help=True, help="Keys of callers.")
config_app = typer.Typer(no_args_is_help=True, help="Configuration files.")


class Role(enum.StrEnum):
    """Whose configuration."""

    EDGE = "edge"
    CLOUD = "cloud"


RoleOption = Annotated[Role, typer.Option(help="Whose configuration.")]
ConfigOption = Annotated[Path | None, typer.Option(help="TOML file; without it, defaults and environment.")]


@certs_app.callback()
def _certs() -> None:
    """Keep the command a subcommand although it is the only one."""


@certs_app.command("dev")
def certs_dev(
    directory: Annotated[Path, typer.Argument(help="Where the PEM files go; made when missing.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of a server, beside loopback; may be repeated.")
    ] = None,
) -> None:
    """Make certificates for development: an authority, both servers, and the edge as the cloud's client."""
    from deploy.certs import make_dev_certs

    made = make_dev_certs(directory, host or ())
    for pair in (made.ca, made.edge, made.cloud, made.edge_client):
        typer.echo(f"{pair.cert_file}  {pair.key_file}")
    typer.echo(f"valid until {made.expires:%Y-%m-%d}; for development only", err=True)


@keys_app.callback()
def _keys() -> None:
    """Keep `api` a subcommand group of its own."""


api_app = typer.Typer(no_args_is_help=True, help="API keys.")
keys_app.add_typer(api_app, name="api")


@api_app.callback()
def _api() -> None:
    """Keep the command a subcommand although it is the only one."""


@api_app.command("new")
def keys_api_new(
    name: Annotated[str, typer.Option(help="The caller's name in logs and metrics.")] = "default",
    file: Annotated[Path | None, typer.Option(help="Keys file to add it to; without it, only shown.")] = None,
) -> None:
    """Make an API key. It is shown once; servers keep its digest only."""
    from protos.auth import append_key, generate_key, hash_key

    key = generate_key()
    if file is not None:
        append_key(file, name, key)
        typer.echo(f"added {name} to {file}; the key is shown only now:", err=True)
    else:
        typer.echo(f'for a keys file: name = "{name}", sha256 = "{hash_key(key)}"', err=True)
    typer.echo(key)


@config_app.command("show")
def config_show(role: RoleOption, config: ConfigOption = None) -> None:
    """Print a role's settings as TOML: every key with its meaning, unit and value."""
    from protos.settings import describe

    typer.echo(describe(*_load(role, config)), nl=False)


@config_app.command("check")
def config_check(role: RoleOption, config: ConfigOption = None) -> None:
    """Say whether a configuration can be used. Exit code 2 when it cannot."""
    _load(role, config)
    typer.echo(f"{config or 'the defaults'}: fine")


def _load(role: Role, config: Path | None) -> tuple[type[msgspec.Struct], msgspec.Struct]:
    if role is Role.EDGE:
        from edge.settings import EdgeSettings
        from edge.settings import load as load_edge

        return EdgeSettings, load_edge(config, env=os.environ)
    from cloud.settings import CloudSettings
    from cloud.settings import load as load_cloud

    return CloudSettings, load_cloud(config, env=os.environ)
