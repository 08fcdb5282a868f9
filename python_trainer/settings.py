"""What all sections of a configuration have in common."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from python_trainer.registry import Registry


class Section(BaseModel):
    """Unknown keys are errors, and the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def fitting(cls, values: Mapping[str, Any]) -> "type[Section]":
        """The class for these settings, where some of them decide what others there are."""
        return cls

    @classmethod
    def around(cls, value: Any) -> Any:
        """Settings for an object that stands in their place, if there are such; otherwise what was given."""
        return value

    @classmethod
    def kinds(cls) -> "dict[str, type[Section]]":
        """Name -> class of those among which :meth:`fitting` chooses by name, as far as they are registered."""
        return {}


class Plugin:
    """Annotation of a setting that names a plug-in, or several: of ``str`` or ``list[str]``.

    Args:
        registry: what is to be named, or a function that returns it where it comes after the settings.
        later: the plug-in is not looked for when the settings are checked.
    """

    def __init__(self, registry: Registry[Any] | Callable[[], Registry[Any]], *, later: bool = False):
        self._registry, self.later = registry, later

    @property
    def registry(self) -> Registry[Any]:
        return self._registry if isinstance(self._registry, Registry) else self._registry()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.no_info_before_validator_function(self._named, handler(source))
        return schema if self.later else core_schema.no_info_after_validator_function(self._check, schema)

    def _named(self, value: Any) -> Any:
        """With names for objects."""
        if isinstance(value, list | tuple):
            return [self.registry.name_of(plugin) for plugin in value]
        return self.registry.name_of(value)

    def _check(self, value: Any) -> Any:
        names = self.registry.names()
        for plugin in value if isinstance(value, list) else [value]:
            if plugin in names:
                continue
            if ":" in plugin or plugin.endswith(".py"):
                self.registry.resolve(plugin)
            elif isinstance(value, list):
                raise ValueError(f'must hold names out of {", ".join(names)} or "{self.registry.form}", got {plugin!r}')
            else:
                *others, last = f'"{self.registry.form}"', *map(repr, names)
                known = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
                raise PydanticCustomError("plugin", "{known}", {"known": known})
        return value

    @property
    def choices(self) -> str:
        return " | ".join([*self.registry.names(), *self.registry.forms, self.registry.form])


class _Fit:
    """Makes a field's settings of the class that :meth:`Section.fitting` chooses."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def fit(value: Any) -> Any:
            return source.fitting(value).model_validate(value) if isinstance(value, Mapping) else source.around(value)

        whole = core_schema.simple_ser_schema("any")  # not the fields of the base alone
        return core_schema.no_info_before_validator_function(fit, handler(source), serialization=whole)


S = TypeVar("S", bound=Section)
Fitted = Annotated[S, _Fit()]
"""A section whose class depends on what it holds."""
