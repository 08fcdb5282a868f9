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

struct Side {  // of kLanes rows: their shares of the result; whether they saw any key
  float weight[kLanes];
  uint32_t there[kLanes];  // all bits or none
};

// The weights of kLanes pairs of rows from their log-sum-exps; returns those of the results.
static vfloat weigh(vfloat a, vfloat b, Side& side_a, Side& side_b) {
  const vint no_a = a == -kInfinity, no_b = b == -kInfinity;
  const vfloat top = (a > b) | (a != a) ? a : b, shift = no_a & no_b ? vfloat{} : top;
  const vfloat part_a = vexp(a - shift), part_b = vexp(b - shift), sum = part_a + part_b;
  store(side_a.weight, no_a ? vfloat{} : part_a / sum);
  store(side_b.weight, no_b ? vfloat{} : part_b / sum);
  store(side_a.there, (vuint)~no_a);
  store(side_b.there, (vuint)~no_b);
  return no_a & no_b ? a : top + vlog_of_1_to_2(sum);
}

// One row of a sum; a side without keys takes no part, whatever its output holds.
template <class Q>
static void merge_row(const Q* a, const Side& side_a, const Q* b, const Side& side_b, int r, Q* out, int64_t dim) {
  const vfloat weight_a = splat(side_a.weight[r]), weight_b = splat(side_b.weight[r]);
  const vuint there_a = vuint{} + side_a.there[r], there_b = vuint{} + side_b.there[r];
  const auto sum = [&](const Q* x, const Q* y) __attribute__((always_inline)) {
    return weight_a * (vfloat)((vuint)load_float(x) & there_a) + weight_b * (vfloat)((vuint)load_float(y) & there_b);
  };
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) store_float(out + c, sum(a + c, b + c));
  if (c == dim) return;
  Q x[kLanes] = {}, y[kLanes] = {};
  std::memcpy(x, a + c, (dim - c) * sizeof(Q));
  std::memcpy(y, b + c, (dim - c) * sizeof(Q));
  store_float(x, sum(x, y));
  std::memcpy(out + c, x, (dim - c) * sizeof(Q));
}

template <class Q>
static void merge_rows(const Q* out_a, const float* lse_a, const Q* out_b, const float* lse_b, Q* out, float* lse,
                       int64_t rows, int64_t dim) {
  Side side_a, side_b;
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int count = rows - first < kLanes ? int(rows - first) : kLanes;
    float a[kLanes] = {}, b[kLanes] = {};
    std::memcpy(a, lse_a + first, count * sizeof(float));
    std::memcpy(b, lse_b + first, count * sizeof(float));
    store(a, weigh(load<vfloat>(a), load<vfloat>(b), side_a, side_b));
    std::memcpy(lse + first, a, count * sizeof(float));
    for (int r = 0; r < count; ++r) {
      const int64_t at = (first + r) * dim;
      merge_row(out_a + at, side_a, out_b + at, side_b, r, out + at, dim);
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
