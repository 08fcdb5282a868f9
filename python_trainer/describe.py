"""Every setting in words: its key, type, default and documentation, from the classes that hold them."""

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from python_trainer.accelerators import AUTO, OrAuto
from python_trainer.config import Config, as_yaml, section_in
from python_trainer.settings import Plugin, Section


def describe_settings(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, documentation) of every setting, in order."""
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not field.annotation:
            default = section.fitting({}).model_fields[name].get_default(call_default_factory=True)
            kind = type_name(field.annotation, field.metadata)
            yield f"{prefix}{name}", kind, as_yaml(default), field.description or ""
        if inner is not None:
            below = f"{prefix}{name}.NAME." if get_origin(field.annotation) is dict else f"{prefix}{name}."
            yield from describe_settings(inner if inner.kinds() else inner.fitting({}), below)
            yield from describe_kinds(inner, below)


def describe_kinds(section: type[Section], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Settings that only some kinds of a section have, each once, with the names of those kinds."""
    owners: dict[tuple[str, str, str, str], list[str]] = {}
    for name, kind in section.kinds().items():
        for row in describe_settings(kind, prefix):
            if row[0].removeprefix(prefix).partition(".")[0] not in section.model_fields:
                owners.setdefault(row, []).append(name)
    for (key, kind_name, default, text), names in owners.items():
        yield key, kind_name, default, f"{', '.join(names)}: {text}"


def type_name(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """``int | null``, ``list of str``, ``group | rloo | module:function`` and the like."""
    plugin = next((item for item in metadata if isinstance(item, Plugin)), None)
    if plugin is not None:
        several = f"list of {plugin.choices}" if get_origin(kind) is list else plugin.choices
        if any(isinstance(item, OrAuto) for item in metadata):
            several = f"{AUTO} | {several}"
        return f"{several} | list" if any(get_origin(part) is list for part in get_args(kind)) else several
    if get_origin(kind) is Annotated:
        return type_name(get_args(kind)[0], get_args(kind)[1:])
    if kind is None or kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (types.UnionType, Union):
        return " | ".join(type_name(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if get_origin(kind) is tuple:
        return f"[{', '.join(type_name(part) for part in get_args(kind))}]"
    return getattr(kind, "__name__", str(kind))
