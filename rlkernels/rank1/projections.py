"""The projections of a model: the matrices that AlphaRL (arXiv 2510.00553) follows.

Mixtures of experts keep the matrices of a layer in one tensor [experts, m, n], a stack. Each of its matrices is a
projection, with the name of the tensor and a number, ``NAME[3]``.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

# embeddings, norms, heads, biases in a matrix (one row an expert, or a table of positions), and Mamba's state matrix
NO_PROJECTION = re.compile(
    r"embed|norm|(^|\.)(wte|wpe|shared)\.weight$|(^|\.)(lm_head|output|score|classifier|qa_outputs|v_head)(\.weight)?$"
    r"|bias(\.weight)?$|(^|\.)A_log$"
)
CONVOLUTION = re.compile(r"conv\w*(\.weight)?$")  # [channels, 1, width] is no stack of matrices
PLACE = re.compile(r"\[(\d+)\]$")  # of a matrix in its stack


def is_projection(name: str) -> bool:
    """Return whether a name is that of a projection of attention or MLP, not of an embedding, norm, bias or head."""
    return NO_PROJECTION.search(name) is None


def matrix_names(name: str, shape: Sequence[int]) -> list[str]:
    """Return the names of a tensor's matrices: the tensor's name, or one for each matrix of a stack.

    Args:
        name: of the tensor.
        shape: of the tensor. Tensors without entries, filters of convolutions, and those with other than two or three
            dimensions have no matrices.
    """
    if 0 in shape:
        return []
    if len(shape) == 2:
        return [name]
    is_stack = len(shape) == 3 and CONVOLUTION.search(name) is None
    return [f"{name}[{place}]" for place in range(shape[0])] if is_stack else []


def tensor_name(matrix: str) -> str:
    """Return the name of the tensor that holds a matrix."""
    return PLACE.sub("", matrix)


def view_of(matrix: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix as a view [m, n] of the tensor that holds it."""
    place = PLACE.search(matrix)
    return tensor[int(place[1])] if place else tensor


class Projections(Mapping[str, torch.Tensor]):
    """The projections of a model as matrices by name; each access makes a view.

    Args:
        weights: name -> tensor.
        shapes: name -> shape, of the ``weights`` to search, in this order.

    Attributes:
        names: name of a matrix -> name of the tensor that holds it.
        left_out: name -> number of parameters of each tensor without projections.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
        self.weights = weights
        self.names = {m: n for n, shape in shapes.items() if is_projection(n) for m in matrix_names(n, shape)}
        with_projections = set(self.names.values())
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self.left_out = {name: size for name, size in sizes.items() if name not in with_projections}
        self.num_parameters = sum(sizes.values())

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> "Projections":
        """Return the projections among tensors in memory."""
        return cls(weights, {name: tuple(tensor.shape) for name, tensor in weights.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        return view_of(name, self.weights[self.names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def describe_left_out(self) -> str:
        """Return a line with the share of parameters outside projections, and their largest tensors."""
        if not self.left_out:
            return "every weight is a projection"
        largest = sorted(self.left_out, key=self.left_out.__getitem__, reverse=True)[:3]
        share = sum(self.left_out.values()) / self.num_parameters
        more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
        return f"{share:.1%} of the parameters are no projections and stay as trained: {', '.join(largest)}{more}"
