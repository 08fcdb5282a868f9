"""Similarity of the distributions of states that trajectories visit."""

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.similarity import arguments, reference

METRICS = ("sliced_wasserstein", "hellinger", "cosine")


def _check_types(x: torch.Tensor, y: torch.Tensor, **_: object) -> None:
    _check.tensor("x", x, ndim=(2, 3), dtype=arguments.FLOATS)
    _check.tensor("y", y, ndim=x.ndim, dtype=arguments.FLOATS, device=x.device)
    _check.no_gradient(arguments.DETACH, x=x, y=y)


@public_op("state_similarity", _check_types)
@torch.no_grad()
def state_similarity(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    metric: str = "sliced_wasserstein",
    scale: float = 1.0,
    projections: int = 64,
    seed: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Return the similarity in [0, 1] of all N x M pairs of state distributions.

    Tensors that require gradients raise, except under ``torch.no_grad``.

    Args:
        x: by metric. "sliced_wasserstein": S samples of E features, [N, S, E]. "hellinger": histograms [N, B],
            counts or shares >= 0, normalised here. "cosine": vectors [N, E].
        y: [M, S, E], [M, B] or [M, E]; the same S, E, B as x.
        metric: "sliced_wasserstein" is exp(-SW2 / scale) with the 2-Wasserstein distance averaged (in the square)
            over random directions (Bonneel et al., 2015); "hellinger" is 1 - H; "cosine" is (1 + cos) / 2.
        scale: distance at which sliced Wasserstein similarity falls to 1/e, in units of the samples. > 0.
        projections: how many directions, >= 1.
        seed: of the directions; the same on every device.

    Returns:
        float32 [N, M]. Two all-zero histograms or vectors are alike (1); one of them: 0 ("hellinger") or 1/2
        ("cosine"). NaN or infinity makes its own pairs NaN.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    _check.one_of("metric", metric, METRICS)
    ndim = 3 if metric == "sliced_wasserstein" else 2
    _check.tensor("x", x, ndim=ndim)
    _check.shape("y", y, (None, *x.shape[1:]))
    _check.positive("scale", scale)
    projections = _check.integer("projections", projections, 1, _check.MOST)
    seed = _check.integer("seed", seed, 0, 2**64 - 1)
    if metric == "hellinger":
        for name, value in (("x", x), ("y", y)):
            arguments.histograms(name, value)
    _backend.choose("state_similarity", x.device, backend)
    return reference.state_similarity(x, y, metric=metric, scale=float(scale), projections=projections, seed=seed)
