"""One entry for each op. Other lists of ops follow from these entries or are compared with them by a test.

Whoever adds an op adds its entry. ``tests/rlkernels/test_op_registry.py`` then names every place that lacks the op.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An op: where it lives, which backends have been written for it, and what its arguments allow.

    Attributes:
        name: The public function, as errors call it.
        folder: The folder of ``rlkernels`` that exports the function.
        cpu, triton, cuda: The backends that have been written; every op has ``torch``.
        variants: Of a backend, named "backend/variant"; a proof chooses one of them all.
        regimes: Kinds of calls with verdicts of their own, named "op/regime". The op's own verdict holds for other
            calls, and for a regime without one.
        like: The op whose kernels, and so whose verdicts, this op uses.
        gradients: Arguments that get a gradient.
        writes: Arguments that it writes to.
        composite: True if ``backend="torch"`` is made of torch's differentiable operations, which know all transforms.
        casts: Whether autocast casts the tensors, as in ``torch.nn.functional.linear``.
        needs_values: True if meta tensors have no result, and the host waits for the GPU.
        on_host: True for a data structure in host memory; it is no function.
    """

    name: str
    folder: str
    cpu: bool = True
    triton: bool = False
    cuda: bool = False
    variants: tuple[str, ...] = ()
    regimes: tuple[str, ...] = ()
    like: str | None = None
    gradients: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    composite: bool = False
    casts: bool = False
    needs_values: bool = False
    on_host: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether it has a GPU kernel, which can be proved."""
        return self.triton or self.cuda

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that have been written, and their variants, without ``torch``."""
        return *(name for name in ("cuda", "cpu", "triton") if getattr(self, name)), *self.variants

    @property
    def verdict_names(self) -> tuple[str, ...]:
        """Its name, and those of its regimes."""
        return self.name, *(f"{self.name}/{regime}" for regime in self.regimes)


QKV = ("query", "key", "value")
CROSSING = ("triton/crossing",)  # tiles that cross the nodes of a tree
# In the order of proof: those that a step spends most time in first.
ALL = (
    Op("paged_attention", "prefix_cache", triton=True, regimes=("prefill",)),  # more queries than sequences
    Op("shared_prefix_attention", "prefix_cache", triton=True),
    Op("grouped_attention", "prefix_cache", triton=True, variants=CROSSING, gradients=QKV, composite=True),
    # of two levels: as grouped_attention
    Op("tree_attention", "prefix_cache", triton=True, variants=CROSSING, gradients=QKV, composite=True),
    Op("write_kv", "prefix_cache", triton=True, regimes=("many",), writes=("key_cache", "value_cache")),
    Op("sample_tokens", "sampling", triton=True),
    Op("token_logprobs", "logprobs", triton=True, gradients=("logits",), composite=True),
    Op("linear_token_logprobs", "logprobs", triton=True, gradients=("hidden", "weight", "bias"), casts=True),
    Op("verify_drafts", "sampling", triton=True),
    Op("merge_attention", "prefix_cache", triton=True),
    Op("dtw", "similarity", triton=True, cuda=True, regimes=("wide",)),  # more than one feature a step
    Op("dtw_topk", "similarity", triton=True, cuda=True, like="dtw"),
    Op("top1_deltas", "rank1", triton=True, needs_values=True),
    Op("top1_delta", "rank1", triton=True, needs_values=True),
    # large: memory, not the host, takes the time
    Op("add_rank1_", "rank1", triton=True, regimes=("large",), writes=("weight",)),
    Op("delta_matvec", "rank1", triton=True),
    Op("keyed_uniform", "sampling"),
    # between the matrix products of a decoder layer
    Op("add_rms_norm", "decoder", gradients=("residual", "x", "weight"), composite=True),
    Op("rope", "decoder", gradients=("x", "q_weight", "k_weight"), composite=True),
    Op("silu_mul", "decoder", gradients=("gate_up",), composite=True),
    Op("soft_dtw", "similarity", cpu=False, gradients=("x", "y")),
    Op("state_similarity", "similarity", cpu=False),
    Op("rhyme_similarity", "similarity", cpu=False),
    Op("rhyme_topk", "similarity", cpu=False),
    Op("block_pool", "prefix_cache", on_host=True),
    Op("rollout_history", "history", on_host=True),
)
OPS: dict[str, Op] = {name: op for op in ALL for name in op.verdict_names}  # regimes too
