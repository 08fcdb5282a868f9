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
# projections in files with one tensor per expert; Transformers joins them, gate before up in its gate_up_proj
FUSED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "", "w2": ""}
SINGLE_EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?P<number>\d+)\.(?P<projection>" + "|".join(FUSED) + r")(\.weight)?"
)


def export_peft(updates: Mapping[str, Rank1Update], directory: str | Path, *, base_model: str,
                scale: float | str = "alpha", task_type: str | None = "CAUSAL_LM",
                fan_in_fan_out: bool = False, model: torch.nn.Module | None = None) -> None:  # fmt: skip
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` to a folder.

    The rank is 1; it is 2 if one matrix of an expert joins two updates, of its gate and up projections.

    ``peft.PeftModel.from_pretrained`` then computes W + scale * sigma * u v^T, the factor sqrt(scale * sigma) on
    each side, in float32. Merging so small an update into bfloat16 weights rounds most of it away.

    Args:
        updates: name of the weight, with or without its ``.weight`` -> update. "zero" updates are skipped. An expert's
            name is ``NAME[3]``, or that in files with one tensor per expert; both need ``model``.
        directory: created if missing; files of the same names are replaced.
        base_model: name or path of the base model, for ``adapter_config.json``.
        scale: factor on ``sigma u v^T``; 1 is the best rank-1 approximation of the delta, "alpha" gives the update
            the Frobenius norm of the whole delta, as AlphaRL does. May be negative.
        task_type: of the adapter, as PEFT names it.
        fan_in_fan_out: without ``model``, True for updates of weights stored as [inputs, outputs], such as those of
            Transformers' ``Conv1D`` in GPT-2; torch's ``Linear`` stores [outputs, inputs].
        model: the base model, which may be on "meta". It shows which modules are embeddings or ``Conv1D``, and PEFT's
            names of modules: the files of vision-language models have others.

    Raises:
        ValueError: all updates are zero; a scale that is not finite; two names of one weight; a name that fits no
            module of the model, or several; without ``model``, a name of an embedding, an expert or a part of a
            vision-language model.
    """
    from safetensors.torch import save

    if scale != "alpha" and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be 'alpha' or a finite number, got {scale!r}")
    modules = None if model is None else dict(model.named_modules())
    layers: dict[str, Factors] = {}  # of modules that PEFT adapts as a layer
    stacks: dict[str, dict[str, list[ExpertFactors]]] = {}  # module -> parameter -> factors
    adapted: dict[Any, str] = {}  # weight (without a model: module) -> its name
    rank = 1
    for name, update in updates.items():
        strength = update.sigma * (update.alpha if scale == "alpha" else float(scale))
        expert = _expert_of(name, update, modules)
        module = expert.module if expert else _module_name(name.removesuffix(".weight"), update, modules)
        if modules is not None and not expert and not _is_layer(modules[module]):  # a router, for example
            expert = Expert(module, "weight", 0, "")
        if strength == 0:
            continue
        weight: Any = expert or (module if modules is None else modules[module].weight)  # tied modules share it
        if weight in adapted:
            raise ValueError(f"updates must hold each weight once, got {adapted[weight]!r} and {name!r}")
        adapted[weight] = name if expert else module
        root = math.sqrt(abs(strength))
        left = update.u.float().cpu() * math.copysign(root, strength)
        right = update.v.float().cpu() * root
        if expert:
            stacks.setdefault(module, {}).setdefault(expert.parameter, []).append(ExpertFactors(expert, left, right))
            if expert.part:  # gate and up share a matrix
                rank = 2
            continue
        if modules is not None:  # PEFT looks at the module as well
            fan_in_fan_out = type(modules[module]).__name__ == "Conv1D"
        is_embedding = modules is not None and isinstance(modules[module], torch.nn.Embedding)
        outputs, inputs = (right, left) if fan_in_fan_out or is_embedding else (left, right)
        layers[module] = Factors(outputs, inputs, is_embedding)
    if not adapted:
        raise ValueError(f"updates must hold at least one that is not zero, got {len(updates)}")
    tensors: dict[str, torch.Tensor] = {}
    for module, factors in layers.items():
        tensors |= factors.tensors(f"base_model.model.{module}", rank)
    for module, parameters in stacks.items():
        assert modules is not None
        order = [name for name, _ in modules[module].named_parameters(recurse=False) if name in parameters]
        for depth, parameter in enumerate(reversed(order)):  # PEFT wraps the module once a parameter, the last outside
            prefix = f"base_model.model.{module}" + ".base_layer" * depth
            tensors |= _stack_tensors(prefix, modules[module], parameter, parameters[parameter], rank)
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
        config["target_parameters"] = [f"{module}.{name}" for module, names in stacks.items() for name in names]
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # save_file ignores the umask: only the owner could read its file
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Factors:
    """Outer product ``outputs inputs^T`` that an adapter adds to a layer."""

    outputs: torch.Tensor
    inputs: torch.Tensor
    embedding: bool

    def tensors(self, prefix: str, rank: int) -> dict[str, torch.Tensor]:
        """Return PEFT's two tensors; rows and columns beyond the first are 0."""
        a = self.inputs.new_zeros(rank, len(self.inputs))
        b = self.outputs.new_zeros(len(self.outputs), rank)
        a[0] = self.inputs
        b[:, 0] = self.outputs
        if self.embedding:
            return {f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B": b}
        return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}


@dataclass(frozen=True)
class Expert:
    """Place of a matrix in a parameter of a model: an expert's whole matrix, or half of its rows."""

    module: str
    parameter: str
    number: int
    part: str  # "" for all rows, "gate" for the first half, "up" for the second


class ExpertFactors(NamedTuple):
    """Outer product ``left right^T`` for an expert."""

    expert: Expert
    left: torch.Tensor
    right: torch.Tensor


def _expert_of(name: str, update: Rank1Update, modules: Mapping[str, torch.nn.Module] | None) -> Expert | None:
    """Return the place of an expert's matrix, by its name in the model or in files with one tensor per expert."""
    stacked = STACKED.fullmatch(name)
    single = SINGLE_EXPERT.fullmatch(name)
    if stacked:
        match = stacked
        part = ""
        parameter = stacked["parameter"]
    elif single and (modules is None or name.removesuffix(".weight") not in modules):
        match = single
        part = FUSED[single["projection"]]
        parameter = "gate_up_proj" if part else "down_proj"
    else:
        return None
    if modules is None:
        raise ValueError(f"model must be given for {name!r}: only the base model tells how PEFT nests its experts")
    number = int(match["number"])
    rows = len(update.u) * (2 if part else 1)
    columns = len(update.v)

    def fits(candidate: torch.nn.Module) -> bool:
        shape = tuple(getattr(getattr(candidate, parameter, None), "shape", ()))
        return len(shape) == 3 and shape[1:] == (rows, columns) and number < shape[0]

    return Expert(_find_module(match["module"], name, modules, fits), parameter, number, part)


def _stack_tensors(
    prefix: str, module: torch.nn.Module, parameter: str, factors: Sequence[ExpertFactors], rank: int
) -> dict[str, torch.Tensor]:
    """Return PEFT's two tensors for experts [E, outputs, inputs], or [E, inputs, outputs] in a transposed module.

    A parameter with two dimensions has one expert.
    """
    *stack, rows, columns = getattr(module, parameter).shape
    experts = stack[0] if stack else 1
    is_transposed = getattr(module, "is_transposed", False)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    a = factors[0].left.new_zeros(experts, rank, inputs)
    b = factors[0].left.new_zeros(outputs, rank, experts)
    for expert, left, right in factors:
        component = 1 if expert.part == "up" else 0
        half = slice(len(left), None) if component else slice(len(left))
        if is_transposed:
            a[expert.number, component] = left
            b[:, component, expert.number] = right
        else:
            a[expert.number, component] = right
            b[half, component, expert.number] = left
    return {f"{prefix}.lora_A.weight": a.flatten(0, 1), f"{prefix}.lora_B.weight": b.flatten(1)}


def _is_layer(module: torch.nn.Module) -> bool:
    """Return whether PEFT adapts a module as a layer; of other modules it adapts the parameter."""
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding) or type(module).__name__ == "Conv1D"


def _module_name(name: str, update: Rank1Update, modules: Mapping[str, torch.nn.Module] | None) -> str:
    """Return PEFT's name of a module, from its name in a checkpoint file.

    Files may omit a component (``layers.0`` for ``language_model.layers.0``) or have another order of components.
    """
    if modules is None:
        if re.search(r"embed|\bwte\b|\bwpe\b|^visual|^vision|^language_model", name):
            raise ValueError(
                f"model must be given for {name!r}: only the base model tells which keys PEFT reads for embeddings and "
                "for the parts of vision-language models"
            )
        return name
    if name in modules:
        return name
    shape = (len(update.u), len(update.v))

    def fits(candidate: torch.nn.Module) -> bool:
        return getattr(getattr(candidate, "weight", None), "shape", None) == shape

    return _find_module(name, name, modules, fits)


def _find_module(
    module: str, name: str, modules: Mapping[str, torch.nn.Module], fits: Callable[[torch.nn.Module], bool]
) -> str:
    """Return the model's name of a module in a checkpoint file; ``fits`` tests a candidate's shapes."""
    if module in modules and fits(modules[module]):
        return module
    components = module.split(".")
    numbers = [component for component in components if component.isdigit()]
    candidates: list[str] = []
    for candidate, candidate_module in modules.items():
        candidate_numbers = [component for component in candidate.split(".") if component.isdigit()]
        if candidate.endswith(f".{components[-1]}") and candidate_numbers == numbers and fits(candidate_module):
            candidates.append(candidate)
    # Mixtral's files say block_sparse_moe where the model says mlp, so a candidate may lack a component
    complete = [candidate for candidate in candidates if not Counter(components) - Counter(candidate.split("."))]
    candidates = complete or candidates
    if len(candidates) != 1:
        raise ValueError(
            f"updates must have names of modules of the model, got {name!r}, which fits {candidates or 'none'}"
        )
    return candidates[0]
