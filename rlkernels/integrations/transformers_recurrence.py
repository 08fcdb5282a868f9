"""Recurrent layers of Transformers' models in a packed pass: each node of the tree continues from its parent.

Modeling files call two kinds of functions by name, and hand them the keyword arguments of the model's forward: a short
causal convolution, and a gated delta rule, which takes and returns a state. With a ``TreeLayout`` as ``attention``

- the convolution runs once over all nodes, each behind the last inputs on the path to it;
- the rule runs once for each level of the tree and size of its nodes, from the states in which their parents end.

Projections, norms and gates see one row of tokens. Autograd adds up the gradients of a state that several nodes take.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from rlkernels.prefix_cache import TreeLayout

__all__: list[str] = []  # for the attention beside it

CHUNK = 64  # tokens that the delta rules take at once


class _Scan(NamedTuple):
    """A call of a delta rule for B nodes, of which the longest has L tokens."""

    tokens: torch.Tensor  # int64 [B, L] places in the layout; the number of its tokens behind the end of a node
    parents: torch.Tensor | None  # int64 [B] among the states of the level above; None: the first level


class _Plan:
    """A layout as calls of the functions, on a device.

    Attributes:
        levels: the scans of each level of the tree.
        scanned: int64 [T], the place of each token among those of all scans.
    """

    def __init__(self, layout: TreeLayout, device: torch.device):
        self.layout, self.device = layout, device
        starts, stops, _ = layout.nodes.unbind(1)
        self._starts, self._parents = starts, _parents(layout)
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        levels: list[dict[int, list[int]]] = []
        depths, numbers = {-1: -1}, {-1: -1}  # of a node: its level, its state among those of the level
        for node, (parent, length) in enumerate(zip(self._parents, (stops - starts).tolist())):
            depths[node] = depth = depths[parent] + 1
            levels += [{}] * (depth == len(levels))
            # sizes of 1, 2, 3 to 4, 5 to 8 ... chunks: padding at most doubles the work
            levels[depth].setdefault((-(-length // CHUNK) - 1).bit_length(), []).append(node)
        self.levels: list[list[_Scan]] = []
        total, places = 0, torch.empty_like(layout.end)
        for level in levels:
            scans: list[_Scan] = []
            for nodes in level.values():
                first, last = starts[nodes, None], stops[nodes, None]
                tokens = first + torch.arange(int((last - first).max()), device="cpu")
                inside = tokens < last
                places[tokens[inside]] = total + inside.flatten().nonzero().flatten()
                total += tokens.numel()
                parents = torch.tensor([numbers[self._parents[node]] for node in nodes], device="cpu")
                tokens = tokens.where(inside, layout.num_tokens)
                scans.append(_Scan(tokens.to(device), parents.to(device) if self.levels else None))
            self.levels.append(scans)
            numbers |= {node: i for i, node in enumerate(node for nodes in level.values() for node in nodes)}
        self.scanned = places.to(device)

    def windows(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nodes one after the other, each behind the ``width`` tokens before it, and the places in there.

        int64 [T + N * width], the number of tokens where a path begins later; int64 [T].
        """
        if width not in self._windows:
            tokens, starts = self.layout.num_tokens, self._starts
            before = torch.arange(-1, tokens, device="cpu")  # of each token, and of none
            above = torch.tensor(self._parents, dtype=torch.int64, device="cpu")
            before[starts] = torch.where(above < 0, tokens, self.layout.nodes[above, 1] - 1)
            before[tokens] = tokens
            history = [starts]
            for _ in range(width):
                history.insert(0, before[history[0]])
            node = torch.zeros(tokens, dtype=torch.int64, device="cpu")
            node[starts] = 1
            places = torch.arange(tokens, device="cpu") + width * node.cumsum(0)
            window = torch.empty(tokens + len(starts) * width, dtype=torch.int64, device="cpu")
            window[places] = torch.arange(tokens, device="cpu")
            for back, ancestors in enumerate(reversed(history)):
                window[places[starts] - back] = ancestors
            self._windows[width] = window.to(self.device), places.to(self.device)
        return self._windows[width]


