// Kernels over a weight delta D = weight - base [m, n] that is never stored; see rank1_solve.h for their use.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace rlk {

enum class Storage : int { float32 = 0, bfloat16 = 1, float16 = 2 };
constexpr int storage_bytes(Storage s) { return s == Storage::float32 ? 4 : 2; }

// Two matrices of one shape; rows are contiguous, strides count elements.
struct DeltaPair {
  const void* weight;
  const void* base;
  int64_t weight_stride, base_stride, m, n;
  Storage weight_type, base_type;
};

// Columns of the Krylov block. The block and its image live in panels: for every stretch of panel_width columns of
// the delta, kBlock rows of that many numbers, in an order that suits the storage type; zeros past n.
constexpr int kBlock = 4;

struct DeltaStats {
  double square;     // sum of squares; NaN or inf when the input has any, or where squares leave float32
  int64_t changed;  // non-zero entries
};

}  // namespace rlk

// Numbers per panel row (depends on the vector width), and floats in a panel array for n columns.
RLK_DECLARE_KERNEL(int64_t, rank1_panel_floats, int64_t)
// block [kBlock][n] (column c of the Krylov block at block + c * n, `columns` of them) times scale -> panels.
RLK_DECLARE_KERNEL(void, rank1_to_panels, const rlk::DeltaPair&, const float*, int, float, float*)
// Sum over `slots` panel arrays in order, times scale -> image [kBlock][n], `columns` of them.
RLK_DECLARE_KERNEL(void, rank1_from_panels, const rlk::DeltaPair&, const float*, int, int, float, float*)
// For rows begin..end: y[c * m + row] = D[row] Q_c for the first `columns`, and panels z = D^T Y (overwritten).
// One read of both matrices; `stats` (may be null) comes from the same read.
RLK_DECLARE_KERNEL(void, rank1_read, const rlk::DeltaPair&, const float*, int, int64_t, int64_t, float*, float*,
                   rlk::DeltaStats*)
// Largest magnitude in the delta, in float64; NaN when there is one. Slow and safe.
RLK_DECLARE_KERNEL(double, rank1_largest, const rlk::DeltaPair&, double*)
// out[row] = D[row] v for rows begin..end, v in panels.
RLK_DECLARE_KERNEL(void, rank1_matvec, const rlk::DeltaPair&, const float*, int64_t, int64_t, float*)

// Dense kernels in float64 on columns of length n, stored one after another.
// out[a * kb + b] = sum_i x[a][i] y[b][i], for ka columns of x and kb <= kBlock of y
RLK_DECLARE_KERNEL(void, rank1_dots, const float*, int, const float*, int, int64_t, double*)
RLK_DECLARE_KERNEL(void, rank1_dots_mixed, const float*, int, const double*, int, int64_t, double*)
RLK_DECLARE_KERNEL(void, rank1_gram, const double*, int, int64_t, double*)
// r[b] -= sum_a x[a] coef[a * kb + b]
RLK_DECLARE_KERNEL(void, rank1_project, double*, int, const float*, int, const double*, int64_t)
// r <- r T for T [kb, kb]
RLK_DECLARE_KERNEL(void, rank1_mix, double*, int, const double*, int64_t)
// out[i] = sum_a x[a][i] coef[a]
RLK_DECLARE_KERNEL(void, rank1_combine, const float*, int, const double*, int64_t, double*)

// weight[row, column] += u[row] * v[column] for rows begin..end, scale already in u; stochastic: see reference.py.
RLK_DECLARE_KERNEL(void, rank1_add, void*, rlk::Storage, int64_t, int64_t, const float*, const float*, int64_t, int64_t,
                   bool, uint64_t)
