"""One process or several: how training is shared among the processes that torchrun started."""

from python_trainer.distributed.group import RankGroup
from python_trainer.distributed.start import start

__all__ = ["RankGroup", "start"]
