"""TRL's GRPO and RLOO trainers with each common prefix computed once per micro-batch, and without padding.

Loss and gradients stay those of TRL. Prompts and answers are packed as a trie: system prompts, prompts and common
beginnings of answers are shared. On most GPUs only prompts are shared (:func:`rlkernels.prefix_cache.packs_tries`).
"""

import functools
import itertools
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

EAGER = "eager_attention_forward"  # each modeling file defines its own; no registry lists them
TOLERANCE = 1e-3  # mean difference of log-probabilities from TRL's that rounding explains
LOW_PRECISION = 0.05  # the same for types narrower than float32
TOKENS_OVER_TRL = "shared_prefix/tokens_over_trl"

logger = logging.getLogger(__name__)


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> Packed:
    """Pack TRL's [B, P + L], with prompts padded on the left and answers on the right; answers are scored."""
    mask = attention_mask.cpu().bool()
    answer = torch.arange(mask.shape[1], device="cpu") >= mask.shape[1] - logits_to_keep
    rows = [ids[is_token] for ids, is_token in zip(input_ids.cpu(), mask)]
    scored: list[Any] = [answer[is_token].numpy() for is_token in mask]
    prefix_lens = None if packs_tries(input_ids.device) else mask[:, ~answer].sum(1).tolist()
    return pack(rows, scored, prefix_lens=prefix_lens).to(input_ids.device)


def regroup(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same samples in batches of the same sizes, sorted by tokens, so that common prefixes meet."""

    def join(kind: str) -> torch.Tensor:
        rows = [torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for batch in batches]
        return torch.cat(rows).cpu()

    sequences = [row[mask].numpy() for row, mask in zip(join("ids"), join("mask").bool())]
    order = torch.tensor(sort_by_tokens(sequences)[0], device="cpu")
    batch_rows = order.split([len(batch["prompt_ids"]) for batch in batches])

    def pick(name: str, rows: torch.Tensor, batch_index: int) -> Any:
        values = [batch[name] for batch in batches]
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            return torch.cat(values)[rows.to(values[0].device)]
        if isinstance(values[0], list):
            samples = list(itertools.chain.from_iterable(values))
            return [samples[row] for row in rows]
        return values[batch_index]  # a number of the whole batch, or None

    return [{name: pick(name, rows, i) for name in batches[0]} for i, rows in enumerate(batch_rows)]


def obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why a model cannot share prefixes, or None."""
    config = model.config.get_text_config(decoder=True)
    if mixing := mixing_layers(config, model.modules()):
        return f"it has layers of {', '.join(mixing)}"
    for name, probability in config.to_dict().items():
        if "att" in name and "drop" in name and probability:
            return f"it has {name}"
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter (aLoRA) begins at a token of each row"
        if adapter.is_prompt_learning:
            return f"its adapter ({type(adapter).__name__}) learns a beginning for each row"
    if config._attn_implementation == "eager" and not _eager_files(model):
        return f"its eager attention is no function {EAGER}"
    return None


def _eager_files(model: PreTrainedModel) -> list[Any]:
    """List the modeling files of a model's layers that define eager attention."""
    names = {type(module).__module__ for module in model.modules()}
    return [file for name in names if hasattr(file := sys.modules.get(name), EAGER)]


def dispatch_packed_attention(model: PreTrainedModel) -> None:
    """Wrap the model's attention functions: passes with a layout of packed tokens use ours."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name != "eager":
        AttentionInterface.register(name, _with_packed_attention(ALL_ATTENTION_FUNCTIONS[name]))
        return
    for file in _eager_files(model):
        setattr(file, EAGER, _with_packed_attention(getattr(file, EAGER)))


# a compiled layer breaks its graph here: what kernels read of a layout, torch.compile would trace for each batch anew
_attend_to_layout = torch.compiler.disable(_attend)


def _with_packed_attention(plain: Any) -> Any:
    """Return an attention function that calls ours if it gets the argument ``attention``, else ``plain``."""
    if plain.__module__ == __name__:
        return plain

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
               *args: Any, attention: TreeLayout | None = None, **kwargs: Any) -> Any:  # fmt: skip
        if attention is None:
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        return _attend_to_layout(module, query, key, value, None, *args, attention=attention, **kwargs)

    return attend


def unwrap(accelerator: Any, model: Any) -> PreTrainedModel:
    """Return the model of Transformers inside the wrappers of accelerate and PEFT."""
    model = accelerator.unwrap_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def packed_arguments(model: Any, ids: torch.Tensor, layout: TreeLayout) -> dict[str, Any]:
    """Return the arguments of a model's forward pass on packed tokens [T]."""
    dispatch_packed_attention(model)
    no_mask = ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)  # four dimensions, so that the model makes no mask itself
    positions = layout.position_ids.to(ids.device)
    return {"input_ids": ids[None], "position_ids": positions[None], "attention": layout, "attention_mask": no_mask}


