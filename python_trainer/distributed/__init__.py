"""One process or several: how training is shared among the processes that torchrun started."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from python_trainer.distributed.group import RankGroup
from python_trainer.errors import Interrupted, UserError, is_shared
from python_trainer.launch import meeting_point, read_launch
from python_trainer.model.loading import choose_device

__all__ = ["RankGroup", "start"]

# How long processes wait for one another: while the first one asks vLLM's servers the others do nothing. One that ends
# is noticed at once.
PATIENCE = timedelta(hours=2)
# Seconds until gloo's threads have let go of what was sent last. One that lets go of a tensor while Python ends aborts
# its process, and torchrun calls the finished run failed (pytorch/pytorch#179291): they live on after the group is
# destroyed, since DTensor keeps it.
LET_GO = 0.5


@contextmanager
def start(parallel: str, device: str = "auto") -> Iterator[RankGroup]:
    """Joins the processes of a run, within it; a group of one where torchrun started none.

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

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if size > 1:
        place = meeting_point()
        try:
            dist.init_process_group(backend, timeout=PATIENCE)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"the processes cannot meet at {place} (MASTER_ADDR:MASTER_PORT): {reason}") from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    alone = False
    try:
        ranks = RankGroup("ddp") if parallel == "ddp" else ShardedGroup()
        with ranks.together():
            if choose_device(device).type == "cuda":
                number, there = launch.local_rank, torch.cuda.device_count()
                if number >= there:
                    raise UserError(
                        f"--nproc-per-node of torchrun must be at most {there}, the number of GPUs here; there is none "
                        f"for process {number}"
                    )
                torch.cuda.set_device(number)
        yield ranks
    except BaseException as error:
        alone = size > 1 and not (isinstance(error, Interrupted) or is_shared(error))
        raise
    finally:
        if not alone:  # NCCL would wait for the others, who wait for this one: it ends, and torchrun ends them
            dist.destroy_process_group()
        if size > 1:
            time.sleep(LET_GO)
