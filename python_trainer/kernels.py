"""The kernels of a run on a GPU: proved before the model is loaded, kept with the run, the same on all ranks."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from python_trainer.accelerators import registered
from python_trainer.distributed import RankGroup
from python_trainer.model.loading import choose_device, policy_folder
from python_trainer.run_directory import write_text
from rlkernels import backend, verdicts
from rlkernels.proof import PROVABLE, prove
from rlkernels.proof.workload import workload_of_run

if TYPE_CHECKING:
    from python_trainer.config import Config

FILE = "kernels.json"  # in the run directory


@dataclass(frozen=True)
class Kernels:
    """Which backend every op takes on the GPU of a run. Empty on a CPU."""

    device: dict[str, Any]
    backends: dict[str, str]

    def save(self, folder: Path) -> None:
        """Keeps them for the steps after an interruption: with the same kernels they compute the same."""
        if self.backends:
            write_text(folder / FILE, json.dumps({"device": self.device, "backends": self.backends}, indent=1) + "\n")


def settle_kernels(config: "Config", folder: Path, ranks: RankGroup, note: Callable[[str], None]) -> Kernels:
    """Chooses the kernels of a run on a GPU, and makes rlkernels take them.

    A run that goes on keeps the kernels that it began with, on the same kind of GPU. Otherwise rank 0 proves, once per
    machine; ``RLKERNELS_PROVE=off`` skips that. Ranks on different GPUs take the kernels of torch.
    """
    if choose_device(config.model.device).type != "cuda":
        return Kernels({}, {})
    here = verdicts.device_facts(torch.cuda.current_device())
    kept = ranks.once(lambda: read(folder, here))
    if kept is None and len({found["gpu"] for found in ranks.gather(here)}) > 1:
        note("the ranks run on different GPUs: all take the kernels of torch")
        kept = {}
    if kept is None:
        kept = ranks.once(lambda: proved(config, note))
    table = {op: kept.get(op, "torch") for op in PROVABLE}
    backend.use(table)
    return Kernels(here, table)


def read(folder: Path, device: dict[str, Any]) -> dict[str, str] | None:
    """Reads the kernels that an earlier part of the run took on such a device; None: there are none."""
    try:
        kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return kept["backends"] if kept["device"] == device else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def proved(config: "Config", note: Callable[[str], None]) -> dict[str, str]:
    """Proves the kernels of this run's shapes; returns the backend of every op, for other ops the known one."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend.use({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is proved yet
        table = {op: backend.choose(op, device) for op in PROVABLE}
    if os.environ.get("RLKERNELS_PROVE") == "off" or backend.wanted() != "auto":
        return table
    try:
        shape = json.loads((policy_folder(config.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return table  # loading the model says what is wrong with it
    special = {op for kind in registered() for op in kind.ops}
    needed = [op for op in PROVABLE if op not in special]
    needed += [op for settings in config.accelerators.chosen() for op in settings.ops]
    note(f"proving the kernels for {torch.cuda.get_device_name()}, once for such runs: about a minute")
    workload = workload_of_run(config.model_dump(mode="json"), shape)
    result = prove(needed, device=device, workload=workload, say=lambda line: None)
    for op, reason in result["left_out"].items():
        note(f"{op}: {reason}; the run takes {table[op]}")
    won = {op: verdict["backend"] for op, verdict in result["verdicts"].items()}
    attention = result["verdicts"].get("paged_attention")
    if attention and attention["candidates"].get("triton", {}).get("cases"):  # it was right, so it was timed
        won["paged_attention"] = "triton"  # in recorded passes the time of the host, which the proof counts, is none
    ours = [op for op, name in won.items() if name != "torch"]
    note(f"kernels of rlkernels: {', '.join(ours) or 'none'}; of torch: {', '.join(set(won) - set(ours)) or 'none'}")
    return table | won