def _parents(layout: TreeLayout) -> list[int]:
    """Return the parent of each node, -1 without one."""
    nodes, path, parents = layout.nodes.tolist(), list[int](), []
    for node, (start, _, _) in enumerate(nodes):
        while path and nodes[path[-1]][2] <= start:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def _plan(layout: TreeLayout, row: torch.Tensor, tokens: int) -> _Plan:
    """Return the layout's plan on the device of ``row`` [B, ...] with so many tokens, which all layers use."""
    if row.shape[0] != 1 or tokens != layout.num_tokens:
        raise ValueError(
            f"input_ids must be [1, {layout.num_tokens}], the tokens of the layout, got [{row.shape[0]}, {tokens}]"
        )
    key = "recurrence", row.device
    if key not in layout.tiles:
        layout.tiles[key] = _Plan(layout, row.device)
    plan: _Plan = layout.tiles[key]
    return plan


def _convolve(plain: Callable[..., torch.Tensor], layout: TreeLayout, inputs: torch.Tensor, weight: torch.Tensor,
              *args: Any, **options: Any) -> torch.Tensor:  # fmt: skip
    """Convolve inputs [1, C, T] with weights [C, K], as ``causal_conv1d_fn`` of a modeling file."""
    if inputs.shape[2] == weight.shape[1]:
        inputs = inputs[..., -layout.num_tokens :]  # a cache fills shorter rows up
    window, places = _plan(layout, inputs, inputs.shape[2]).windows(weight.shape[1] - 1)
    out = plain(F.pad(inputs, (0, 1))[..., window], weight, *args, **options)
    return out[..., places]


def _scan(plain: Callable[..., Any], layout: TreeLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
          *, g: torch.Tensor, beta: torch.Tensor, initial_state: None = None, output_final_state: bool = False,
          **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Apply a delta rule to [1, T, H, ...] each. The final state is that of a node of the last level.

    Zeros behind the end of a node leave its state as it is: nothing decays (g), nothing is written (beta).
    """
    plan = _plan(layout, query, query.shape[1])
    row = [torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]) for x in (query, key, value, g, beta)]
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for level in plan.levels:
        ends = []
        for tokens, parents in level:
            start = None if states is None else states[parents]
            q, k, v, decay, write = (x[tokens] for x in row)
            options |= {"g": decay, "beta": write, "initial_state": start, "output_final_state": True}
            out, end = plain(q, k, v, **options)
            outputs.append(out.flatten(0, 1))
            ends.append(end)
        states = torch.cat(ends)
    assert states is not None
    return torch.cat(outputs)[plan.scanned][None], states[-1:] if output_final_state else None


# functions of modeling files -> how to call them for a tree, the kind of layers that then follow it
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_fn": (_convolve, "conv"),
    "torch_chunk_gated_delta_rule": (_scan, "linear_attention"),
    "chunk_kimi_delta_attention": (_scan, "linear_attention"),
}


def _beside(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain, updated=())  # it is a module where the package `kernels` is installed
    def function(*args: Any, attention: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention, TreeLayout):
            return ours(plain, attention, *args, **kwargs)
        return plain(*args, **kwargs)

    function.follows_trees = True  # type: ignore[attr-defined]
    return function


def _follow(modeling: ModuleType) -> None:
    """Replace the functions of a modeling file by those that follow a tree where they are given one."""
    for name, (ours, _) in FUNCTIONS.items():
        plain = vars(modeling).get(name)
        if plain is not None and not hasattr(plain, "follows_trees"):
            setattr(modeling, name, _beside(plain, ours))


@functools.cache
def followed_layers(modeling: str) -> frozenset[str]:
    """Return the kinds of layers that follow a tree, by the names in ``config.layer_types``, in a modeling file."""
    defined = vars(sys.modules[modeling]) if modeling in sys.modules else {}
    return frozenset(kind for name, (_, kind) in FUNCTIONS.items() if hasattr(defined.get(name), "follows_trees"))


def _follow_models() -> None:
    """Let the models of Transformers follow trees: those that are imported, and others as they come."""
    plain = PreTrainedModel.__init_subclass__.__func__  # type: ignore[attr-defined]

    def follow(cls: type[PreTrainedModel], **kwargs: Any) -> None:
        plain(cls, **kwargs)
        _follow(sys.modules[cls.__module__])

    PreTrainedModel.__init_subclass__ = classmethod(follow)  # type: ignore[assignment]
    for cls in PreTrainedModel.__subclasses__():
        _follow(sys.modules[cls.__module__])


_follow_models()
