"""Lets a running vLLM take a policy's weights: the ``worker_extension_cls`` of an engine or server.

    llm = LLM(model, worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker")
    llm.collective_rpc("load_policy", args=(state_dict.items(),))

    vllm serve MODEL --worker-extension-cls rlkernels.integrations.vllm_worker.PolicyWorker

Needs vllm 0.32 or newer, and nothing compiled of this package.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["PolicyWorker"]


class PolicyWorker:
    """Mixed into vLLM's worker."""

    # the worker's
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def load_policy(self, weights: Iterable[tuple[str, torch.Tensor]] | str) -> None:
        """Loads weights in place.

        What was computed with the old ones stays in the prefix cache: send another ``cache_salt`` from now on.

        Args:
            weights: by their names in a checkpoint; or a folder of safetensors files that this process can read.

        Raises:
            FileNotFoundError: there is no such file in the folder.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        # modules without weights of their own are reported as not loaded, each time
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        pairs = _read(Path(weights)) if isinstance(weights, str) else weights
        self.reload_weights(weights_iterator=pairs)
        with set_current_vllm_config(self.vllm_config):
            for module in self.model_runner.get_model().modules():
                # On a CPU a head that is tied to the embedding has a repacked copy, which vLLM 0.32 leaves as it was.
                if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)

    def policy_settings(self) -> dict[str, Any]:
        """What a trainer has to know of the engine."""
        config = self.model_runner.model_config
        return {
            "logprobs_mode": config.logprobs_mode,
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
            "model_type": config.hf_text_config.model_type,
            "dtype": str(config.dtype).removeprefix("torch."),
        }


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file that vLLM's worker can see")
    for file in files:
        yield from load_file(file).items()
