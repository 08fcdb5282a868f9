"""What the sections of a configuration share: plug-ins by name, one class for settings, and their description."""

import difflib
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from python_trainer.errors import UserError

T = TypeVar("T")
Row = tuple[str, str, str, str]  # key, type, default, documentation


class PluginError(UserError, ValueError):
    """A plug-in that does not exist or has the wrong type. As a ValueError it is reported with its setting."""


def copy_nested(value: Any) -> Any:
    """Copy nested dictionaries, lists, tuples and sets, but not the objects in them."""
    if isinstance(value, Mapping):
        return {key: copy_nested(inner) for key, inner in value.items()}
    return type(value)(map(copy_nested, value)) if type(value) in (list, tuple, set) else value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Suggest the names that are nearest to a misspelt one; empty where none is near."""
    close = difflib.get_close_matches(name, names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def imported(plugin: Any) -> Any:
    """Return a plug-in that is given as itself or as ``module:name``."""
    return resolve_name(plugin) if isinstance(plugin, str) else plugin


class Local:
    """Annotation of a setting that may differ between ranks: a path or URL, whose contents are compared instead."""


LOCAL = Local()


def read_bytes(value: Any) -> Any:
    """Read a number of bytes that may have a unit, such as ``4GiB``."""
    if isinstance(value, str):
        try:
            return int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            pass
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number of bytes, such as 4294967296 or 4GiB, got {value!r}")
    return value


Bytes = Annotated[int, BeforeValidator(read_bytes)]


class Registry(Generic[T]):
    """Plug-ins of one kind, each by a registered name, as ``module:attribute``, or as the object itself.

    It is also the annotation of a setting that names plug-ins: ``Annotated[str, LOSS_TYPES]``, or of ``list[str]``.
    The setting keeps names, never objects, so that it can be written to a file. Modules may lie in the current folder.

    Args:
        kind: word for messages: ``reward``.
        plugins: name -> object, or ``module:attribute`` of it, which is imported at its first use.
        of: type of the plug-ins, itself or as ``module:Class``; None for functions.
        classes: plug-ins are subclasses of ``of``, not instances.
        makers: prefix -> ``module:attribute`` of what makes a plug-in from the text after ``prefix:``.
        lazy: settings are accepted without importing what they name.
    """

    def __init__(
        self,
        kind: str,
        plugins: Mapping[str, Any],
        *,
        of: type | str | None = None,
        classes: bool = False,
        makers: Mapping[str, str] | None = None,
        lazy: bool = False,
    ):
        self.kind = kind
        self.lazy = lazy
        self.names = list(plugins)  # registered ones, in their order
        self._of = of
        self._classes = classes
        self._makers = dict(makers or {})
        self._plugins = dict(plugins)  # with the objects that a caller passed in place of names

    def registered(self) -> list[T]:
        """List the registered plug-ins in their order, each once."""
        return list(dict.fromkeys(map(self.resolve, self.names)))

    @property
    def choices(self) -> list[str]:
        """List everything that a setting may hold, as help shows it."""
        form = "module:Class" if self._classes else "module:function" if self._of is None else f"module:{self.kind}"
        return [*self.names, *(f"{prefix}:PATH" for prefix in self._makers), form]

    def name_of(self, plugin: Any) -> Any:
        """Name an object ``module:name``, and let that name mean the object; return anything else unchanged."""
        if isinstance(plugin, str) or not self._fits(plugin):
            return plugin
        function_or_class = plugin if hasattr(plugin, "__name__") else type(plugin)
        place = name = f"{function_or_class.__module__}:{function_or_class.__name__}"
        number = 1
        while self._plugins.get(name, plugin) is not plugin:  # closures of one function, a cell that was run again
            number += 1
            name = f"{place}#{number}"
        return self.register(name, plugin)

    def register(self, name: str, plugin: T) -> str:
        """Let a name mean this object in this process; return the name."""
        self._plugins[name] = plugin
        return name

    def resolve(self, plugin: str | T) -> T:
        """Return the object that a name refers to; return an object unchanged.

        Raises:
            PluginError: there is no such plug-in, or it has the wrong type.
        """
        resolved: Any = self._plugins.get(plugin, plugin) if isinstance(plugin, str) else plugin
        if isinstance(resolved, str):
            prefix, _, argument = resolved.partition(":")
            maker = self._makers.get(prefix) if argument else None
            resolved = self._load(resolved) if maker is None else resolve_name(maker)(argument)
        if not self._fits(resolved):
            form = "a subclass" if self._classes else "an instance"
            allowed = "a function" if self._type is None else f"{form} of {self._type.__name__}"
            raise PluginError(f"{self.kind} {plugin!r} is not {allowed}")
        return cast(T, resolved)

    def without_path(self, value: Any) -> Any:
        """Return a setting of this registry without the paths from which plug-ins are made."""
        if isinstance(value, list):
            return [self.without_path(item) for item in value]
        prefix = str(value).partition(":")[0]
        return prefix if prefix in self._makers else value

    def _load(self, name: str) -> Any:
        module_name, _, attribute = name.partition(":")
        if module_name.endswith(".py") or not attribute.isidentifier():
            hint = "; name a module without .py" if module_name.endswith(".py") else did_you_mean(name, self.names)
            raise PluginError(f"must be one of {', '.join(self.choices)}, got {name!r}{hint}")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return resolve_name(name)
        except Exception as error:
            raise PluginError(f"{self.kind} {name!r}: importing failed: {type(error).__name__}: {error}") from error

    def _fits(self, plugin: object) -> bool:
        if self._classes:
            return isinstance(plugin, type) and issubclass(plugin, self._type)
        return callable(plugin) if self._type is None else isinstance(plugin, self._type)

    @property
    def _type(self) -> Any:
        return imported(self._of)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.no_info_before_validator_function(self._named, handler(source))
        return schema if self.lazy else core_schema.no_info_after_validator_function(self._check, schema)

    def _named(self, value: Any) -> Any:
        """Replace objects by their names."""
        return [self.name_of(item) for item in value] if isinstance(value, list | tuple) else self.name_of(value)

    def _check(self, value: Any) -> Any:
        for name in value if isinstance(value, list) else [value]:
            if name not in self.names:  # the trainer's own plug-ins are imported when they are used
                self.resolve(name)
        return value


class Section(BaseModel):
    """Settings that belong together. Unknown keys are errors; the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def class_for(cls, values: Mapping[str, Any]) -> "type[Section]":
        """Return the subclass that validates these values, where some of them decide which others exist."""
        return cls

    @classmethod
    def kinds(cls) -> "list[type[Section]]":
        """Return the registered classes among which :meth:`class_for` chooses."""
        return []

    @model_validator(mode="wrap")
    @classmethod
    def _validate_by_subclass(cls, values: Any, handler: ModelWrapValidatorHandler) -> Any:
        subclass = cls.class_for(values) if isinstance(values, Mapping) else cls
        return handler(values) if subclass is cls else subclass.model_validate(values)


