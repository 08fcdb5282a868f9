"""Models and tokenizers from their files: where they lie, in which type, whether they are complete and fit together."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import WEIGHTS_INDEX_NAME
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from python_trainer.errors import UserError, first_line
from python_trainer.model.fused import MAX_BYTES
from python_trainer.model.hub import FILES, hub_model, policy_folder
from python_trainer.model.lora import merge_adapter
from python_trainer.model.settings import ModelConfig
from python_trainer.model.weights import META, named_weights
from rlkernels.integrations.transformers_attention import other_layers
from rlkernels.weights.checkpoints import indexed_files, weight_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")  # features of a processor, by torch's names; bf16 is Arm's


def base_folder(folder: Path, files: Sequence[str] = FILES) -> Path:
    """Find the folder of the model itself: below an adapter, or several on one another, else the given folder."""
    below = adapter_base(folder, files)
    return folder if below == folder else base_folder(below, files)


def adapter_base(folder: Path, files: Sequence[str] = FILES) -> Path:
    """Find the folder that an adapter names as its base; the given one if it holds no adapter.

    Args:
        files: to get of a base on the Hub.

    Raises:
        UserError: an adapter that names no base, or one that is not there.
    """
    if not (folder / "adapter_config.json").is_file():
        return folder
    try:
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base, revision = adapter["base_model_name_or_path"], adapter.get("revision")
        base = policy_folder(f"{base}@{revision}" if revision and not Path(base).is_dir() else base, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path: adapter_config.json of {folder} names no base model") from error
    except UserError as error:
        raise UserError(f"the base of the adapter {folder}: {error}") from error
    return base


def base_name(config: ModelConfig) -> tuple[str, str | None]:
    """Return the base of an adapter: an id of the Hub and a revision, or a folder by its absolute path."""
    hub = None if Path(config.path).exists() else hub_model(config.path)
    return hub or (str(policy_folder(config.path).resolve()), None)


@contextmanager
def model_source(folder: Path, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield the arguments of every ``from_pretrained`` for what lies in a folder.

    It turns what Transformers raises for a folder that it cannot read into a UserError.
    """
    disable_progress_bar()
    set_verbosity_error()  # this module checks what matters
    options = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    try:
        yield {"pretrained_model_name_or_path": folder, **options}
    except UserError:
        raise
    except Exception as error:  # of Transformers, torch and the readers of files
        first = first_line(error)
        if (folder / "model" / "config.json").is_file():
            first = f"that of this run is in {folder / 'model'}"
        raise UserError(f"model.path: {folder} holds no causal language model with a tokenizer: {first}") from error


def check_weight_names(folder: Path) -> None:
    """Raise ValueError if a file of the folder names weights outside it, which Transformers would read."""
    weight_files(folder)
    if (index := folder / WEIGHTS_INDEX_NAME).is_file():
        indexed_files(index)


def read_tokenizer(folder: Path, config: ModelConfig) -> Any:
    """Read the tokenizer of a folder; that of its base if an adapter brings none.

    Raises:
        UserError: there is none, or an empty one.
    """
    if not (folder / "tokenizer_config.json").is_file() and (base := adapter_base(folder)) != folder:
        return read_tokenizer(base, config)
    with model_source(folder, config) as source:
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"model.path: {folder} has no tokenizer: a file tokenizer.json or the like is missing")
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return 32 hexadecimal digits, the same for tokenizers that give text the same token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    """Read a model onto the CPU, and its tokenizer; merge an adapter into its base.

    Raises:
        UserError: one of them is not there, not complete, or does not fit the other.
    """
    tokenizer = read_tokenizer(folder, config)
    model = _read_weights(folder, config, dtype)
    if broken := [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]:
        raise UserError(f"model.path: {len(broken)} weights of {folder} hold NaN or infinity: {', '.join(broken[:3])}")
    if (vocab_size := model.get_input_embeddings().num_embeddings) < len(tokenizer):
        raise UserError(
            f"model.path: the tokenizer of {folder} has {len(tokenizer)} tokens, more than the {vocab_size} that its "
            "model knows"
        )
    return model, tokenizer


