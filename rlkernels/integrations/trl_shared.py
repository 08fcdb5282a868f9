"""Updates of TRL's GRPO and RLOO trainers that compute what answers begin with once per micro-batch, and pads nothing.

Loss and gradients stay those of TRL. On a CPU prompts and answers are packed as a trie: system prompts, prompts, and
what answers to one prompt begin with. On a GPU prompts alone are shared (:func:`rlkernels.prefix_cache.packs_tries`).
"""

import functools
import logging
import sys
import types
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

from rlkernels import linear_token_logprobs, token_logprobs
from rlkernels.integrations.transformers_attention import _attend, logit_factor, mixing_layers, rotary_limit
from rlkernels.prefix_cache import Packed, TreeLayout, pack, packs_tries
from rlkernels.prefix_cache.layout import sort_by_tokens

__all__ = ["SharedPrefixGRPOTrainer", "SharedPrefixRLOOTrainer"]

EAGER = "eager_attention_forward"  # that of a model, in its own file, which no registry knows
TOLERANCE = {torch.float32: 1e-3}  # mean difference of log-probabilities from TRL's that rounding explains
LOW_PRECISION = 0.05
TOKENS_OVER_TRL = "shared_prefix/tokens_over_trl"

logger = logging.getLogger(__name__)


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> Packed:
    """Pack TRL's [B, P + L], with prompts padded on the left and answers on the right; answers are scored."""
    mask = attention_mask.cpu().bool()
    answer = torch.arange(mask.shape[1]) >= mask.shape[1] - logits_to_keep
    rows = [ids[kept] for ids, kept in zip(input_ids.cpu(), mask)]
    scored: list[Any] = [answer[kept].numpy() for kept in mask]
    prefix_lens = None if packs_tries(input_ids.device) else mask[:, ~answer].sum(1).tolist()
    return pack(rows, scored, prefix_lens=prefix_lens).to(input_ids.device)


def regroup(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same samples in batches of the same sizes, sorted by tokens: those that begin alike are neighbours."""
    ids, masks = (
        torch.cat([torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for batch in batches]).cpu()
        for kind in ("ids", "mask")
    )
    order = torch.tensor(sort_by_tokens([row[mask.bool()].numpy() for row, mask in zip(ids, masks)])[0])
    parts = order.split([len(batch["prompt_ids"]) for batch in batches])

    def pick(name: str, part: torch.Tensor, i: int) -> Any:
        values = [batch[name] for batch in batches]
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            return torch.cat(values)[part.to(values[0].device)]
        if isinstance(values[0], list):
            return [[row for value in values for row in value][at] for at in part]
        return values[i]  # a number of the whole batch, or None

    return [{name: pick(name, part, i) for name in batches[0]} for i, part in enumerate(parts)]


def obstacle(model: PreTrainedModel) -> str | None:
    """Return what keeps a model from sharing prefixes, or None."""
    config = model.config.get_text_config(decoder=True)
    if mixing := mixing_layers(config, model.modules()):
        return f"it has layers of {', '.join(mixing)}"
    if dropped := [name for name, share in config.to_dict().items() if "att" in name and "drop" in name and share]:
        return f"it has {dropped[0]}"
    if any(getattr(one, "alora_invocation_tokens", None) for one in getattr(model, "peft_config", {}).values()):
        return "its adapter (aLoRA) begins at a token of each row"
    if config._attn_implementation == "eager" and not _eager_files(model):
        return f"its eager attention is no function {EAGER}"
    return None


def _eager_files(model: PreTrainedModel) -> list[Any]:
    """List the files of a model's layers that hold its eager attention."""
    files = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    return [file for file in files.values() if hasattr(file, EAGER)]


def _attend_beside(model: PreTrainedModel) -> None:
    """Let the model's attention functions leave a pass to ours that says what its packed tokens look at."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name != "eager":
        AttentionInterface.register(name, _beside(ALL_ATTENTION_FUNCTIONS[name]))
        return
    for file in _eager_files(model):
        setattr(file, EAGER, _beside(getattr(file, EAGER)))


def _beside(plain: Any) -> Any:
    """Return an attention function that leaves a pass to ours if the pass says what its tokens look at."""
    if plain.__module__ == __name__:
        return plain

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
               *args: Any, attention: TreeLayout | None = None, **kwargs: Any) -> Any:  # fmt: skip
        if attention is None:
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # rotary factors leave queries and keys in float32, as SDPA would not
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        return _attend(module, query, key, value, None, *args, attention=attention, **kwargs)

    return attend


def packed_arguments(model: Any, ids: torch.Tensor, layout: TreeLayout) -> dict[str, Any]:
    """Return the arguments of a model's forward pass on packed tokens [T]."""
    _attend_beside(model)
    no_mask = ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)  # of four dimensions: the model makes none itself
    positions = layout.position_ids.to(ids.device)
    return {"input_ids": ids[None], "position_ids": positions[None], "attention": layout, "attention_mask": no_mask}


