"""``python -m python_trainer plan``: a table of what a device would hold, and what would make it fit."""

import argparse
import json
import os
import re
from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from python_trainer.config import Config, load_config
from python_trainer.engine_choice import choose_engine, has_vllm
from python_trainer.errors import UserError
from python_trainer.model.policy import choose_device
from python_trainer.model.settings import LoraSettings
from python_trainer.plan.advice import what_would_fit
from python_trainer.plan.memory import PARALLEL, PROMPT_TOKENS, Memory, Plan
from python_trainer.plan.passes import Device
from python_trainer.run_directory import write_text
from python_trainer.settings import as_yaml

USABLE = 0.94  # of a GPU's memory; the rest is for CUDA's context and for gaps between tensors: not measured yet


def parse_gpus(text: str) -> Device:
    """``8x80`` or ``80``: GPUs of so many gigabytes, 10^9 bytes each, which is what is left of those that are sold.

    Raises:
        UserError: something else.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", text)
    if found is None or int(found[1] or 1) < 1 or float(found[2]) <= 0:
        raise UserError(f"--gpus must be like 80, or 8x80 for eight of 80 GB, got {text!r}")
    return Device("cuda", int(float(found[2]) * 1e9), int(found[1] or 1))


def device_here(name: str) -> Device:
    """That of this machine which ``model.device`` means."""
    if choose_device(name).type == "cpu":
        return Device("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return Device("cuda", int(total * USABLE), torch.cuda.device_count())


# to be noted where it does
RECOMPUTES = "model.gradient_checkpointing: auto recomputes activations, which would not fit otherwise"


def needs_recomputing(config: Config, ranks: int, prompt: int = PROMPT_TOKENS) -> bool:
    """Whether ``model.gradient_checkpointing`` is ``auto`` and activations do not fit into the GPU without it.

    Args:
        prompt: tokens of one.
    """
    if config.model.gradient_checkpointing != "auto" or choose_device(config.model.device).type == "cpu":
        return False
    device = replace(device_here(config.model.device), count=ranks)
    return Memory(config, device, prompt).plan(config.parallel).trouble is not None


def make_table(plans: list[Plan], chosen: str) -> Table:
    table = Table(box=box.SIMPLE, title="gigabytes (10^9 bytes) on each device")
    table.add_column("")
    for plan in plans:
        count = 1 if plan.parallel == "none" else plan.device.count
        mark = " (chosen)" if plan.parallel == chosen and len(plans) > 1 else ""
        table.add_column(f"{plan.parallel}, {count} of {plan.device.memory / 1e9:.1f}{mark}", justify="right")
    for what in ("parts", "phases"):
        for name in dict.fromkeys(name for plan in plans for name in getattr(plan, what)):
            cells = [getattr(plan, what).get(name) for plan in plans]
            label = name if what == "parts" else f"most in {name}"
            table.add_row(label, *("-" if cell is None else f"{cell / 1e9:.2f}" for cell in cells))
        table.add_section()
    if any(plan.host for plan in plans):
        table.add_row("on the host, of each process", *(f"{plan.host / 1e9:.2f}" for plan in plans))
    table.add_row("answers of full length in the cache", *("-" if p.room is None else str(p.answers) for p in plans))
    table.add_row("fits", *("no" if plan.trouble else "yes" for plan in plans))
    return table


def as_settings(changes: list[dict[str, Any]]) -> str:
    """As ``--set`` takes them."""
    return " ".join(f"{name}={_value(value)}" for change in changes for name, value in change.items())


def _value(value: Any) -> str:
    plain = value.model_dump() if isinstance(value, LoraSettings) else value
    return f"'{as_yaml(plain)}'" if isinstance(plain, dict) else as_yaml(plain)


def as_json(memory: Memory, plans: list[Plan], fix: list[dict[str, Any]] | None) -> dict[str, Any]:
    policy, config = memory.policy, memory.config
    return {
        "model": policy.name,
        "parameters": sum(p.numel() for p in policy.whole.parameters()),
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "prompt_tokens": memory.prompt,
        "parallel": config.parallel,
        "recompute": memory.recompute,
        "plans": {
            plan.parallel: {
                "devices": 1 if plan.parallel == "none" else plan.device.count,
                "memory": plan.device.memory,
                "parts": plan.parts,
                "phases": plan.phases,
                "host": plan.host,
                "cache_tokens": plan.room,
                "trouble": plan.trouble,
            }
            for plan in plans
        },
        "would_fit": None if fix is None else as_settings(fix),
    }


def run(args: argparse.Namespace) -> None:
    """The command.

    Raises:
        UserError: the run does not fit; says what would. Everything has been printed and written then.
    """
    config, prompt, json_file = load_config(args.config, args.overrides), args.prompt_tokens, args.json
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"there is no folder {json_file.parent} for {json_file.name}")
    if prompt < 1:
        raise UserError(f"--prompt-tokens must be at least 1, got {prompt}")
    device = device_here(config.model.device) if args.gpus is None else parse_gpus(args.gpus)
    told = config.rollout.engine == "auto" and args.gpus is not None and not has_vllm()
    config, of_engine = choose_engine(config, gpu=None if args.gpus is None else True)
    memory, said = Memory(config, device, prompt), [of_engine] if of_engine else []
    if told and config.rollout.engine == "paged":
        said.append("rollout.engine: auto is paged here; where vLLM is installed a run takes that: set it to vllm")
    plan = memory.plan(config.parallel)
    if plan.trouble is not None and config.model.gradient_checkpointing == "auto" and device.kind != "cpu":
        config = config.model_copy(update={"model": config.model.model_copy(update={"gradient_checkpointing": True})})
        memory = memory.like(config)
        plan = memory.plan(config.parallel)
        said.append("model.gradient_checkpointing: auto is true here")
    shared = device.count > 1
    plans = [memory.plan(name) for name in PARALLEL if shared or name == config.parallel]
    fix = what_would_fit(memory) if plan.trouble is not None else None
    if json_file is not None:
        write_text(json_file, json.dumps(as_json(memory, plans, fix and fix[0]), indent=1) + "\n")
    console = Console(highlight=False)
    count = sum(p.numel() for p in memory.policy.whole.parameters())
    kind = str(memory.policy.model.dtype).removeprefix("torch.")
    console.print(f"{memory.policy.name}: {count / 1e9:.2f} billion parameters, {kind}", soft_wrap=True)
    console.print(
        f"prompts of {prompt} tokens, answers of {config.rollout.max_completion_length}, micro-batches of "
        f"{config.optimizer.micro_batch_tokens}, activations {'computed again' if memory.recompute else 'kept'}",
        soft_wrap=True,
    )
    for text in said:
        console.print(text, soft_wrap=True)
    console.print(make_table(plans, config.parallel))
    if plan.trouble is not None:
        what = "no change of the settings that this command knows would make it fit"
        if fix is not None:
            what = f"this would fit, with {fix[1].peak / 1e9:.1f} GB at most: --set {as_settings(fix[0])}"
        raise UserError(f"{plan.trouble} (parallel: {plan.parallel}); {what}")
