"""Settings: each way to get them wrong has its sentence, and the documented defaults are a valid file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from protos.settings import SettingsError, describe, load_settings, undocumented


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the node."""

    queue_requests: Annotated[int, Meta(ge=1, le=4096, description="Most requests that wait.")] = 64
    deadline_s: Annotated[float, Meta(gt=0, le=3600, description="Seconds, when none is set.")] = 60.0


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody."""

    name: Annotated[str, Meta(description="Its name.")]
    weight: Annotated[float, Meta(ge=0, description="Its share.")] = 1.0


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it listens."""

    listen: Annotated[str, Meta(description='Host and port, "quotes" and all.')] = "127.0.0.1:50051"
    reflection: Annotated[bool, Meta(description="Whether reflection is on.")] = True
    engine: Annotated[Literal["onnxruntime", "torch"], Meta(description="What runs it.")] = "onnxruntime"
    store: Annotated[Path | None, Meta(description="Where releases are.")] = None
    names: Annotated[list[str], Meta(description="Names it answers to.")] = []
    limits: Limits = Limits()


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a role in this test."""

    server: Server = Server()
    peers: Annotated[list[Peer], Meta(description="Peers.")] = []
    backup: Annotated[Server | None, Meta(description="A second listener.")] = None


class Required(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Has a key without a default."""

    address: Annotated[str, Meta(description="Host and port.")]


def load(tmp_path: Path, text: str | bytes, env: dict[str, str] | None = None) -> Settings:
    path = tmp_path / "node.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_settings(Settings, path, env=env or {}, env_prefix="FOREBAY_NODE")


def refused(tmp_path: Path, text: str | bytes, env: dict[str, str] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text, env)
    return caught.value


def test_no_file_and_no_environment_gives_the_defaults() -> None:
    assert load_settings(Settings, None, env={"HOME": "/x"}, env_prefix="FOREBAY_NODE") == Settings()


def test_the_file_overrides_the_defaults_and_the_environment_the_file(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        '[server]\nlisten = "0.0.0.0:1"\n[server.limits]\nqueue_requests = 5\ndeadline_s = 3\n',
        {"FOREBAY_NODE__SERVER__LIMITS__QUEUE_REQUESTS": "7", "FOREBAY_NODE__SERVER__REFLECTION": "off"},
    )
    assert settings.server.listen == "0.0.0.0:1"
    assert settings.server.limits == Limits(queue_requests=7, deadline_s=3.0)
    assert settings.server.reflection is False


def test_relative_paths_in_the_file_are_relative_to_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, '[server]\nstore = "releases"').server.store == tmp_path / "releases"


def test_relative_paths_in_the_environment_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    settings = load(tmp_path, "", {"FOREBAY_NODE__SERVER__STORE": "releases"})
    assert settings.server.store == elsewhere / "releases"


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[servr]\n", "servr", "server"),
        ("[server]\nlistn = 'x'", "server.listn", "server.listen"),
        ("[server.limits]\nqueue_request = 1", "server.limits.queue_request", "server.limits.queue_requests"),
        ("queue_requests = 1", "queue_requests", "server.limits.queue_requests"),
        ("[[peers]]\nname = 'a'\nwieght = 1", "peers[0].wieght", "peers.weight"),
        ("zzzzzzzz = 1", "zzzzzzzz", None),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, key: str, nearest: str | None
) -> None:
    error = refused(tmp_path, text)
    assert (error.key, error.nearest) == (key, nearest)
    assert f"unknown key {key}" in error.message
    assert str(tmp_path / "node.toml") in error.message
    assert nearest is None or f"did you mean {nearest}?" in error.message


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("[server]\nlisten = 5", "server.listen", ["expected str, got int", "5"]),
        ("[server]\nreflection = 1", "server.reflection", ["expected bool, got int"]),
        ("[server]\nengine = 'tensorrt'", "server.engine", ["tensorrt"]),
        ("[server.limits]\nqueue_requests = 0", "server.limits.queue_requests", ["int >= 1", "got 0"]),
        ("[server.limits]\nqueue_requests = 1.5", "server.limits.queue_requests", ["expected int", "1.5"]),
        ("[server.limits]\nqueue_requests = 5000", "server.limits.queue_requests", ["<= 4096", "5000"]),
        ("[server.limits]\ndeadline_s = nan", "server.limits.deadline_s", ["finite"]),
        ("[server.limits]\ndeadline_s = inf", "server.limits.deadline_s", ["finite"]),
        ("[server.limits]\ndeadline_s = -1.0", "server.limits.deadline_s", ["> 0", "-1.0"]),
        ("server = 5", "server", ["expected a table, got int"]),
        ("[[peers]]\nname = 'a'\n[[peers]]\nname = 3", "peers[1].name", ["expected str, got int"]),
        ("[[peers]]\nweight = 1", "peers[0].name", ["is required"]),
        ("[server]\nstore = ''", "server.store", ["expected a path"]),
        ("[server]\nnames = ['a', 1]", "server.names[1]", ["expected str, got int"]),
    ],
)
def test_wrong_values_are_refused_with_key_expected_and_got(
    tmp_path: Path, text: str, key: str, words: list[str]
) -> None:
    error = refused(tmp_path, text)
    assert error.key == key
    assert all(word in error.message for word in [str(tmp_path), key, *words]), error.message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SERVER__LISTN", "x", ["__SERVER__LISTN names", "did you mean FOREBAY_NODE__SERVER__LISTEN?"]),
        ("QQQQ", "x", ["FOREBAY_NODE__QQQQ names no setting"]),
        ("SERVER__REFLECTION", "maybe", ["FOREBAY_NODE__SERVER__REFLECTION", "true or false", "maybe"]),
        ("SERVER__LIMITS__QUEUE_REQUESTS", "many", ["whole number", "many"]),
        ("SERVER__LIMITS__QUEUE_REQUESTS", "0", ["FOREBAY_NODE__SERVER__LIMITS__QUEUE", ">= 1", "0"]),
        ("SERVER__LIMITS__DEADLINE_S", "nan", ["finite"]),
        ("PEERS", "[{", ["FOREBAY_NODE__PEERS", "as in TOML"]),
    ],
)
def test_wrong_environment_is_refused_by_the_variable_s_name(
    tmp_path: Path, name: str, value: str, words: list[str]
) -> None:
    error = refused(tmp_path, "", {f"FOREBAY_NODE__{name}": value})
    assert all(word in error.message for word in words), error.message


