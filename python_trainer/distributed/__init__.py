"""One process or several: how training is shared among the processes that torchrun started."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from python_trainer.distributed.group import RankGroup
from python_trainer.distributed.watch import Watch
from python_trainer.errors import Interrupted, UserError, first_line, is_shared, is_timed_out
from python_trainer.model.loading import choose_device
from python_trainer.process.launch import DDP_TIMEOUT, Launch, meeting_point, read_launch

__all__ = ["RankGroup", "start"]

# Seconds until gloo's threads have let go of what was sent last. One that lets go of a tensor while Python ends aborts
# its process, and torchrun calls the finished run failed (pytorch/pytorch#179291): they live on after the group is
# destroyed, since DTensor keeps it.
LET_GO = 0.5


@contextmanager
def start(parallel: str, device: str = "auto", *, timeout: float = DDP_TIMEOUT) -> Iterator[RankGroup]:
    """Join the processes of a run, within it; a group of one where torchrun started none.

    Args:
        timeout: seconds that a process waits for another one.

    Raises:
        UserError: torchrun started several, but ``parallel`` is none; there are more processes than GPUs; a variable
            that torchrun sets is wrong.
    """
    launch = read_launch()
    size = launch.size
    if parallel == "none":
        if size > 1:
            raise UserError(f"parallel is none, but torchrun started {size} processes: set parallel=ddp or fsdp2")
        yield RankGroup()
        return
    from python_trainer.distributed.sharded import ShardedGroup

    store = _join(launch, timedelta(seconds=timeout))
    fails_alone = False
    watch = None
    try:
        ranks = RankGroup("ddp") if parallel == "ddp" else ShardedGroup()
        with ranks.fail_together():
            if choose_device(device).type == "cuda":
                num_gpus = torch.cuda.device_count()
                if launch.local_rank >= num_gpus:
                    raise UserError(
                        f"--nproc-per-node of torchrun must be at most {num_gpus}, the number of GPUs here; there is "
                        f"none for process {launch.local_rank}"
                    )
                torch.cuda.set_device(launch.local_rank)
        with Watch(ranks, store, timeout) as watch:
            yield ranks
    except BaseException as error:
        if watch and watch.finding and is_timed_out(error):
            error.add_note(watch.finding)
        fails_alone = size > 1 and not (isinstance(error, Interrupted) or is_shared(error))
        raise
    finally:
        if not fails_alone:  # else NCCL waits for the others, who wait for this rank; torchrun ends them after it
            dist.destroy_process_group()
        if size > 1:
            time.sleep(LET_GO)


def _join(launch: Launch, timeout: timedelta) -> dist.Store:
    """Make the process group; return its store."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store: dist.Store = dist.HashStore()
    place = meeting_point() if launch.size > 1 else "here"
    try:
        if launch.size > 1:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = first_line(error)
        raise UserError(f"the processes cannot meet at {place} (MASTER_ADDR:MASTER_PORT): {reason}") from error
    return dist.PrefixStore("rlkernels", store)
