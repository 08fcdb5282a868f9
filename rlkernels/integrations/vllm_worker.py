"""Load a policy's weights into a running vLLM: the ``worker_extension_cls`` of an engine or server.

    llm = LLM(model, worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker")
    llm.collective_rpc("load_policy", args=(state_dict.items(),))

    llm.collective_rpc("load_policy", args=(state_dict.items(), None, True))  # once, then a delta for each step
    llm.collective_rpc("load_policy", args=(rlkernels.weights.encode(new, old),))

    vllm serve MODEL --worker-extension-cls rlkernels.integrations.vllm_worker.PolicyWorker

Needs vllm 0.32 or newer, and nothing compiled of this package.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from rlkernels.weights.adapter import merged_weight
from rlkernels.weights.checkpoints import refuse_adapter, weight_files
from rlkernels.weights.delta import apply_, has_zstandard

__all__ = ["PolicyWorker", "merged_weight", "read_policy"]


DELTA = ".delta"  # suffix of a delta's file


class PolicyWorker:
    """A mixin of vLLM's worker."""

    policy_copy: dict[str, torch.Tensor] | None = None  # on the host: the base of the next delta
    # attributes of vLLM's worker
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def load_policy(self, weights: Iterable[tuple[str, torch.Tensor]] | str | Path | bytes, adapter: str | None = None,
                    deltas: bool = False) -> dict[str, bool]:  # fmt: skip
        """Load weights in place.

        vLLM's prefix cache still holds keys and values of the old weights: send another ``cache_salt`` from now on.

        Args:
            weights: by their names in a checkpoint; or a folder of safetensors files that this process can read; or a
                delta of :func:`rlkernels.weights.encode`, or the file NAME.delta that holds it.
            adapter: for a folder, as of :func:`read_policy`.
            deltas: deltas of these weights may follow; for them a copy of all weights stays on the host.

        Returns:
            ``{"loaded": True}``, or ``{"loaded": False}`` for a delta whose base is not the copy on the host. Nothing
            has changed then; send all weights.

        Raises:
            FileNotFoundError, KeyError, ValueError: as of :func:`read_policy`.
            ImportError: a delta, without zstandard.
        """
        # vLLM warns at every load that modules without weights are not loaded
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        policy = self.policy_weights(weights, adapter, deltas)
        if policy is None:
            return {"loaded": False}
        iterator = iter(policy)
        first = list(islice(iterator, 1))  # a folder without weights fails here, before vLLM drops its weights
        self.reload_weights(weights_iterator=chain(first, iterator))
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                # On a CPU a head that is tied to the embedding has a repacked copy, which vLLM 0.32 leaves as it was.
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)
        return {"loaded": True}

    def policy_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | str | Path | bytes, adapter: str | None, deltas: bool
    ) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return the weights that :meth:`load_policy` gets; None for a delta whose base is not the copy."""
        if isinstance(weights, str | Path) and Path(weights).suffix == DELTA:
            weights = Path(weights).read_bytes()
        if isinstance(weights, bytes):
            if self.policy_copy is None:
                return None
            try:
                apply_(self.policy_copy, weights)
            except ValueError:
                return None
            return self.policy_copy.items()
        self.policy_copy = None
        if isinstance(weights, str | Path):
            weights = read_policy(weights, adapter, self.model_runner.device)
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
