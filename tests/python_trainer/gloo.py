"""Runs a function, or a training, in two processes that are connected by gloo."""

import os
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from safetensors.torch import save_file

from python_trainer.config import load_config
from python_trainer.distributed import RankGroup
from python_trainer.distributed.sharded import ShardedGroup
from python_trainer.trainer import Trainer

TIMEOUT = timedelta(minutes=5)  # for another process, which may have more work
KINDS = {"ddp": partial(RankGroup, "ddp"), "fsdp2": ShardedGroup}


def _enter(rank, size, threads, rendezvous, function, args):
    torch.set_num_threads(threads)
    tempfile.tempdir = str(rendezvous.parent)  # os._exit below leaves what a process has there
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
    # Python does not end as usual: a thread of gloo that lets go of a tensor meanwhile would abort the process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_on_ranks(folder: Path, function, *args, size: int = 2) -> None:
    """Call the module-level ``function(*args)`` in each process; raise their exceptions here."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder_of_tests = str(Path(__file__).parent)  # they import conftest by its name, and other folders have one too
    sys.path[:] = [folder_of_tests, *(path for path in sys.path if path != folder_of_tests)]
    arguments = size, torch.get_num_threads(), folder / "rendezvous", function, args
    mp.spawn(_enter, arguments, nprocs=size)


def train(settings: dict, folder: Path, parallel: str | None = None, *, resume: bool = False) -> Trainer:
    """Train, in the processes of the default group where ``parallel`` is given; write ``weights.safetensors``."""
    ranks = None if parallel is None else KINDS[parallel]()
    config = load_config(settings | {"parallel": parallel or "none"})
    trainer = Trainer(config, folder, console=Console(quiet=True), ranks=ranks, resume=resume)
    trainer.run()
    trainer.policy.restore_inference_model()
    if trainer.ranks.rank == 0:
        weights = {name: p.detach().clone() for name, p in trainer.policy.inference_model.named_parameters()}
        save_file(weights, folder / "weights.safetensors")
    return trainer
