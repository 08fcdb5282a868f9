"""Plug-ins: what a setting can name, whether it comes with the trainer or lies in the user's own module."""

import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from python_trainer.errors import UserError

T = TypeVar("T")


class PluginError(UserError, ValueError):
    """A plug-in that does not exist or has the wrong type. As a ValueError it is reported with its setting."""


def load(place: str) -> Any:
    """Imports ``module:attribute``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggests the known names that are nearest to a misspelt one; empty where none is near."""
    close = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


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
        self.kind, self.lazy = kind, lazy
        self._plugins, self._of, self._classes, self._makers = dict(plugins), of, classes, dict(makers or {})
        self._given: dict[str, Any] = {}  # name -> object that a caller passed in a mapping of settings

    def names(self) -> list[str]:
        """Lists the registered names in their order."""
        return list(self._plugins)

    @property
    def choices(self) -> list[str]:
        """Everything that a setting may hold, as help shows it."""
        form = "module:Class" if self._classes else "module:function" if self._of is None else f"module:{self.kind}"
        return [*self.names(), *(f"{prefix}:PATH" for prefix in self._makers), form]

    def name_of(self, plugin: Any) -> Any:
        """Names an object ``module:name``, and lets that name mean the object; returns anything else unchanged."""
        if isinstance(plugin, str) or not self._fits(plugin):
            return plugin
        of = plugin if hasattr(plugin, "__name__") else type(plugin)
        place = name = f"{of.__module__}:{of.__name__}"
        number = 1
        while self._given.get(name, plugin) is not plugin:  # closures of one function, a cell that was run again
            number += 1
            name = f"{place}#{number}"
        return self.give(name, plugin)

    def give(self, name: str, plugin: T) -> str:
        """Lets a name mean this object in this process; returns the name."""
        self._given[name] = plugin
        return name

    def resolve(self, plugin: str | T) -> T:
        """Returns the object that a name stands for; an object stands for itself.

        Raises:
            PluginError: there is no such plug-in, or it has the wrong type.
        """
        if not isinstance(plugin, str):
            if not self._fits(plugin):
                raise PluginError(f"{self.kind} {plugin!r} is not {self._wanted()}")
            return plugin
        prefix, _, argument = plugin.partition(":")
        if argument and prefix in self._makers and plugin not in self._given:
            return cast(T, load(self._makers[prefix])(argument))
        found = self._given.get(plugin, self._plugins.get(plugin, plugin))
        return self._load(plugin, found) if isinstance(found, str) else cast(T, found)

    def _load(self, name: str, place: str) -> T:
        module_name, _, attribute = place.partition(":")
        if module_name.endswith(".py") or not attribute.isidentifier():
            file = "; name a module without .py" if module_name.endswith(".py") else did_you_mean(name, self.names())
            raise PluginError(f"must be one of {', '.join(self.choices)}, got {name!r}{file}")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise PluginError(f"{self.kind} {name!r}: importing {module_name} failed: {what}") from error
        found = getattr(module, attribute, None)
        if not self._fits(found):
            where = f"{module_name} ({getattr(module, '__file__', None)})"
            raise PluginError(f"{self.kind} {name!r}: module {where} has no {attribute} that is {self._wanted()}")
        return cast(T, found)

    def _type(self) -> Any:
        return load(self._of) if isinstance(self._of, str) else self._of

    def _fits(self, found: object) -> bool:
        of = self._type()
        if self._classes:
            return isinstance(found, type) and issubclass(found, of)
        return callable(found) if of is None else isinstance(found, of)

    def _wanted(self) -> str:
        of = self._type()
        return "a function" if of is None else f"{'a subclass' if self._classes else 'an instance'} of {of.__name__}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.no_info_before_validator_function(self._named, handler(source))
        return schema if self.lazy else core_schema.no_info_after_validator_function(self._check, schema)

    def _named(self, value: Any) -> Any:
        """Replaces objects by their names."""
        return [self.name_of(one) for one in value] if isinstance(value, list | tuple) else self.name_of(value)

    def _check(self, value: Any) -> Any:
        for name in value if isinstance(value, list) else [value]:
            if name not in self._plugins:  # those are imported when they are used
                self.resolve(name)
        return value
