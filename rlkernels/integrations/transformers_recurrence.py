"""Recurrent layers of Transformers' models in a packed pass: each node of the tree continues from its parent.

Modeling files call two kinds of functions by name, with the keyword arguments of the model's forward: a short causal
convolution, and a gated delta rule, which takes and returns a state. With a ``TreeLayout`` as ``attention``

- the convolution runs once over all nodes, each of which follows the last inputs on its path;
- the rule runs once for each level of the tree and size of nodes, and starts from the final states of their parents.

Projections, norms and gates get one row of tokens. Autograd sums the gradients of a state that several nodes take.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from rlkernels.prefix_cache import TreeLayout

__all__: list[str] = []  # for the attention beside it

CHUNK = 64  # tokens in a step of the delta rules


class _Scan(NamedTuple):
    """A call of a delta rule for B nodes, of which the longest has L tokens."""

    tokens: torch.Tensor  # int64 [B, L] places in the layout; padding is the layout's number of tokens
    parents: torch.Tensor | None  # int64 [B] among the states of the level above; None: the first level


class _Plan:
    """The calls of both functions for a layout, on a device.

    Attributes:
        levels: the scans of each level of the tree.
        scanned: int64 [T], the place of each token among those of all scans.
    """

    def __init__(self, layout: TreeLayout, device: torch.device):
        self.layout = layout
        self.device = device
        starts, stops, _ = layout.nodes.unbind(1)
        self._starts = starts
        self._parents = layout.parents()
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        levels: list[dict[int, list[int]]] = []  # of each level: nodes by size
        depths = {-1: -1}
        for node, (parent, length) in enumerate(zip(self._parents, (stops - starts).tolist())):
            depth = depths[parent] + 1
            depths[node] = depth
            if depth == len(levels):
                levels.append({})
            chunks = -(-length // CHUNK)
            size = (chunks - 1).bit_length()  # 1, 2, 3 to 4, 5 to 8 ... chunks: padding at most doubles the work
            levels[depth].setdefault(size, []).append(node)
        self.levels: list[list[_Scan]] = []
        states = {-1: -1}  # of a node: its place among the states of its level
        places = torch.empty_like(layout.end)
        total = 0
        for level in levels:
            scans: list[_Scan] = []
            for nodes in level.values():
                start = starts[nodes, None]
                stop = stops[nodes, None]
                tokens = start + torch.arange(int((stop - start).max()), device="cpu")
                inside = tokens < stop
                places[tokens[inside]] = total + inside.flatten().nonzero().flatten()
                total += tokens.numel()
                parents = torch.tensor([states[self._parents[node]] for node in nodes], device="cpu")
                tokens = tokens.where(inside, layout.num_tokens)
                scans.append(_Scan(tokens.to(device), parents.to(device) if self.levels else None))
            self.levels.append(scans)
            states |= {node: state for state, node in enumerate(itertools.chain.from_iterable(level.values()))}
        self.scanned = places.to(device)

    def windows(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of all N nodes, each node after the ``width`` tokens of its path before it.

        Returns:
            int64 [T + N * width], tokens of the layout; its number of tokens stands for places before a path's start.
            int64 [T], the place of each token in there.
        """
        if width not in self._windows:
            tokens = self.layout.num_tokens
            starts = self._starts
            parents = torch.tensor(self._parents, dtype=torch.int64, device="cpu")
            previous = torch.arange(-1, tokens, device="cpu")  # of each token on its path, and of no token
            previous[starts] = torch.where(parents < 0, tokens, self.layout.nodes[parents, 1] - 1)
            previous[tokens] = tokens
            history = [starts]
            for _ in range(width):
                history.insert(0, previous[history[0]])
            is_start = torch.zeros(tokens, dtype=torch.int64, device="cpu")
            is_start[starts] = 1
            places = torch.arange(tokens, device="cpu") + width * is_start.cumsum(0)
            window = torch.empty(tokens + len(starts) * width, dtype=torch.int64, device="cpu")
            window[places] = torch.arange(tokens, device="cpu")
            for distance, ancestors in enumerate(reversed(history)):
                window[places[starts] - distance] = ancestors
            self._windows[width] = window.to(self.device), places.to(self.device)
        return self._windows[width]


