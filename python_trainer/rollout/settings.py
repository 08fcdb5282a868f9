"""Settings of generation."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from python_trainer.settings import LOCAL, Bytes, Section

LEAST_VLLM_TEMPERATURE = 0.01  # vLLM samples at this one where it is asked for a lower one
SERVER = re.compile(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:[1-9]\d{0,4})?(/\S*)?")


def truncates(sampling: Any) -> bool:
    """Return whether ``top_p`` or ``top_k`` leave tokens out."""
    return bool(sampling.top_p < 1 or sampling.top_k > 0)


def vllm_logprobs_modes(sampling: Any) -> list[str]:
    """List the modes in which vLLM gives log softmax(logits / temperature) of a token, which the loss needs.

    Raw ones are at temperature 1, processed ones of what top-k and top-p leave. Empty: neither will do.

    Args:
        sampling: has ``temperature``, ``top_p`` and ``top_k``.
    """
    processed = [] if truncates(sampling) else ["processed_logprobs"]
    return processed + ["raw_logprobs"] * (sampling.temperature == 1)


class RolloutConfig(Section):
    """How answers are generated."""

    engine: Literal["auto", "paged", "vllm"] = "auto"
    """`paged`: the trainer's own engine. `vllm`: vLLM 0.32 or newer, on the device of the model or on servers. `auto`:
    vllm if vllm_server is set or the model has recurrent layers, else paged."""
    vllm_server: Annotated[list[str] | None, LOCAL] = Field(None)
    """URL of a vLLM server, or a list of servers that share the work. docs/scale.md says how to start one. Servers read
    weights from OUTPUT_DIR."""
    vllm_request_timeout: float = Field(7200.0, gt=0)
    """Seconds that a request to a vLLM server may take in all. One that takes longer ends the run."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts per training step."""
    num_generations: int = Field(8, ge=1)
    """Answers per prompt: the group size."""
    max_completion_length: int = Field(256, ge=1)
    """Tokens per answer, at most, with the end token."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling and of the log-probabilities in the loss."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0: all."""
    dynamic_sampling: bool = False
    """Drop prompts whose answers are all right or all wrong, and draw new prompts until the step is full (DAPO)."""
    max_sampling_rounds: int = Field(4, ge=1)
    """Rounds of dynamic_sampling, at most. If the step is still not full, dropped prompts fill it."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Strings that end an answer, beside the model's end-of-sequence tokens."""
    schedule: Literal["fifo", "history"] = "fifo"
    """history: predict lengths from earlier answers, generate the longest first, and give servers equal shares. It
    changes no answer."""
    memory_bytes: Bytes | None = Field(None, ge=1)
    """Size of the KV cache, such as 4GiB. null: room for 256 of the longest sequences, but at most 1 GiB on a CPU and
    40 % of what training leaves free on a GPU."""

    @property
    def takes_vllm(self) -> bool:
        """Return whether vLLM generates; ``engine: auto`` may still choose it."""
        return self.engine == "vllm" or self.vllm_server is not None

    @property
    def hidden_logprobs(self) -> str | None:
        """Say why the engine has no log-probabilities for the loss, and what to set; None: it has."""
        if not self.takes_vllm or vllm_logprobs_modes(self):
            return None
        return (
            "vLLM has log-probabilities of the tokens that rollout.top_p and top_k leave, or of all tokens at "
            f"temperature 1, not of all tokens at rollout.temperature {self.temperature:g}; set "
            "rollout.temperature=1, or top_p=1 and top_k=0, or rollout.engine=paged"
        )

    @field_validator("vllm_server", mode="before")
    @classmethod
    def _servers_have_addresses(cls, value: Any) -> Any:
        """Make a list of one address; check it here, since pydantic's message would show a password."""
        urls = value if isinstance(value, list) else [value]
        if value is not None and not (urls and all(isinstance(url, str) and SERVER.fullmatch(url) for url in urls)):
            shown = re.sub(r"//\S*@", "//...@", repr(value))  # a password would be in the output of the run
            raise ValueError(f"must be a URL like http://HOST:8000, or a list of such; got {shown}")
        return None if value is None else urls
