"""What would make a run fit."""

from collections.abc import Iterator, Sequence
from typing import Any

from python_trainer.config import Config
from python_trainer.model.settings import LoraSettings
from python_trainer.plan.memory import Memory, Plan

Change = dict[str, Any]  # dotted setting -> value
ANSWERS = 16  # of full length, at least, that a smaller KV cache still has room for


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """The same settings with others in some places."""
    for change in changes:
        for name, value in change.items():
            section, _, field = name.rpartition(".")
            if section:
                part = getattr(config, section).model_copy(update={field: value})
                config = config.model_copy(update={section: part})
            else:
                config = config.model_copy(update={field: value})
    return config


def possible_changes(memory: Memory) -> Iterator[Change]:
    """What takes less memory, in the order in which it is tried: first what changes nothing but speed."""
    config = memory.config
    tokens = config.optimizer.micro_batch_tokens
    while tokens // 2 >= memory.longest:
        tokens //= 2
        yield {"optimizer.micro_batch_tokens": tokens}
    if not memory.recompute:
        yield {"model.gradient_checkpointing": True}
    offload: Change = {"optimizer.offload": True}
    refused = any(x.conflicts(changed(config, [offload])) for x in config.accelerators.chosen())
    if not config.optimizer.offload and memory.device.kind != "cpu" and not refused:
        yield offload
    if config.model.dtype == "float32" and memory.device.kind != "cpu":
        yield {"model.dtype": "bfloat16"}
    cache = config.rollout.memory_bytes or 0
    while cache // 2 >= ANSWERS * memory.longest * memory.token_bytes:
        cache //= 2
        yield {"rollout.memory_bytes": cache}
    if config.model.lora is None:
        yield {"model.lora": LoraSettings()}
    if config.parallel != "fsdp2" and memory.device.count > 1:
        yield {"parallel": "fsdp2"}


def what_would_fit(memory: Memory) -> tuple[list[Change], Plan] | None:
    """The first changes, one after the other as far as it takes, without those that are not needed after all."""
    changes: list[Change] = []

    def plan_with(tried: Sequence[Change]) -> Plan:
        config = changed(memory.config, tried)
        return memory.like(config).plan(config.parallel)

    for change in possible_changes(memory):
        changes = [c for c in changes if c.keys() != change.keys()] + [change]
        if (plan := plan_with(changes)).trouble is None:
            break
    else:
        return None
    for change in list(changes[:-1]):
        fewer = [c for c in changes if c is not change]
        if (without := plan_with(fewer)).trouble is None:
            changes, plan = fewer, without
    return changes, plan
