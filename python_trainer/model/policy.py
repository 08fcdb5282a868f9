"""The policy: a causal language model of Transformers, its tokenizer, and log-probabilities of packed answers."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.data import Example, Messages
from python_trainer.errors import UserError
from python_trainer.model.dtype import choose_dtype, count_weights
from python_trainer.model.flat_forward import flat_attention, forward_with_states
from python_trainer.model.fused import FusedDecoder, supports
from python_trainer.model.logit_rule import LogitRule
from python_trainer.model.lora import AdaptedWeight, add_adapters, merged_weights, without_adapters
from python_trainer.model.packing import Packed
from python_trainer.model.reading import read_model
from python_trainer.model.settings import ModelConfig
from python_trainer.model.shipped import policy_folder
from python_trainer.model.tensors import full
from python_trainer.model.traits import find_traits, longest_sequence
from python_trainer.run_directory import usual_mode
from rlkernels import token_logprobs

ANSWER_LENGTH = "rollout.max_completion_length"  # the setting
LARGEST_LOGITS = 1 << 28  # bytes of logits in a micro-batch; more are not held but computed block by block, twice


def set_matmul_precision(precision: str) -> None:
    """Sets for the whole process how float32 matrix products round their inputs; see ``ModelConfig``."""
    # typed as any: torch's stubs do not know this setting
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.matmul.fp32_precision = "bf16" if precision == "medium" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "medium" else "ieee"


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda was asked for, but torch finds no CUDA device here")
    return torch.device(name)


def load_policy(config: ModelConfig) -> "Policy":
    """Loads a model: a folder, a GGUF file, one of the Hub, a base policy that ships, or an adapter, merged.

    Raises:
        UserError: there is no such model, or no model or tokenizer in its folder, or as of :class:`Policy`.
    """
    folder = policy_folder(config.path, config.revision)
    device = choose_device(config.device)
    model, tokenizer = read_model(folder, config, find_dtype(config))
    policy = Policy(model.to(device=device), tokenizer, name=str(folder))
    if config.lora is not None:
        policy.whole, policy.adapted = add_adapters(policy.model, config.lora), True
    if config.gradient_checkpointing is True:
        recompute_activations(policy.model)
    return policy


def find_dtype(config: ModelConfig) -> torch.dtype:
    """The type of weights that the settings stand for, here."""
    device = choose_device(config.device)
    # of a model of the Hub the folder takes requests: it is looked for only where the size decides
    return choose_dtype(
        config.dtype, device, lambda: count_weights(policy_folder(config.path, config.revision), config)
    )


def recompute_activations(model: Any) -> None:
    """Switches gradient checkpointing on, while dropout stays off."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():  # checkpointing looks at the mode of its own layer only
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def find_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """All end-of-sequence tokens, smallest first."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set([ids] if isinstance(ids, int) else ids or [])
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no EOS token: set eos_token in its tokenizer_config.json")
    return sorted(found)


def mend_generation_config(model: PreTrainedModel) -> None:
    """Makes it one that can be written: Transformers reads a temperature without sampling, say, and refuses to save it.

    What still cannot be written then is left out but for the special tokens.
    """
    found = getattr(model, "generation_config", None)
    if found is None or can_be_written(found):
        return
    found.do_sample = True
    if not can_be_written(found):
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(found, name) for name in names})


def can_be_written(found: GenerationConfig) -> bool:
    try:
        found.validate(strict=True)
    except ValueError:
        return False
    return True


class Policy:
    """A model with its tokenizer.

    Attributes:
        model: what is trained; in evaluation mode (no dropout).
        whole: the plain model for generation and export: ``model`` itself, or a copy where the weights of ``model``
            are in shards or adapters, which :meth:`update_whole` brings up to date.
        traits: what was found of the plain model.
        fused: small models may take :class:`FusedDecoder` for passes with gradients.
        adapted: whether only adapters train (``model.lora``).
        lean: whether generation gathers the weights itself: ``whole`` then stays as it is, or without memory.
        on_merge: is told name and parts of every weight with an adapter whenever ``whole`` is brought up to date.
        eos_token_ids: every token that ends an answer, from the generation config, the config and the tokenizer.
        max_length: most tokens of prompt and answer together.
        limited_by: what that limit is, for messages.
        chat_template_kwargs: further arguments of the tokenizer's template.

    Raises:
        UserError: the tokenizer has no end-of-sequence token; something but attention mixes the model's tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str):
        self.model, self.whole, self.tokenizer, self.name = model, model, tokenizer, name
        self.adapted = self.lean = False
        self.on_merge: Callable[[str, AdaptedWeight], object] | None = None
        self.device = next(model.parameters()).device
        mend_generation_config(model)
        self.eos_token_ids = find_eos(model, tokenizer, name)
        self.chat_template_kwargs: dict[str, Any] = {}
        model.eval()
        self.traits = find_traits(model, f"{name} ({type(model).__name__})")
        self.max_length, self.limited_by = longest_sequence(model, self.traits.window)
        self.fused = self.traits.fusible

    def encode(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
        """Token ids of texts, and of chat messages through the tokenizer's template; both may be mixed.

        Raises:
            UserError: the tokenizer has no template, or it refuses the messages.
        """
        chats = [not isinstance(prompt, str) for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else self._chat(prompt) for prompt in prompts]
        encoded: dict[int, list[int]] = {}
        for chat in set(chats):
            rows = [row for row, kind in enumerate(chats) if kind == chat]
            # a template writes the special tokens itself
            ids = self.tokenizer([texts[row] for row in rows], add_special_tokens=not chat)["input_ids"]
            encoded |= zip(rows, ids)
        return [encoded[row] for row in range(len(prompts))]

    def _chat(self, messages: Messages) -> str:
        template, options = self.tokenizer.chat_template, self.chat_template_kwargs
        if not template:
            raise UserError(f"prompts are lists of messages, but the tokenizer of {self.name} has no chat template")
        if unknown := [name for name in options if name not in str(template)]:
            raise UserError(
                f"task.chat_template_kwargs: {unknown[0]!r} does not occur in the chat template of {self.name}"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            )
        except (TemplateError, TypeError) as error:
            raise UserError(
                f"the chat template of {self.name} refuses the messages {str(messages)[:80]}: {error}"
            ) from error

    def encode_split(self, split: str, examples: Sequence[Example], max_completion_length: int) -> list[list[int]]:
        """Token ids of the prompts of a split.

        Raises:
            UserError: as of :meth:`check_room`.
        """
        encoded = self.encode([example.prompt for example in examples])
        self.check_room(split, examples, encoded, max_completion_length)
        return encoded

    def encode_said(self, said: str | Messages, chat: bool, last: int) -> list[int]:
        """Token ids of what is said after a turn of the policy, up to where it goes on; ``last`` ended that turn.

        Of a chat: what the template writes between two messages of the assistant, with these in between.

        Raises:
            UserError: messages outside of a chat, or a template that does not show the assistant's.
        """
        if not chat:
            if not isinstance(said, str):
                raise UserError(f"an environment said messages to a prompt that is text: {said!r:.80}; allowed: text")
            return self.tokenizer(said, add_special_tokens=False)["input_ids"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        mark = "<<turn>>"
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        _, found, between = self._chat([*before, *messages]).partition(mark)
        if not found:
            raise UserError(f"the chat template of {self.name} does not show what the assistant says")
        if last in self.eos_token_ids:
            between = between.removeprefix(self.tokenizer.decode([last]))
        return self.tokenizer(between, add_special_tokens=False)["input_ids"]

    def room(self, max_completion_length: int, setting: str = ANSWER_LENGTH) -> int:
        """Most tokens of a prompt; UserError where there is room for none.

        Args:
            setting: the one that says how long answers may be, for messages.
        """
        room = self.max_length - max_completion_length
        if room < 1:
            raise UserError(
                f"{setting} {max_completion_length} leaves no room for a prompt: {self.limited_by} is "
                f"{self.max_length} tokens, prompt and answer together"
            )
        return room

    def check_room(
        self,
        split: str,
        examples: Sequence[Example],
        encoded: Sequence[Sequence[int]],
        max_completion_length: int,
        setting: str = ANSWER_LENGTH,
    ) -> None:
        """Raises UserError that names a prompt which is empty, or together with its answer beyond ``max_length``."""
        room = self.room(max_completion_length, setting)
        for index, ids in enumerate(encoded):
            if not 0 < len(ids) <= room:
                name = examples[index].place or f"{index} of the {split} split"
                raise UserError(
                    f"prompt {name} has {len(ids)} tokens; with {setting} {max_completion_length} and "
                    f"{self.limited_by} of {self.max_length} tokens it may have 1 to {room}: "
                    f"{str(examples[index].prompt)[:60]!r}"
                )

    def decode(self, response_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self.tokenizer.decode(list(response_ids), skip_special_tokens=True))

    def packed_attention(self) -> AbstractContextManager[None]:
        """Within it :meth:`score` and its backward pass work; afterwards the model attends as it did before."""
        return flat_attention(self.model)

    def score(self, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy at every response token, [B, L] float32, both differentiable, 0 where masked.

        Of softmax(logits / temperature): the distribution that was sampled from, when nothing was cut off it. To be
        called, and differentiated, within :meth:`packed_attention`.
        """
        return self.score_with_states(packed, temperature)[:2]

    def score_with_states(self, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`score`, and the last hidden states [R, H] that its R pairs were predicted from."""
        head, targets = self.model.get_output_embeddings(), packed.targets
        logits_bytes = targets.numel() * head.weight.shape[0] * head.weight.element_size()
        if logits_bytes > LARGEST_LOGITS and self.traits.logits is not None:
            _, states = self._run(packed, predict=1)
            logprobs, entropy = self.traits.logits.logprobs(states, head, targets, temperature)
        else:
            logits, states = self._run(packed)
            logprobs, entropy = token_logprobs(logits, targets, temperature=temperature, return_entropy=True)
        return packed.spread(logprobs), packed.spread(entropy), states

    def _run(self, packed: Packed, predict: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, V] of the R pairs, or of the first ``predict`` of them, and all last hidden states [R, H]."""
        positions = packed.layout.position_ids.to(self.device)
        inputs = packed.input_ids, positions, packed.rows, packed.layout
        # a hook or checkpointing may have come since
        if self.fused and not self.model.is_gradient_checkpointing and supports(self.model):
            decoder = FusedDecoder(self.model, int(packed.layout.position_ids.max()) + 1)  # read on the host
            states = decoder.states(*inputs)
            return decoder.head(states[:predict]), states
        return forward_with_states(self.model, *inputs, predict)

    def mean_prediction(self, states: torch.Tensor, table: torch.Tensor, temperature: float) -> torch.Tensor:
        """sum_v p(v) ``table[v]`` [R, K] float32, p being what states [R, H] predict by the output layer alone.

        Args:
            table: float32 [V, K].
        """
        head, rule = self.model.get_output_embeddings(), self.traits.logits or LogitRule()
        rows = max(LARGEST_LOGITS // (table.element_size() * len(table)), 1)
        parts = [(rule(head(part)).float() / temperature).softmax(-1) @ table for part in states.split(rows)]
        return torch.cat(parts)

    def frozen_copy(self, copied: Callable[[Any], Any] = copy.deepcopy) -> "Policy":
        """The policy as it is, with weights of its own that do not train; with adapters: as it was without them.

        Args:
            copied: makes a copy of the plain model.
        """
        if self.adapted:
            return Unadapted(self)
        frozen = copy.copy(self)
        frozen.model = frozen.whole = copied(self.whole).requires_grad_(False)
        return frozen

    @torch.no_grad()
    def update_whole(self) -> None:
        """Gives ``whole`` the weights of ``model``; where those are sharded all ranks must call this together."""
        if self.whole is not self.model and not self.lean:
            targets = dict(self.whole.named_parameters())
            # rounded before it is gathered: half as much is sent and held
            trained = (
                (name, full(p.to(targets[name].dtype))) for name, p in self.model.named_parameters() if p.requires_grad
            )
            for name, value in merged_weights(self.model, self.on_merge) if self.adapted else trained:
                targets[name].copy_(value)

    def release_whole(self) -> None:
        """Gives the memory of ``whole`` back; its modules, shapes and types stay."""
        for parameter in self.whole.parameters():
            parameter.untyped_storage().resize_(0)

    def save(self, folder: Path) -> None:
        """Writes model and tokenizer in Hugging Face format; the weights are those of ``whole``.

        Raises:
            UserError: it has none now.
        """
        if any(p.numel() and not p.untyped_storage().nbytes() for p in self.whole.parameters()):
            raise UserError(
                "the policy's weights are in shards: model.gathering.fill_whole, called in all processes, gathers them"
            )
        self.whole.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        usual_mode(folder)


class Unadapted(Policy):
    """A policy with its adapters off: what it began as, in the same memory."""

    def __init__(self, policy: Policy):
        # not set up anew, which would put the model that both share, and its checkpointing, out of their modes
        vars(self).update(vars(policy))
        self.whole, self.adapted = policy.model, False

    def score_with_states(self, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with without_adapters(self.model):
            return super().score_with_states(packed, temperature)
