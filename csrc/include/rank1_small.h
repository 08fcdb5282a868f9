// Small symmetric eigenproblems and the certificate of the rank-1 solver; rlkernels/rank1/reference.py explains it.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

namespace rlk::rank1 {

// Eigenvalues (descending) and eigenvectors (columns of `vectors` [n][n]) of a symmetric matrix, by cyclic Jacobi
// rotations. `a` is destroyed.
inline void symmetric_eigen(std::vector<double>& a, int n, std::vector<double>& values, std::vector<double>& vectors) {
  std::vector<double> rows(size_t(n) * n, 0.0);  // eigenvectors as rows, so that rotations run along memory
  for (int i = 0; i < n; ++i) rows[i * n + i] = 1;
  const auto rotate = [n](double* x, double* y, double c, double s) {
    for (int k = 0; k < n; ++k) {
      const double u = x[k], v = y[k];
      x[k] = c * u - s * v;
      y[k] = s * u + c * v;
    }
  };
  double scale = 0;
  for (int i = 0; i < n; ++i) scale = std::max(scale, std::fabs(a[i * n + i]));
  for (int sweep = 0; sweep < 30; ++sweep) {
    bool done = true;
    for (int p = 0; p < n; ++p) {
      for (int q = p + 1; q < n; ++q) {
        const double apq = a[p * n + q], app = a[p * n + p], aqq = a[q * n + q];
        if (std::fabs(apq) <= 1e-17 * scale) continue;
        done = false;
        const double theta = (aqq - app) / (2 * apq);
        const double t = std::copysign(1.0, theta) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        rotate(&a[p * n], &a[q * n], c, s);
        for (int k = 0; k < n; ++k) a[k * n + p] = a[p * n + k], a[k * n + q] = a[q * n + k];
        a[p * n + p] = app - t * apq;
        a[q * n + q] = aqq + t * apq;
        a[p * n + q] = a[q * n + p] = 0;
        rotate(&rows[p * n], &rows[q * n], c, s);
      }
    }
    if (done) break;
  }
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return a[i * n + i] > a[j * n + j]; });
  values.resize(n);
  vectors.resize(size_t(n) * n);
  for (int j = 0; j < n; ++j) {
    values[j] = a[order[j] * n + order[j]];
    for (int i = 0; i < n; ++i) vectors[i * n + j] = rows[order[j] * n + i];
  }
}

constexpr double kRisk = 1e-4;      // chance that the random start hides a direction from the certificate
constexpr double kDrop = 1e-5;      // a new direction this much shorter than its column was lost to rounding
constexpr double kGapFloor = 0.01;  // below this relative gap the leading direction is called ill-defined
constexpr double kEps = 0x1p-23;
constexpr double kHalfPi = 1.57079632679489661923;

// Length that the random start's coordinates of any fixed unit vector exceed, but for a chance of kRisk.
inline double hidden_floor(int random_columns, int64_t n) {
  const double k = random_columns;
  return std::sqrt(std::pow(kRisk * std::pow(2.0, k / 2) * std::tgamma(k / 2 + 1), 2 / k) / double(n));
}

struct Certificate {
  const std::vector<double>& theta;   // [K] Ritz values, descending
  const std::vector<double>& ritz;    // [K][K] Ritz coordinates, columns
  const std::vector<double>& rest;    // [k][k] Gram matrix of the residual block
  int first_begin, first_end;         // rows of `ritz` that belong to the random start
  int last;                           // rows of `ritz` that belong to the last block: its k trailing ones
  double floor;

  // Longest coordinates along the random start that an eigenvector with eigenvalue x can have, leaving out the
  // first `skip` Ritz pairs.
  double reach(double x, int skip) const {
    const int n = int(theta.size()), r = first_end - first_begin;
    double response[16] = {}, scaled[16] = {};
    for (int a = 0; a < r; ++a)
      for (int b = 0; b < last; ++b) {
        double sum = 0;
        for (int i = skip; i < n; ++i)
          sum += ritz[(first_begin + a) * n + i] * ritz[(n - last + b) * n + i] / (x - theta[i]);
        response[a * last + b] = sum;
      }
    for (int a = 0; a < r; ++a)
      for (int b = 0; b < last; ++b)
        for (int c = 0; c < last; ++c) scaled[a * last + b] += response[a * last + c] * rest[c * last + b];
    std::vector<double> square(size_t(r) * r), values, vectors;
    for (int a = 0; a < r; ++a)
      for (int b = 0; b < r; ++b)
        for (int c = 0; c < last; ++c) square[a * r + b] += scaled[a * last + c] * response[b * last + c];
    for (double& s : square)
      if (!std::isfinite(s)) return INFINITY;
    symmetric_eigen(square, r, values, vectors);
    return std::sqrt(std::max(values[0], 0.0));
  }

  // Upper bound for the second eigenvalue, or a negative number when there is none yet.
  double second_eigenvalue() const {
    const double top = theta[0], second = theta.size() > 1 ? std::max(theta[1], 0.0) : 0.0;
    if (top <= second || (theta.size() > 1 && !(reach(top, 1) < floor / 2))) return -1;
    double bound = -1;
    for (int step = 49; step > 0; --step) {
      const double x = second + (top - second) * step / 50;
      if (reach(x, 0) < floor) bound = x;
      else if (bound >= 0) break;
    }
    return bound;
  }

  double angle_bound(double residual) const {
    const double second = second_eigenvalue();
    if (second < 0) return kHalfPi;
    const double sine = (residual + 4 * kEps) / (1 - second / theta[0]);
    return std::min(kHalfPi, std::asin(std::min(1.0, sine)) + kEps);
  }
};

// T [k][kept] such that R T is orthonormal, from the Gram matrix of R [k][k] and the least lengths
// at which a column counts; columns that add nothing are left out. Row-major with row length k.
inline int cholesky_columns(const std::vector<double>& gram, int k, const double* least, std::vector<double>& t) {
  t.assign(size_t(k) * k, 0.0);
  int kept = 0;
  for (int b = 0; b < k; ++b) {
    double column[4] = {};  // coordinates of the new direction in R
    column[b] = 1;
    for (int c = 0; c < kept; ++c) {
      double dot = 0;
      for (int i = 0; i < k; ++i) dot += t[i * k + c] * gram[i * k + b];
      for (int i = 0; i < k; ++i) column[i] -= dot * t[i * k + c];
    }
    double square = 0;
    for (int i = 0; i < k; ++i)
      for (int j = 0; j < k; ++j) square += column[i] * gram[i * k + j] * column[j];
    const double length = std::sqrt(std::max(square, 0.0));
    if (!(length > least[b])) continue;
    for (int i = 0; i < k; ++i) t[i * k + kept] = column[i] / length;
    ++kept;
  }
  return kept;
}

}  // namespace rlk::rank1