def share_prefixes(model: PreTrainedModel, temperature: float, head_in_float32: bool) -> None:
    """Let ``model(shared_prefix=packed)`` give log-probabilities and entropies of packed answers, float32 [R] each.

    The second is None unless ``with_entropy`` is true. All else stays as it was.
    """
    config = model.config.get_text_config(decoder=True)
    factor, softcap = logit_factor(config), getattr(config, "final_logit_softcapping", None)
    inner = model.forward

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(self: Any, *args: Any, shared_prefix: Packed | None = None, with_entropy: bool = False,
                **kwargs: Any) -> Any:  # fmt: skip
        if shared_prefix is None:
            return inner(*args, **kwargs)
        packed = shared_prefix
        given = packed_arguments(self, packed.ids, packed.layout)
        hidden = self.base_model(**given, use_cache=False).last_hidden_state[0, packed.rows]
        head, kind = self.get_output_embeddings(), hidden.device.type
        if head_in_float32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        weight, bias = head.weight.to(hidden.dtype), None if head.bias is None else head.bias.to(hidden.dtype)
        with torch.autocast(kind, enabled=False):
            score: Any
            if softcap is None:
                scaled = temperature / factor
                score = functools.partial(linear_token_logprobs, hidden, weight, bias=bias, temperature=scaled)
            else:  # the logits of answers alone, where TRL makes those of padding too
                logits = softcap * (F.linear(hidden, weight, bias) * (factor / softcap)).tanh()
                score = functools.partial(token_logprobs, logits, temperature=temperature)
            found = score(packed.targets, return_entropy=with_entropy)
        return found if with_entropy else (found, None)

    model.forward = types.MethodType(forward, model)


