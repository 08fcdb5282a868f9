"""Load a policy's weights into a running vLLM: the ``worker_extension_cls`` of an engine or server.

    llm = LLM(model, worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker")
    llm.collective_rpc("load_policy", args=(state_dict.items(),))

    llm.collective_rpc("load_policy", args=(state_dict.items(), None, True))  # once, then a delta for each step
    llm.collective_rpc("load_policy", args=(rlkernels.weights.encode(new, old),))

    vllm serve MODEL --worker-extension-cls rlkernels.integrations.vllm_worker.PolicyWorker

Needs vllm 0.32 or newer, and nothing compiled of this package.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rlkernels.weights.adapter import merged_weight
from rlkernels.weights.checkpoints import refuse_adapter, weight_files
from rlkernels.weights.delta import apply_, has_zstandard

__all__ = ["PolicyWorker", "merged_weight", "read_policy"]

logger = logging.getLogger(__name__)

DELTA = ".delta"  # suffix of a delta's file
Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class PolicyWorker:
    """A mixin of vLLM's worker."""

    policy_copy: dict[str, torch.Tensor] | None = None  # on the host: the base of the next delta
    # attributes of vLLM's worker
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def load_policy(self, weights: Weights | str | Path | bytes, adapter: str | None = None,
                    deltas: bool = False) -> dict[str, bool]:  # fmt: skip
        """Load weights in place.

        vLLM's prefix cache still holds keys and values of the old weights: send another ``cache_salt`` from now on.

        Args:
            weights: all, by their names in a checkpoint, for an engine in the caller's process; or a folder of
                safetensors files that this process can read; or a delta of :func:`rlkernels.weights.encode`, or the
                file NAME.delta that holds it.
            adapter: for a folder, as of :func:`read_policy`.
            deltas: deltas of these weights may follow; for them a copy of all weights stays on the host.

        Returns:
            ``{"loaded": True}``, or ``{"loaded": False}`` for a delta whose base is not the copy on the host; the log
            says why. Nothing has changed then; send all weights.

        Raises:
            FileNotFoundError, KeyError, ValueError: as of :func:`read_policy`.
            ImportError: a delta, without zstandard.
            TypeError: a weight that is no tensor, such as one that was sent to another process.
            ValueError: there is no weight, one that the model does not have in this shape, or only a part of those that
                vLLM fuses. The engine may have some of the new weights then; it goes on once all weights are sent.
        """
        # vLLM warns at every load that modules without weights are not loaded
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        policy = self.policy_weights(weights, adapter, deltas)
        if policy is None:
            return {"loaded": False}
        handed: list[Any] = []  # name and shape of the weight that vLLM is loading

        def hand_over() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in policy:
                handed[:] = name, list(weight.shape)
                yield name, weight
                handed.clear()
            self._check_fused_layers()

        iterator = hand_over()
        first = next(iterator, None)  # before vLLM drops its weights
        if first is None:
            raise ValueError("weights must hold those of a model, got none")
        try:
            self.reload_weights(weights_iterator=chain([first], iterator))
        except Exception as error:
            self.policy_copy = None
            self._restore_layers()
            if handed:
                raise ValueError(
                    f"vLLM cannot load the weight {handed[0]} of shape {handed[1]}, and may have loaded others; send "
                    f"all weights of its model: {error}"
                ) from error
            raise
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                # On a CPU a head that is tied to the embedding has a repacked copy, which vLLM 0.32 leaves as it was.
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)
        return {"loaded": True}

    def _check_fused_layers(self) -> None:
        """Raise ValueError if weights of a fused layer came in part: vLLM leaves the rest uninitialized."""
        from vllm.model_executor.layers.linear import (
            MergedColumnParallelLinear,
            QKVParallelLinear,
            UnquantizedLinearMethod,
        )
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        model = self.model_runner.get_model()
        names_of_parts = getattr(model, "packed_modules_mapping", {})  # such as gate_up_proj: gate_proj, up_proj
        for name, module in model.named_modules():
            is_fused = isinstance(module, QKVParallelLinear | MergedColumnParallelLinear)
            if is_fused and isinstance(module.quant_method, UnquantizedLinearMethod):
                info = get_layerwise_info(module)
                if info.can_load() and 0 < info.load_numel < info.load_numel_total:
                    came = {arguments.arguments.get("loaded_shard_id") for _, arguments in info.loaded_weights}
                    parts = enumerate(names_of_parts.get(name.rpartition(".")[2], ()))
                    missing = [part for i, part in parts if came.isdisjoint({i, "qkv"[i : i + 1]})]
                    raise ValueError(
                        f"weights must hold all of {name}, got {info.load_numel} of its {info.load_numel_total} "
                        f"numbers{', without ' if missing else ''}{', '.join(missing)}; send all weights of the model"
                    )

    def _restore_layers(self) -> None:
        """Put old weights back where a failed load has ended; vLLM 0.32 leaves such a model unable to load or run."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

        model = self.model_runner.get_model()
        for module in model.modules():
            info = get_layerwise_info(module)
            info.load_numel = 0
            info.loaded_weights.clear()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)

    def policy_weights(
        self, weights: Weights | str | Path | bytes, adapter: str | None, deltas: bool
    ) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return the weights that :meth:`load_policy` gets; None for a delta whose base is not the copy."""
        if isinstance(weights, str | Path) and Path(weights).suffix == DELTA:
            weights = Path(weights).read_bytes()
        if isinstance(weights, bytes):
            try:
                if self.policy_copy is None:
                    raise ValueError("no weights were loaded with deltas=True before it")
                apply_(self.policy_copy, weights)
            except ValueError as error:
                logger.warning("the delta was not loaded: %s", error)
                return None
            return self.policy_copy.items()
        self.policy_copy = None
        if isinstance(weights, str | Path):
            weights = read_policy(weights, adapter, self.model_runner.device)
        else:
            weights = _tensors(weights)
        if deltas:
            # a file may be removed or rewritten while its tensors map it
            self.policy_copy = {name: weight.to("cpu", copy=True) for name, weight in weights}
            return self.policy_copy.items()
        return weights

    def policy_settings(self) -> dict[str, Any]:
        """Return the engine's settings that a trainer must know."""
        config = self.model_runner.model_config
        return {
            "logprobs_mode": config.logprobs_mode,
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
            "model_type": config.hf_text_config.model_type,
            "dtype": str(config.dtype).removeprefix("torch."),
            "deltas": has_zstandard(),
        }


