"""Rank-1 updates as a LoRA adapter in the format of the PEFT package."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlkernels.rank1.update import Rank1Update

STACKED = re.compile(r"(?P<module>.+)\.(?P<parameter>\w+)\[(?P<number>\d+)\]")  # as in rlkernels.rank1.projections
# of files with a tensor an expert, which Transformers joins; its gate_up_proj holds the rows of the gate first
FUSED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "", "w2": ""}
SINGLE_EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?P<number>\d+)\.(?P<projection>" + "|".join(FUSED) + r")(\.weight)?"
)


def export_peft(updates: Mapping[str, Rank1Update], directory: str | Path, *, base_model: str,
                scale: float | str = "alpha", task_type: str | None = "CAUSAL_LM",
                fan_in_fan_out: bool = False, model: torch.nn.Module | None = None) -> None:  # fmt: skip
    """Writes ``adapter_model.safetensors`` and ``adapter_config.json`` to a folder.

    The rank is 1; it is 2 where two updates meet in one matrix of an expert, its gate and up projections.

    ``peft.PeftModel.from_pretrained`` then computes W + scale * sigma * u v^T, the factor sqrt(scale * sigma) on
    each side, in float32. Merging so small an update into bfloat16 weights rounds most of it away.

    Args:
        updates: name of the weight, with or without its ``.weight`` -> update. "zero" ones are left out. An expert's is
            ``NAME[3]``, or the name in files that hold a tensor an expert; both need ``model``.
        directory: made when missing; files of the same names are replaced.
        base_model: name or path of the base model, for ``adapter_config.json``.
        scale: factor on ``sigma u v^T``; 1 is the best rank-1 approximation of the delta, "alpha" gives the update
            the Frobenius norm of the whole delta, as AlphaRL does. May be negative.
        task_type: of the adapter, as PEFT names it.
        fan_in_fan_out: without ``model``, True where the updates are of weights stored as [inputs, outputs], such as
            those of Transformers' ``Conv1D``, which GPT-2 is made of; torch's ``Linear`` stores [outputs, inputs].
        model: the base model, which may lie on "meta". It tells which modules are embeddings or ``Conv1D``, and the
            names that PEFT knows: the files of vision-language models have others.

    Raises:
        ValueError: no update that is not zero; a scale that is not finite; two names of one weight; a name that fits no
            module of the model, or several; without ``model``, a name of an embedding, an expert or a part of a
            vision-language model.
    """
    from safetensors.torch import save

    if scale != "alpha" and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be 'alpha' or a finite number, got {scale!r}")
    known = None if model is None else dict(model.named_modules())
    layers: dict[str, Factors] = {}  # of modules with a weight of their own
    stacks: dict[str, dict[str, list[ExpertFactors]]] = {}  # module -> parameter -> factors
    adapted: dict[Any, str] = {}  # weight (without a model: module) -> its name
    for name, update in updates.items():
        strength = update.sigma * (update.alpha if scale == "alpha" else float(scale))
        expert = _expert_of(name, update, known)
        module = expert.module if expert else _module_name(name.removesuffix(".weight"), update, known)
        if known is not None and not expert and not _is_layer(known[module]):  # a router, for example
            expert = Expert(module, "weight", 0, "")
        if strength == 0:
            continue
        weight: Any = expert or (module if known is None else known[module].weight)  # of tied modules the same
        if weight in adapted:
            raise ValueError(f"updates must hold each weight once, got {adapted[weight]!r} and {name!r}")
        adapted[weight] = name if expert else module
        root = math.sqrt(abs(strength))
        left, right = update.u.float().cpu() * math.copysign(root, strength), update.v.float().cpu() * root
        if expert:
            stacks.setdefault(module, {}).setdefault(expert.parameter, []).append(ExpertFactors(expert, left, right))
            continue
        if known is not None:  # PEFT goes by the module as well
            fan_in_fan_out = type(known[module]).__name__ == "Conv1D"
        embedding = known is not None and isinstance(known[module], torch.nn.Embedding)
        outputs, inputs = (right, left) if fan_in_fan_out or embedding else (left, right)
        layers[module] = Factors(outputs, inputs, embedding)
    if not adapted:
        raise ValueError(f"updates must hold at least one that is not zero, got {len(updates)}")
    is_fused = any(factors.expert.part for parts in stacks.values() for part in parts.values() for factors in part)
    rank = 2 if is_fused else 1
    tensors: dict[str, torch.Tensor] = {}
    for module, factors in layers.items():
        tensors |= factors.tensors(f"base_model.model.{module}", rank)
    for module, parts in stacks.items():
        assert known is not None
        order = [name for name, _ in known[module].named_parameters(recurse=False) if name in parts]
        for depth, parameter in enumerate(reversed(order)):  # PEFT wraps the module once a parameter, the last outside
            prefix = f"base_model.model.{module}" + ".base_layer" * depth
            tensors |= _stack_tensors(prefix, known[module], parameter, parts[parameter], rank)
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "target_modules": list(layers),
        "inference_mode": True,
    }
    if stacks:
        config["target_parameters"] = [f"{module}.{name}" for module, parts in stacks.items() for name in parts]
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # save_file would leave the file to its owner alone, whatever the umask
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Factors:
    """Outer product ``outputs inputs^T`` that an adapter adds to a layer."""

    outputs: torch.Tensor
    inputs: torch.Tensor
    embedding: bool

    def tensors(self, prefix: str, rank: int) -> dict[str, torch.Tensor]:
        """Return the two tensors of PEFT, the rows and columns beyond the first 0."""
        keys = ("lora_embedding_A", "lora_embedding_B") if self.embedding else ("lora_A.weight", "lora_B.weight")
        a, b = self.inputs.new_zeros(rank, len(self.inputs)), self.outputs.new_zeros(len(self.outputs), rank)
        a[0], b[:, 0] = self.inputs, self.outputs
        return {f"{prefix}.{keys[0]}": a, f"{prefix}.{keys[1]}": b}


@dataclass(frozen=True)
class Expert:
    """Place of a matrix in a parameter of a model: all of the matrix of an expert, or a half of its rows."""

    module: str
    parameter: str
    number: int
    part: str  # "" for all rows, "gate" for the first half, "up" for the second


class ExpertFactors(NamedTuple):
    """Outer product ``left right^T`` for an expert."""

    expert: Expert
    left: torch.Tensor
    right: torch.Tensor


def _expert_of(name: str, update: Rank1Update, known: Mapping[str, torch.nn.Module] | None) -> Expert | None:
    """Return the place of an expert's matrix, by its name in the model or in files with a tensor an expert."""
    if stacked := STACKED.fullmatch(name):
        module, parameter, number, part = stacked["module"], stacked["parameter"], int(stacked["number"]), ""
    elif (single := SINGLE_EXPERT.fullmatch(name)) and (known is None or name.removesuffix(".weight") not in known):
        module, number, part = single["module"], int(single["number"]), FUSED[single["projection"]]
        parameter = "gate_up_proj" if part else "down_proj"
    else:
        return None
    if known is None:
        raise ValueError(f"model must be given for {name!r}: only the base model tells how PEFT nests its experts")
    rows, columns = len(update.u) * (2 if part else 1), len(update.v)

    def holds(other: torch.nn.Module) -> bool:
        shape = tuple(getattr(getattr(other, parameter, None), "shape", ()))
        return len(shape) == 3 and shape[1:] == (rows, columns) and number < shape[0]

    return Expert(_find_module(module, name, known, holds), parameter, number, part)


