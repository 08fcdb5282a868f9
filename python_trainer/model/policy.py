"""The policy: a causal language model of Transformers, its tokenizer, and log-probabilities of packed answers."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.data import Messages
from python_trainer.errors import UserError
from python_trainer.model.forward import attend_by, forward
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.loading import choose_device, find_dtype, policy_folder, read_model
from python_trainer.model.lora import AdaptedWeight, adapted_weight, add_adapters, is_adapter, plain_name
from python_trainer.model.packing import PackedRollouts
from python_trainer.model.settings import ModelConfig
from python_trainer.model.traits import find_traits, longest_sequence
from python_trainer.model.turns import encode_texts, find_stop_tokens, find_turn_end
from python_trainer.model.weights import checkpoint_weights, copy_weights, full, named_weights
from rlkernels import linear_token_logprobs, token_logprobs
from rlkernels.weights import merged_weight

# Most bytes of logits in a micro-batch. Larger logits are recomputed block by block in the backward pass; models with
# softcapped logits cannot do that.
LARGEST_LOGITS = 1 << 28


def load_policy(config: ModelConfig) -> "Policy":
    """Load a model: a folder, one of the Hub, a base policy that ships, or an adapter, merged.

    Raises:
        UserError: there is no such model, or no model or tokenizer in its folder, or as of :class:`Policy`.
    """
    folder = policy_folder(config.path)
    device = choose_device(config.device)
    model, tokenizer = read_model(folder, config, find_dtype(config, device))
    policy = Policy(model.to(device=device), tokenizer, name=str(folder))
    if config.lora is not None:
        policy.inference_model = add_adapters(policy.model, config.lora)
        policy.adapted = True
    if config.gradient_checkpointing is True:
        recompute_activations(policy.model)
    return policy


def recomputes(model: Any) -> bool:
    """Return whether the layers recompute their activations in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def recompute_activations(model: Any) -> None:
    """Recompute what the layers hold in the backward pass; no module changes its mode, so dropout stays off."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True  # a mark: Transformers heeds it in training mode alone
            # the forward of the class, with the module as an argument, so that a copy runs itself
            module.forward = partial(_recomputed, type(module).forward, module)


def _recomputed(forward: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)


def mend_generation_config(model: PreTrainedModel) -> None:
    """Reduce a generation config that Transformers refuses to write to its special tokens.

    It reads but does not write, for example, a temperature without sampling.
    """
    config = getattr(model, "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in names})


class Policy:
    """A model with its tokenizer.

    Attributes:
        model: what is trained; in evaluation mode (no dropout).
        inference_model: the plain model for generation and export: ``model`` itself, or a copy where the weights of
            ``model`` are in shards or adapters, which :meth:`sync_inference_model` brings up to date.
        traits: properties of the plain model.
        fused: small models may take :class:`FusedDecoder` for passes with gradients.
        adapted: whether only adapters train (``model.lora``).
        streams_weights: the engine gathers the weights itself (:func:`stream_checkpoint`); ``inference_model`` is then
            not brought up to date, and may be without memory.
        on_merge: called with name and parts of every weight with an adapter when ``inference_model`` is synced.
        eos_token_ids: every token that ends an answer, of the generation config, the tokenizer and the chat template;
            the generation config that is saved with the model names them all.
        turn_end: tokens with which the template closes an answer; see :func:`find_turn_end`.
        max_length: most tokens of prompt and answer together.
        limited_by: what that limit is, for messages.
        chat_template_kwargs: further arguments of the tokenizer's template.

    Raises:
        UserError: the tokenizer has no end-of-sequence token; something but attention mixes the model's tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str):
        self.model = model
        self.inference_model = model
        self.tokenizer = tokenizer
        self.name = name
        self.adapted = self.streams_weights = False
        self.on_merge: Callable[[str, AdaptedWeight], object] | None = None
        self.device = next(model.parameters()).device
        mend_generation_config(model)
        self.chat_template_kwargs: dict[str, Any] = {}
        self.eos_token_ids = find_stop_tokens(model, tokenizer, name)
        self.turn_end = find_turn_end(self)
        self.eos_token_ids = sorted({*self.eos_token_ids, *self.turn_end[-1:]})
        if (generation := getattr(model, "generation_config", None)) is not None:
            generation.eos_token_id = self.eos_token_ids if len(self.eos_token_ids) > 1 else self.eos_token_ids[0]
        model.eval()
        self.traits = find_traits(model, f"{name} ({type(model).__name__})")
        self.max_length, self.limited_by = longest_sequence(model)
        self.fused = self.traits.fusible

    def encode(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
        """Encode texts, and chat messages through the tokenizer's template; both may be mixed.

        An answer continues the last message if that is the assistant's, and else opens one, as in TRL.

        Raises:
            UserError: the tokenizer has no template, or it refuses the messages.
        """
        texts, num_end_tokens = encode_texts(self.tokenizer, [prompt for prompt in prompts if isinstance(prompt, str)])
        # the tokenizer may end a text by EOS (add_eos_token), after which there is nothing to answer
        text_rows = iter([row[: len(row) - num_end_tokens] for row in texts])
        chats = [self.chat_text(prompt) for prompt in prompts if not isinstance(prompt, str)]
        # a template writes the special tokens itself
        chat_rows = iter(self.tokenizer(chats, add_special_tokens=False)["input_ids"] if chats else [])
        return [list(next(text_rows if isinstance(prompt, str) else chat_rows)) for prompt in prompts]

    def chat_text(self, messages: Messages, *, opens: bool = True) -> str:
        """Write messages by the tokenizer's template, with or without the opening of the next answer.

        With it the last message stays open instead, if it is the assistant's.
        """
        template = self.tokenizer.chat_template
        options = dict(self.chat_template_kwargs)
        if not template:
            raise UserError(f"prompts are lists of messages, but the tokenizer of {self.name} has no chat template")
        if unknown := [name for name in options if name not in str(template)]:
            raise UserError(
                f"task.chat_template_kwargs: {unknown[0]!r} does not occur in the chat template of {self.name}"
            )
        continues = opens and messages[-1]["role"] == "assistant"
        options |= {"add_generation_prompt": opens and not continues, "continue_final_message": continues}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the chat template of {self.name} refuses the messages {str(messages)[:80]}: {error}"
            ) from error

    def room(self, max_completion_length: int) -> int:
        """Return the most tokens of a prompt; UserError if there is room for none."""
        room = self.max_length - max_completion_length
        if room < 1:
            raise UserError(
                f"rollout.max_completion_length {max_completion_length} leaves no room for a prompt: "
                f"{self.limited_by} is {self.max_length} tokens, prompt and answer together"
            )
        return room

    def ending(self, prompt: str | Messages) -> list[int]:
        """Return the tokens that end an answer to a prompt."""
        return [self.tokenizer.eos_token_id] if isinstance(prompt, str) else self.turn_end or self.ending("")

    def decode(self, response_ids: Sequence[int]) -> str:
        """Decode an answer without the tokens that end it; other special tokens stay."""
        ids = list(response_ids)
        end = self.turn_end
        if end and ids[-len(end) :] == end:
            ids = ids[: -len(end)]
        ids = [token for token in ids if token not in self.eos_token_ids]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def packed_attention(self) -> AbstractContextManager[None]:
        """Prepare the model for :meth:`token_logprobs` and its backward pass, and afterwards restore its attention."""
        return attend_by(self.model)

    def token_logprobs(
        self, packed: PackedRollouts, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies of response tokens, under softmax(logits / temperature).

        That is the distribution of the sampler without top-k and top-p. Call it, and differentiate the results, within
        :meth:`packed_attention`.

        Returns:
            Log-probabilities and entropies, [M, L] float32, differentiable, 0 where masked; the last hidden states
            [R, H] of the predictions.
        """
        head = self.model.get_output_embeddings()
        targets = packed.targets
        logits_bytes = targets.numel() * head.weight.shape[0] * head.weight.element_size()
        if logits_bytes > LARGEST_LOGITS and self.traits.logit_scale is not None:
            _, states = self._run(packed, max_logit_rows=1)  # Transformers must return some logits
            options: dict[str, Any] = {"temperature": temperature / self.traits.logit_scale, "return_entropy": True}
            logprobs, entropy = linear_token_logprobs(states, head.weight, targets, bias=head.bias, **options)
        else:
            logits, states = self._run(packed)
            logprobs, entropy = token_logprobs(logits, targets, temperature=temperature, return_entropy=True)
        return packed.spread(logprobs), packed.spread(entropy), states

    def _run(self, packed: PackedRollouts, max_logit_rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [R, V] of the predictions, or of the first few, and the last hidden states [R, H] of all."""
        inputs = packed.ids, packed.position_ids, packed.rows, packed.layout
        # a hook or checkpointing may have come since
        if self.fused and not recomputes(self.model) and supports(self.model):
            decoder = FusedDecoder(self.model, packed.layout.longest)
            return decoder(*inputs, max_logit_rows)
        return forward(self.model, *inputs, max_logit_rows)

    def frozen_copy(self, ranks: Any) -> "Policy":
        """Return a policy with frozen copies of these weights, which the RankGroup ``ranks`` makes."""
        frozen = copy.copy(self)
        frozen.model = frozen.inference_model = ranks.copy(self.inference_model, trains=False)
        return frozen

    def sync_inference_model(self) -> None:
        """Give ``inference_model`` the weights of ``model``; where those are sharded all ranks must call together."""
        if self.inference_model is not self.model and not self.streams_weights:
            copy_weights(self.inference_model, self._gather(trained_only=True))

    def restore_inference_model(self) -> None:
        """Give ``inference_model`` memory and weights again, where the engine streams them; all ranks together."""
        if self.streams_weights:
            for parameter in self.inference_model.parameters():
                parameter.untyped_storage().resize_(parameter.nbytes)
            copy_weights(self.inference_model, self._gather())

    def stream_checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights by their names in a checkpoint, gathered a layer at a time.

        It frees those of ``inference_model`` first, whose modules, shapes and types stay.
        """
        for parameter in self.inference_model.parameters():
            parameter.untyped_storage().resize_(0)
        # names of a layer agree up to its number, the first in them
        for _, layer in groupby(self._gather(), lambda pair: re.sub(r"(\.\d+)\..*", r"\1", pair[0])):
            yield from checkpoint_weights(self.inference_model, layer)

    @torch.no_grad()
    def _gather(self, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights by their names in the plain model, whole, with adapters merged; all ranks call together.

        Weights are rounded before they are sent: half as much is sent and held.
        """
        dtypes = {name: tensor.dtype for name, tensor in named_weights(self.inference_model)}
        for name, shard in named_weights(self.model):
            if is_adapter(name):
                continue
            plain = plain_name(name)
            if ".base_layer.weight" in name:
                adapted = adapted_weight(self.model.get_submodule(name.rpartition(".base_layer.")[0]))
                if self.on_merge is not None:
                    self.on_merge(plain, adapted)
                yield plain, merged_weight(*adapted).to(dtypes[plain])
            elif shard.requires_grad or not trained_only:
                yield plain, full(shard.to(dtypes[plain]))

    def save(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format, with the weights of ``inference_model``.

        Raises:
            UserError: it has none now.
        """
        if any(p.numel() and not p.untyped_storage().nbytes() for p in self.inference_model.parameters()):
            raise UserError(
                "the policy's weights are in shards: restore_inference_model(), called in all processes, gathers them"
            )
        self.inference_model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