def _tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that a caller sent; raise TypeError for one that is no tensor any more."""
    for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(weight, torch.Tensor):
            raise TypeError(
                f"weights must be tensors by their names, got {type(weight).__name__} for {name!r}; an engine in "
                "another process takes a folder or a delta"
            )
        yield name, weight


def read_policy(folder: str | Path, adapter: str | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the safetensors files of a folder.

    Args:
        folder: of the safetensors files; all are read if ``from_pretrained`` of Transformers would read none.
        adapter: a safetensors file of low-rank changes, which are added: for a weight NAME [out, in] ``NAME.down``
            [r, in], ``NAME.up`` [out, r] and ``NAME.scale`` [].
        device: where they are added.

    Yields:
        name and weight, in the file's dtype.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
        KeyError: the adapter changes a weight that the folder lacks, or lacks a tensor itself.
        ValueError: the folder holds an adapter of PEFT, or its config.json or index cannot be read.
    """
    from safetensors.torch import load_file

    refuse_adapter(Path(folder))
    files = weight_files(Path(folder)) or sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file that vLLM's worker can see")
    changes = {} if adapter is None else load_file(adapter)
    unmerged = {name.removesuffix(".down") for name in changes if name.endswith(".down")}
    for file in files:
        for name, weight in load_file(file).items():
            if name in unmerged:
                unmerged.remove(name)
                down = changes[f"{name}.down"].to(device)
                up = changes[f"{name}.up"].to(device)
                scale = changes[f"{name}.scale"].item()
                yield name, merged_weight(weight.to(device), down, up, scale).to(weight.dtype)
            else:
                yield name, weight
    if unmerged:
        raise KeyError(f"the adapter changes {min(unmerged)}, which is not among the weights")
