// The warp of csrc/cuda/dtw.cu on the host: 32 lanes of csrc/include/dtw_lane.h in lockstep, shuffles by an array.
#include <cmath>
#include <vector>

#include "dtw_lane.h"

template <int K, bool kOneFeature, bool kBand, bool kSubsequence>
static void run(const rlk::DtwPair& p, float* cost, int* start, int* stop) {
  std::vector<float> border(p.columns);
  std::vector<int> border_start(p.columns);
  *cost = INFINITY;
  int known = 0;
  for (int first = 0; first < p.rows; first += 32 * K) {
    const int begin = rlk::strip_begin(p, first), end = rlk::strip_end(p, first, 32 * K);
    const bool last_strip = first + 32 * K >= p.rows;
    rlk::DtwLane<K, kOneFeature, kBand, kSubsequence> cells[32];
    float below[32], above[32];
    int below_start[32], above_start[32];
    for (int lane = 0; lane < 32; ++lane) cells[lane].begin(p, first + lane * K, begin), below[lane] = INFINITY;
    for (int step = 0; step < end - begin + 31; ++step) {
      for (int lane = 0; lane < 32; ++lane) {
        above[lane] = below[lane ? lane - 1 : 0], above_start[lane] = below_start[lane ? lane - 1 : 0];
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int j = begin + step - lane;
        if (j < begin || j >= end) continue;
        if (lane == 0) {
          if (first == 0) {
            above[0] = kSubsequence ? 0.0f : INFINITY, above_start[0] = j;
          } else {
            above[0] = j < known ? border[j] : INFINITY, above_start[0] = border_start[j];
          }
        }
        cells[lane].column(p, j, kOneFeature ? p.y[j] : 0.0f, above[lane], above_start[lane]);
        below[lane] = cells[lane].left[K - 1], below_start[lane] = cells[lane].left_start[K - 1];
        if (!last_strip) {
          if (lane == 31) border[j] = below[lane], border_start[j] = below_start[lane];
        } else if (lane == (p.rows - 1) / K % 32) {
          if (kSubsequence ? below[lane] < *cost || j == 0 : j == p.columns - 1) {
            *cost = kSubsequence ? below[lane] : cells[lane].cell(p.rows - 1);
            *start = below_start[lane], *stop = j;
          }
        }
      }
    }
    known = end;
  }
}

extern "C" void dtw_warp(const float* x, const float* y, int rows, int columns, int dims, int radius, int k,
                         int subsequence, float* cost, int* start, int* stop) {
  const rlk::DtwPair p{x, y, rows, columns, dims, radius < rows + columns ? radius : rows + columns};
  const bool band = radius < rows || radius < columns;
  if (dims > 1) {
    subsequence ? run<4, false, false, true>(p, cost, start, stop)
    : band      ? run<4, false, true, false>(p, cost, start, stop)
                : run<4, false, false, false>(p, cost, start, stop);
  } else if (k == 2) {
    subsequence ? run<2, true, false, true>(p, cost, start, stop)
    : band      ? run<2, true, true, false>(p, cost, start, stop)
                : run<2, true, false, false>(p, cost, start, stop);
  } else {
    subsequence ? run<8, true, false, true>(p, cost, start, stop)
    : band      ? run<8, true, true, false>(p, cost, start, stop)
                : run<8, true, false, false>(p, cost, start, stop);
  }
}
