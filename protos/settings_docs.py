"""Settings types as documented TOML: the reference page, and the effective settings of a node.

`describe` of a tree without required keys is itself a valid file that says nothing but the defaults.
"""

from __future__ import annotations

import enum
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as mi

from protos.settings_tree import bare, item_of, struct_of

_WIDTH = 100


def describe(cls: type[msgspec.Struct], values: msgspec.Struct | None = None) -> str:
    """Every key with its description, type, range and default.

    Args:
        cls: The root of the tree.
        values: Effective settings to print instead of the defaults.
    """
    lines: list[str] = []
    root = mi.type_info(cls)
    assert isinstance(root, mi.StructType)
    _comment(lines, _docstring(cls))
    _table(lines, root, values, "", live=True)
    return "\n".join(lines).strip() + "\n"


def undocumented(cls: type[msgspec.Struct]) -> list[str]:
    """Dotted paths of the keys that have no description. Tests hold this empty."""
    return _undocumented(mi.type_info(cls), "")


def _undocumented(kind: mi.Type, prefix: str) -> list[str]:
    struct = struct_of(kind)
    if struct is None:
        item = item_of(kind)
        return _undocumented(item, prefix) if item is not None else []
    missing: list[str] = []
    for field in struct.fields:
        path = f"{prefix}{field.encode_name}"
        if not _description(field.type):
            missing.append(path)
        missing.extend(_undocumented(field.type, f"{path}."))
    return missing


def _table(lines: list[str], struct: mi.StructType, values: Any, path: str, *, live: bool) -> None:
    """The struct's own keys first, then its sections: TOML cannot return to a table."""
    sections: list[mi.Field] = []
    for field in struct.fields:
        if _is_section(field.type):
            sections.append(field)
        else:
            _key(lines, field, values, live=live)
    for field in sections:
        _section(lines, field, values, path, live=live)


def _is_section(kind: mi.Type) -> bool:
    item = item_of(kind)
    return struct_of(kind) is not None or (item is not None and struct_of(item) is not None)


def _key(lines: list[str], field: mi.Field, values: Any, *, live: bool) -> None:
    default = _default(field)
    value = getattr(values, field.name) if values is not None else default
    facts = f"{_type_name(field.type)}."
    if default is msgspec.NODEFAULT:
        facts += " Required."
    elif default is None:
        facts += " Default: unset."
    else:
        facts += f" Default: {_toml(default)}."
    if lines and lines[-1]:
        lines.append("")
    _comment(lines, _description(field.type))
    _comment(lines, facts)
    if value is None or value is msgspec.NODEFAULT:
        lines.append(f"# {field.encode_name} =")
    else:
        lines.append(f"{'' if live else '# '}{field.encode_name} = {_toml(value)}")


def _section(lines: list[str], field: mi.Field, values: Any, path: str, *, live: bool) -> None:
    name = f"{path}{field.encode_name}"
    default = _default(field)
    value = getattr(values, field.name) if values is not None else default
    struct = struct_of(field.type)
    if lines and lines[-1]:
        lines.append("")
    _comment(lines, _description(field.type))
    if struct is not None:
        present = isinstance(value, msgspec.Struct)
        optional = default is None
        if optional:
            _comment(lines, "Optional section; unset when absent.")
        shown = live and (present or not optional)
        lines.append(f"{'' if shown else '# '}[{name}]")
        _table(lines, struct, value if present else None, f"{name}.", live=shown)
        return
    item = item_of(field.type)
    inner = struct_of(item) if item is not None else None
    assert inner is not None
    mapping = isinstance(bare(field.type), mi.DictType)
    entries = list(value.items() if mapping else ((None, one) for one in value)) if value else []
    _comment(lines, "Any number of these." + ("" if entries else " Default: none."))
    for key, entry in entries or [("NAME" if mapping else None, None)]:
        shown = live and entry is not None
        header = f"[{name}.{key}]" if mapping else f"[[{name}]]"
        lines.append(f"{'' if shown else '# '}{header}")
        _table(lines, inner, entry, f"{name}.{key}." if mapping else f"{name}.", live=shown)


def _default(field: mi.Field) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT


def _description(kind: mi.Type) -> str:
    while isinstance(kind, mi.Metadata):
        schema = kind.extra_json_schema or {}
        if "description" in schema:
            return str(schema["description"])
        kind = kind.type
    if isinstance(kind, mi.UnionType):
        return next((found for member in kind.types if (found := _description(member))), "")
    struct = struct_of(kind)
    return _docstring(struct.cls) if struct is not None else ""


def _docstring(cls: type) -> str:
    """The first paragraph, in one line. Structs without a docstring of their own have none."""
    text = cls.__dict__.get("__doc__") or ""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def _type_name(kind: mi.Type) -> str:
    kind = bare(kind)
    match kind:
        case mi.BoolType():
            return "true or false"
        case mi.IntType():
            return f"Whole number{_range(kind)}"
        case mi.FloatType():
            return f"Number{_range(kind)}"
        case mi.StrType():
            return "Text"
        case mi.LiteralType():
            return "One of " + ", ".join(_toml(value) for value in kind.values)
        case mi.EnumType():
            return "One of " + ", ".join(_toml(member.value) for member in kind.cls)
        case mi.CustomType():
            return "Path" if kind.cls is Path else kind.cls.__name__
        case mi.UnionType():
            return " or ".join(_type_name(m) for m in kind.types if not isinstance(bare(m), mi.NoneType))
        case mi.DictType():
            return f"Table of {_type_name(kind.value_type)}"
        case _:
            item = item_of(kind)
            return f"List of {_type_name(item).lower()}" if item is not None else type(kind).__name__


def _range(kind: mi.IntType | mi.FloatType) -> str:
    bounds = [
        f"{words} {bound:,}" if isinstance(bound, int) else f"{words} {bound:g}"
        for words, bound in (
            ("over", kind.gt),
            ("at least", kind.ge),
            ("under", kind.lt),
            ("at most", kind.le),
        )
        if bound is not None
    ]
    return f", {', '.join(bounds)}" if bounds else ""


def _toml(value: Any) -> str:
    """One value as TOML. JSON's strings are TOML's basic strings."""
    match value:
        case enum.Enum():
            return _toml(value.value)
        case bool():
            return "true" if value else "false"
        case Path() | str():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
        case _:
            return "[" + ", ".join(_toml(item) for item in value) + "]"


def _comment(lines: list[str], text: str) -> None:
    lines.extend(f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2))
