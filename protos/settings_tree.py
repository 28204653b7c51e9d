"""Walking a tree of settings types: known keys, unknown keys, values from text.

Pure. It speaks `msgspec.inspect` types and plain TOML values.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import inspect as mi

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def bare(kind: mi.Type) -> mi.Type:
    """The type without its metadata."""
    while isinstance(kind, mi.Metadata):
        kind = kind.type
    return kind


def struct_of(kind: mi.Type) -> mi.StructType | None:
    """The struct that this type is, or may be (`Section | None`)."""
    kind = bare(kind)
    if isinstance(kind, mi.StructType):
        return kind
    if isinstance(kind, mi.UnionType):
        structs = [bare(member) for member in kind.types]
        found = [member for member in structs if isinstance(member, mi.StructType)]
        return found[0] if len(found) == 1 else None
    return None


def item_of(kind: mi.Type) -> mi.Type | None:
    """What a list, tuple or mapping holds; None for other types."""
    kind = bare(kind)
    match kind:
        case mi.UnionType():
            return next((item for member in kind.types if (item := item_of(member))), None)
        case mi.ListType() | mi.SetType() | mi.FrozenSetType() | mi.VarTupleType():
            return kind.item_type
        case mi.DictType():
            return kind.value_type
        case _:
            return None


def known_paths(kind: mi.Type, prefix: str = "", *, items: bool = False) -> list[str]:
    """Dotted paths of every key, sections included. `items` enters lists and mappings too, unindexed."""
    struct = struct_of(kind)
    if struct is None and items and (item := item_of(kind)) is not None:
        struct = struct_of(item)
    paths: list[str] = []
    for field in struct.fields if struct is not None else ():
        path = f"{prefix}{field.encode_name}"
        paths.append(path)
        paths.extend(known_paths(field.type, f"{path}.", items=items))
    return paths


def find_unknown(value: Any, kind: mi.Type, path: str = "") -> str | None:
    """Path of the first key that the type does not know, items of lists included. None: all are known."""
    struct = struct_of(kind)
    if struct is not None and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in struct.fields}
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            if key not in fields:
                return inner_path
            if (found := find_unknown(inner, fields[key], inner_path)) is not None:
                return found
        return None
    item = item_of(kind)
    if item is None:
        return None
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(value, list):
        children = ((f"{path}[{index}]", inner) for index, inner in enumerate(value))
    elif isinstance(value, dict):
        children = ((f"{path}.{key}", inner) for key, inner in value.items())
    return next((found for where, inner in children if (found := find_unknown(inner, item, where))), None)


def nearest(path: str, known: Iterable[str]) -> str | None:
    """The known path that a person most likely meant, or None when none is near.

    The whole path counts, and so does its last part alone: a key in the wrong section is common.
    """
    candidates = list(known)
    plain = re.sub(r"\[\d+\]", "", path)
    if close := difflib.get_close_matches(plain, candidates, n=1, cutoff=0.75):
        return close[0]
    separator = "__" if "__" in plain else "."
    leaves: dict[str, str] = {}
    for candidate in candidates:
        leaves.setdefault(candidate.rsplit(separator, 1)[-1], candidate)
    close = difflib.get_close_matches(plain.rsplit(separator, 1)[-1], list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def non_finite(value: Any, path: str = "") -> str | None:
    """Path of the first number that is NaN or infinite, which TOML allows and no setting means."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        children = ((f"{path}.{key}" if path else str(key), inner) for key, inner in value.items())
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", inner) for index, inner in enumerate(value))
    return next((found for where, inner in children if (found := non_finite(inner, where))), None)


def value_at(raw: Any, path: str) -> tuple[bool, Any]:
    """Whether there is a value at the path, and the value."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if name and isinstance(raw, dict) and name in raw:
            raw = raw[name]
        elif index.isdigit() and isinstance(raw, list) and int(index) < len(raw):
            raw = raw[int(index)]
        else:
            return False, None
    return True, raw


def coerce(text: str, kind: mi.Type) -> Any:
    """A value from an environment variable.

    Text, numbers and booleans as they are; an empty text is None where the key may be unset; lists of text
    may be separated by commas; everything else is written as in TOML.

    Raises:
        ValueError: Says what was expected.
    """
    kind = bare(kind)
    match kind:
        case mi.BoolType():
            if text.strip().lower() not in _TRUE | _FALSE:
                raise ValueError(f"expected true or false, got {text!r}")
            return text.strip().lower() in _TRUE
        case mi.IntType():
            return _number(int, text, "a whole number")
        case mi.FloatType():
            return _number(float, text, "a number")
        case mi.StrType() | mi.LiteralType() | mi.EnumType():
            return text
        case mi.CustomType():
            # The type is Path: relative to where the command was started, and so not to the settings file.
            return str(Path(text).expanduser().absolute()) if text else text
        case mi.UnionType():
            members = [bare(member) for member in kind.types]
            if any(isinstance(member, mi.NoneType) for member in members):
                if not text:
                    return None
                members = [member for member in members if not isinstance(member, mi.NoneType)]
            return coerce(text, members[0])
        case _:
            return _toml(text, kind)


def _number(convert: type[int] | type[float], text: str, expected: str) -> int | float:
    try:
        return convert(text)
    except ValueError:
        raise ValueError(f"expected {expected}, got {text!r}") from None


def _toml(text: str, kind: mi.Type) -> Any:
    item = item_of(kind)
    if item is not None and isinstance(bare(item), mi.StrType) and not text.lstrip().startswith(("[", "{")):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        raise ValueError(f"expected a value written as in TOML, got {text!r}") from None