class PrefixSharing:
    """A trainer of TRL with what samples begin with computed once per micro-batch.

    It also joins your own subclass, as ``class Mine(SharedPrefixGRPOTrainer, YourTrainer)``.
    Where prefixes cannot be shared, TRL's own computation runs, and one line of the log says why: layers such as
    Mamba's, dropout of attention, aLoRA, images, a router's loss, or a batch longer than the length at which rotary
    factors change.
    The first batch that fits in all processes is computed both ways. If the log-probabilities differ, TRL's way stays
    for the whole run.

    Attributes:
        shares_prefixes: False once the whole run goes TRL's way; a batch that does so alone leaves it. The logs show
            ``shared_prefix/tokens_over_trl``: tokens through the model over those that TRL would pass, so far.
    """

    args: Any  # TRL's, as the others
    accelerator: Any
    model: Any
    ref_model: Any
    aux_loss_enabled: bool
    _metrics: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        served = [base.__name__ for base in cls.__mro__ if base in (GRPOTrainer, RLOOTrainer, DPOTrainer)]
        if len(served) > 1:
            raise TypeError(
                f"{cls.__name__} must derive from one trainer of TRL, got {' and '.join(served)}: take "
                f"{' or '.join(f'SharedPrefix{name}' for name in served)}"
            )

    def __init__(self, *args: Any, **kwargs: Any):
        self._is_set_up = self.shares_prefixes = self._compared = False
        self._told = set[str]()
        self._passed, self._padded = Counter[str](), Counter[str]()  # tokens through the model, and TRL's, by mode
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        if self._is_set_up:
            return
        self._is_set_up = True
        models = [self.accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        models = [model.get_base_model() if hasattr(model, "get_base_model") else model for model in models]
        for model in models:
            if reason := obstacle(model):
                self._step_back(f"{type(model).__name__} computes prompts for each answer: {reason}")
                return
        config = models[0].config.get_text_config(decoder=True)
        self._rotary_limit = rotary_limit(config)
        self.shares_prefixes = True
        for model in models:
            self._share(model)

    def _share(self, model: Any) -> None:
        """Let the model take what this trainer packs as the argument ``shared_prefix``."""
        raise NotImplementedError

    def _step_back(self, reason: str) -> None:
        self.shares_prefixes = False
        self._tell(f"prompts are not shared: {reason}")

    def _tell(self, line: str) -> None:
        if line not in self._told and self.accelerator.is_main_process:
            logger.warning("%s", line)
        self._told.add(line)

    def _log_tokens(self, passed: int, padded: int) -> None:
        """Log the tokens that this process passed through the model, over those that TRL would have, padding too."""
        mode = "train" if self.model.training else "eval"
        self._passed[mode] += passed
        self._padded[mode] += padded
        self._metrics[mode][TOKENS_OVER_TRL] = [self._passed[mode] / self._padded[mode]]

    def _fits(self, attention_mask: torch.Tensor, compute_aux_loss: bool, others: dict[str, Any]) -> bool:
        given = [name for name, value in others.items() if value is not None]
        if given:
            reason = f"a batch with {given[0]} goes TRL's way"
        elif compute_aux_loss:
            reason = "the loss of the router needs TRL's way"
        elif self._rotary_limit is not None and attention_mask.shape[1] > self._rotary_limit:  # TRL counts padding
            reason = f"a padded batch is longer than {self._rotary_limit} tokens, where rotary factors change"
        else:
            return True
        self._tell(f"prompts are not shared: {reason}")
        return False

    def _agrees(self, fits: bool, model: Any, ours: Any, theirs: Any, mask: torch.Tensor) -> bool:
        """Return whether a batch goes our way; the first that fits in all processes is computed both ways."""
        if self.shares_prefixes and not self._compared:  # by all or none: forward passes are collective
            fits = bool(self.accelerator.gather(torch.tensor([fits], device=mask.device)).all())
            if fits:
                self._compare(model, ours, theirs, mask)
        return fits and self.shares_prefixes

    @torch.no_grad()
    def _compare(self, model: Any, ours: Any, theirs: Any, mask: torch.Tensor) -> None:
        """Compute a batch both ways, without dropout; all processes step back where one of them finds a difference."""
        training, difference, reason = model.training, torch.zeros(1, device=mask.device), ""
        self._compared = True
        model.eval()
        try:
            found = ours()[mask] - theirs()[mask]
            difference += found.float().abs().mean() if found.numel() else 0
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # of a model that we do not know
            difference, reason = difference + torch.inf, str(error).split("\n")[0]
        finally:
            model.train(training)
        low = self.args.bf16 or self.args.fp16
        limit = LOW_PRECISION if low else TOLERANCE.get(next(model.parameters()).dtype, LOW_PRECISION)
        worst = self.accelerator.gather(difference).max().item()
        if not worst <= limit:
            self._step_back(reason or f"log-probabilities differ from TRL's by {worst:.2g} a token, above {limit:g}")


class SharedPrefix(PrefixSharing):
    """A trainer of TRL that scores groups of answers as :class:`PrefixSharing`.

    Args:
        keep_groups: put the answers to a prompt into as few micro-batches as possible, where TRL shuffles them over the
            whole generation batch. None: where that changes no gradient; elsewhere one line of the log says why not:
            ``loss_type="bnpo"``, ``top_entropy_quantile`` below 1, an entropy bonus, a router's loss, or
            ``gradient_accumulation_steps`` that are no multiple of ``steps_per_generation``. Logged means over
            micro-batches, such as ``entropy``, are then of other micro-batches.
    """

    temperature: float
    _step: int
    _buffered_inputs: Any

    def __init__(self, *args: Any, keep_groups: bool | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        shuffled_for = self._needs_shuffle()
        self.keep_groups = shuffled_for is None if keep_groups is None else keep_groups
        if self.shares_prefixes and shuffled_for and not self.keep_groups:
            self._tell(f"TRL shuffles answers for {shuffled_for}: fewer share prompts; keep_groups=True regroups")

    def _share(self, model: Any) -> None:
        share_prefixes(model, self.temperature, getattr(self.args, "cast_lm_head_to_fp32", False))

    def _needs_shuffle(self) -> str | None:
        """Return why the gradient depends on which answers are in a micro-batch, or None."""
        settings = self.args
        if settings.steps_per_generation == 1:
            return None
        if (steps := settings.gradient_accumulation_steps) % (size := settings.steps_per_generation):
            return f"gradient_accumulation_steps={steps}, no multiple of steps_per_generation={size}"
        return next((reason for reason, holds in self._mixes().items() if holds), None)

    def _mixes(self) -> dict[str, bool]:
        """Return the settings under which a micro-batch is more than the sum of its answers."""
        return {"the router's loss": self.aux_loss_enabled}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        score: Any = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        theirs = functools.partial(
            score, model, logits_to_keep=logits_to_keep, compute_aux_loss=compute_aux_loss, **others
        )
        fits = self.shares_prefixes and self._fits(attention_mask, compute_aux_loss, others)
        ours = functools.partial(self._score, model, input_ids, attention_mask, logits_to_keep)
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        padded = {name: F.pad(value, (1, 0)) for name, value in tokens.items()}  # does padding shift positions?
        if self._agrees(
            fits, model, lambda: ours(len(input_ids), False)[0], lambda: theirs(**padded, batch_size=1)[0],
            attention_mask[:, -logits_to_keep:].bool(),
        ):  # fmt: skip
            logps, entropies, passed = ours(batch_size or len(input_ids), compute_entropy)
            self._log_tokens(passed, input_ids.numel())
            return logps, entropies, None
        self._log_tokens(input_ids.numel(), input_ids.numel())
        return theirs(**tokens, batch_size=batch_size, compute_entropy=compute_entropy)

    def _score(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
               size: int, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None, int]:  # fmt: skip
        """Return log-probabilities, and entropies if wanted, [B, logits_to_keep], and the number of packed tokens.

        Places without a token hold zeros.
        """
        tokens = 0
        logps: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size)):
            packed, scored = pack_rows(ids, mask, logits_to_keep), mask[:, -logits_to_keep:].bool()
            tokens += len(packed.ids)
            with self.accelerator.autocast():
                found = model(shared_prefix=packed, with_entropy=with_entropy)
            for parts, values in zip((logps, entropies), found, strict=True):
                if values is not None:
                    empty = values.new_zeros(len(ids), logits_to_keep)
                    parts.append(empty.masked_scatter(scored, values[packed.pairs]))
        return torch.cat(logps), torch.cat(entropies) if with_entropy else None, tokens

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        batches = self._buffered_inputs
        fresh = batches is not before and batches is not None and len(batches) > 1
        if self.keep_groups and self.shares_prefixes and fresh and "num_images" not in batches[0]:
            self._buffered_inputs = regroup(batches)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


class SharedPrefixGRPOTrainer(SharedPrefix, GRPOTrainer):
    """TRL's ``GRPOTrainer`` as :class:`SharedPrefix`, which has the arguments beside TRL's."""

    def _mixes(self) -> dict[str, bool]:
        settings = self.args
        return {
            f"loss_type={self.loss_type!r}": self.loss_type == "bnpo",
            f"top_entropy_quantile={self.top_entropy_quantile}": self.top_entropy_quantile < 1,
            "the entropy bonus": settings.entropy_coef != 0 or settings.use_adaptive_entropy,
            **super()._mixes(),
        }


class SharedPrefixRLOOTrainer(SharedPrefix, RLOOTrainer):
    """TRL's ``RLOOTrainer`` as :class:`SharedPrefix`, which has the arguments beside TRL's."""