def share_prefixes(model: PreTrainedModel, temperature: float, head_in_float32: bool) -> None:
    """Let ``model(shared_prefix=packed)`` return log-probabilities and entropies of packed answers, float32 [R] each.

    Entropies are None unless ``with_entropy`` is true. Other calls are unchanged.
    """
    config = model.config.get_text_config(decoder=True)
    factor = logit_factor(config)
    softcap = getattr(config, "final_logit_softcapping", None)
    inner = model.forward

    @functools.wraps(type(model).forward)  # generate() inspects the signature
    def forward(self: Any, *args: Any, shared_prefix: Packed | None = None, with_entropy: bool = False,
                **kwargs: Any) -> Any:  # fmt: skip
        if shared_prefix is None:
            return inner(*args, **kwargs)
        packed = shared_prefix
        arguments = packed_arguments(self, packed.ids, packed.layout)
        output = self.base_model(**arguments, use_cache=False)
        hidden = output.last_hidden_state[0, packed.rows]
        device_type = hidden.device.type
        if head_in_float32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(device_type):
            hidden = hidden.to(torch.get_autocast_dtype(device_type))
        head = self.get_output_embeddings()
        weight = head.weight.to(hidden.dtype)
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        with torch.autocast(device_type, enabled=False):
            score: Any
            if softcap is None:
                scaled = temperature / factor
                score = functools.partial(linear_token_logprobs, hidden, weight, bias=bias, temperature=scaled)
            else:  # logits of answers only; TRL computes those of padding too
                logits = softcap * (F.linear(hidden, weight, bias) * (factor / softcap)).tanh()
                score = functools.partial(token_logprobs, logits, temperature=temperature)
            scores = score(packed.targets, return_entropy=with_entropy)
        return scores if with_entropy else (scores, None)

    model.forward = types.MethodType(forward, model)


