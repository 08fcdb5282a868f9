"""Check a model with seven tokens: training and generation compute by their own paths what the model computes."""

import random
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.forward import Forward, attend_by, forward, logit_scale, page
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.precision import Float32, stated_precision
from rlkernels import PagedKVCache
from rlkernels.integrations.transformers_attention import (
    attention_layers,
    mixing_layers,
    other_layers,
    probe_layers,
    rotary_limit,
)
from rlkernels.prefix_cache import GroupedLayout, Sequence

BLOCK_TOKENS = 2  # tokens: the prompt fills a block, which is shared, and half of another, which is copied
# Largest difference of logits, relative to the largest. Rounding in float32 makes 1e-6 in SmolLM2 (30 layers), and 1e-4
# in random models of 12 layers with attention scores five times as large as usual.
TOLERANCE = 1e-3
# Groups of which one must agree. Rounding may send a token to another expert, in float32 about once in 30 groups of a
# model with 100 layers of 128 experts; what a model computes otherwise shows in every group.
NUM_GROUPS = 3


@dataclass(frozen=True)
class ModelTraits:
    """Keys and values are of one shape in all layers of attention."""

    layers: int  # of attention
    kv_heads: int
    head_dim: int
    window: int | None  # tokens of the smallest sliding window
    logit_scale: float | None  # of logits to the product of states and output matrix; None: made in another way
    fusible: bool  # FusedDecoder computes what the model computes
    recurrent: tuple[str, ...] = ()  # kinds of layers beside attention, which no paged cache holds


def find_traits(model: PreTrainedModel, name: str | None = None) -> ModelTraits:
    """Run the model on a group as training and generation do, and compare with eager attention of Transformers.

    The model must be in evaluation mode.

    Raises:
        UserError: a pass does not go through, layers are not all plain attention, or the numbers differ.
    """
    try:
        return _find_traits(model)
    except Exception as error:  # whatever the model's own code raises
        reason = (str(error).strip() or "no message").splitlines()[0]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"cannot run {name or type(model).__name__} on flattened tokens: {kind}{reason}") from error


class _Group:
    """Tokens of a prompt and two answers to it."""

    def __init__(self, vocabulary: int, seed: int, device: torch.device):
        # from the middle of the vocabulary: special tokens, which are extreme in many models, are at its ends
        tokens = random.Random(seed).choices(range(vocabulary // 4, vocabulary - vocabulary // 4), k=7)
        self.prompt = tokens[:3]
        self.answers = [tokens[3:5], tokens[5:]]
        layout = GroupedLayout([3], [2, 2], [0, 2])
        rows = torch.arange(7, device=device)
        self.packed = torch.tensor(tokens, device=device), layout.position_ids.to(device), rows, layout
        self.unpacked = torch.tensor([[*self.prompt, *answer] for answer in self.answers], device=device)  # [2, 5]


@torch.no_grad()
def _find_traits(model: PreTrainedModel) -> ModelTraits:
    if model.get_output_embeddings() is None:
        raise ValueError("it names no output layer (get_output_embeddings)")
    config = model.config.get_text_config()
    if mixing := mixing_layers(config, model.modules()):
        raise ValueError(f"it has layers of {', '.join(mixing)}")
    layers, recurrent = attention_layers(config), tuple(other_layers(config))
    device, dtype = next(model.parameters()).device, model.dtype
    vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
    groups = [_Group(vocabulary, seed, device) for seed in range(NUM_GROUPS)]
    with stated_precision(device):
        with attend_by(model):
            heads, dim, window = probe_layers(model, layers)
            logits, states = forward(model, *groups[0].packed)
        if not logits.isfinite().all():
            raise ValueError(f"its logits hold NaN or infinity in {dtype}")
        fusible, same_type = supports(model), logits.dtype == states.dtype
        cache = partial(PagedKVCache, len(layers), heads, dim, num_blocks=8, block_size=BLOCK_TOKENS, device=device)
        cache = partial(cache, dtype=torch.float32)
        with Float32():  # in low precision rounding is as large as some faults
            for group in groups:
                with attend_by(model):
                    if recurrent:  # trees alone
                        packed, states = forward(model, *group.packed)
                        outputs = packed[None]
                    else:
                        outputs, states = _pass_by_pass(partial(forward, model), group, cache())
                expected = _eager_logits(model, group)
                if _agree(outputs, expected):
                    break
            else:
                raise ValueError("it computes something else than on its own; nothing but attention may mix tokens")
            scale = logit_scale(model, outputs[0], states) if same_type else None
            fusible = fusible and _agree(_pass_by_pass(FusedDecoder(model, 5), group, cache())[0], expected)
    return ModelTraits(len(layers), heads, dim, window, scale, fusible, recurrent)


def _eager_logits(model: PreTrainedModel, group: _Group) -> torch.Tensor:
    """Compute logits [7, V] by eager attention of Transformers, an answer a row."""
    with attend_by(model, "eager"):
        rows = model(input_ids=group.unpacked, use_cache=False).logits  # [2, 5, V]
    return torch.cat([rows[0, :3], rows[0, 3:], rows[1, 3:]])


def _agree(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((outputs - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _pass_by_pass(run: Forward, group: _Group, cache: PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits [2, 7, V], by a packed pass and by three cached ones, and the last hidden states of the first."""
    packed, states = run(*group.packed)
    return torch.stack([packed, _cached_logits(run, cache, group)]), states


def _cached_logits(run: Forward, cache: PagedKVCache, group: _Group) -> torch.Tensor:
    """Compute logits [7, V] of the prompt, of the first tokens of the answers and of the second ones.

    By a prefill, by decoding from the cache, and by decoding with the shared block read once.
    """

    def logits(
        sequences: list[Sequence], tokens: list[list[int]], slots: torch.Tensor, share_from: int | None = None
    ) -> torch.Tensor:
        lens = [len(row) for row in tokens]
        ends = [sequence.length for sequence in sequences]
        places = [range(end - n, end) for end, n in zip(ends, lens)]
        ids, positions = (torch.tensor([*chain(*rows)], device=cache.device) for rows in (tokens, places))
        paged = page(cache, sequences, slots, lens, ends, share_from=share_from)
        return run(ids, positions, torch.arange(len(ids), device=cache.device), paged)[0]

    first = cache.open(group.prompt)
    prompt = logits([first], [group.prompt], first.slots)  # [3, V]
    cache.commit(first)
    sequences = [first, *cache.fork(first, len(group.answers) - 1)]
    decoded = []
    for place, share_from in ((0, None), (1, BLOCK_TOKENS)):
        tokens = [answer[place : place + 1] for answer in group.answers]
        decoded.append(logits(sequences, tokens, cache.append_many(sequences, tokens), share_from))  # [2, V]
    return torch.cat([prompt, torch.stack(decoded, 1).flatten(0, 1)])


def longest_sequence(model: PreTrainedModel, window: int | None = None) -> tuple[int, str]:
    """Find the most tokens of a sequence that the model computes as by itself, packed or cached with any others.

    Args:
        window: a limit where layers cannot look at a window of a sequence.

    Returns:
        Their number, and the reason, for messages.
    """
    config = model.config.get_text_config()
    limits = [
        (getattr(config, "max_position_embeddings", None) or 1 << 30, "the model's limit"),
        (window, "the model's sliding window"),
        (rotary_limit(config), "the original length of the model's rotary factors"),
    ]
    return min(((n, reason) for n, reason in limits if n is not None), key=lambda limit: limit[0])
