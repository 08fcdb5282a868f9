"""Rank-1 updates as a LoRA adapter in the format of the PEFT package."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlkernels.rank1.update import Rank1Update


def export_peft(updates: Mapping[str, Rank1Update], directory: str | Path, *, base_model: str,
                scale: float | str = "alpha", task_type: str | None = "CAUSAL_LM",
                fan_in_fan_out: bool = False, model: torch.nn.Module | None = None) -> None:  # fmt: skip
    """Writes ``adapter_model.safetensors`` and ``adapter_config.json`` (r = 1, lora_alpha = 1) to a folder.

    ``peft.PeftModel.from_pretrained`` then computes W + scale * sigma * u v^T, the factor sqrt(scale * sigma) on
    each side, in float32. Merging so small an update into bfloat16 weights rounds most of it away.

    Args:
        updates: name of the weight, with or without its ``.weight`` -> update. "zero" ones are left out.
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
            module of the model, or several; without ``model``, a name of an embedding or of a part of a vision-language
            model.
    """
    from safetensors.torch import save

    if scale != "alpha" and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be 'alpha' or a finite number, got {scale!r}")
    tensors = {}
    adapted: dict[Any, str] = {}  # weight (without a model: module) -> module
    known = None if model is None else dict(model.named_modules())
    for name, update in updates.items():
        module = _module_name(name.removesuffix(".weight"), update, known)
        strength = update.sigma * (update.alpha if scale == "alpha" else float(scale))
        if strength == 0:
            continue
        weight = module if known is None else known[module].weight  # of tied modules the same
        if weight in adapted:
            raise ValueError(f"updates must hold each weight once, got {adapted[weight]!r} and {name!r}")
        adapted[weight] = module
        root = math.sqrt(abs(strength))
        prefix = f"base_model.model.{module}"
        if known is not None:  # PEFT goes by the module as well
            fan_in_fan_out = type(known[module]).__name__ == "Conv1D"
        embedding = known is not None and isinstance(known[module], torch.nn.Embedding)
        outputs, inputs = (update.v, update.u) if fan_in_fan_out or embedding else (update.u, update.v)
        keys = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        tensors[f"{prefix}.{keys[0]}"] = inputs.float().cpu()[None, :] * root
        tensors[f"{prefix}.{keys[1]}"] = outputs.float().cpu()[:, None] * math.copysign(root, strength)
    if not adapted:
        raise ValueError(f"updates must hold at least one that is not zero, got {len(updates)}")
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": 1,
        "lora_alpha": 1,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "target_modules": list(adapted.values()),
        "inference_mode": True,
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # save_file would leave the file to its owner alone, whatever the umask
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


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
    if name in known:
        return name
    parts, shape = name.split("."), (len(update.u), len(update.v))
    fits = [
        other
        for other, module in known.items()
        if other.endswith(f".{parts[-1]}")
        and not Counter(parts) - Counter(other.split("."))
        and [p for p in other.split(".") if p.isdigit()] == [p for p in parts if p.isdigit()]
        and getattr(getattr(module, "weight", None), "shape", None) == shape
    ]
    if len(fits) != 1:
        raise ValueError(f"updates must have names of modules of the model, got {name!r}, which fits {fits or 'none'}")
    return fits[0]
