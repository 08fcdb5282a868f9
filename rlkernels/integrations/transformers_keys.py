"""What keys and values depend on beside tokens and positions: adapters of PEFT, dropout, other inputs of the model."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

__all__: list[str] = []  # for the cache beside it

# Tensors that a forward pass may be given; keys and values depend on the first three, the others do not change them.
KNOWN = ("input_ids", "attention_mask", "position_ids", "labels", "logits_to_keep", "num_items_in_batch")


def check_pass(model: PreTrainedModel, given: Mapping[str, Any], adapters: tuple) -> None:
    """Checks a forward pass whose keys and values will be found by tokens, positions and adapters alone.

    Args:
        given: the arguments of the model's forward by name.
        adapters: as :func:`adapter_state` found them when the tokens were looked up.

    Raises:
        ValueError: other tensors are given, or the adapters have changed, or something is dropped at random.
    """
    name = type(model).__name__
    for argument, value in given.items():
        if argument not in KNOWN and _holds_tensor(value):
            raise ValueError(
                f"{argument} must not be given to {name} with a PagedCache, which finds keys and values by tokens, "
                "positions and adapters alone: run it without a PagedCache"
            )
    if adapter_state(model) != adapters:
        raise ValueError(f"the adapters of {name} must stay as they were when the PagedCache was opened")
    if model.training and (active := _dropout(model)):
        raise ValueError(f"{name} must be in eval mode, got {active}: cached keys and values would hold its noise")


def adapter_state(model: PreTrainedModel | None) -> tuple:
    """What adapters of PEFT each layer that has some computes with now; () without any.

    Raises:
        ValueError: they differ within a batch.
    """
    state = []
    module: Any
    for module in model.modules() if model is not None else ():
        if not isinstance(getattr(type(module), "disable_adapters", None), property):  # in every layer of PEFT
            continue
        for hook in module._forward_pre_hooks.values():
            for name in ("adapter_names", "alora_offsets"):
                if name in getattr(hook, "keywords", ()):
                    raise ValueError(
                        f"{name} must not be given with a PagedCache: it has one adapter for all rows. Choose it with "
                        "set_adapter, and open a PagedCache for each"
                    )
        state.append(None if module.disable_adapters else (*module.active_adapters, "merged", *module.merged_adapters))
    return tuple(state) if any(state) else ()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensor, value)))


def _dropout(model: PreTrainedModel) -> str | None:
    """A setting of the model or one of its modules that drops something in training mode."""
    settings = model.config.get_text_config(decoder=True).to_dict().items()
    found = [f"{name} {value}" for name, value in settings if "drop" in name and isinstance(value, float) and value > 0]
    found += [f"{n} {m.p}" for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    return found[0] if found else None
