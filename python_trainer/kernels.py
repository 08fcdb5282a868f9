"""The kernels of a run on a GPU: proved before the model is loaded, kept with the run, the same on all ranks."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import Config
from python_trainer.distributed import RankGroup
from python_trainer.model.loading import choose_device, described_model
from rlkernels import backend, verdicts
from rlkernels.proof import PROVABLE, prove
from rlkernels.proof.workload import workload_of_run


def settle_kernels(
    config: Config, saved: Mapping[str, Any] | None, ranks: RankGroup, note: Callable[[str], None]
) -> dict[str, Any]:
    """Chooses the kernels of a run on a GPU, and makes rlkernels take them.

    A run that goes on keeps the kernels that it began with, on the same kind of GPU: with these it computes the same.
    Otherwise rank 0 proves, once per machine; ``RLKERNELS_PROVE=off`` skips that. Ranks on different GPUs take the
    kernels of torch.

    Args:
        saved: the checkpoint that the run continues from, which holds what this returned; None: it begins anew.

    Returns:
        ``device``, the GPU, and ``backends``, by op. Empty on a CPU.
    """
    if choose_device(config.model.device).type != "cuda":
        return {}
    here = verdicts.device_facts(torch.cuda.current_device())
    before = saved.get("kernels") if saved else None
    kept: dict[str, str] | None = ranks.first(before["backends"] if before and before["device"] == here else None)
    if kept is None and len({found["gpu"] for found in ranks.gather(here)}) > 1:
        note("the ranks run on different GPUs: all take the kernels of torch")
        kept = {}
    if kept is None:
        kept = ranks.once(lambda: proved(config, note))
    table = {op: kept.get(op, kept.get(backend.base(op), "torch")) for op in PROVABLE}
    backend.use(table)
    return {"device": here, "backends": table}


def proved(config: Config, note: Callable[[str], None]) -> dict[str, str]:
    """Proves the kernels of this run's shapes; returns the backend of every op, for other ops the known one."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend.use({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is proved yet
        table = {op: backend.choose(op, device) for op in PROVABLE}
    if os.environ.get("RLKERNELS_PROVE") == "off" or backend.wanted() != "auto":
        return table
    special = {op for kind in ACCELERATORS.registered() for op in kind.ops}
    unneeded = special - {op for settings in config.accelerators.chosen() for op in settings.ops}
    needed = [op for op in PROVABLE if backend.base(op) not in unneeded]
    note(f"proving the kernels for {torch.cuda.get_device_name()}, once for such runs: about a minute")
    workload = workload_of_run(config.model_dump(mode="json"), described_model(config.model).config.get_text_config())
    result = prove(needed, device=device, workload=workload, say=lambda line: None)
    for op, reason in result["left_out"].items():
        note(f"{op}: {reason}; the run takes {table[op]}")
    won = {op: verdict["backend"] for op, verdict in result["verdicts"].items()}
    attention = result["verdicts"].get("paged_attention")
    if attention and attention["candidates"].get("triton", {}).get("cases"):  # it was right, so it was timed
        won["paged_attention"] = "triton"  # torch's waits for the GPU, so that no pass with it can be recorded
    ours = [op for op, name in won.items() if name != "torch"]
    note(f"kernels of rlkernels: {', '.join(ours) or 'none'}; of torch: {', '.join(set(won) - set(ours)) or 'none'}")
    return table | won