def _plan(layout: TreeLayout, row: torch.Tensor, tokens: int) -> _Plan:
    """Return the layout's plan on the device of ``row`` [B, ...] with ``tokens`` tokens; all layers share the plan."""
    if row.shape[0] != 1 or tokens != layout.num_tokens:
        raise ValueError(
            f"input_ids must be [1, {layout.num_tokens}], the tokens of the layout, got [{row.shape[0]}, {tokens}]"
        )
    key = "recurrence", row.device
    if key not in layout.kernel_tables:
        layout.kernel_tables[key] = _Plan(layout, row.device)
    plan: _Plan = layout.kernel_tables[key]
    return plan


def _convolve(plain: Callable[..., torch.Tensor], layout: TreeLayout, inputs: torch.Tensor, weight: torch.Tensor,
              *args: Any, **options: Any) -> torch.Tensor:  # fmt: skip
    """Convolve inputs [1, C, T] with weights [C, K], like ``causal_conv1d_fn`` of a modeling file."""
    if inputs.shape[2] == weight.shape[1]:
        inputs = inputs[..., -layout.num_tokens :]  # a cache pads rows shorter than K on the left
    window, places = _plan(layout, inputs, inputs.shape[2]).windows(weight.shape[1] - 1)
    out = plain(F.pad(inputs, (0, 1))[..., window], weight, *args, **options)
    return out[..., places]


def _scan(plain: Callable[..., Any], layout: TreeLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
          *, g: torch.Tensor, beta: torch.Tensor, initial_state: None = None, output_final_state: bool = False,
          **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Apply a delta rule to [1, T, H, ...] each; return outputs and the final state of the last node.

    Zeros after the end of a node do not change its state: nothing decays (g), nothing is written (beta).
    """
    plan = _plan(layout, query, query.shape[1])
    row = [torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]) for x in (query, key, value, g, beta)]
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for level in plan.levels:
        final_states = []
        for tokens, parents in level:
            initial = None if states is None else states[parents]
            q, k, v, decay, write = (x[tokens] for x in row)
            options |= {"g": decay, "beta": write, "initial_state": initial, "output_final_state": True}
            out, final = plain(q, k, v, **options)
            outputs.append(out.flatten(0, 1))
            final_states.append(final)
        states = torch.cat(final_states)
    assert states is not None
    return torch.cat(outputs)[plan.scanned][None], states[-1:] if output_final_state else None


# functions of modeling files -> how to call them for a tree, the kind of layers that then follows trees
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_fn": (_convolve, "conv"),
    "torch_chunk_gated_delta_rule": (_scan, "linear_attention"),
    "chunk_kimi_delta_attention": (_scan, "linear_attention"),
}


def _with_trees(plain: Callable[..., Any], on_tree: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``on_tree`` for a tree, else ``plain``."""

    @functools.wraps(plain, updated=())  # with the package `kernels` installed it is a module
    def function(*args: Any, attention: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention, TreeLayout):
            return on_tree(plain, attention, *args, **kwargs)
        return plain(*args, **kwargs)

    function.follows_trees = True  # type: ignore[attr-defined]
    return function


def _follow(model_class: type[PreTrainedModel]) -> None:
    """Wrap the functions of a model's modeling file, so that they follow a tree if they get one."""
    modeling = sys.modules.get(model_class.__module__)  # None for a file that was executed without an import
    for name, (on_tree, _) in FUNCTIONS.items():
        plain = getattr(modeling, name, None)
        if plain is not None and not hasattr(plain, "follows_trees"):
            setattr(modeling, name, _with_trees(plain, on_tree))


@functools.cache
def followed_layers(modeling: str) -> frozenset[str]:
    """Return the kinds of layers in a modeling file that follow a tree, by their names in ``config.layer_types``."""
    functions = vars(sys.modules[modeling]) if modeling in sys.modules else {}
    return frozenset(kind for name, (_, kind) in FUNCTIONS.items() if hasattr(functions.get(name), "follows_trees"))


def _follow_models() -> None:
    """Let the models of Transformers follow trees: imported ones now, others when they are imported."""
    plain = PreTrainedModel.__init_subclass__.__func__  # type: ignore[attr-defined]

    def follow(cls: type[PreTrainedModel], **kwargs: Any) -> None:
        plain(cls, **kwargs)
        _follow(cls)

    PreTrainedModel.__init_subclass__ = classmethod(follow)  # type: ignore[assignment]
    for cls in PreTrainedModel.__subclasses__():
        _follow(cls)


_follow_models()
