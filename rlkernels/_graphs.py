"""CUDA graphs: one launch for all that a call launches."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

R = TypeVar("R")


def record(run: Callable[[], R], pool: Any = None) -> tuple[Callable[[], None], R]:
    """Record what ``run`` launches; return what repeats it, and the result, whose tensors it then fills.

    Args:
        run: what to record. It runs three times.
        pool: of memory, which recordings that never run at once may share.

    Raises:
        RuntimeError: it waits for the GPU. That is found before the recording: one that CUDA refuses leaves torch up to
            2.11 on another stream, without random numbers, and unable to free memory (pytorch/pytorch#180395).
    """
    warmup_stream = torch.cuda.Stream()
    warmup_stream.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(warmup_stream):
            run()  # compiles kernels and sets up libraries
            with warnings.catch_warnings(action="ignore"):  # that torch may not find all waits
                torch.cuda.set_sync_debug_mode("error")
            run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(warmup_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph.replay, result
