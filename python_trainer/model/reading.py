"""Models and tokenizers read from their files, and found to be complete and to fit together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from python_trainer.errors import UserError
from python_trainer.model.gguf import gguf_file, gguf_options
from python_trainer.model.lora import adapted_folder, merge_adapter
from python_trainer.model.settings import ModelConfig


def read_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model, on the CPU, and tokenizer; of an adapter its base with the adapter merged in.

    Raises:
        UserError: one of them is not there, not complete, or does not fit the other.
    """
    if (base := base_folder(folder)) != folder:
        model, tokenizer = _read(base, config, torch.float32)
        merged = merge_adapter(model, folder).requires_grad_(True)  # PEFT has frozen it
        for p in merged.parameters():  # rounded once, and no buffers: those are float32 in any model
            p.data = p.data.to(dtype)
        return merged, tokenizer
    return _read(folder, config, dtype)


def base_folder(folder: Path) -> Path:
    """Where the model itself lies: of an adapter its base, else the folder or GGUF file that is given.

    Raises:
        UserError: an adapter that names no base, or one that is not there.
    """
    return adapted_folder(folder) if (folder / "adapter_config.json").is_file() else folder


def read_settings(base: Path, config: ModelConfig) -> Any:
    """The configuration of Transformers in a folder or GGUF file; what it raises is Transformers' own."""
    return AutoConfig.from_pretrained(**place_of(base), **options_of(config))


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Within it what Transformers raises for a folder that it cannot read is a UserError."""
    disable_progress_bar()
    set_verbosity_error()  # what matters is checked here
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if (folder / "model" / "config.json").is_file():
            first = f"that of this run is in {folder / 'model'}"
        raise UserError(f"model.path: {folder} holds no causal language model with a tokenizer: {first}") from error


def read_tokenizer(folder: Path, config: ModelConfig) -> Any:
    """The tokenizer of a folder or GGUF file.

    Raises:
        UserError: there is none, or an empty one.
    """
    with reading(folder):
        tokenizer = AutoTokenizer.from_pretrained(**place_of(folder), **options_of(config))
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"model.path: {folder} has no tokenizer: a file tokenizer.json or the like is missing")
    return tokenizer


def place_of(folder: Path) -> dict[str, Any]:
    """What ``from_pretrained`` takes to find what lies in a folder or GGUF file."""
    file = gguf_file(folder)
    return {"pretrained_model_name_or_path": file.parent if file else folder, "gguf_file": file.name if file else None}


def options_of(config: ModelConfig) -> dict[str, Any]:
    """What every ``from_pretrained`` takes."""
    return {"trust_remote_code": config.trust_remote_code, "local_files_only": True}


def _read(folder: Path, config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model, on the CPU, and tokenizer; both are complete and fit together."""
    tokenizer = read_tokenizer(folder, config)
    # of sizes that differ it says no more than where the report would be, were it not silent
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options_of(config)}
    with reading(folder):
        options |= place_of(folder) | (gguf_options(file) if (file := gguf_file(folder)) else {})
        found: Any = AutoModelForCausalLM.from_pretrained(dtype=dtype, **options)
    model, loaded = found
    if loaded["mismatched_keys"]:
        name, there, wanted = sorted(loaded["mismatched_keys"])[0]
        raise UserError(
            f"model.path: weights of {folder} have other sizes than its config.json says: {name} is {list(there)}, not "
            f"{list(wanted)}"
        )
    if loaded["missing_keys"]:
        some = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise UserError(f"model.path: {folder} lacks {len(loaded['missing_keys'])} weights of its model: {some}, ...")
    check_finite(folder, [name for name, p in model.named_parameters() if not bool(p.isfinite().all())])
    check_vocabulary(folder, model, tokenizer)
    return model, tokenizer


def check_finite(folder: Path, broken: Sequence[str]) -> None:
    """Raises UserError where there are weights that are not finite, given by name."""
    if broken:
        raise UserError(f"model.path: {len(broken)} weights of {folder} hold NaN or infinity: {', '.join(broken[:3])}")


def check_vocabulary(folder: Path, model: Any, tokenizer: Any) -> None:
    """Raises UserError where the tokenizer has tokens that the model does not know."""
    if model.get_input_embeddings().num_embeddings < len(tokenizer):
        raise UserError(
            f"model.path: the tokenizer of {folder} has {len(tokenizer)} tokens, "
            f"more than the {model.get_input_embeddings().num_embeddings} that its model knows"
        )
