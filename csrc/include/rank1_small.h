// Small symmetric eigenproblems and the certificate of the rank-1 solver; rlkernels/rank1/reference.py explains it.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

namespace rlk::rank1 {

// Reduces symmetric a [n][n] to tridiagonal Q^T a Q by Householder reflections: diagonal d, off-diagonal e (e[i]
// between i and i + 1), and `rows` [n][n] = Q^T. `a` is destroyed. Golub and Van Loan, Matrix Computations, 8.3.1.
inline void tridiagonal(double* a, int n, double* d, double* e, double* rows) {
  std::vector<double> work(size_t(n) * 2, 0.0);
  double *w = work.data(), *beta = w + n;
  for (int k = 0; k + 2 < n; ++k) {
    double* v = a + k * n;  // row k right of the diagonal: the column to reflect, then its reflector
    double tail = 0;
    for (int i = k + 2; i < n; ++i) tail += v[i] * v[i];
    if (tail == 0) continue;
    const double length = std::sqrt(tail + v[k + 1] * v[k + 1]);
    e[k] = v[k + 1] > 0 ? -length : length;
    v[k + 1] -= e[k];
    beta[k] = 2 / (tail + v[k + 1] * v[k + 1]);
    double dot = 0;
    for (int i = k + 1; i < n; ++i) {
      double sum = 0;
      for (int j = k + 1; j < n; ++j) sum += a[i * n + j] * v[j];
      w[i] = beta[k] * sum;
      dot += w[i] * v[i];
    }
    for (int i = k + 1; i < n; ++i) w[i] -= beta[k] / 2 * dot * v[i];
    for (int i = k + 1; i < n; ++i)
      for (int j = k + 1; j < n; ++j) a[i * n + j] -= v[i] * w[j] + w[i] * v[j];
  }
  for (int i = 0; i < n; ++i) {
    d[i] = a[i * n + i];
    if (i + 1 < n && beta[i] == 0) e[i] = a[i * n + i + 1];
    for (int j = 0; j < n; ++j) rows[i * n + j] = i == j;
  }
  for (int k = n - 3; k >= 0; --k) {
    const double* v = a + k * n;
    for (int i = k + 1; i < n && beta[k] != 0; ++i) {
      double dot = 0;
      for (int j = k + 1; j < n; ++j) dot += rows[i * n + j] * v[j];
      for (int j = k + 1; j < n; ++j) rows[i * n + j] -= beta[k] * dot * v[j];
    }
  }
}

// Eigenvalues into d, by implicit QL steps with Wilkinson's shift on the tridiagonal (d, e); every rotation is applied
// to the rows of `rows` [n][n]. Bowdler, Martin, Reinsch and Wilkinson, Numer. Math. 11 (1968).
inline void implicit_ql(double* d, double* e, int n, double* rows) {
  double least = 0;  // what is lost beside the largest entry, as in the null space of a rank-deficient matrix
  for (int i = 0; i < n; ++i) least = std::max(least, 0x1p-56 * (std::fabs(d[i]) + (i + 1 < n ? std::fabs(e[i]) : 0)));
  const auto negligible = [&](int i) {
    return std::fabs(e[i]) <= std::max(least, 0x1p-53 * (std::fabs(d[i]) + std::fabs(d[i + 1])));
  };
  for (int low = 0; low < n; ++low) {
    for (int step = 0; step < 50; ++step) {
      int high = low;
      while (high + 1 < n && !negligible(high)) ++high;
      if (high == low) break;
      const double half = (d[low + 1] - d[low]) / (2 * e[low]);
      double g = d[high] - d[low] + e[low] / (half + std::copysign(std::sqrt(half * half + 1), half));
      double s = 1, c = 1, moved = 0;
      int i = high - 1;
      for (; i >= low; --i) {
        const double f = s * e[i], b = c * e[i], r = std::sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0) {  // the matrix splits here
          d[i + 1] -= moved;
          break;
        }
        s = f / r, c = g / r;
        g = d[i + 1] - moved;
        const double t = (d[i] - g) * s + 2 * c * b;
        moved = s * t;
        d[i + 1] = g + moved;
        g = c * t - b;
        double *x = rows + i * n, *y = x + n;
        for (int k = 0; k < n; ++k) {
          const double u = x[k], v = y[k];
          x[k] = c * u - s * v;
          y[k] = s * u + c * v;
        }
      }
      e[high] = 0;
      if (i >= low) continue;
      d[low] -= moved;
      e[low] = g;
    }
  }
}

// Eigenvalues (descending) and eigenvectors (columns of `vectors` [n][n]) of a symmetric matrix, which is destroyed.
inline void symmetric_eigen(std::vector<double>& a, int n, std::vector<double>& values, std::vector<double>& vectors) {
  std::vector<double> rows(size_t(n) * n), diagonal(n), next(n, 0.0);
  tridiagonal(a.data(), n, diagonal.data(), next.data(), rows.data());
  implicit_ql(diagonal.data(), next.data(), n, rows.data());
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return diagonal[i] > diagonal[j]; });
  values.resize(n);
  vectors.resize(size_t(n) * n);
  for (int j = 0; j < n; ++j) {
    values[j] = diagonal[order[j]];
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

  // What an eigenvector's coordinates along the random start are made of: for every Ritz pair, the products of its
  // coordinates in the random start and in the last block, [K][r][last].
  std::vector<double> products() const {
    const int n = int(theta.size()), r = first_end - first_begin;
    std::vector<double> out(size_t(n) * r * last);
    for (int i = 0; i < n; ++i)
      for (int a = 0; a < r; ++a)
        for (int b = 0; b < last; ++b)
          out[(i * r + a) * last + b] = ritz[(first_begin + a) * n + i] * ritz[(n - last + b) * n + i];
    return out;
  }

  // Whether the coordinates along the random start of an eigenvector with eigenvalue x are all shorter than `limit`,
  // leaving out the first `skip` Ritz pairs.
  bool hidden(const std::vector<double>& parts, double x, int skip, double limit) const {
    const int n = int(theta.size()), r = first_end - first_begin, size = r * last;
    double response[16] = {};
    for (int i = skip; i < n; ++i) {
      const double weight = 1 / (x - theta[i]);
      for (int j = 0; j < size; ++j) response[j] += weight * parts[i * size + j];
    }
    std::vector<double> square(size_t(r) * r);
    double trace = 0;
    for (int a = 0; a < r; ++a) {
      double scaled[4] = {};
      for (int c = 0; c < last; ++c)
        for (int b = 0; b < last; ++b) scaled[b] += response[a * last + c] * rest[c * last + b];
      for (int b = 0; b < r; ++b)
        for (int c = 0; c < last; ++c) square[a * r + b] += scaled[c] * response[b * last + c];
      trace += square[a * r + a];
    }
    // The largest of r eigenvalues lies between the mean and the sum of all
    if (!(trace < r * limit * limit)) return false;
    if (trace < limit * limit) return true;
    std::vector<double> values, vectors;
    symmetric_eigen(square, r, values, vectors);
    return values[0] < limit * limit;
  }

  // Upper bound for the second eigenvalue, or a negative number when there is none yet.
  double second_eigenvalue() const {
    const double top = theta[0], second = theta.size() > 1 ? std::max(theta[1], 0.0) : 0.0;
    if (top <= second) return -1;
    const std::vector<double> parts = products();
    if (theta.size() > 1 && !hidden(parts, top, 1, floor / 2)) return -1;
    double bound = -1;
    for (int step = 49; step > 0; --step) {
      const double x = second + (top - second) * step / 50;
      if (hidden(parts, x, 0, floor)) bound = x;
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
