"""The weights of models on disk: folders of safetensors, and the steps of a run that are kept as deltas.

A history is a folder with the first model, ``base/``, and a delta for each step after it, ``step-000001.delta`` and so
on; the trainer writes one to RUN/weights (``save.weight_history``). The file of a step stands for its model wherever a
checkpoint is read.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlkernels._files import draft_of, replace_folder
from rlkernels.weights.delta import apply_

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STATE = (".safetensors", ".bin", ".pt", ".pth")  # weights and what a trainer keeps beside them: not copied
BASE = "base"
STEP_FILE = re.compile(r"step-(\d{6,})\.delta")


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a folder, from the files that ``from_pretrained`` of Transformers would read.

    That is the file or index that ``transformers_weights`` in config.json names, else model.safetensors, else the
    shards of model.safetensors.index.json. No other file matters. Reads headers only, until asked for a tensor.

    Attributes:
        path: of the checkpoint.
        folder: has the other files of the model.
        files: name -> the file that holds the tensor.
        shapes: name -> shape.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = self.folder = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder")
        if (self.path / "adapter_config.json").is_file():
            raise ValueError(f"{self.path} holds an adapter (adapter_config.json): merge it into the weights first")
        if not (files := weight_files(self.path)):
            raise ValueError(f"{self.path} holds no .safetensors file of a model: neither {SINGLE} nor {INDEX}")
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118
                self.files[name] = file
                self.shapes[name] = opened.get_slice(name).get_shape()

    @staticmethod
    def _open(file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is missing, truncated or not a safetensors file: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor; its memory maps the file until the last reference goes."""
        return self._open(self.files[name]).get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that ``from_pretrained`` would read, as :class:`Folder` says; none without safetensors.

    Raises:
        ValueError: config.json or the index names a file outside the folder, or cannot be read.
    """
    config = folder / "config.json"
    named = _read_json(config, "configuration").get("transformers_weights") if config.is_file() else None
    for name in (SINGLE, INDEX):
        if named is None and (folder / name).is_file():
            named = name
    if named is None:
        return []
    file = _beside(config, named)
    return indexed_files(file) if file.suffix == ".json" else [file]


def indexed_files(index: Path) -> list[Path]:
    """Return the weight files that an index names; ValueError unless all of them lie in its folder."""
    weight_map = _read_json(index, "safetensors index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map")
    return sorted({_beside(index, name) for name in weight_map.values()})


def _beside(file: Path, name: object) -> Path:
    """Return the path of a file that another file of its folder names."""
    if not isinstance(name, str) or Path(name).name != name or not Path(name).suffix:  # the names "" and ".." have none
        raise ValueError(f"{file} must name weight files of its own folder, got {name!r}")
    return file.with_name(name)


def _read_json(file: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a {what}: {error!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a {what}: it holds no object")
    return found


class History:
    """The models of a run, of which one at a time is in memory.

    Args:
        path: the folder.

    Attributes:
        base: the first model, step 0.
        steps: number of the last step.

    Raises:
        ValueError: there is no first model, or the file of a step is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.base = Folder(self.path / BASE)
        files = step_files(self.path)
        self.steps = len(files)
        if missing := {*range(1, self.steps + 1)} - {*files}:
            raise ValueError(f"{step_file(self.path, min(missing))} is missing: later steps cannot be restored")
        self._step = 0
        self._weights: dict[str, torch.Tensor] | None = None

    def weights(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the weights after a step, or those of the first model (0); valid until another step is asked for.

        From one step to a later one only the deltas between them are read.

        Raises:
            ValueError: there is no such step, or a delta is damaged or of another run.
        """
        if not 0 <= step <= self.steps:
            raise ValueError(f"step must be one of {self.path}, 0 to {self.steps}, got {step}")
        if self._weights is None or step < self._step:
            self._weights = {name: self.base[name].clone() for name in self.base}
            self._step = 0
        while self._step < step:
            file = step_file(self.path, self._step + 1)
            try:
                apply_(self._weights, file.read_bytes())
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
            self._step += 1
        return self._weights


class Step(Folder):
    """A step of a history, as a folder of its weights would be; ``files`` are those of the first model.

    Args:
        path: the file of the step.
        history: that it belongs to; None: a new one.

    Raises:
        ValueError: this is no such file, or as for :class:`History`.
    """

    def __init__(self, path: str | Path, history: History | None = None) -> None:
        self.path = Path(path)
        found = STEP_FILE.fullmatch(self.path.name)
        if found is None:
            raise ValueError(f"a step of a weight history must be called like step-000010.delta, got {self.path}")
        self.history, self.step = history or History(self.path.parent), int(found[1])
        base = self.history.base
        self.folder, self.files, self.shapes = base.folder, base.files, base.shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor; it changes when another step of the history is asked for."""
        return self.history.weights(self.step)[name]


def step_file(folder: Path, step: int) -> Path:
    """Return where a history keeps the delta of a step."""
    return folder / f"step-{step:06d}.delta"


def step_files(folder: Path) -> dict[int, Path]:
    """Return the deltas in a history by their steps."""
    found = ((STEP_FILE.fullmatch(file.name), file) for file in folder.glob("step-*.delta"))
    return {int(name[1]): file for name, file in found if name}


def open_checkpoint(path: str | Path, histories: dict[Path, History] | None = None) -> Folder:
    """Return the weights of a folder of safetensors, or of a step of a history.

    Args:
        path: folder, or file of the step.
        histories: those that are open, by folder; each has one model in memory, whichever steps are read.

    Raises:
        ValueError: as for :class:`Folder` and :class:`Step`.
    """
    path = Path(path)
    if path.suffix != ".delta":
        return Folder(path)
    histories = {} if histories is None else histories
    if path.parent not in histories:
        histories[path.parent] = History(path.parent)
    return Step(path, histories[path.parent])


def check_new_folder(output_dir: Path) -> None:
    """Raise ValueError if the folder that :func:`write_checkpoint` is to make is there already."""
    if output_dir.exists():
        raise ValueError(f"--output-dir must be a new folder, got {output_dir}")


def write_checkpoint(
    source: Folder, output_dir: Path, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
) -> None:
    """Write a model as a folder, as a whole or not at all, one weight file at a time in memory.

    Args:
        source: its files other than weights are copied.
        output_dir: the new folder.
        change: returns what to write for the name and tensor of the source, in the same dtype.
    """
    from safetensors.torch import save_file

    aside = draft_of(output_dir)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in source.folder.iterdir():
        if file.is_file() and file.suffix not in STATE:
            shutil.copyfile(file, aside / file.name)
    for file in sorted(set(source.files.values())):
        tensors = {name: change(name, source[name]) for name, place in source.files.items() if place == file}
        save_file(tensors, aside / file.name, metadata={"format": "pt"})
        shutil.copymode(file, aside / file.name)  # save_file leaves it to its owner alone, whatever the umask
    replace_folder(output_dir)
