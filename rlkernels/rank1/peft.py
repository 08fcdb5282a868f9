"""Rank-1 updates as a LoRA adapter in the format of the PEFT package."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from rlkernels.rank1.update import Rank1Update


def export_peft(updates: Mapping[str, Rank1Update], directory: str | Path, *, base_model: str,
                scale: float | str = "alpha", task_type: str | None = "CAUSAL_LM",
                fan_in_fan_out: bool = False) -> None:  # fmt: skip
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
        fan_in_fan_out: True where the updates are of weights stored as [inputs, outputs], such as those of
            Transformers' ``Conv1D``, which GPT-2 is made of; torch's ``Linear`` stores [outputs, inputs].

    Raises:
        ValueError: no update that is not zero; a scale that is not finite.
        ImportError: without the safetensors package.
    """
    if scale != "alpha" and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be 'alpha' or a finite number, got {scale!r}")
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError("export_peft needs the safetensors package; `pip install safetensors`") from None
    tensors, modules = {}, []
    for name, update in updates.items():
        module = name.removesuffix(".weight")
        strength = update.sigma * (update.alpha if scale == "alpha" else float(scale))
        if strength == 0:
            continue
        root = math.sqrt(abs(strength))
        modules.append(module)
        prefix = f"base_model.model.{module}"
        outputs, inputs = (update.v, update.u) if fan_in_fan_out else (update.u, update.v)
        tensors[f"{prefix}.lora_A.weight"] = inputs.float().cpu()[None, :] * root
        tensors[f"{prefix}.lora_B.weight"] = outputs.float().cpu()[:, None] * math.copysign(root, strength)
    if not modules:
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
        "target_modules": modules,
        "inference_mode": True,
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # save_file would leave the file to its owner alone, whatever the umask
    (folder / "adapter_model.safetensors").write_bytes(save({k: v.to(torch.float32) for k, v in tensors.items()}))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
