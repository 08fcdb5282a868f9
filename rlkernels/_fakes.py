"""What the compiled ops return, as shapes and dtypes only: for torch.compile and torch.export.

Imported with the extension, and the one place for them: ops of csrc/ops have no meta kernels in C++.
"""

import torch


@torch.library.register_fake("rlkernels::paged_attention")
@torch.library.register_fake("rlkernels::shared_prefix_attention")
def _(query, *_):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.register_fake("rlkernels::merge_attention")
def _(out_a, lse_a, out_b, lse_b):
    return torch.empty_like(out_a), torch.empty_like(lse_a)


@torch.library.register_fake("rlkernels::grouped_attention_backward")
def _(grad_out, query, key, value, *_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@torch.library.register_fake("rlkernels::write_kv")
@torch.library.register_fake("rlkernels::advise_huge_pages")
@torch.library.register_fake("rlkernels::add_rank1_")
def _(*_):
    return None


@torch.library.register_fake("rlkernels::add_rms_norm")
def _(residual, x, *_):
    total = residual.new_empty(0, residual.shape[1]) if x is None else torch.empty_like(residual)
    return total, torch.empty_like(residual), residual.new_empty(residual.shape[0], dtype=torch.float32)


@torch.library.register_fake("rlkernels::rms_norm_backward")
def _(grad_out, grad_sum, total, factor, weight):
    return torch.empty_like(total), torch.empty_like(weight)


@torch.library.register_fake("rlkernels::rope")
def _(x, *_):
    return torch.empty_like(x)


@torch.library.register_fake("rlkernels::rope_backward")
def _(grad_out, x, positions, cos, *_):
    return torch.empty_like(x), cos.new_empty(2, cos.shape[1], dtype=torch.float32)


@torch.library.register_fake("rlkernels::silu_mul_backward")
def _(grad_out, gate_up):
    return torch.empty_like(gate_up)


@torch.library.register_fake("rlkernels::silu_mul")
def _(gate_up):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("rlkernels::token_weights")
def _(z):
    return torch.empty_like(z, dtype=torch.int64)


@torch.library.register_fake("rlkernels::keyed_uniform")
def _(seed, sample_ids, positions):
    return torch.empty_like(sample_ids, dtype=torch.float32)


@torch.library.register_fake("rlkernels::sample_tokens")
def _(logits, uniforms, *_):
    return torch.empty_like(uniforms, dtype=torch.int64), torch.empty_like(uniforms)


@torch.library.register_fake("rlkernels::verify_drafts")
def _(logits, drafts, starts, uniforms, temperature, *_):
    accepted, ids = (torch.empty_like(t, dtype=torch.int64) for t in (temperature, uniforms))
    return accepted, ids, torch.empty_like(uniforms)


@torch.library.register_fake("rlkernels::token_logprobs")
def _(logits, ids, temperature, with_entropy):
    rows = logits.shape[0]
    shapes = (rows,), (rows if with_entropy else 0,), (rows, 2)
    return tuple(logits.new_empty(shape, dtype=torch.float32) for shape in shapes)


@torch.library.register_fake("rlkernels::token_logprobs_backward")
def _(logits, *_):
    return torch.empty_like(logits)


@torch.library.register_fake("rlkernels::top1_deltas")
def _(weights, bases, starts, tol, max_passes, min_passes, rank, seed):
    us, vs = ([w.new_empty(rank, w.shape[i], dtype=torch.float32) for w in weights] for i in (0, 1))
    sigmas, facts = (torch.empty(len(weights), k, dtype=torch.float64, device="cpu") for k in (rank, 7))
    return us, vs, sigmas, facts


@torch.library.register_fake("rlkernels::delta_matvec")
def _(weight, base, v):
    return weight.new_empty(weight.shape[0], dtype=torch.float32)


@torch.library.register_fake("rlkernels::dtw")
def _(x, y, x_lengths, y_lengths, band):
    return x.new_empty(x.shape[0], y.shape[0])


@torch.library.register_fake("rlkernels::dtw_subsequence")
def _(x, y, x_lengths, y_lengths):
    place = x.new_empty(x.shape[0], y.shape[0], dtype=torch.int64)
    return x.new_empty(x.shape[0], y.shape[0]), place, torch.empty_like(place)


@torch.library.register_fake("rlkernels::dtw_warps")
def _(x, y, x_lengths, y_lengths, band, subsequence):
    place = x.new_empty(x.shape[0] if subsequence else 0, y.shape[0], dtype=torch.int64)
    return x.new_empty(x.shape[0], y.shape[0]), place, torch.empty_like(place)


@torch.library.register_fake("rlkernels::dtw_topk")
def _(x, y, k, x_lengths, y_lengths, band):
    return x.new_empty(x.shape[0], k), x.new_empty(x.shape[0], k, dtype=torch.int64)
