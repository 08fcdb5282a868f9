"""Updates of TRL's GRPOTrainer on a GPU: loss and gradients of one group, by TRL alone and with what we and others add.

The models have the shapes of Qwen2.5-0.5B and 1.5B, weights at random, bfloat16, no gradient checkpointing. The first
row of an arm is judged: the gradients of a small model against float32, at most twice the error of TRL's own.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

Message = dict[str, Any]
# of the model, without what all of them share
SIZES = {
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                     "num_key_value_heads": 2},
    "Qwen2.5-1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2},
}  # fmt: skip
TINY = "tiny"  # the model of a rehearsal, that of bench.gpu.model
# Liger changes functions of the model's module, for all later arms of a process
# A failure of the first two counts. Hub kernels need a network.
ARMS = ("TRL", "rlkernels", "FlexAttention tree", "TRL, use_kernels")
LIGER_ARMS = ("rlkernels, Liger's layers", "TRL, Liger's layers")
SHAPES = ((256, 512), (2048, 512), (256, 2048), (2048, 2048))  # prompt, longest answer
ANSWERS = 8
REPEATS, ENOUGH_S = 5, 0.6  # updates that are timed, and seconds after which no further one is
JUDGED, FEW = (2, 256, 128), (2, 24, 8)  # layers, prompt, longest answer; in a rehearsal
FLOOR = 1e-3  # of the gradients' error, relative to their norm


def jobs(device: str) -> Iterator[tuple[str, str]]:
    """Yield (size, arm), a worker's job each."""
    for arms in (ARMS, LIGER_ARMS):
        for size in SIZES if device == "cuda" else (TINY,):
            yield from ((size, arm) for arm in arms)


def attend_by_flex(self: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
                   window: int | None) -> torch.Tensor:  # fmt: skip
    """Stand in for ``TreeLayout.attend``: FlexAttention with the mask of the tree, made once for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask

    from bench.gpu.rivals import flex_on

    place = "FlexAttention", query.device
    if place not in self.tiles:
        end = self.end.to(query.device)
        self.tiles[place] = create_block_mask(
            lambda b, h, i, j: (j <= i) & (i < end[j]), None, None, len(end), len(end), device=query.device
        )
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    out = flex_on(query.device)(q, k, v, block_mask=self.tiles[place], scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Updates:
    """An arm on one model: TRL's trainer and the patches of the arm."""

    def __init__(self, arm: str, size: Any, device: torch.device, dtype: torch.dtype):
        from trl import GRPOTrainer

        from bench.gpu.model import make_model
        from bench.trl_update import make_trainer
        from rlkernels.integrations.trl import SharedPrefixGRPOTrainer

        self.device, self.vocab, self.patches = device, size.config["vocab_size"], dict[str, Any]()
        model: Any = make_model(size, device)
        model = model.to(dtype)
        if arm.endswith("use_kernels"):
            model.set_use_kernels(True)
        if arm.endswith("Liger's layers"):
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
        if arm == "FlexAttention tree":
            self.patches["rlkernels.prefix_cache.TreeLayout.attend"] = attend_by_flex
        cls = GRPOTrainer if arm.startswith("TRL") else SharedPrefixGRPOTrainer
        self.trainer = make_trainer(cls, model, 8, max(longest for _, longest in SHAPES), ANSWERS, device.type)

    def batch(self, prompt: int, longest: int) -> Message:
        from bench.trl_update import make_batch

        given = make_batch(prompt, longest, ANSWERS, self.vocab)
        return {name: value.to(self.device) for name, value in given.items()}

    def call(self, prompt: int, longest: int) -> Callable[[], float]:
        """Return an update that gives the norm of the gradient."""
        from bench.trl_update import update

        return update(self.trainer, self.batch(prompt, longest), ANSWERS, self.patches)

    def gradients(self, prompt: int, longest: int) -> list[torch.Tensor]:
        self.call(prompt, longest)()
        return [p.grad.float() for p in self.trainer.model.parameters() if p.grad is not None]

    def fallback(self) -> str:
        """Return what made ours leave the batch to TRL; empty if nothing did."""
        if getattr(self.trainer, "shares_prefixes", True):
            return ""
        return "; ".join(getattr(self.trainer, "_told", ())) or "prefixes are not shared"


# by size: gradients in float32, and the error of those of TRL in bfloat16
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
    tried = Updates(arm, small, device, low)
    row = verdict([gradient_error([g.cpu() for g in tried.gradients(*lengths)], exact)], [allowed])
    if reason := tried.fallback():
        row |= {"ok": False, "missing": reason[:300]}
    return row


def measure(updates: Updates, prompt: int, longest: int) -> Message:
    """Return the time of an update, and the most memory that is held during it."""
    from bench.gpu.model import peak_bytes, seconds

    call, device = updates.call(prompt, longest), updates.device
    norm = call()
    peak = peak_bytes(call, device)
    taken = list[float]()
    while len(taken) < REPEATS and (not taken or sum(taken) < ENOUGH_S):
        taken.append(seconds(call, device))
    row: Message = {"ok": norm == norm, "median_s": statistics.median(taken), "peak_bytes": peak, "gradient_norm": norm}
    if reason := updates.fallback():
        row |= {"ok": False, "missing": reason[:300]}
    return row


def run(name: str, arm: str, device: torch.device, without: Sequence[Sequence[str]], say: Callable[[Message], None]
        ) -> Message:  # fmt: skip
    """A job of the worker: a row for the gradients of an arm, and one for each shape; ``without``: those there are."""
    say({"begin": arm})
    from bench.gpu.model import QWEN, synchronize
    from bench.gpu.model import TINY as TINY_SIZE

    size = TINY_SIZE if name == TINY else replace(QWEN, config={**QWEN.config, **SIZES[name]})
    shapes = SHAPES if device.type == "cuda" else (FEW[1:],)
    made: list[Updates] = []
    release()
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def timed(prompt: int, longest: int) -> Message:
        if not made:
            made.append(Updates(arm, size, device, dtype_on(device)))
        row = measure(made[0], prompt, longest)
        return row if row["peak_bytes"] is None else row | {"peak_bytes": row["peak_bytes"] - held}

    parts: dict[str, Callable[[], Message]] = {
        f"{name}, gradients of {JUDGED[0]} layers": partial(judge, arm, name, size, device)
    }
    parts |= {f"{name}, prompt {p}, answers to {a}": partial(timed, p, a) for p, a in shapes}
    for shape, part in parts.items():
        if [shape, arm] in without:
            continue
        row: Message = {"op": "trl_update", "provider": arm, "shape": shape, "device": str(device)}
        try:
            row |= part()
        except Exception as error:
            row |= {"ok": False if arm in ARMS[:2] else None, "missing": f"{type(error).__name__}: {error}"[:300]}
            synchronize(device)  # raises where the device is broken
        say({"row": row})
        for updates in made:
            updates.trainer.model.zero_grad(set_to_none=True)
        release()  # what an update left when the memory ran out
        if row["ok"] is None:  # it would not fare better with longer ones
            break
    return {"ok": True}


def release() -> None:
    """Give back memory that nobody uses: trainers refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