def _stack_tensors(
    prefix: str, module: torch.nn.Module, parameter: str, parts: Sequence[ExpertFactors], rank: int
) -> dict[str, torch.Tensor]:
    """Return PEFT's two tensors for experts [E, outputs, inputs], or [E, inputs, outputs] in a transposed module.

    A parameter with two dimensions is that of one expert.
    """
    *stack, rows, columns = getattr(module, parameter).shape
    experts = stack[0] if stack else 1
    is_transposed = getattr(module, "is_transposed", False)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    a, b = torch.zeros(experts, rank, inputs), torch.zeros(outputs, rank, experts)
    for expert, left, right in parts:
        place = 1 if expert.part == "up" else 0
        half = slice(len(left), None) if place else slice(len(left))
        if is_transposed:
            a[expert.number, place], b[:, place, expert.number] = left, right
        else:
            a[expert.number, place], b[half, place, expert.number] = right, left
    return {f"{prefix}.lora_A.weight": a.flatten(0, 1), f"{prefix}.lora_B.weight": b.flatten(1)}


def _is_layer(module: torch.nn.Module) -> bool:
    """Tell whether PEFT adapts a module as a layer; of others it adapts the parameter."""
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding) or type(module).__name__ == "Conv1D"


def _module_name(name: str, update: Rank1Update, known: Mapping[str, torch.nn.Module] | None) -> str:
    """Return PEFT's name of a module, from its name in a checkpoint file.

    Files may lack a part of it (``layers.0`` for ``language_model.layers.0``) or have them in another order.
    """
    if known is None:
        if re.search(r"embed|\bwte\b|\bwpe\b|^visual|^vision|^language_model", name):
            raise ValueError(
                f"model must be given for {name!r}: only the base model tells which keys PEFT reads for embeddings and "
                "for the parts of vision-language models"
            )
        return name
    shape = (len(update.u), len(update.v))
    return _find_module(
        name, name, known, lambda module: getattr(getattr(module, "weight", None), "shape", None) == shape
    )


def _find_module(
    module: str, name: str, known: Mapping[str, torch.nn.Module], holds: Callable[[torch.nn.Module], bool]
) -> str:
    """Return the module of the model that a module of a checkpoint file is."""
    if module in known:
        return module
    parts = module.split(".")
    numbers = [part for part in parts if part.isdigit()]
    fits = [
        other
        for other, candidate in known.items()
        if other.endswith(f".{parts[-1]}")
        and [part for part in other.split(".") if part.isdigit()] == numbers
        and holds(candidate)
    ]
    # Mixtral's files say block_sparse_moe where the model says mlp: not all parts need to be there
    fits = [other for other in fits if not Counter(parts) - Counter(other.split("."))] or fits
    if len(fits) != 1:
        raise ValueError(f"updates must have names of modules of the model, got {name!r}, which fits {fits or 'none'}")
    return fits[0]
