"""Tell which decoders of Transformers run on our attention, and why the others do not.

    python tools/architectures.py > docs/architectures.md

Every type that ``AutoModelForCausalLM`` knows is built tiny and random, in float32, with sliding windows that cut.
Three things are held against eager attention of Transformers: packed passes with their gradients (``pack`` of
``rlkernels.integrations.transformers``, TRL's trainers), the paged cache beside it, and the passes in which
``python_trainer`` trains and generates. Names as arguments: only these types.
"""

import inspect
import re
import resource
import sys
from collections import defaultdict
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from python_trainer.model.traits import find_traits
from rlkernels.integrations.transformers import IMPLEMENTATION, PagedCache, pack, paged_kv_cache

VOCAB, MEMORY = 320, 8 << 30
HEADER = """Tiny random decoders of Transformers {}, in float32, with windows that cut, equal its eager attention in

- packed passes: logits and gradients of `rlkernels.integrations.transformers.pack`, for your loop and TRL's trainers;
- paged cache: that of `rlkernels.integrations.transformers`;
- trainer: packed passes and generation of `python_trainer`.

`python tools/architectures.py TYPE ...` writes such a table.
"""
# a size -> the settings of configs that get it, where they have it
SIZES: dict[Any, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx",
    48: "intermediate_size ffn_dim n_inner moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp "
    "shared_intermediate_size ffn_hidden_size expert_ffn_hidden_size decoder_ffn_dim",
    32: "hidden_size n_embd d_model word_embed_proj_dim lru_width kv_lora_rank q_lora_rank",
    8: "sliding_window local_attention attention_window window_size "
    "head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input laurel_rank "
    "mamba_n_heads mamba_d_head linear_key_head_dim linear_value_head_dim",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "rotary_dim",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k linear_num_key_heads eos_token_id",
    1: "n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups bos_token_id",
    0: "num_kv_shared_layers pad_token_id",
    0.3: "initializer_range init_std",
}
# whose keys and values come from one latent vector of a token
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in LATENT},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "global_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
}


def build(kind: str) -> Any:
    """Make a tiny random model whose biases and norms are no trivial ones."""
    given = AutoConfig.for_model(kind).to_dict()
    sizes = {name: size for size, names in SIZES.items() for name in names.split() if given.get(name) is not None}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **sizes | SPECIAL.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def check_packed(model: Any) -> None:
    """Raise unless a packed pass has the logits and the gradients of eager attention on padded rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 24), generator=generator)
    ids[1, :20], ids[2, :7] = ids[0, :20], ids[0, :7]
    mask = torch.ones_like(ids)
    mask[1, 22:] = 0
    rows = [row[kept.bool()] for row, kept in zip(ids, mask)]
    packed = pack([[*row.tolist(), 0] for row in rows])  # whose last token predicts nothing
    grads = torch.randn(int(mask.sum()), VOCAB, generator=generator)

    def results(logits: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        logits.backward(grads[:, : logits.shape[1]])
        return [logits.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]

    model.set_attn_implementation("eager")
    expected = results(model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    model.set_attn_implementation(IMPLEMENTATION)
    passed = model(packed.ids[None], position_ids=packed.position_ids[None], use_cache=False, attention=packed.layout)
    found = results(passed.logits[0, torch.cat(packed.layout.places)])
    most = max(float(p.abs().max()) for p in expected[1:])
    for i, (ours, theirs) in enumerate(zip(found, expected)):
        limit = 1e-3 * most if i else 1e-4 * max(float(theirs.abs().max()), 1.0)
        if not (gap := (ours - theirs).abs().max()) <= limit:
            raise ValueError(f"the {'gradients' if i else 'logits'} differ by {gap:.1e}")


@torch.no_grad()
def check_paged(model: Any) -> None:
    """Raise unless a batch on the paged cache has the logits of eager attention, computed and found there."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ids = torch.randint(3, VOCAB, (3, 24), generator=torch.Generator().manual_seed(0))
    ids[1, :20] = ids[0, :20]
    mask = torch.ones_like(ids)
    if takes_positions:
        mask[2, :9] = 0

    def logits(start: int, **cache: Any) -> torch.Tensor:
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, start:]} if takes_positions else {}
        return model(ids[:, start:], attention_mask=mask, **positions, **cache).logits[:, -1]

    model.set_attn_implementation("eager")
    expected = logits(0, use_cache=False)
    kv = paged_kv_cache(model, num_blocks=64, block_size=4)
    for _ in range(2):
        with PagedCache(kv, ids, mask) as cache:
            found = logits(cache.get_seq_length(), past_key_values=cache)
        if not (gap := (found - expected).abs().max()) <= 1e-4 * expected.abs().max().clamp(min=1):
            raise ValueError(f"the logits differ by {gap:.1e}")


def reason(kind: str, check: Any) -> str:
    """Return why the check of an architecture fails, without names of classes; empty if it passes."""
    try:
        check(build(kind))
    except Exception as error:  # whatever the model's own code raises
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        text = re.sub(r"^cannot run \w+ on flattened tokens: ", "", text)
        return re.sub(r"\b[A-Z]\w*(ForCausalLM|LMHeadModel|Attention)\b", "it", text).replace("|", "/")
    return ""


def look_at(kind: str) -> tuple[str, str]:
    """Return (result, why) of an architecture."""
    if reason(kind, lambda model: model(torch.ones(1, 4, dtype=torch.int64))):
        return "not tried: its tiny model does not run by itself", ""
    reasons = {"packed passes": reason(kind, check_packed), "paged cache": reason(kind, check_paged)}
    reasons["trainer"] = reason(kind, find_traits)
    runs = [name for name, why in reasons.items() if not why]
    return "all" if len(runs) == 3 else ", ".join(runs) or "none", next(filter(None, reasons.values()), "")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a type of which no size is in the table is huge
    transformers.logging.set_verbosity_error()
    kinds, found = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), defaultdict(list)
    for number, kind in enumerate(kinds, 1):
        print(f"{number}/{len(kinds)} {kind}", file=sys.stderr)
        found[look_at(kind)].append(kind)
    print(f"# Architectures\n\n{HEADER.format(transformers.__version__)}")
    print("| runs on | types | why not more |\n|---|---|---|")
    order = {"all": 0, "none": 2}
    for (result, why), names in sorted(found.items(), key=lambda row: (order.get(row[0][0], 1), row[0])):
        print(f"| {result} | {', '.join(names)} | {why} |")


if __name__ == "__main__":
    main()
