"""Settings: one TOML file per role, typed, with environment overrides.

A role's settings are a tree of `msgspec.Struct` classes whose fields carry
`Annotated[..., msgspec.Meta(description=...)]`. This module fills such a tree.

Invariants
- Every key is known, every value is of its type and in its range, or `SettingsError` says which is not.
- The environment wins over the file, the file over the defaults. `PREFIX__SECTION__KEY=value` overrides
  `section.key`; a variable with that prefix which names no key is refused like an unknown key.
- A relative `Path` in the file is relative to the file's directory; in the environment, to the working
  directory. `~` is the home directory.
- Numbers are finite.

It does not watch files, and it holds no settings of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as mi

from protos.settings_docs import describe, undocumented
from protos.settings_errors import SettingsError
from protos.settings_tree import (
    coerce,
    find_unknown,
    known_paths,
    nearest,
    non_finite,
    struct_of,
    value_at,
)

__all__ = ["SettingsError", "describe", "load_settings", "undocumented"]

T = TypeVar("T", bound=msgspec.Struct)

# A settings file is written by a person; more than this is another file by mistake.
MAX_FILE_BYTES = 1024 * 1024


def load_settings(cls: type[T], path: Path | None, *, env: Mapping[str, str], env_prefix: str) -> T:
    """Read, check and build the settings of one role.

    Args:
        cls: The root of the tree.
        path: The TOML file; None takes the defaults.
        env: The environment, usually `os.environ`.
        env_prefix: Such as `FOREBAY_EDGE`; overrides begin with it and two underscores.

    Raises:
        SettingsError: One sentence with the file or variable, the key, what was expected and what came.
    """
    root = mi.type_info(cls)
    source = str(path) if path is not None else "defaults"
    raw: dict[str, Any] = {} if path is None else _read(path)
    base = Path.cwd() if path is None else path.absolute().parent
    if (unknown := find_unknown(raw, root)) is not None:
        hint = nearest(unknown, known_paths(root, items=True))
        raise SettingsError(
            f"{source}: unknown key {unknown}" + (f"; did you mean {hint}?" if hint else ""),
            source=source,
            key=unknown,
            nearest=hint,
        )
    origins = _apply_env(raw, root, env, env_prefix)
    if (key := non_finite(raw)) is not None:
        where = origins.get(key, source)
        raise SettingsError(f"{where}: {key} must be a finite number", source=where, key=key)
    try:
        return msgspec.convert(raw, cls, dec_hook=lambda kind, value: _decode_path(base, kind, value))
    except msgspec.ValidationError as error:
        raise _explain(error, raw, source, origins) from error


def _read(path: Path) -> dict[str, Any]:
    """The file as plain values. Raises SettingsError for each way in which a file can be unreadable."""
    source = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise SettingsError(f"{source}: there is no such settings file", source=source) from error
    except OSError as error:
        raise SettingsError(f"{source}: cannot be read: {error.strerror}", source=source) from error
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"{source}: is larger than {MAX_FILE_BYTES} bytes", source=source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{source}: is not UTF-8: line {line} has the byte 0x{data[error.start]:02x}", source=source
        ) from error
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise SettingsError(f"{source}: is not TOML: {reason}", source=source) from error


def _apply_env(raw: dict[str, Any], root: mi.Type, env: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Write overrides into `raw`. Returns which variable each overridden key comes from."""
    origins: dict[str, str] = {}
    known = {path.replace(".", "__").upper(): path for path in known_paths(root)}
    for name in sorted(name for name in env if name.startswith(f"{prefix}__")):
        key = known.get(name.removeprefix(f"{prefix}__").upper())
        if key is None:
            hint = nearest(name.removeprefix(f"{prefix}__").upper(), known)
            hint_name = f"{prefix}__{hint}" if hint else None
            raise SettingsError(
                f"environment: {name} names no setting"
                + (f"; did you mean {hint_name}?" if hint_name else ""),
                source=name,
                nearest=hint_name,
            )
        kind: mi.Type = root
        table = raw
        *sections, leaf = key.split(".")
        for section in sections:
            kind = _field(kind, section)
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise SettingsError(f"{name}: {section} is set to a value, not a table", source=name, key=key)
        try:
            table[leaf] = coerce(env[name], _field(kind, leaf))
        except ValueError as error:
            raise SettingsError(f"{name}: {error}", source=name, key=key) from error
        origins[key] = name
    return origins


def _field(kind: mi.Type, name: str) -> mi.Type:
    struct = struct_of(kind)
    assert struct is not None
    return next(field.type for field in struct.fields if field.encode_name == name)


def _decode_path(base: Path, kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(f"settings of type {kind} are not supported")
    if not isinstance(value, str) or not value:
        raise ValueError("Expected a path")
    return base / Path(value).expanduser()


def _explain(
    error: msgspec.ValidationError, raw: dict[str, Any], source: str, origins: Mapping[str, str]
) -> SettingsError:
    """msgspec's message, which speaks JSON, as a sentence about a TOML key."""
    message, _, where = str(error).partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    message = message.replace("`object`", "a table").replace("`", "").replace("str | null", "str")
    message = message.replace(" | null", "")
    if message.startswith("Object missing required field "):
        leaf = message.removeprefix("Object missing required field ")
        key = f"{key}.{leaf}" if key else leaf
        sentence = f"{key} is required"
    else:
        found, value = value_at(raw, key)
        sentence = f"{key or 'the file'}: {message[:1].lower()}{message[1:]}"
        if found and not isinstance(value, dict | list):
            shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}…"
            sentence += f" ({shown})" if ", got " in message else f", got {shown}"
    origin = origins.get(key, source)
    return SettingsError(f"{origin}: {sentence}", source=origin, key=key)
