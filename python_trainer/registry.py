"""Plug-ins: what can be named in a setting, whether it comes with the trainer or lies in somebody's own module."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from python_trainer.errors import UserError

T = TypeVar("T")


class PluginError(UserError, ValueError):
    """A plug-in that is not there, or not what it should be. As a ValueError it also names the setting that has it."""


def load(place: str) -> Any:
    """What lies at ``module:attribute``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Generic[T]):
    """Plug-ins of one kind, by a registered name, as ``module:attribute``, or as the object itself.

    Modules may lie in the current folder. Nothing is imported before :meth:`resolve` asks for it.

    Args:
        kind: for messages: ``reward``.
        plugins: name -> object, or where it lies: ``package.module:attribute``.
        what: the word for one of them; of a ``"class"`` the subclasses of ``of`` are meant, otherwise the instances.
        of: their type; ``Callable`` for functions.
        makers: ``prefix:WHAT`` -> where a class or function lies that makes a plug-in of what follows the prefix.
    """

    def __init__(
        self,
        kind: str,
        plugins: Mapping[str, Any],
        *,
        what: str = "function",
        of: Any = Callable,
        makers: Mapping[str, str] | None = None,
    ):
        self.kind, self._plugins, self._what, self._of = kind, dict(plugins), what, of
        self._given: dict[str, Any] = {}  # objects by the name that settings have for them
        self._makers = {form.partition(":")[0]: place for form, place in (makers or {}).items()}
        self.forms = list(makers or {})
        self.form = "module:Class" if what == "class" else f"module:{what}"

    def names(self) -> list[str]:
        """Registered ones, in their order."""
        return list(self._plugins)

    def name_of(self, plugin: Any) -> Any:
        """``module:name`` of an object, which is what that name means from then on; anything else as it is."""
        if isinstance(plugin, str) or not self._fits(plugin):
            return plugin
        of = plugin if hasattr(plugin, "__name__") else type(plugin)
        place = name = f"{of.__module__}:{of.__name__}"
        number = 1
        while self._given.get(name, plugin) is not plugin:  # closures of one maker, a cell that was run again
            number += 1
            name = f"{place}#{number}"
        return self.give(name, plugin)

    def give(self, name: str, plugin: T) -> str:
        """Lets a name mean this object, in this process -> the name."""
        self._given[name] = plugin
        return name

    def resolve(self, plugin: str | T) -> T:
        """The object that is meant.

        Raises:
            PluginError: no such plug-in, or one of another kind; says what to write instead where that is plain.
        """
        if not isinstance(plugin, str):
            if not self._fits(plugin):
                raise PluginError(f"{self.kind} {plugin!r} is no {self._what}")
            return plugin
        prefix, _, argument = plugin.partition(":")
        if argument and prefix in self._makers and plugin not in self._given:
            return cast(T, load(self._makers[prefix])(argument))
        found = self._given.get(plugin, self._plugins.get(plugin, plugin))
        return self._load(plugin, found) if isinstance(found, str) else cast(T, found)

    def _load(self, name: str, place: str) -> T:
        module_name, _, attribute = place.partition(":")
        if not module_name or module_name.endswith(".py") or not attribute.isidentifier():
            raise PluginError(
                f'{self.kind} {name!r} is neither {", ".join(self._plugins)} nor of the form "{self.form}"'
                f"{self._instead(name, module_name, attribute)}"
            )
        module = self._import(name, module_name)
        found = getattr(module, attribute, None)
        if not self._fits(found):
            made_of = "" if found is None or self._of is Callable else f" made of {self._of.__name__}"
            raise PluginError(
                f"{self.kind} {name!r}: module {module_name} ({getattr(module, '__file__', None)}) has no "
                f"{self._what} {attribute}{made_of}"
            )
        return cast(T, found)

    def _fits(self, found: object) -> bool:
        if self._what == "class":
            return isinstance(found, type) and issubclass(found, self._of)
        return isinstance(found, self._of)

    def _import(self, name: str, module_name: str) -> ModuleType:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(module_name)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise PluginError(f"{self.kind} {name!r}: importing {module_name} failed: {what}") from error

    def _instead(self, name: str, module_name: str, attribute: str) -> str:
        """What to write for a file name, or for a module without attribute; nothing for what is no module at all."""
        file = module_name.endswith(".py")
        module_name = ".".join(Path(module_name).with_suffix("").parts) if file else module_name
        if not all(map(str.isidentifier, module_name.split("."))):
            return "; name a module of the current folder, without .py" if file else ""
        if attribute.isidentifier():
            return f"; write {module_name}:{attribute}"
        try:
            found = vars(self._import(name, module_name)).items()
        except PluginError as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == module_name:
                return ""
            raise
        own = [key for key, value in found if self._is_own(value, module_name) and not key.startswith("_")]
        return "; write " + " or ".join(f"{module_name}:{key}" for key in own or [self.form.partition(":")[2]])

    def _is_own(self, found: object, module_name: str) -> bool:
        """Whether it is a plug-in that the module does not merely import."""
        if self._of is not Callable and self._what != "class":  # objects do not say where they were made
            return self._fits(found)
        kind = inspect.isclass if self._what == "class" else inspect.isfunction
        return kind(found) and self._fits(found) and found.__module__ == module_name
