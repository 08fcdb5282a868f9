"""Updates of TRL's GRPOTrainer on a GPU: loss and gradients of one group, by TRL alone and with added kernels.

The models have the shapes of Qwen2.5-0.5B and 1.5B, random weights, bfloat16, no gradient checkpointing. The first row
of an arm is a check: gradients of a small model against float32, with at most twice the error of TRL. An arm is a
trainer, and what computes norms, rotary embeddings and feed-forward layers around its attention.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu.journal import measured
from rlkernels.proof.worker import seconds_of

Message = dict[str, Any]
# settings of the model that differ between sizes
SIZES = {
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                     "num_key_value_heads": 2},
    "Qwen2.5-1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2},
}  # fmt: skip
TINY = "tiny"  # the model of a rehearsal, that of bench.gpu.model
FLEX, HUB, LIGER, COMPILED = "FlexAttention tree", "use_kernels", "Liger's layers", "compiled layers"
FIRST_ARMS = ("TRL", "rlkernels")  # whose failure counts
# in order of their value: compilers take seconds
ARMS = (
    (*FIRST_ARMS, FLEX, f"TRL, {HUB}", f"rlkernels, {HUB}"),
    (f"rlkernels, {LIGER}", f"TRL, {LIGER}"),
    (f"rlkernels, {COMPILED}", f"TRL, {COMPILED}"),
)
SHAPES = ((256, 512), (2048, 512), (256, 2048), (2048, 2048))  # prompt, longest answer
ANSWERS = 8
MAX_TIMED_UPDATES = 5  # updates to time
MAX_TIMED_S = 0.6  # after which no further update is timed
JUDGED = (2, 256, 128)  # layers, prompt, longest answer
FEW = (2, 24, 8)  # the same in a rehearsal


def jobs(device: str) -> Iterator[tuple[str, str]]:
    """Yield (size, arm), a worker's job each."""
    for arms in ARMS:
        for size in SIZES if device == "cuda" else (TINY,):
            yield from ((size, arm) for arm in arms)