def _read_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
    if (base := adapter_base(folder)) != folder:
        if not (folder / "adapter_model.safetensors").is_file():  # PEFT would read a pickle instead
            raise UserError(f"model.path: {folder} lacks adapter_model.safetensors")
        merged = merge_adapter(_read_weights(base, config, torch.float32), folder).requires_grad_(True)  # PEFT froze it
        for p in merged.parameters():  # rounded once, and no buffers: those are float32 in any model
            p.data = p.data.to(dtype)
        return merged
    with model_source(folder, config) as source:
        check_weight_names(folder)
        # without this Transformers raises an error that does not name the weights
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(dtype=dtype, **options, **source)
    model, loading_info = loaded
    if loading_info["mismatched_keys"]:
        name, shape, config_shape = sorted(loading_info["mismatched_keys"])[0]
        raise UserError(
            f"model.path: weights of {folder} have other sizes than its config.json says: {name} is {list(shape)}, not "
            f"{list(config_shape)}"
        )
    if missing := sorted(loading_info["missing_keys"]):
        names = ", ".join(missing[:3])
        raise UserError(f"model.path: {folder} lacks {len(missing)} weights of its model: {names}, ...")
    return model


def ignored_settings(model: Any) -> str | None:
    """Name the settings of a model's config that act in training by Transformers and not here; None without any.

    Returns:
        A note: the loss of the router, and what drops or jitters values at random.
    """
    config = model.config.get_text_config().to_dict()
    active = {name: value for name, value in config.items() if isinstance(value, float) and value > 0}
    noise = [name for name in active if re.match("(?!classifier|summary).*(drop|jitter)", name)]
    router = [name for name in active if "aux_loss" in name] if config.get("output_router_logits") else []
    if not noise + router:
        return None
    listed = ", ".join(f"{name} {active[name]:g}" for name in router + noise)
    about = " (output_router_logits): the router has no loss of its own" * bool(router)
    return f"training ignores what the model's config sets: {listed}{about}"


def described_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Make the policy, or the base of its adapter, on ``meta``; weights are neither read nor fetched.

    Raises:
        UserError: there is none, or it does not say what model it is.
    """
    with _described_source(config) as settings, META:
        return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)


def recurrent_layers(config: ModelConfig) -> list[str]:
    """List the kinds of layers that the policy has beside attention; as :func:`described_model`."""
    with _described_source(config) as settings:
        return other_layers(settings.get_text_config(decoder=True))


@contextmanager
def _described_source(config: ModelConfig) -> Iterator[Any]:
    """Yield the config of the policy's model, within :func:`model_source`."""
    files = "*.json", "*.py"
    with model_source(base_folder(policy_folder(config.path, files), files), config) as source:
        yield AutoConfig.from_pretrained(**source)


def model_without_weights(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Make :func:`described_model` as ``from_pretrained`` does, but for the numbers in its weights.

    Every parameter repeats one number, so that none takes memory. Buffers that no file holds, such as the frequencies
    of rotary embeddings, are as they should be; those that a file does hold are not.

    Raises:
        UserError: it does not say what model it is.
    """
    folder = base_folder(policy_folder(config.path))
    shapes = described_model(config, dtype)
    weights = {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in named_weights(shapes)}
    with model_source(folder, config):
        model = type(shapes).from_pretrained(None, config=shapes.config, state_dict=weights, dtype=dtype)
        model.config.name_or_path = str(folder)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def choose_device(name: str) -> torch.device:
    """Resolve the setting ``model.device`` on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device is cuda, but torch finds no CUDA device: write cpu or auto")
    return torch.device(name)


def find_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Resolve the setting ``model.dtype`` on a device."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16
    # emulation is slower than float32; by torch 2.12 and later
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(capabilities.get(product) for product in PRODUCTS):
        return torch.float32
    # in small models calls cost as much as products; large ones depend on the rate of products
    weights = sum(p.numel() for p in described_model(config).parameters())
    return torch.bfloat16 if weights * torch.float32.itemsize > MAX_BYTES else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in the setting ``model.dtype``."""
    return str(dtype).removeprefix("torch.")


def run_dtype(config: ModelConfig, saved: Mapping[str, Any] | None) -> str:
    """Resolve ``model.dtype`` for a run: ``auto`` is the type of weights that its checkpoint names, if any."""
    saved_dtype = saved.get("dtype") if saved else None
    if saved_dtype in DTYPES and config.dtype == "auto":
        return saved_dtype
    return dtype_name(find_dtype(config, choose_device(config.device)))
