"""Checks a model with seven tokens: training and generation compute by their own paths what the model computes."""

from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.forward import Forward, attend_by, forward, logit_scale, page
from python_trainer.model.fused import FusedDecoder, supports
from rlkernels import PagedKVCache
from rlkernels.integrations.transformers_attention import PackedLayout, other_layers, probe_layers, rotary_limit
from rlkernels.prefix_cache import Sequence

PROMPT, ANSWERS = (1, 2, 1), ((2, 1), (1, 2))  # of one group
BLOCK = 2  # tokens: the prompt fills a block, which is shared, and half of another, which is copied


@dataclass(frozen=True)
class ModelTraits:
    """Keys and values are of one shape in all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None  # tokens of the smallest sliding window
    logit_scale: float | None  # of logits to the product of states and output matrix; None: made in another way
    fusible: bool  # FusedDecoder computes what the model computes


def find_traits(model: PreTrainedModel, name: str | None = None) -> ModelTraits:
    """Runs the model on a group as training and generation do, and compares with eager attention of Transformers.

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


@torch.no_grad()
def _find_traits(model: PreTrainedModel) -> ModelTraits:
    if model.get_output_embeddings() is None:
        raise ValueError("it names no output layer (get_output_embeddings)")
    config = model.config.get_text_config()
    if others := other_layers(config):
        raise ValueError(f"it has layers of {', '.join(others)}")
    device, layers = next(model.parameters()).device, config.num_hidden_layers
    size = next(model.get_input_embeddings().parameters()).shape[0]  # some have no token 2
    prompt, *answers = ([token % size for token in ids] for ids in (PROMPT, *ANSWERS))
    layout = PackedLayout([len(prompt)], [len(answer) for answer in answers], [0, len(answers)])
    ids = torch.tensor([*prompt, *(token for answer in answers for token in answer)], device=device)
    packed = ids, layout.position_ids.to(device), torch.arange(len(ids), device=device)
    with attend_by(model):
        heads, dim, window = probe_layers(model, layers)
        logits, states = forward(model, *packed, layout)
        cache = partial(PagedKVCache, layers, heads, dim, num_blocks=8, block_size=BLOCK)
        cache = partial(cache, dtype=model.dtype, device=device)
        cached = _cached_logits(partial(forward, model), cache(), prompt, answers)
        scale = logit_scale(model, logits, states)
    with attend_by(model, "eager"):
        rows = torch.tensor([[*prompt, *answer] for answer in answers], device=device)
        own = model(input_ids=rows, use_cache=False).logits  # [2, 5, V]
    if not _agree(model, logits, cached, own):
        raise ValueError("it computes something else than on its own; nothing but attention may mix tokens")
    fusible = False
    if supports(model):
        decoder = FusedDecoder(model, own.shape[1])
        logits, cached = decoder(*packed, layout)[0], _cached_logits(decoder, cache(), prompt, answers)
        fusible = _agree(model, logits, cached, own)
    return ModelTraits(layers, heads, dim, window, scale, fusible)


def _cached_logits(run: Forward, cache: PagedKVCache, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Computes logits of the prompt, of the first tokens of the answers and of the second ones, one after the other.

    By a prefill, by decoding from the cache, and by decoding with the shared block read once.
    """

    def logits(
        sequences: list[Sequence], tokens: list[list[int]], slots: torch.Tensor, share_from: int | None = None
    ) -> torch.Tensor:
        lens, ends = [len(some) for some in tokens], [sequence.length for sequence in sequences]
        places = [range(end - n, end) for end, n in zip(ends, lens)]
        ids, positions = (torch.tensor([*chain(*rows)], device=cache.device) for rows in (tokens, places))
        paged = page(cache, sequences, slots, lens, ends, share_from=share_from)
        return run(ids, positions, torch.arange(len(ids), device=cache.device), paged)[0]

    first = cache.open(prompt)
    found = [logits([first], [prompt], first.slots)]
    cache.commit(first)
    sequences = [first, *cache.fork(first, len(answers) - 1)]
    for place, share_from in ((0, None), (1, BLOCK)):
        tokens = [answer[place : place + 1] for answer in answers]
        found.append(logits(sequences, tokens, cache.append_many(sequences, tokens), share_from))
    return torch.cat(found)


def longest_sequence(model: PreTrainedModel, window: int | None) -> tuple[int, str]:
    """Finds the most tokens of a sequence that the model computes as by itself, packed or cached with any others.

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


def _agree(model: PreTrainedModel, packed: torch.Tensor, cached: torch.Tensor, own: torch.Tensor) -> bool:
    """Tells whether logits [7, V] of a packed and three cached passes equal those [2, 5, V] of the sequences alone.

    In low precision rounding may send a token to another expert: then the median of the tokens of a pass has to agree.
    """
    own, exact = own.float(), model.dtype == torch.float32
    prompt, answers = own[0, : len(PROMPT)], own[:, len(PROMPT) :]  # [3, V], [2, 2, V]
    whole = torch.cat([prompt, answers.flatten(0, 1)])
    wanted = [prompt, *answers.unbind(1)]
    pairs = [(packed, whole), *zip(cached.split([len(part) for part in wanted]), wanted)]
    off = [(found.float() - right).abs().amax(-1) for found, right in pairs]  # of each token
    worst = torch.stack([x.max() if exact else x.median() for x in off]).max()
    return bool(worst <= (1e-3 if exact else 0.1) * own.abs().max())