class PrefixSharing:
    """A trainer of TRL that computes common prefixes of samples once per micro-batch.

    It also joins your own subclass, as ``class Mine(SharedPrefixGRPOTrainer, YourTrainer)``.
    Where prefixes cannot be shared, TRL's own computation runs, and one line of the log says why: layers such as
    Mamba's, dropout of attention, aLoRA, prompt tuning, NEFTune, images, a router's loss, a prompt without tokens, or
    a batch longer than the length at which rotary factors change.
    The first batch that can be shared in all processes is computed both ways. If the log-probabilities differ, TRL's
    computation stays for the whole run.

    Attributes:
        shares_prefixes: False once TRL's computation stays for the whole run; single batches leave it True. The logs
            show ``shared_prefix/tokens_over_trl``: tokens through the model over those that TRL would pass, so far.
    """

    args: Any  # this and the following attributes are TRL's
    accelerator: Any
    model: Any
    ref_model: Any
    aux_loss_enabled: bool
    _metrics: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        trainers = [base.__name__ for base in cls.__mro__ if base in (GRPOTrainer, RLOOTrainer, DPOTrainer)]
        if len(trainers) > 1:
            raise TypeError(
                f"{cls.__name__} must derive from one trainer of TRL, got {' and '.join(trainers)}: take "
                f"{' or '.join(f'SharedPrefix{name}' for name in trainers)}"
            )

    def __init__(self, *args: Any, **kwargs: Any):
        self._is_set_up = False
        self._compared = False
        self.shares_prefixes = False
        self._told = set[str]()  # lines of the log
        self._passed_tokens = Counter[str]()  # through the model, by mode
        self._trl_tokens = Counter[str]()  # those that TRL would pass, by mode
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        if self._is_set_up:
            return
        self._is_set_up = True
        if self.args.neftune_noise_alpha:
            self._stop_sharing("neftune_noise_alpha scales noise by the length of a row")
            return
        given = (model for model in (self.model, self.ref_model) if model is not None)
        models = [self.accelerator.unwrap_model(model) for model in given]  # with their adapters
        for model in models:
            if reason := obstacle(model):
                self._stop_sharing(f"{type(model).__name__} computes prompts for each answer: {reason}")
                return
        config = models[0].config.get_text_config(decoder=True)
        self._rotary_limit = rotary_limit(config)
        self.shares_prefixes = True
        for model in models:
            self._share(unwrap(self.accelerator, model))

    def _share(self, model: Any) -> None:
        """Let the model's forward pass take this trainer's packed batch as the argument ``shared_prefix``."""
        raise NotImplementedError

    def _stop_sharing(self, reason: str) -> None:
        """Leave the rest of the run to TRL's computation."""
        self.shares_prefixes = False
        self._warn_once(f"prompts are not shared: {reason}")

    def _warn_once(self, line: str) -> None:
        if line not in self._told and self.accelerator.is_main_process:
            logger.warning("%s", line)
        self._told.add(line)

    def _log_tokens(self, passed: int, padded: int) -> None:
        """Log the tokens that this process passed through the model, over TRL's tokens with padding."""
        mode = "train" if self.model.training else "eval"
        self._passed_tokens[mode] += passed
        self._trl_tokens[mode] += padded
        self._metrics[mode][TOKENS_OVER_TRL] = [self._passed_tokens[mode] / self._trl_tokens[mode]]

    def _fits(
        self, attention_mask: torch.Tensor, compute_aux_loss: bool, extra: dict[str, Any], logits_to_keep: int = 0
    ) -> bool:
        """Return whether this batch can share prefixes; ``extra``: inputs that packed passes do not take.

        The last ``logits_to_keep`` columns are those of answers whose first token is scored.
        """
        extra_names = [name for name, value in extra.items() if value is not None]
        prompt_mask, answer_mask = attention_mask.tensor_split([attention_mask.shape[1] - logits_to_keep], dim=1)
        if extra_names:
            reason = f"a batch with {extra_names[0]} goes TRL's way"
        elif compute_aux_loss:
            reason = "the loss of the router needs TRL's way"
        elif self._rotary_limit is not None and attention_mask.shape[1] > self._rotary_limit:  # TRL counts padding
            reason = f"a padded batch is longer than {self._rotary_limit} tokens, where rotary factors change"
        elif (answer_mask.any(1) & ~prompt_mask.any(1)).any():  # no token predicts the first one of such an answer
            reason = "a batch with a prompt without tokens goes TRL's way"
        elif not (attention_mask.sum(1) > 1).any():  # prompts of one token whose answers are masked
            reason = "a batch without a second token goes TRL's way"
        else:
            return True
        self._warn_once(f"prompts are not shared: {reason}")
        return False

    def _shares_batch(self, can_share: bool, model: Any, packed_logps: Any, trl_logps: Any, mask: torch.Tensor) -> bool:
        """Return whether a batch shares prefixes; the first that can in all processes is computed both ways."""
        if self.shares_prefixes and not self._compared:  # all processes or none: forward passes are collective
            can_share = bool(self.accelerator.gather(torch.tensor([can_share], device=mask.device)).all())
            if can_share:
                self._compare(model, packed_logps, trl_logps, mask)
        return can_share and self.shares_prefixes

    @torch.no_grad()
    def _compare(self, model: Any, packed_logps: Any, trl_logps: Any, mask: torch.Tensor) -> None:
        """Compute a batch both ways, without dropout; if one process finds a difference, all stop sharing."""
        training = model.training
        mean_error = torch.zeros(1, device=mask.device)
        reason = ""
        self._compared = True
        model.eval()
        try:
            errors = packed_logps()[mask] - trl_logps()[mask]
            mean_error += errors.float().abs().mean() if errors.numel() else 0
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # an unknown model may raise any of them
            mean_error = mean_error + torch.inf
            reason = str(error).split("\n")[0]
        finally:
            model.train(training)
        is_narrow = self.args.bf16 or self.args.fp16 or next(model.parameters()).itemsize < 4
        limit = LOW_PRECISION if is_narrow else TOLERANCE
        worst = self.accelerator.gather(mean_error).max().item()
        if not worst <= limit:
            self._stop_sharing(reason or f"log-probabilities differ from TRL's by {worst:.2g} a token, above {limit:g}")


