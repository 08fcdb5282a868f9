"""A checkpoint of a run as a model or an adapter of PEFT, with a model card: ``python -m python_trainer export``."""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file

from python_trainer.checkpoint import list_checkpoints, load_checkpoint, step_of
from python_trainer.config import Config, flatten, settings_used
from python_trainer.distributed.shard_files import load_whole
from python_trainer.errors import UserError
from python_trainer.hub import is_hub_id
from python_trainer.model.dtype import saved_dtype
from python_trainer.model.gguf import gguf_file
from python_trainer.model.lora import adapted_layers
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.shipped import policy_folder
from python_trainer.model.tensors import load_weights
from python_trainer.run_directory import check_output_dir, publish, read_metrics, usual_mode
from python_trainer.run_state import best_evaluated, versions


def run(args: argparse.Namespace) -> None:
    """The command."""
    print(export(args.run, checkpoint=args.checkpoint, output=args.output_dir, adapter=args.adapter))
    if args.push:
        push(args.output_dir or args.run / "export", args.push)


def export(run: Path, *, checkpoint: str | None = None, output: Path | None = None, adapter: bool = False) -> Path:
    """Writes a checkpoint of a run, finished or not, in Hugging Face format -> the folder.

    Args:
        run: the run directory.
        checkpoint: the number of its step, ``best`` for the best of those that were evaluated; None: the newest.
        output: a new folder; None: ``export`` in the run directory.
        adapter: of a run with ``model.lora``, its adapter alone instead of the whole model.

    Raises:
        UserError: no such run or checkpoint, a folder that is in use, an adapter of a run without one.
    """
    config, output = model_settings(run), output or run / "export"
    check_output_dir(output)
    if adapter and config.lora is None:
        raise UserError(f"--adapter needs a run with model.lora, {run} has none")
    if adapter and (made_of_parts(policy_folder(config.path, config.revision))):
        raise UserError(f"--adapter needs a run on a whole model, but its model.path is {config.path}: leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output-dir must be a new folder, got {output}")
    found = choose(run, checkpoint)
    saved = load_whole(found, part="model/")
    weights = saved["model"]
    # shards are float32 whatever the type is in which the run computes; checkpoints of before do not name that
    low = any(value.dtype == torch.bfloat16 for value in weights.values())
    dtype = saved_dtype(saved) or ("bfloat16" if low else "float32")
    here = {"device": "cpu", "dtype": dtype, "gradient_checkpointing": False}
    policy = load_policy(config.model_copy(update=here))
    try:
        load_weights(policy.model, weights, partly=policy.adapted)
    except RuntimeError as error:
        raise UserError(f"{found} is of another model than {config.path}, which model.path of {run} names") from error
    policy.update_whole()
    aside = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    save_adapter(policy, config, aside) if adapter else policy.save(aside)
    (aside / "README.md").write_text(model_card(run, config, step_of(found), adapter=adapter), encoding="utf-8")
    if output.exists():
        output.rmdir()
    publish(aside, output)
    return output


def model_settings(run: Path) -> ModelConfig:
    """Of the run; whatever else is in its settings need not be there any more."""
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{run} is no run directory: its config.yaml cannot be read ({error.strerror})") from error
    try:
        return ModelConfig.model_validate(yaml.safe_load(text)["model"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{run / 'config.yaml'} has no settings of a model that this version knows: {reason}"
        ) from error


def choose(run: Path, checkpoint: str | None) -> Path:
    """The checkpoint that is meant.

    Raises:
        UserError: it is not there.
    """
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise UserError(f"{run} has no checkpoint to export")
    steps = [step_of(path) for path in found]
    if checkpoint is None:
        return found[-1]
    if checkpoint == "best":
        best = best_evaluated(load_checkpoint(found[-1]).get("state", {}).get("evaluations", []), steps)
        if best is None:
            raise UserError(f"no checkpoint of {run} was evaluated: set evaluation.eval_steps so that some are")
        return found[steps.index(best)]
    if not checkpoint.isdecimal() or int(checkpoint) not in steps:
        raise UserError(f"--checkpoint must be best or one of {', '.join(map(str, steps))}, got {checkpoint}")
    return found[steps.index(int(checkpoint))]


def save_adapter(policy: Policy, settings: ModelConfig, folder: Path) -> None:
    """Writes the adapter and the tokenizer as PEFT and vLLM read them."""
    from peft import LoraConfig

    assert settings.lora is not None
    modules = [name for name, _ in adapted_layers(policy.model)]
    ends = {name.rpartition(".")[2] for name in modules}
    linear = [name for name, module in policy.whole.named_modules() if isinstance(module, torch.nn.Linear)]
    alone = all(name in modules for name in linear if name.rpartition(".")[2] in ends)
    options: dict[str, Any] = {
        "r": settings.lora.r,
        "lora_alpha": settings.lora.alpha,
        "target_modules": sorted(ends) if alone else modules,
        "base_model_name_or_path": base_of(settings),
        "revision": settings.revision,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    LoraConfig(**options).save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(folder)
    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": value.detach().contiguous()
        for name, value in policy.model.state_dict().items()
        if ".lora_" in name
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    usual_mode(folder)


def made_of_parts(folder: Path) -> bool:
    """Whether a model is an adapter or a GGUF file, on which another adapter cannot lie for PEFT."""
    return gguf_file(folder) is not None or (folder / "adapter_config.json").exists()


def base_of(settings: ModelConfig) -> str:
    """The model of a run as others find it: an id of the Hub, or a folder."""
    on_hub = is_hub_id(settings.path) and not Path(settings.path).exists()
    return settings.path if on_hub else str(policy_folder(settings.path, settings.revision).resolve())


def model_card(run: Path, settings: ModelConfig, step: int, *, adapter: bool) -> str:
    """README.md: what it is, how it was made and what was measured."""
    used, usual = settings_used(run), flatten(Config().model_dump(mode="json"))
    changed = [f"{name}: {value}" for name, value in used.items() if usual.get(name) != value]
    rows = [(int(row["step"]), row) for row in read_metrics(run) if "eval/accuracy" in row and row["step"] <= step]
    metrics = list(dict.fromkeys(name for _, row in rows for name in row if name.startswith("eval/")))
    table = [["step", *metrics], ["---"] * (len(metrics) + 1)]
    table += [[str(at), *(cell(row, name) for name in metrics)] for at, row in rows]
    head = {
        **({"base_model": settings.path} if is_hub_id(settings.path) and not Path(settings.path).exists() else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "rlkernels", *(["lora"] if adapter else [])],
    }
    used_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join([
        "---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", "",
        f"# {run.resolve().name}, step {step}", "",
        f"{'An adapter (PEFT) for' if adapter else 'A model that began as'} `{settings.path}`, trained by "
        f"reinforcement learning (advantage {json.loads(used['algorithm.advantage'])}) on the task "
        f"{json.loads(used['task.name'])} with python_trainer of rlkernels ({used_by}).", "",
        "## Results", "", *("| " + " | ".join(line) + " |" for line in table), "",
        "## Settings other than the defaults", "", "```yaml", *changed, "```", "",
    ])  # fmt: skip


def cell(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.4f}" if row.get(name) is not None else ""


def push(folder: Path, repository: str) -> None:
    """Uploads a folder to a repository of the Hugging Face Hub, which is made, private, if there is none.

    Raises:
        UserError: the Hub refuses, or cannot be reached.
    """
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        print(api.upload_folder(repo_id=repository, folder_path=folder))
    except (HfHubHTTPError, ValueError, OSError) as error:  # also of its check of the model card
        first = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--push {repository}: {first}; {folder} is complete") from error
