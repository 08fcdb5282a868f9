"""The weights of models on disk: folders of safetensors, and the steps of a run, stored as deltas.

A history is a folder with the first model, ``base/``, and a delta for each step after it, ``step-000001.delta`` and so
on; the trainer writes one to RUN/weights (``save.weight_history``). All functions that read a checkpoint also take the
file of a step.
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
STATE = (".safetensors", ".bin", ".pt", ".pth")  # weights and a trainer's state: not copied
BASE = "base"
STEP_FILE = re.compile(r"step-(\d{6,})\.delta")


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a folder, from the files that ``from_pretrained`` of Transformers would read.

    That is the file or index that ``transformers_weights`` in config.json names, else model.safetensors, else the
    shards of model.safetensors.index.json. Other files are ignored. Only headers are read before the first access.

    Attributes:
        path: of the checkpoint.
        folder: of the model's other files.
        files: name -> the file that holds the tensor.
        shapes: name -> shape.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = self.folder = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a folder")
        refuse_adapter(self.path)
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
        """Return the tensor; its memory maps the file while references exist."""
        return self._open(self.files[name]).get_tensor(name)


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a folder that holds an adapter of PEFT."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter (adapter_config.json): merge it into the weights first")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that ``from_pretrained`` would read, as listed in :class:`Folder`; none without safetensors.

    Raises:
        ValueError: config.json or the index names a file outside the folder, or cannot be read.
    """
    config = folder / "config.json"
    name = _read_json(config, "configuration").get("transformers_weights") if config.is_file() else None
    for default in (SINGLE, INDEX):
        if name is None and (folder / default).is_file():
            name = default
    if name is None:
        return []
    file = _in_same_folder(config, name)
    return indexed_files(file) if file.suffix == ".json" else [file]


def indexed_files(index: Path) -> list[Path]:
    """Return the weight files that an index names; ValueError unless all of them lie in its folder."""
    weight_map = _read_json(index, "safetensors index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is not a safetensors index: it has no weight_map")
    return sorted({_in_same_folder(index, name) for name in weight_map.values()})


def _in_same_folder(file: Path, name: object) -> Path:
    """Return the path of the file ``name`` in the folder of ``file``, which names it."""
    if not isinstance(name, str) or Path(name).name != name or not Path(name).suffix:  # "" and ".." have no suffix
        raise ValueError(f"{file} must name weight files of its own folder, got {name!r}")
    return file.with_name(name)


def _read_json(file: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a {what}: {error!r}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a {what}: it holds no object")
    return content


class History:
    """The models of a run; one of them is in memory at a time.

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
        """Return the weights after a step, valid until the next call, or those of the first model (0), which stay.

        A later step than that of the last call reads only the deltas between them.

        Raises:
            ValueError: there is no such step, or a delta is damaged or of another run.
        """
        if not 0 <= step <= self.steps:
            raise ValueError(f"step must be one of {self.path}, 0 to {self.steps}, got {step}")
        if step == 0:
            return self.base
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
    """A step of a history, with the interface of a folder; ``files`` are those of the first model.

    Args:
        path: the file of the step.
        history: the step's history.

    Raises:
        ValueError: the file is no step.
    """

    def __init__(self, path: Path, history: History) -> None:
        self.path = path
        match = STEP_FILE.fullmatch(self.path.name)
        if match is None:
            raise ValueError(f"a step of a weight history must be called like step-000010.delta, got {self.path}")
        self.history = history
        self.step = int(match[1])
        self.folder = history.base.folder
        self.files = history.base.files
        self.shapes = history.base.shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor; it changes when another step of the history is read."""
        return self.history.weights(self.step)[name]


def step_file(folder: Path, step: int) -> Path:
    """Return the path of a step's delta in a history."""
    return folder / f"step-{step:06d}.delta"


def step_files(folder: Path) -> dict[int, Path]:
    """Return the deltas in a history by their steps."""
    matches = ((STEP_FILE.fullmatch(file.name), file) for file in folder.glob("step-*.delta"))
    return {int(match[1]): file for match, file in matches if match}


def open_checkpoint(path: str | Path, histories: dict[Path, History] | None = None) -> Folder:
    """Return the weights of a folder of safetensors, or of a step of a history.

    Args:
        path: folder, or file of the step.
        histories: open histories by folder; each has one model in memory, for all of its steps.

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
    """Raise ValueError if the new folder of :func:`write_checkpoint` exists."""
    if output_dir.exists():
        raise ValueError(f"--output-dir must be a new folder, got {output_dir}")


def write_checkpoint(
    source: Folder, output_dir: Path, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
) -> None:
    """Write a model as a folder, as a whole or not at all, one weight file at a time in memory.

    Args:
        source: its files other than weights are copied.
        output_dir: the new folder.
        change: name and tensor of the source -> the tensor to write, in the same dtype.
    """
    from safetensors.torch import save_file

    draft = draft_of(output_dir)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in source.folder.iterdir():
        if file.is_file() and file.suffix not in STATE:
            shutil.copyfile(file, draft / file.name)
    for file in sorted(set(source.files.values())):
        tensors = {name: change(name, source[name]) for name, its_file in source.files.items() if its_file == file}
        save_file(tensors, draft / file.name, metadata={"format": "pt"})
        shutil.copymode(file, draft / file.name)  # save_file ignores the umask: only the owner could read its file
    replace_folder(output_dir)