class SharedPrefix(PrefixSharing):
    """A trainer of TRL that scores groups of answers with :class:`PrefixSharing`.

    Args:
        keep_groups: put the answers to a prompt into as few micro-batches as possible; TRL shuffles them over the
            whole generation batch. None: do so if it changes no gradient; if not, one line of the log says why:
            ``loss_type="bnpo"``, ``top_entropy_quantile`` below 1, an entropy bonus, a router's loss, or
            ``gradient_accumulation_steps`` that are no multiple of ``steps_per_generation``. Logged means over
            micro-batches, such as ``entropy``, are then of other micro-batches.
    """

    temperature: float
    _step: int
    _buffered_inputs: Any

    def __init__(self, *args: Any, keep_groups: bool | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        shuffle_reason = self._needs_shuffle()
        self.keep_groups = shuffle_reason is None if keep_groups is None else keep_groups
        if self.shares_prefixes and shuffle_reason and not self.keep_groups:
            self._warn_once(
                f"TRL shuffles answers for {shuffle_reason}: fewer share prompts; keep_groups=True regroups"
            )

    def _share(self, model: Any) -> None:
        share_prefixes(model, self.temperature, getattr(self.args, "cast_lm_head_to_fp32", False))

    def _needs_shuffle(self) -> str | None:
        """Return why the gradient depends on which answers are in a micro-batch, or None."""
        accumulation_steps = self.args.gradient_accumulation_steps
        generation_steps = self.args.steps_per_generation
        if generation_steps == 1:
            return None
        if accumulation_steps % generation_steps:
            return (
                f"gradient_accumulation_steps={accumulation_steps}, "
                f"no multiple of steps_per_generation={generation_steps}"
            )
        return next((setting for setting, active in self._mixing_settings().items() if active), None)

    def _mixing_settings(self) -> dict[str, bool]:
        """Return whether each setting is active that makes a loss more than the sum over its answers."""
        return {"the router's loss": self.aux_loss_enabled}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **extra: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        score: Any = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        trl_score = functools.partial(
            score, model, logits_to_keep=logits_to_keep, compute_aux_loss=compute_aux_loss, **extra
        )
        can_share = self.shares_prefixes and self._fits(attention_mask, compute_aux_loss, extra, logits_to_keep)
        packed_score = functools.partial(self._score, model, input_ids, attention_mask, logits_to_keep)
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}

        def trl_logps() -> torch.Tensor:
            padded = {name: F.pad(value, (1, 0)) for name, value in tokens.items()}  # does padding shift positions?
            return trl_score(**padded, batch_size=1)[0]

        if self._shares_batch(
            can_share, model, lambda: packed_score(len(input_ids), False)[0], trl_logps,
            attention_mask[:, -logits_to_keep:].bool(),
        ):  # fmt: skip
            logps, entropies, passed = packed_score(batch_size or len(input_ids), compute_entropy)
            self._log_tokens(passed, input_ids.numel())
            return logps, entropies, None
        self._log_tokens(input_ids.numel(), input_ids.numel())
        return trl_score(**tokens, batch_size=batch_size, compute_entropy=compute_entropy)

    def _score(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
               size: int, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None, int]:  # fmt: skip
        """Return log-probabilities and entropies [B, logits_to_keep], and the number of packed tokens.

        Entropies are None unless ``with_entropy`` is true. Padding holds zeros. ``size``: rows in a forward pass.
        """
        tokens = 0
        logps: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size)):
            packed = pack_rows(ids, mask, logits_to_keep)
            scored = mask[:, -logits_to_keep:].bool()
            tokens += len(packed.ids)
            with self.accelerator.autocast():
                scores = model(shared_prefix=packed, with_entropy=with_entropy)
            for batches, values in zip((logps, entropies), scores, strict=True):
                if values is not None:
                    padded = values.new_zeros(len(ids), logits_to_keep)
                    batches.append(padded.masked_scatter(scored, values[packed.pairs]))
        return torch.cat(logps), torch.cat(entropies) if with_entropy else None, tokens

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        previous = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        batches = self._buffered_inputs
        is_new = batches is not previous and batches is not None and len(batches) > 1
        if self.keep_groups and self.shares_prefixes and is_new and "num_images" not in batches[0]:
            self._buffered_inputs = regroup(batches)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


class SharedPrefixGRPOTrainer(SharedPrefix, GRPOTrainer):
    """TRL's ``GRPOTrainer`` that shares prefixes; :class:`SharedPrefix` lists the arguments added to TRL's."""

    def _mixing_settings(self) -> dict[str, bool]:
        settings = self.args
        return {
            f"loss_type={self.loss_type!r}": self.loss_type == "bnpo",
            f"top_entropy_quantile={self.top_entropy_quantile}": self.top_entropy_quantile < 1,
            "the entropy bonus": settings.entropy_coef != 0 or settings.use_adaptive_entropy,
            **super()._mixing_settings(),
        }


class SharedPrefixRLOOTrainer(SharedPrefix, RLOOTrainer):
    """TRL's ``RLOOTrainer`` that shares prefixes; :class:`SharedPrefix` lists the arguments added to TRL's."""