def attend_by_flex(self: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
                   window: int | None) -> torch.Tensor:  # fmt: skip
    """Stand in for ``TreeLayout.attend``: FlexAttention with the mask of the tree, made once for all layers."""
    from bench.gpu.rivals import flex_on, tree_mask

    place = "FlexAttention", query.device
    if place not in self.kernel_tables:
        self.kernel_tables[place] = tree_mask(self, query.device)
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    out = flex_on(query.device)(q, k, v, block_mask=self.kernel_tables[place], scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_hub_kernels(model: Any) -> None:
    """Replace layers by kernels of the Hub.

    Raises:
        RuntimeError: none was loaded; Transformers would silently keep its own layers.
    """
    reason = "no layer was replaced"
    try:
        model.set_use_kernels(True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if all(getattr(module.forward, "__func__", None) is type(module).forward for module in model.modules()):
        raise RuntimeError(f"hub kernels need network or a local cache: {reason}")


def replace_layers(model: Any, arm: str) -> None:
    """Let the library of an arm compute the layers around attention."""
    if arm.endswith(HUB):
        load_hub_kernels(model)
    elif arm.endswith(LIGER):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    elif arm.endswith(COMPILED):
        backend = "inductor" if model.device.type == "cuda" else "aot_eager"
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend=backend)


class Updates:
    """An arm on one model: TRL's trainer and the patches of the arm."""

    def __init__(self, arm: str, size: Any, device: torch.device, dtype: torch.dtype):
        from trl import GRPOTrainer

        from bench.gpu.model import make_model
        from bench.trl_update import make_trainer
        from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

        self.device = device
        self.vocab = size.config["vocab_size"]
        self.patches = dict[str, Any]()
        model: Any = make_model(size, device)
        model = model.to(dtype)
        replace_layers(model, arm)
        if arm == FLEX:
            self.patches["rlkernels.prefix_cache.TreeLayout.attend"] = attend_by_flex
        cls = GRPOTrainer if arm.startswith("TRL") else SharedPrefixGRPOTrainer
        self.trainer = make_trainer(cls, model, 8, max(longest for _, longest in SHAPES), ANSWERS, device.type)

    def batch(self, prompt: int, longest: int) -> Message:
        from bench.trl_update import make_batch

        batch = make_batch(prompt, longest, ANSWERS, self.vocab)
        return {name: value.to(self.device) for name, value in batch.items()}

    def call(self, prompt: int, longest: int) -> Callable[[], float]:
        """Return an update that gives the norm of the gradient."""
        from bench.trl_update import update

        return update(self.trainer, self.batch(prompt, longest), ANSWERS, self.patches)

    def gradients(self, prompt: int, longest: int) -> list[torch.Tensor]:
        self.call(prompt, longest)()
        return [p.grad.float() for p in self.trainer.model.parameters() if p.grad is not None]

    def checked(self, row: Message) -> Message:
        """Return a row, which is wrong if our trainer left the batch to TRL."""
        if getattr(self.trainer, "shares_prefixes", True):
            return row
        reason = "; ".join(getattr(self.trainer, "_told", ())) or "prefixes are not shared"
        return row | {"ok": False, "missing": reason[:300]}


# by size: gradients in float32, and the error of TRL's gradients in bfloat16
_known: dict[str, tuple[list[torch.Tensor], float]] = {}


def judge(arm: str, name: str, size: Any, device: torch.device) -> Message:
    """Return a verdict on the gradients of a small model."""
    from bench.gpu.model import gradient_error, verdict

    layers, *lengths = JUDGED if device.type == "cuda" else FEW
    small = replace(size, config={**size.config, "num_hidden_layers": layers})
    low = dtype_on(device)
    if name not in _known:
        exact = Updates("TRL", small, device, torch.float32).gradients(*lengths)
        plain = Updates("TRL", small, device, low).gradients(*lengths)
        _known[name] = [g.cpu() for g in exact], gradient_error(plain, exact)
        del exact, plain
        release()
    exact, allowed = _known[name]
    updates = Updates(arm, small, device, low)
    return updates.checked(verdict([gradient_error([g.cpu() for g in updates.gradients(*lengths)], exact)], [allowed]))


def measure(updates: Updates, prompt: int, longest: int) -> Message:
    """Return the time of an update and the peak memory during it."""
    from bench.gpu.model import peak_bytes

    call = updates.call(prompt, longest)
    device = updates.device
    norm = call()
    times = list[float]()
    peak = peak_bytes(lambda: times.append(seconds_of(call, 1, device)), device)
    while len(times) < MAX_TIMED_UPDATES and sum(times) < MAX_TIMED_S:
        times.append(seconds_of(call, 1, device))
    median_s = statistics.median(times)
    return updates.checked({"ok": norm == norm, "median_s": median_s, "peak_bytes": peak, "gradient_norm": norm})


def run(name: str, arm: str, device: torch.device, without: Sequence[Sequence[str]], say: Callable[[Message], None]
        ) -> Message:  # fmt: skip
    """Run a job of the worker: rows for the gradients of an arm and for each shape, but those in ``without``."""
    say({"begin": arm})
    from transformers.models.qwen2 import modeling_qwen2

    names = dict(vars(modeling_qwen2))
    try:
        return measure_arm(name, arm, device, without, say)
    finally:
        vars(modeling_qwen2).update(names)  # Liger replaces some, which later arms need


def measure_arm(name: str, arm: str, device: torch.device, without: Sequence[Sequence[str]],
                say: Callable[[Message], None]) -> Message:  # fmt: skip
    from bench.gpu.model import QWEN
    from bench.gpu.model import TINY as TINY_SIZE

    size = TINY_SIZE if name == TINY else replace(QWEN, config={**QWEN.config, **SIZES[name]})
    shapes = SHAPES if device.type == "cuda" else (FEW[1:],)
    trainers: list[Updates] = []
    release()
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def timed(prompt: int, longest: int) -> Message:
        if not trainers:
            trainers.append(Updates(arm, size, device, dtype_on(device)))
        row = measure(trainers[0], prompt, longest)
        return row if row["peak_bytes"] is None else row | {"peak_bytes": row["peak_bytes"] - allocated}

    measurements: dict[str, Callable[[], Message]] = {
        f"{name}, gradients of {JUDGED[0]} layers": partial(judge, arm, name, size, device)
    }
    measurements |= {f"{name}, prompt {p}, answers to {a}": partial(timed, p, a) for p, a in shapes}
    for shape, measure_row in measurements.items():
        if [shape, arm] in without:
            continue
        labels = {"op": "trl_update", "provider": arm, "shape": shape, "device": str(device)}
        row = measured(labels, measure_row, device, failed=False if arm in FIRST_ARMS else None)
        say({"row": row})
        for updates in trainers:
            updates.trainer.model.zero_grad(set_to_none=True)
        release()  # after an update that ran out of memory
        if row["ok"] is None:  # longer shapes would fail, too
            break
    return {"ok": True}


def release() -> None:
    """Free unused memory: trainers have reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
