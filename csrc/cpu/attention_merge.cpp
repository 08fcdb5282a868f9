// Moving keys and values into their pages, and merging attention over disjoint sets of keys.
#include "attention.h"
#include "dispatch.h"
#include "simd_float.h"

namespace RLK_KERNEL_NAMESPACE {

constexpr float kInfinity = __builtin_huge_valf();

template <class S, class D>
static void copy_rows(const char* from, int64_t token_stride, int64_t head_stride, const Pages& to,
                      int64_t block_size, const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim) {
  const S* source = reinterpret_cast<const S*>(from);
  D* target = static_cast<D*>(const_cast<void*>(to.data));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const S* s = source + t * token_stride + h * head_stride;
      D* d = target + slots[t] / block_size * to.block_stride + slots[t] % block_size * to.token_stride +
             h * to.head_stride;
      if constexpr (__is_same(S, D)) {
        std::memcpy(d, s, dim * sizeof(S));
      } else {
        for (int64_t c = 0; c < dim; ++c) from_float(d + c, to_float(s[c]));
      }
    }
}

template <class S>
static auto pick_copy(Float to) {
  return to == Float::f32 ? &copy_rows<S, float> : to == Float::bf16 ? &copy_rows<S, bf16> : &copy_rows<S, f16>;
}

// rows: [tokens, heads, dim] with unit stride of the last dimension.
void copy_to_pages(const void* rows, Float from, int64_t token_stride, int64_t head_stride, const Pages& to,
                   Float to_type, int64_t block_size, const int64_t* slots, int64_t tokens, int64_t heads,
                   int64_t dim) {
  const auto copy = from == Float::f32    ? pick_copy<float>(to_type)
                    : from == Float::bf16 ? pick_copy<bf16>(to_type)
                                          : pick_copy<f16>(to_type);
  copy(static_cast<const char*>(rows), token_stride, head_stride, to, block_size, slots, tokens, heads, dim);
}

template <class Q>
static void merge_into(const Attention& a, int64_t token, const AttentionParts* sources, int count) {
  for (int64_t h = 0; h < a.heads; ++h) {
    float top = -kInfinity, sum = 0;
    for (int s = 0; s < count; ++s)
      for (int i = 0; i < sources[s].count; ++i) {
        const float lse = sources[s].lse[i * sources[s].lse_stride + h];
        top = lse > top || lse != lse ? lse : top;
      }
    float total[512];  // the widest head that csrc/ops lets through
    std::memset(total, 0, a.dim * sizeof(float));
    for (int s = 0; s < count && top != -kInfinity; ++s)
      for (int i = 0; i < sources[s].count; ++i) {
        const float lse = sources[s].lse[i * sources[s].lse_stride + h];
        if (lse == -kInfinity) continue;
        const float weight = __builtin_expf(lse - top);
        const float* out = sources[s].out + i * sources[s].out_stride + h * a.dim;
        sum += weight;
        for (int c = 0; c < a.dim; ++c) total[c] += weight * out[c];
      }
    const float inverse = sum == 0 ? 0.0f : 1 / sum;
    Q* to = static_cast<Q*>(a.out) + (token * a.heads + h) * a.dim;
    for (int c = 0; c < a.dim; ++c) from_float(to + c, total[c] * inverse);
    a.lse[token * a.heads + h] = sum == 0 ? -kInfinity : top + __builtin_logf(sum);
  }
}

// Writes out and lse of one token from all the parts.
void merge_parts(const Attention& a, int64_t token, const AttentionParts* sources, int count) {
  if (a.query_type == Float::f32) return merge_into<float>(a, token, sources, count);
  if (a.query_type == Float::bf16) return merge_into<bf16>(a, token, sources, count);
  return merge_into<f16>(a, token, sources, count);
}

template <class Q>
static void merge_rows(const Q* out_a, const float* lse_a, const Q* out_b, const float* lse_b, Q* out, float* lse,
                       int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float a = lse_a[r], b = lse_b[r], top = a > b || a != a ? a : b;
    const bool nothing = top == -kInfinity;
    float weight_a = nothing ? 0.0f : __builtin_expf(a - top), weight_b = nothing ? 0.0f : __builtin_expf(b - top);
    const float sum = weight_a + weight_b;
    lse[r] = nothing ? -kInfinity : top + __builtin_logf(sum);
    weight_a = a == -kInfinity ? 0.0f : weight_a / sum;
    weight_b = b == -kInfinity ? 0.0f : weight_b / sum;
    for (int64_t c = 0; c < dim; ++c) {  // a side without keys takes no part, whatever its output holds
      const float x = a == -kInfinity ? 0.0f : weight_a * to_float(out_a[r * dim + c]);
      const float y = b == -kInfinity ? 0.0f : weight_b * to_float(out_b[r * dim + c]);
      from_float(out + r * dim + c, x + y);
    }
  }
}

void merge_pairs(Float type, const void* out_a, const float* lse_a, const void* out_b, const float* lse_b, void* out,
                 float* lse, int64_t rows, int64_t dim) {
#define RLK_MERGE(Q) \
  return merge_rows(static_cast<const Q*>(out_a), lse_a, static_cast<const Q*>(out_b), lse_b, static_cast<Q*>(out), \
                    lse, rows, dim)
  if (type == Float::f32) RLK_MERGE(float);
  if (type == Float::bf16) RLK_MERGE(bf16);
  RLK_MERGE(f16);
#undef RLK_MERGE
}

}  // namespace RLK_KERNEL_NAMESPACE
