"""AdamW with a schedule, gradient clipping, and float32 master weights for low-precision models."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from python_trainer.errors import NotFinite
from python_trainer.model.offload import HostStore, in_parts
from python_trainer.model.settings import OptimizerConfig
from python_trainer.model.tensors import full, like, local

OFFLOADED_ELEMENTS = 1 << 26  # weights whose moments come back from the host at once


def learning_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Learning rate of training step ``step``, counted from 1."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(max_steps - config.warmup_steps, 1)  # 0 at the first step after it
    done = min(max(done, 0.0), 1.0)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.learning_rate * shape[config.lr_scheduler_type]


@torch.no_grad()
def add_gradient(master: torch.Tensor, param: torch.Tensor) -> None:
    """Moves the gradient of a parameter, where there is one, onto the float32 gradient of its master."""
    if param.grad is not None:
        master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
        param.grad = None


class PolicyOptimizer:
    """Updates the trainable parameters of a model.

    Parameters that are not float32 get a float32 master copy, which AdamW updates and which is rounded back after
    each step. Whoever changes the model's weights in between is heard: where they no longer are the rounded master,
    the master follows. A backward pass leaves its gradient with the master, where the passes of a step add up in
    float32, parameter by parameter: the gradient of the parameter itself is gone at once.

    With ``config.offload`` moments and those copies are in the memory of the host but for a step, which takes them in
    parts of :data:`OFFLOADED_ELEMENTS`; nothing else may look at their values then.

    Attributes:
        masters: what AdamW updates and whose ``grad`` counts, by parameter name: the parameter itself if it is float32.
        adamw: the underlying ``torch.optim.AdamW``.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig):
        self.config = config
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.host = HostStore() if config.offload else None
        self.masters = {name: self._master(p) for name, p in self.params.items()}
        sizes = [(name, local(p).numel()) for name, p in self.params.items()]
        self.parts = in_parts(sizes, OFFLOADED_ELEMENTS) if config.offload else [list(self.masters)]
        for param, master in self._low_precision():
            param.register_post_accumulate_grad_hook(partial(add_gradient, master))
        decayed = [p for p in self.masters.values() if p.ndim >= 2]
        others = [p for p in self.masters.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype == torch.float32:
            return param
        master = param.detach().float().requires_grad_()
        if self.host is not None:
            self.host.put_away([master])
        return master

    def _low_precision(self, names: Iterable[str] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and their masters, where these are two."""
        pairs = ((self.params[name], self.masters[name]) for name in (self.masters if names is None else names))
        return [(param, master) for param, master in pairs if master is not param]

    def _state(self, names: Iterable[str]) -> list[torch.Tensor]:
        """What is on the host between steps: moments, and masters that are not the parameters themselves."""
        found = [master for _, master in self._low_precision(names)]
        for name in names:
            moments = self.adamw.state.get(self.masters[name], {})
            found += [value for key, value in moments.items() if key != "step"]
        return found

    @contextmanager
    def _here(self, names: Sequence[str]) -> Iterator[None]:
        """Within it moments and masters of these parameters have their values."""
        if self.host is not None:
            self.host.bring_back(self._state(names))
        try:
            yield
        finally:
            if self.host is not None:
                self.host.put_away(self._state(names))

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """One update with the gradients that are there, which are then gone -> their norm before clipping.

        Raises:
            NotFinite: the norm is NaN or infinite; no weight has changed then.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for param, master in self._low_precision():
            add_gradient(master, param)  # one that no backward pass has left
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.config.max_grad_norm)))
        if not math.isfinite(norm):
            self.adamw.zero_grad()
            raise NotFinite(f"the norm of the gradient is {norm}")
        gradients = {name: master.grad for name, master in self.masters.items()}
        self.adamw.zero_grad()
        for part in self.parts:
            with self._here(part):
                self._step_part(part, gradients)
        return norm

    def _step_part(self, names: Sequence[str], gradients: dict[str, torch.Tensor | None]) -> None:
        """AdamW on these parameters, whose gradients are then gone."""
        low_precision = self._low_precision(names)
        for param, master in low_precision:
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        for name in names:
            self.masters[name].grad = gradients.pop(name)
        self.adamw.step()  # passes over those without a gradient
        self.adamw.zero_grad()
        for param, master in low_precision:
            param.copy_(master)

    @torch.no_grad()
    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets weights by parameter name, master copies included, in the precision of the masters."""
        for name, value in values.items():
            self.masters[name].copy_(value)
            if self.masters[name] is not self.params[name]:
                self.params[name].copy_(self.masters[name])

    def forget_momentum(self, names: Iterable[str]) -> None:
        """Sets the gradient's mean of these parameters to 0; the mean of its square and the step count stay."""
        for name in names:
            state = self.adamw.state.get(self.masters[name], {})
            if "exp_avg" in state:
                state["exp_avg"].zero_()

    def places(self, name: str) -> list[torch.Tensor]:
        """The tensors that hold this weight: its master, then the parameter, where that is rounded from it."""
        param, master = self.params[name], self.masters[name]
        return [param] if master is param else [master, param]

    def state_dict(self) -> dict[str, Any]:
        """Moments and, where they are not the model's own parameters, master weights, all by parameter name."""
        values = torch.Tensor.detach if self.host is None else self.host.values
        state = {}
        for name, master in self.masters.items():
            state[name] = {key: values(value) for key, value in self.adamw.state.get(master, {}).items()}
            if master is not self.params[name]:
                state[name]["master"] = values(master)
        return state

    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Undoes :meth:`state_dict`; ``weights`` are those of the model, for whom no master was saved."""
        own = self.host is None
        for name, master in self.masters.items():
            with torch.no_grad(), self._here([name]):
                values = dict(state.get(name, {}))  # without moments where no gradient has come yet
                master.copy_(like(values.pop("master", weights[name]), master))
                # the fused step wants its count beside the weights; it is one number, never sharded. What is put away
                # needs a storage of its own: that of a file that was read cannot be let go of.
                self.adamw.state[master] = {
                    key: value.to(master.device) if key == "step" else like(value if own else value.clone(), master)
                    for key, value in values.items()
                }
