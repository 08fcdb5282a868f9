"""Host time of a call without its kernel, and of a pass of the paged engine without its model.

Launches do nothing, and calls take turns with ``torch.add``.

Compiled CPU ops run on inputs of a few numbers. Triton's launchers get CPU tensors in place of a GPU's, and their
kernels do nothing. Not included: ops that wait for results on the way (``top1_deltas``) or have no kernel
(``soft_dtw``), and the host structures.
"""

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import rlkernels
from bench import Measurement, Row
from bench._calls import GRADIENTS, Arguments, inputs, public
from bench._runner import one_thread
from bench.gpu.model import TINY, make_model, tokens
from python_trainer.data import Request
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged import graphs
from python_trainer.rollout.paged.engine import PagedEngine
from rlkernels import RolloutHistory, _check, backend, registry

# ops that wait for results are those that need values
TIMED = [op.name for op in registry.ALL if (op.cpu or op.on_gpu) and not op.needs_values and not op.on_host]
CALLS_PER_TURN = 100
PLAIN, TRAINED = "no gradient", "with a gradient"
PROMPTS, PROMPT_TOKENS, NUM_GENERATIONS = 32, 128, 8  # of decoding: 256 sequences


class NoKernel:
    """Stand in for a kernel and do nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **settings: Any) -> None:
        pass


@contextmanager
def no_launches() -> Iterator[None]:
    """Make Triton's launchers accept CPU tensors and launch nothing."""
    names = [module.name for module in pkgutil.walk_packages(rlkernels.__path__, "rlkernels.")]
    with ExitStack() as stack:
        for module in (importlib.import_module(name) for name in names if ".triton_" in name):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(patch.object(module, name, NoKernel()))
        stack.enter_context(patch.object(backend, "unavailable", lambda *_: None))
        stack.enter_context(patch.object(backend, "_choices", {}))
        stack.enter_context(patch.object(_check, "on_host", lambda _: False))
        yield


def seconds(call: Callable[[], Any]) -> float:
    """Return the mean time of a call in a turn, in CPU seconds of this thread."""
    start = time.thread_time()
    for _ in range(CALLS_PER_TURN):
        call()
    return (time.thread_time() - start) / CALLS_PER_TURN


def measure(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Time the calls in turns; return the seconds a call of each turn, by name."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            samples[name].append(seconds(call))
    return samples


def with_gradient(op: str, arguments: Arguments) -> Arguments:
    return arguments | {name: arguments[name].clone().requires_grad_() for name in GRADIENTS[op]}


def rows(op: str, arguments: Arguments, shape: str, turns: int) -> list[Row]:
    """Time an op in turns with ``torch.add``; other load only adds time, so the ratio is of the shortest turns."""
    x, y = torch.randn(2, 4)
    calls: dict[str, Callable[[], Any]] = {"torch.add": lambda: torch.add(x, y)}
    backends = registry.OPS[op]
    for name in ("cpu", "triton"):
        if getattr(backends, name):
            options = arguments | {"validate": False} if name == "triton" and "uniforms" in arguments else arguments
            calls[f"rlkernels, {name}"] = partial(public(op), **options, backend=name)
    with no_launches():
        samples = measure(calls, turns)
    unit = min(samples["torch.add"])
    return [
        Row(op, name, shape, extra=f"{min(s) * 1e6:.1f} µs, {min(s) / unit:.1f} x torch.add").timed(s)
        for name, s in samples.items()
    ]


def pass_seconds(passes: int, with_drafts: bool) -> list[float]:
    """Time decoding passes of 256 sequences, whose logits are always the same, in CPU seconds of this thread."""
    model = make_model(TINY, torch.device("cpu"))
    engine = PagedEngine(model, eos_token_ids=(), max_batch_tokens=PROMPTS * PROMPT_TOKENS)
    engine.cache.key_cache.zero_()
    engine.cache.value_cache.zero_()
    engine.graphs = graphs.DecodeGraphs(model, engine.cache)
    prompts = tokens(TINY, PROMPTS, PROMPT_TOKENS, seed=1)
    if with_drafts:
        engine.drafter = Drafter(RolloutHistory(), pass_overhead=1e6)
        for prompt, answer in zip(prompts, tokens(TINY, PROMPTS, passes, seed=2)):
            engine.drafter.history.add(prompt, answer)
    requests = [
        Request(prompt, num_generations=NUM_GENERATIONS, max_new_tokens=passes, sample_id=NUM_GENERATIONS * i)
        for i, prompt in enumerate(prompts)
    ]
    fixed_logits = torch.randn(PROMPTS * PROMPT_TOKENS, model.config.vocab_size)
    step = engine._step
    samples = []

    def timed(run: Any) -> list[Any]:
        start = time.thread_time()
        done = step(lambda ids, positions, rows, paged: (fixed_logits[: len(rows)], fixed_logits))
        samples.append(time.thread_time() - start)
        return done

    with patch.object(engine, "_step", timed), patch.object(graphs, "record", lambda run, _: (int, run())):
        engine.generate(requests, SamplingParams(seed=1))
    return samples[2:-1]  # without the passes that compute prompts, record, and close sequences


def pass_rows(shape: str, passes: int, with_drafts: bool) -> Iterator[Row]:
    samples = pass_seconds(passes, with_drafts)
    yield Row("decode pass", "PagedEngine", shape, extra=f"at least {min(samples) * 1e3:.2f} ms").timed(samples)


def cases(quick: bool) -> Iterator[Measurement]:
    passes, turns = (20, 10) if quick else (120, 100)
    with one_thread():
        for with_drafts in (False, True):
            shape = f"256 sequences{', drafts' if with_drafts else ''}"
            yield Measurement([shape], partial(pass_rows, shape, passes, with_drafts))
        for op, arguments in inputs().items():
            if op in TIMED:
                yield Measurement([PLAIN], partial(rows, op, arguments, PLAIN, turns))
                if op in GRADIENTS:
                    yield Measurement([TRAINED], partial(rows, op, with_gradient(op, arguments), TRAINED, turns))
