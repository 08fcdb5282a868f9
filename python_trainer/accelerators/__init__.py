"""What makes training cheaper, by name. To add one: a file or folder, and a line in ``ACCELERATORS``.

One of somebody else's is a module with a subclass of ``AcceleratorSettings`` and a subclass of
``python_trainer.accelerators.base.Accelerator``, and ``accelerators.enabled: [module:Class]`` names the first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, PrivateAttr, create_model, field_validator
from pydantic_core import CoreSchema, core_schema

from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.registry import PluginError, Registry
from python_trainer.settings import Section

HOME = "python_trainer.accelerators"
# in the order in which they run within a step
ACCELERATORS: Registry[type[AcceleratorSettings]] = Registry(
    "accelerator",
    {
        "curriculum": f"{HOME}.curriculum.settings:CurriculumSettings",
        "rpo": f"{HOME}.rpo.settings:RPOSettings",  # decides what the answers of a group begin with
        "rhyme": f"{HOME}.rhyme.settings:RhymeSettings",
        "drafts": f"{HOME}.drafts.settings:DraftsSettings",
        "alpha": f"{HOME}.alpha.settings:AlphaSettings",
    },
    classes=True,
    of=AcceleratorSettings,
)


AUTO: Any = "auto"


class OrAuto:
    """Annotation of a list that may be ``auto`` until the other settings are known."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, inner: AUTO if value == AUTO else inner(value), handler(source)
        )


class AcceleratorsConfig(Section):
    """Which accelerators run, and their settings."""

    enabled: Annotated[list[str], ACCELERATORS, OrAuto()] = Field([])
    """Which of them take part. The order of the registered ones does not matter; others run after them. auto: those
    that leave plain training as it is where they do not expect to pay, as far as the other settings allow them."""

    _said: str | None = PrivateAttr(None)

    @property
    def said(self) -> str | None:
        """What to say of ``auto``."""
        return self._said

    def choose(self, refused: Callable[[AcceleratorSettings], str | None]) -> None:
        """Replaces ``auto``.

        Args:
            refused: why an accelerator cannot go with the other settings; None: it can.
        """
        able = [getattr(self, kind.name) for kind in registered() if kind.modest]
        reasons = {
            settings.name: reason.removeprefix("accelerators.enabled: ")
            for settings in able
            if (reason := refused(settings)) is not None
        }
        self.enabled = [settings.name for settings in able if settings.name not in reasons]
        chosen = [f"{settings.name}: {settings.modest}" for settings in able if settings.name in self.enabled]
        self._said = f"accelerators.enabled: auto turns on {'; '.join([*(chosen or ['nothing']), *reasons.values()])}"

    @field_validator("enabled")
    @classmethod
    def in_their_order(cls, enabled: list[str]) -> list[str]:
        if enabled == AUTO:
            return enabled
        names = ACCELERATORS.names()
        ordered = [name for name in names if name in enabled]
        return ordered + [name for name in dict.fromkeys(enabled) if name not in names]

    @classmethod
    def fitting(cls, values: Mapping[str, Any]) -> type["AcceleratorsConfig"]:
        """With a section for each registered plug-in, and for others that are enabled."""
        enabled = values.get("enabled")
        names = map(ACCELERATORS.name_of, enabled) if isinstance(enabled, list | tuple) else ()
        return with_sections((*registered(), *others(names)))

    def with_enabled(self, enabled: Sequence[str]) -> dict[str, Any]:
        """These settings as values, with others enabled; only enabled and registered plug-ins have sections."""
        wanted = enabled if enabled == AUTO else list(enabled)
        known = AcceleratorsConfig.fitting({"enabled": wanted}).model_fields
        sections = {name: values for name, values in self.model_dump(mode="json").items() if name in known}
        return sections | {"enabled": wanted}

    def chosen(self) -> list[AcceleratorSettings]:
        """Settings of the enabled ones, in the order in which they run; none as long as ``auto`` stands there."""
        if self.enabled == AUTO:
            return []
        return [getattr(self, ACCELERATORS.resolve(name).name) for name in self.enabled]

    def others(self) -> list[AcceleratorSettings]:
        """Settings of those that are not enabled."""
        enabled = {settings.name for settings in self.chosen()}
        return [getattr(self, kind.name) for kind in registered() if kind.name not in enabled]


def registered() -> list[type[AcceleratorSettings]]:
    return [ACCELERATORS.resolve(name) for name in ACCELERATORS.names()]


def others(enabled: Iterable[Any]) -> list[type[AcceleratorSettings]]:
    """Of these plug-ins those that are not registered, but can be used."""
    found = {}
    for name in enabled:
        if isinstance(name, str) and name not in ACCELERATORS.names():
            with suppress(PluginError):  # the setting's own check says why
                found[ACCELERATORS.resolve(name)] = name
    return list(found)


@cache
def with_sections(kinds: tuple[type[AcceleratorSettings], ...]) -> type[AcceleratorsConfig]:
    """The configuration with a section for each of these."""
    sections: dict[str, Any] = {}
    for kind in kinds:
        name = getattr(kind, "name", None)
        if not isinstance(name, str) or not name.isidentifier() or name in ("enabled", *sections):
            raise PluginError(
                f"{kind.__module__}:{kind.__name__}.name must be an identifier that no accelerator has, got {name!r}"
            )
        sections[name] = (kind, Field(default=kind(), description=" ".join((kind.__doc__ or "").split())))
    doc = AcceleratorsConfig.__doc__
    return create_model("AcceleratorsConfig", __base__=AcceleratorsConfig, __doc__=doc, **sections)
