"""Lets a running vLLM take a policy's weights: the ``worker_extension_cls`` of an engine or server.

    llm = LLM(model, worker_extension_cls="rlkernels.integrations.vllm_worker.PolicyWorker")
    llm.collective_rpc("load_policy", args=(state_dict.items(),))

    llm.collective_rpc("load_policy", args=(state_dict.items(), None, True))  # then a delta for each step
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

from rlkernels.weights.delta import apply_, has_zstandard

__all__ = ["PolicyWorker", "merged_weight", "read_policy"]


DELTA = ".delta"  # how the file of a delta ends


class PolicyWorker:
    """Mixed into vLLM's worker."""

    policy_copy: dict[str, torch.Tensor] | None = None  # on the host: what the next delta changes
    # the worker's
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def load_policy(self, weights: Iterable[tuple[str, torch.Tensor]] | str | Path | bytes, adapter: str | None = None,
                    deltas: bool = False) -> dict[str, bool]:  # fmt: skip
        """Loads weights in place.

        What was computed with the old ones stays in the prefix cache: send another ``cache_salt`` from now on.

        Args:
            weights: by their names in a checkpoint; or a folder of safetensors files that this process can read; or a
                delta of :func:`rlkernels.weights.encode`, or the file NAME.delta that holds it.
            adapter: for a folder, as of :func:`read_policy`.
            deltas: deltas of these weights may follow; for them a copy of all weights stays on the host.

        Returns:
            Whether they are loaded, as ``{"loaded": True}``: False for a delta of other weights than those that were
            sent before. Nothing has changed then, and all weights should be sent.

        Raises:
            FileNotFoundError, KeyError: as of :func:`read_policy`.
            ImportError: a delta, without zstandard.
        """
        # modules without weights of their own are reported as not loaded, each time
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        if (found := self.policy_weights(weights, adapter, deltas)) is None:
            return {"loaded": False}
        rest = iter(found)
        first = list(islice(rest, 1))  # a folder without weights fails here; vLLM would have dropped those that it has
        self.reload_weights(weights_iterator=chain(first, rest))
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
        """Return the weights that :meth:`load_policy` is given; None for a delta of others than the copy's."""
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
            # a file may go or be written again while its tensors map it
            self.policy_copy = {name: weight.to("cpu", copy=True) for name, weight in weights}
            return self.policy_copy.items()
        return weights

    def policy_settings(self) -> dict[str, Any]:
        """Return what a trainer has to know of the engine."""
        config = self.model_runner.model_config
        return {
            "logprobs_mode": config.logprobs_mode,
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
            "model_type": config.hf_text_config.model_type,
            "dtype": str(config.dtype).removeprefix("torch."),
            "deltas": has_zstandard(),
        }


def merged_weight(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Add a low-rank adapter to a weight.

    Args:
        base: floating point [out, in].
        down, up: floating point [r, in] and [out, r].
        scale: of their product.

    Returns:
        ``base`` + ``scale`` x ``up`` ``down``, float32 [out, in].
    """
    return base.float() + scale * (up.float() @ down.float())


def read_policy(folder: str | Path, adapter: str | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what the safetensors files of a folder hold.

    Args:
        folder: has them.
        adapter: a safetensors file of low-rank changes, which are added: for a weight NAME [out, in] ``NAME.down``
            [r, in], ``NAME.up`` [out, r] and ``NAME.scale`` [].
        device: where they are added.

    Yields:
        name and weight, in its own type.

    Raises:
        FileNotFoundError: there is no such file in the folder.
        KeyError: the adapter changes what is not among the weights, or lacks a part.
    """
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file that vLLM's worker can see")
    parts = {} if adapter is None else load_file(adapter)
    left = {name.removesuffix(".down") for name in parts if name.endswith(".down")}
    for file in files:
        for name, weight in load_file(file).items():
            if name in left:
                left.remove(name)
                base, down, up = (x.to(device) for x in (weight, parts[f"{name}.down"], parts[f"{name}.up"]))
                yield name, merged_weight(base, down, up, parts[f"{name}.scale"].item()).to(weight.dtype)
            else:
                yield name, weight
    if left:
        raise KeyError(f"the adapter changes {min(left)}, which is not among the weights")