def shared_values(section: Section) -> dict[str, Any]:
    """Return the settings that all ranks must share.

    A local path or URL becomes True or False, a dictionary of them its names.
    """
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            values[name] = shared_values(value)
        for mark in field.metadata:
            if isinstance(mark, Registry):
                values[name] = mark.without_path(values[name])
            elif mark is LOCAL:
                values[name] = sorted(value) if isinstance(value, dict) else value is not None
    return values


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a setting is, or may be."""
    options = [annotation, *get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def as_yaml(value: Any) -> str:
    """Write a value on one line, as ``--set`` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 16).split("\n")[0]


def describe_section(section: type[Section], prefix: str = "") -> Iterator[Row]:
    """Describe every setting of a section and of the sections in it, in order.

    Settings that only one subclass has follow, prefixed by its name.
    """
    for subclass in [section, *section.kinds()]:
        about = "" if subclass is section else f"{subclass.model_fields['name'].default}: "
        for name, field in subclass.model_fields.items():
            if about and name in section.model_fields:
                continue
            key = f"{prefix}{name}"
            text = f"{about}{field.description or ''}"
            inner = section_in(field.annotation)
            if inner is None:
                default = subclass.class_for({}).model_fields[name].get_default(call_default_factory=True)
                allowed = ", ".join([type_name(field.annotation, field.metadata), *bounds(field.metadata)])
                yield key, allowed, as_yaml(default), text
                continue
            if type(None) in get_args(field.annotation):
                yield key, "null | section", "null", text
            yield from describe_section(inner if inner.kinds() else inner.class_for({}), f"{key}.")


def bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Yield the bounds of a number: ``>= 1``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for item in metadata:
        for name, sign in signs.items():
            if (bound := getattr(item, name, None)) is not None:
                yield f"{sign} {bound:g}"


def type_name(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Write a type as ``int | null``, ``list of str``, ``group | rloo | module:function`` and the like."""
    registry = next((item for item in metadata if isinstance(item, Registry)), None)
    if any(isinstance(item, BeforeValidator) and item.func is read_bytes for item in metadata):
        return "bytes"
    origin = get_origin(kind)
    arguments = get_args(kind)
    if registry is not None:
        choices = " | ".join(registry.choices)
        return f"list of {choices}" if list in (origin, *map(get_origin, arguments)) else choices
    if origin is Annotated:
        return type_name(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, Union):
        return " | ".join(map(type_name, arguments))
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {', '.join(map(type_name, arguments))}"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
