"""What the sections of a configuration have in common, and how help describes them."""

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from python_trainer.registry import Registry


class Section(BaseModel):
    """Unknown keys are errors, and the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def fitting(cls, values: Mapping[str, Any]) -> "type[Section]":
        """Returns the class for these settings, where some of them decide what others there are."""
        return cls

    @classmethod
    def around(cls, value: Any) -> Any:
        """Returns settings for an object that stands in their place, or what was given."""
        return value

    @classmethod
    def kinds(cls) -> "dict[str, type[Section]]":
        """Returns the registered classes among which :meth:`fitting` chooses by name."""
        return {}


class _Fit:
    """Annotation of a section whose class depends on what it holds: see :meth:`Section.fitting`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def fit(value: Any) -> Any:
            return source.fitting(value).model_validate(value) if isinstance(value, Mapping) else source.around(value)

        whole = core_schema.simple_ser_schema("any")  # not the fields of the base alone
        return core_schema.no_info_before_validator_function(fit, handler(source), serialization=whole)


S = TypeVar("S", bound=Section)
Fitted = Annotated[S, _Fit()]


def section_in(annotation: Any) -> type[Section] | None:
    """Returns the section that a setting is, or may be."""
    options = [annotation, *get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def as_yaml(value: Any) -> str:
    """Writes a value on one line, as ``--set`` takes it."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 16).split("\n")[0]


Row = tuple[str, str, str, str]  # key, type, default, documentation


def describe_section(section: type[Section], prefix: str = "") -> Iterator[Row]:
    """Describes every setting of a section and of those within it, in order."""
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{name}", section_in(field.annotation)
        if inner is None:
            default = section.fitting({}).model_fields[name].get_default(call_default_factory=True)
            yield key, type_name(field.annotation, field.metadata), as_yaml(default), field.description or ""
        else:
            yield from describe_section(inner if inner.kinds() else inner.fitting({}), f"{key}.")
            yield from describe_kinds(inner, f"{key}.")


def describe_kinds(section: type[Section], prefix: str) -> Iterator[Row]:
    """Describes the settings that only some kinds of a section have, each once, with the names of those kinds."""
    owners: dict[Row, list[str]] = {}
    for name, kind in section.kinds().items():
        for row in describe_section(kind, prefix):
            if row[0].removeprefix(prefix).partition(".")[0] not in section.model_fields:
                owners.setdefault(row, []).append(name)
    for (key, kind_name, default, text), names in owners.items():
        yield key, kind_name, default, f"{', '.join(names)}: {text}"


def type_name(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Writes a type as ``int | null``, ``list of str``, ``group | rloo | module:function`` and the like."""
    registry = next((item for item in metadata if isinstance(item, Registry)), None)
    origin, parts = get_origin(kind), get_args(kind)
    if registry is not None:
        choices = " | ".join(registry.choices)
        return f"list of {choices}" if list in (origin, *map(get_origin, parts)) else choices
    if origin is Annotated:
        return type_name(parts[0], parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (types.UnionType, Union):
        return " | ".join(map(type_name, parts))
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {', '.join(map(type_name, parts))}"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
