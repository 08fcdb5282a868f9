"""AdamW with gradient clipping and float32 master weights for low-precision models."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from python_trainer.errors import NotFinite
from python_trainer.model.settings import OptimizerConfig
from python_trainer.model.weights import full, like
from rlkernels.extrapolation import forget_momentum
from rlkernels.rank1.projections import tensor_name, view_of

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW, for each parameter


def check_moments(name: str, values: Mapping[str, Any], shape: torch.Size) -> None:
    """Check what a checkpoint holds for a parameter: the fused step reads memory by the shape of the parameter alone.

    Raises:
        ValueError: a moment is missing or no tensor of that shape, or the count of steps is no whole number.
    """
    if (moments := values.keys() - {"master"}) not in (set(), MOMENTS):
        raise ValueError(f"{name} must have {', '.join(sorted(MOMENTS))}, got {', '.join(sorted(moments))}")
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{key} of {name} is no tensor but {value!r:.80}")
        if key == "step":
            if value.numel() != 1 or not (0 <= float(value) < math.inf and float(value).is_integer()):
                raise ValueError(f"step of {name} must be a whole number of at least 0, got {value!r:.80}")
        elif value.shape != shape:
            raise ValueError(f"{key} of {name} has shape {list(value.shape)}, not {list(shape)}")


@torch.no_grad()
def add_gradient(master: torch.Tensor, param: torch.Tensor) -> None:
    """Move the gradient of a parameter, where there is one, onto the float32 gradient of its master."""
    if param.grad is not None:
        master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
        param.grad = None


class MasterWeightAdamW:
    """AdamW for the trainable parameters of a policy or a critic, with float32 master weights.

    Parameters that are not float32 get a float32 master copy, which AdamW updates and which is rounded back after
    each step. If other code edits a weight, it is copied into its master. Gradients accumulate in float32 on the
    master; a backward pass frees ``param.grad`` at once.

    Attributes:
        masters: what AdamW updates and whose ``grad`` counts, by parameter name: the parameter itself if it is float32.
        adamw: the underlying ``torch.optim.AdamW``.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig):
        self.config = config
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self.params.items()
        }
        pairs = ((self.params[name], master) for name, master in self.masters.items())
        self.low_precision = [(param, master) for param, master in pairs if master is not param]
        for param, master in self.low_precision:
            param.register_post_accumulate_grad_hook(partial(add_gradient, master))
        decayed = [p for p in self.masters.values() if p.ndim >= 2]
        not_decayed = [p for p in self.masters.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """Scale the gradients down to ``max_grad_norm``; return their norm before.

        Raises:
            NotFinite: the norm is NaN or infinite; the gradients are cleared.
        """
        for param, master in self.low_precision:
            add_gradient(master, param)  # gradients set by hand bypass the hook
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.config.max_grad_norm)))
        if not math.isfinite(norm):
            self.adamw.zero_grad()
            raise NotFinite(f"the norm of the gradient is {norm}")
        return norm

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        """Update with the gradients, which :meth:`clip_gradients` has clipped, and clear them.

        Args:
            lr_scale: factor of ``config.learning_rate``.
        """
        for group in self.adamw.param_groups:
            group["lr"] = self.config.learning_rate * lr_scale
        for param, master in self.low_precision:
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        self.adamw.step()  # skips parameters without gradients
        self.adamw.zero_grad()
        for param, master in self.low_precision:
            param.copy_(master)

    def forget_momentum(self, matrices: Iterable[str]) -> None:
        """Set the gradient's mean of these matrices to 0; the mean of its square and the step count stay.

        Args:
            matrices: names as in :class:`rlkernels.rank1.projections.Projections`.
        """
        forget_momentum(self.adamw, self.masters, matrices)

    def places(self, matrix: str) -> list[torch.Tensor]:
        """Return views of the tensors that hold a matrix: the master, then the parameter if it is rounded from that."""
        param, master = (tensors[tensor_name(matrix)] for tensors in (self.params, self.masters))
        return [view_of(matrix, tensor) for tensor in ([param] if master is param else [master, param])]

    def state_dict(self) -> dict[str, Any]:
        """Return moments, and master weights that are not the model's own parameters, by parameter name."""
        state = {}
        for name, master in self.masters.items():
            state[name] = {key: value.detach() for key, value in self.adamw.state.get(master, {}).items()}
            if master is not self.params[name]:
                state[name]["master"] = master.detach()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Undo :meth:`state_dict`; ``weights`` are those of the model, for whom no master was saved."""
        for name, master in self.masters.items():
            values = dict(state.get(name, {}))  # without moments where no gradient has come yet
            check_moments(name, values, master.shape)
            master.copy_(like(values.pop("master", weights[name]), master))
            # the fused step wants its count beside the weights; it is one number, never sharded
            self.adamw.state[master] = {
                key: value.to(master.device) if key == "step" else like(value, master) for key, value in values.items()
            }
