"""Accelerators, which make training cheaper, by name. To add one: a file or folder, and a line in ``ACCELERATORS``.

A plug-in is a module with a subclass of ``AcceleratorSettings`` and a subclass of
``python_trainer.accelerators.base.Accelerator``; ``accelerators.enabled: [module:Class]`` names the first.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

from pydantic import Field, create_model, field_validator

from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.settings import PluginError, Registry, Section, imported

HOME = "python_trainer.accelerators"
# in the order in which they run within a step
ACCELERATORS: Registry[type[AcceleratorSettings]] = Registry(
    "accelerator",
    {
        "rpo": f"{HOME}.settings:RPOSettings",  # decides what the answers of a group begin with
        "rhyme": f"{HOME}.settings:RhymeSettings",
        "drafts": f"{HOME}.settings:DraftsSettings",
        "alpha": f"{HOME}.settings:AlphaSettings",
    },
    classes=True,
    of=AcceleratorSettings,
)


class AcceleratorsConfig(Section):
    """Which accelerators run, and their settings."""

    enabled: Annotated[list[str], ACCELERATORS] = Field([])
    """Accelerators to use. The shipped ones run in a fixed order, your own after them."""

    @field_validator("enabled")
    @classmethod
    def in_their_order(cls, enabled: list[str]) -> list[str]:
        names = ACCELERATORS.names
        ordered = [name for name in names if name in enabled]
        return ordered + [name for name in dict.fromkeys(enabled) if name not in names]

    @classmethod
    def class_for(cls, values: Mapping[str, Any]) -> type["AcceleratorsConfig"]:
        """Make a class with a section for each registered plug-in, and for others that are enabled."""
        enabled = values.get("enabled")
        kinds = dict.fromkeys(ACCELERATORS.registered())
        for name in map(ACCELERATORS.name_of, enabled) if isinstance(enabled, list | tuple) else ():
            with suppress(PluginError):  # the setting's own check says why
                kinds[ACCELERATORS.resolve(name)] = None
        return with_sections(tuple(kinds))

    def with_enabled(self, enabled: Sequence[str]) -> dict[str, Any]:
        """Return these settings as values with others enabled; only enabled and registered plug-ins have sections."""
        fields = set(AcceleratorsConfig.class_for({"enabled": list(enabled)}).model_fields)
        return self.model_dump(mode="json", include=fields) | {"enabled": list(enabled)}

    def chosen(self) -> list[AcceleratorSettings]:
        """Return the settings of the enabled ones, in the order in which they run."""
        return [getattr(self, ACCELERATORS.resolve(name).name) for name in self.enabled]

    def recording(self) -> list[AcceleratorSettings]:
        """Return the settings of accelerators that are not enabled, but record the run."""
        registered = (getattr(self, kind.name) for kind in ACCELERATORS.registered())
        return [settings for settings in registered if settings.recorder and settings not in self.chosen()]

    def make(self) -> list[Any]:
        """Make the enabled accelerators, and after them those that record the run."""
        classes = [(settings.accelerator, settings) for settings in self.chosen()]
        classes += [(settings.recorder, settings) for settings in self.recording()]
        return [imported(kind)(settings) for kind, settings in classes]


@cache
def with_sections(kinds: tuple[type[AcceleratorSettings], ...]) -> type[AcceleratorsConfig]:
    """Return the configuration with a section for each of these."""
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
