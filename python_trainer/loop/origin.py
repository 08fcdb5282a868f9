"""Digests of the inputs of a run: ranks compare theirs, and a resumed run those in its checkpoint.

No digest depends on the device, the number of threads, ``model.dtype`` or how weights are divided among files.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import safe_open

import rlkernels
from python_trainer.config import Config, flatten
from python_trainer.data import Example
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.prompts import Prompts
from python_trainer.model.hub import policy_folder
from python_trainer.model.loading import adapter_base, choose_device, tokenizer_fingerprint
from python_trainer.model.policy import Policy
from python_trainer.run.run_state import versions
from python_trainer.settings import shared_values
from rlkernels.weights.checkpoints import weight_files

PLUGIN = re.compile(r"([\w.]+):[A-Za-z_]\w*(#\d+)?")  # module:attribute
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in this process


class Origin(BaseModel):
    """Inputs that must be the same when a run is resumed.

    Attributes:
        tokenizer: a digest of its vocabulary, its rules and its chat template.
        weights: a digest of the files of ``model.path``, which is the base of adapters or the reference of
            ``algorithm.beta``; None: the checkpoint has all weights that count.
        lora_alpha: it scales the adapters in the checkpoint.
    """

    seed: int
    tokenizer: str
    weights: str | None = None
    lora_alpha: float | None = None


def find_origin(config: Config, policy: Policy, ranks: RankGroup) -> Origin:
    """Return the origin of a run whose policy has just been loaded; all ranks call it together."""
    origin = Origin(seed=config.seed, tokenizer=digest_tokenizer(policy.tokenizer))
    lora = config.model.lora
    if lora is not None or config.algorithm.beta:
        origin.weights = ranks.on_rank0(lambda: digest_weights(policy_folder(config.model.path)))
    origin.lora_alpha = lora.alpha if lora is not None else None
    return origin


def check_origin(saved: Origin, origin: Origin, folder: Path, path: str) -> None:
    """Compare the origin in a checkpoint with that of the run that continues from it.

    Args:
        folder: the run directory.
        path: the setting ``model.path``.

    Raises:
        UserError: they differ.
    """
    settings = {"seed": "seed", "lora_alpha": "model.lora.alpha"}
    for name, old in saved:
        new = getattr(origin, name)
        if None in (old, new) or old == new:
            continue
        if name in settings:
            raise UserError(f"{settings[name]} must be {old}, with which {folder} began, got {new}")
        raise UserError(
            f"{folder} began with another {name} than model.path has now ({path}): resume it with that model, or "
            f"begin a new run with model.path={folder / 'model'}"
        )


def compare_settings(config: Config, ranks: RankGroup) -> None:
    """Compare settings, versions, devices and code of all ranks, before anything is loaded.

    Raises:
        UserError: they differ; on all ranks.
    """
    if ranks.size == 1:
        return
    with ranks.fail_together():
        values = flatten(shared_values(config))
        packages = {name: version for name, version in versions().items() if name != "python"}
        shown = values | packages | {"the type of device": choose_device(config.model.device).type}
        hidden = {"the code of rlkernels, python_trainer or plug-ins": digest_code(values.values())}
    ranks.check_equal(shown, hidden)


def compare_inputs(
    config: Config, policy: Policy, prompts: Prompts, origin: Origin, checkpoint: Path | None, ranks: RankGroup
) -> None:
    """Compare model, tokenizer, prompts and checkpoint of all ranks, before the first step.

    Raises:
        UserError: they differ; on all ranks.
    """
    if ranks.size == 1:
        return
    with ranks.fail_together():
        model_config = json.loads(policy.model.config.to_json_string(use_diff=False), object_hook=without_path)
        hidden = {
            "the configuration of the model": digest_value([model_config, policy.eos_token_ids]),
            "the tokenizer": origin.tokenizer,
            "the checkpoint": checkpoint and hashlib.sha256((checkpoint / "checksums.json").read_bytes()).hexdigest(),
        }
        if not ranks.sharded:  # if sharded, rank 0 has sent them to all
            hidden["the initial weights"] = digest_weights(policy_folder(config.model.path))
        for split, ids in prompts.ids.items():
            hidden[f"the {split} prompts"] = digest_examples(getattr(prompts.task, split), ids)
        for prompt_set in prompts.sets:
            digest = digest_examples(prompt_set.examples, prompt_set.ids)
            hidden[f"the prompts of evaluation.{prompt_set.name}"] = digest
        for name, function in prompts.task.reward_functions.items():
            if isinstance(folder := getattr(function, "folder", None), Path):
                hidden[f"the reward model {name}"] = digest_weights(folder)
    ranks.check_equal({}, hidden)


def digest_tokenizer(tokenizer: Any) -> str:
    return digest_value([tokenizer_fingerprint(tokenizer), tokenizer.chat_template])


def digest_weights(folder: Path) -> str:
    """Return a digest of the tensors in a folder of weights, and of the folders below if it holds an adapter."""
    base = adapter_base(folder)
    below = None
    if base == folder:
        files = weight_files(folder)
    else:
        files = [folder / "adapter_model.safetensors"]
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        scaling = {key: adapter.get(key) for key in ("r", "lora_alpha", "use_rslora")}
        below = digest_value([digest_weights(base), scaling])
    tensors = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors += [(file, name) for name in opened.keys()]  # noqa: SIM118
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests: list[Any] = sorted(pool.map(digest_tensor, tensors))
    if not files:  # torch's own format
        for file in sorted(folder.glob("*.bin")):
            with file.open("rb") as opened:
                digests.append(hashlib.file_digest(opened, "blake2b").hexdigest())
    return digest_value([below, digests])


def digest_tensor(place: tuple[Path, str]) -> list[str]:
    """Return the name of a tensor in a file, and a digest of its type, shape and bits."""
    file, name = place
    with safe_open(file, framework="pt") as opened:
        tensor = opened.get_tensor(name)  # it maps the file
        digest = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return [name, digest.hexdigest()]


def digest_examples(examples: Sequence[Example], ids: Sequence[Sequence[int]]) -> str:
    """Return a digest of prompts, as token ids, and of the columns that rewards get."""
    digest = hashlib.blake2b(digest_size=16)
    for example, tokens in zip(examples, ids, strict=True):
        columns = json.dumps([len(tokens), example.columns], default=plain, skipkeys=True)
        digest.update(columns.encode())
        digest.update(array("q", tokens))
    return digest.hexdigest()


def digest_code(values: Iterable[str]) -> str:
    """Return a digest of the sources of our packages, and of the modules that settings name as ``module:attribute``."""
    digest = hashlib.blake2b(digest_size=16)
    for root in (Path(__file__).parents[1], Path(rlkernels.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    plugins = {match[1] for value in values for match in PLUGIN.finditer(value)}
    for name in sorted(plugins & sys.modules.keys()):
        source = getattr(sys.modules[name], "__file__", None)
        if source and Path(source).is_file():
            digest.update(name.encode() + Path(source).read_bytes())
    return digest.hexdigest()


def digest_value(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """Write what JSON does not know so that equal values of two processes look the same."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else ADDRESS.sub("", str(value))


def without_path(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "_name_or_path"}
