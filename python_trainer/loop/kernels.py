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
from rlkernels.registry import OPS


def settle_kernels(
    config: Config, saved: Mapping[str, Any] | None, ranks: RankGroup, note: Callable[[str], None]
) -> dict[str, Any]:
    """Choose the kernels of a run on a GPU, and make rlkernels take them.

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
    device = verdicts.device_facts(torch.cuda.current_device())
    saved_kernels = (saved or {}).get("kernels", {})
    known = saved_kernels.get("backends") if saved_kernels.get("device") == device else None
    chosen: dict[str, str] | None = ranks.broadcast(known)
    if chosen is None and len({facts["gpu"] for facts in ranks.gather(device)}) > 1:
        note("the ranks run on different GPUs: all take the kernels of torch")
        chosen = {}
    if chosen is None:
        chosen = ranks.on_rank0(lambda: prove_kernels(config, note))
    table = {op: chosen.get(op, chosen.get(OPS[op].name, "torch")) for op in PROVABLE}
    backend.set_run_backends(table)
    return {"device": device, "backends": table}


def prove_kernels(config: Config, note: Callable[[str], None]) -> dict[str, str]:
    """Prove the kernels of this run's shapes; return the backend of every op, for other ops the known one."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend.set_run_backends({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is proved yet
        table = {op: backend.choose(op, device) for op in PROVABLE}
    if os.environ.get("RLKERNELS_PROVE") == "off" or backend.environment_backend() != "auto":
        return table
    special = {op for kind in ACCELERATORS.registered() for op in kind.ops}
    unneeded = special - {op for settings in config.accelerators.chosen() for op in settings.ops}
    needed = [op for op in PROVABLE if OPS[op].name not in unneeded]
    note(f"proving the kernels for {torch.cuda.get_device_name()}, once for such runs: about a minute")
    workload = workload_of_run(config.model_dump(mode="json"), described_model(config.model).config.get_text_config())
    result = prove(needed, device=device, workload=workload, say=lambda line: None)
    for op, reason in result["left_out"].items():
        note(f"{op}: {reason}; the run takes {table[op]}")
    winners = {op: verdict["backend"] for op, verdict in result["verdicts"].items()}
    attention = result["verdicts"].get("paged_attention")
    if attention and attention["candidates"].get("triton", {}).get("cases"):  # timed, so it was right
        winners["paged_attention"] = "triton"  # torch's waits for the GPU, so that no pass with it can be recorded
    by_rlkernels = [op for op, name in winners.items() if name != "torch"]
    by_torch = [op for op, name in winners.items() if name == "torch"]
    note(f"kernels of rlkernels: {', '.join(by_rlkernels) or 'none'}; of torch: {', '.join(by_torch) or 'none'}")
    return table | winners
