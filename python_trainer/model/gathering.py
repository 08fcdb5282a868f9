"""The weights of a policy in shards, gathered one after the other: nothing holds all of them."""

from collections.abc import Iterator
from itertools import groupby

import torch

from python_trainer.model.hollow import weights_of
from python_trainer.model.lora import adapted_weight, is_adapter, plain_name
from python_trainer.model.policy import Policy
from python_trainer.model.tensors import full


@torch.no_grad()
def gathered_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the plain model and whole tensor, in the type of generation, adapters merged; all ranks ask together."""
    dtypes = {name: tensor.dtype for name, tensor in weights_of(policy.whole)}
    for name, shard in weights_of(policy.model):
        if is_adapter(name):
            continue
        layer = policy.model.get_submodule(name.rpartition(".base_layer.")[0]) if ".base_layer.weight" in name else None
        plain = plain_name(name)
        if layer is not None:
            yield plain, adapted_weight(layer).merged().to(dtypes[plain])
        else:
            yield plain, full(shard.to(dtypes[plain]))  # rounded before it is sent


def gathered_checkpoint(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`gathered_weights` by their names in a checkpoint, a layer at a time; ``whole`` lets its memory go."""
    from transformers.core_model_loading import revert_weight_conversion

    policy.release_whole()
    for _, layer in groupby(gathered_weights(policy), lambda pair: _layer_of(pair[0])):
        yield from revert_weight_conversion(policy.whole, dict(layer)).items()


@torch.no_grad()
def fill_whole(policy: Policy) -> None:
    """Gives ``whole`` its memory and the weights of now, where generation does without; all ranks call it together."""
    if policy.lean:
        targets = dict(weights_of(policy.whole))
        for name, weight in gathered_weights(policy):
            targets[name].untyped_storage().resize_(weight.nbytes)
            targets[name].copy_(weight)


def _layer_of(name: str) -> str:
    """What is before the first number in a name, and that number; the name itself where there is none."""
    parts = name.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: end + 1])
