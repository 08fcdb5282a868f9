"""The API reference as web pages, from the docstrings: ``make docs`` writes site/index.html and more."""

import importlib
import pkgutil
import sys
from pathlib import Path

# of the trainer, what a loop of your own is made of
TRAINER = (
    "callbacks",
    "config",
    "data",
    "run",
    "learner",
    "algorithms.advantages",
    "algorithms.losses",
    "model.policy",
    "rollout.engine",
    "tasks.base",
    "tasks.settings",
    "accelerators.base",
    "accelerators.settings",
)


def public_modules() -> list[str]:
    """Modules whose public names are documented: their ``__all__``."""
    import rlkernels
    from rlkernels import integrations

    packages = [f"rlkernels.{module.name}" for module in pkgutil.iter_modules(rlkernels.__path__) if module.ispkg]
    plugins = [f"rlkernels.integrations.{module.name}" for module in pkgutil.iter_modules(integrations.__path__)]
    return ["rlkernels", *(name for name in packages if name != "rlkernels.integrations"), *plugins]


def importable(names: list[str]) -> list[str]:
    """Without the integrations whose library is not installed, which are named."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
            found.append(name)
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return found


def main(folder: Path) -> int:
    import pdoc

    pdoc.render.configure(docformat="google", footer_text="rlkernels", search=True)
    pdoc.pdoc(*importable(public_modules()), *(f"python_trainer.{name}" for name in TRAINER), output_directory=folder)
    print(f"{len(list(folder.rglob('*.html')))} pages: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