def test_variables_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    assert (
        load(tmp_path, "", {"FOREBAY_NODE": "x", "FOREBAY_NODES__A": "1", "FOREBAY_HOME": "y"}) == Settings()
    )


def test_lists_and_tables_come_from_the_environment_too(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        "",
        {"FOREBAY_NODE__SERVER__NAMES": "a, b", "FOREBAY_NODE__PEERS": "[{name = 'c', weight = 2.0}]"},
    )
    assert settings.server.names == ["a", "b"]
    assert settings.peers == [Peer(name="c", weight=2.0)]


def test_an_empty_variable_unsets_an_optional_key(tmp_path: Path) -> None:
    assert load(tmp_path, "[server]\nstore = 'x'", {"FOREBAY_NODE__SERVER__STORE": ""}).server.store is None


def test_an_optional_section_is_made_by_a_variable_inside_it(tmp_path: Path) -> None:
    backup = load(tmp_path, "", {"FOREBAY_NODE__BACKUP__LISTEN": "h:1"}).backup
    assert backup == Server(listen="h:1")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[server]\nlisten = '\xff'\n", ["not UTF-8", "line 2", "0xff"]),
        (b"[server\n", ["not TOML", "line 1"]),
        (b"a = 1\na = 2\n", ["not TOML", "line 2"]),
        (b"a = " + b"[" * 100_000, ["not TOML"]),
        (b"#" * (1024 * 1024 + 1), ["larger than 1048576 bytes"]),
    ],
)
def test_unreadable_files_are_refused_with_the_place(tmp_path: Path, data: bytes, words: list[str]) -> None:
    error = refused(tmp_path, data)
    assert all(word in error.message for word in words), error.message


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.toml", "no such settings file"), (tmp_path, "cannot be read")):
        with pytest.raises(SettingsError, match=words):
            load_settings(Settings, path, env={}, env_prefix="FOREBAY_NODE")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf[server]\nlisten = 'h:2'").server.listen == "h:2"


def test_the_description_is_a_file_that_says_the_defaults(tmp_path: Path) -> None:
    text = describe(Settings)
    assert load(tmp_path, text) == Settings()
    for line in (
        "# Seconds, when none is set.",
        "# Number, over 0, at most 3,600. Default: 60.0.",
        "deadline_s = 60.0",
        "[server.limits]",
        "# [[peers]]",
        "# [backup]",
        "# store =",
    ):
        assert line in text.splitlines(), text


def test_the_description_of_effective_settings_loads_back_to_them(tmp_path: Path) -> None:
    settings = Settings(
        server=Server(listen='quo"te\\\x7f:1', store=Path("/a"), limits=Limits(queue_requests=9)),
        peers=[Peer(name="ü"), Peer(name="b", weight=0.25)],
        backup=Server(engine="torch", names=["x"]),
    )
    assert load(tmp_path, describe(Settings, settings)) == settings


def test_required_keys_are_said_and_missed(tmp_path: Path) -> None:
    assert "# Text. Required." in describe(Required)
    path = tmp_path / "r.toml"
    path.write_text("")
    with pytest.raises(SettingsError, match="address is required"):
        load_settings(Required, path, env={}, env_prefix="X")
    assert load_settings(Required, path, env={"X__ADDRESS": "a:1"}, env_prefix="X").address == "a:1"


def test_keys_without_a_description_are_found() -> None:
    class Bare(msgspec.Struct):
        inner: Limits = Limits()
        plain: int = 1

    assert undocumented(Settings) == []
    assert undocumented(Bare) == ["plain"]
