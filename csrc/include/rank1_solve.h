// Leading singular triplets of a weight delta by block Krylov iteration; rlkernels/rank1/reference.py is the same
// algorithm in torch. Row slots are fixed by the shape and reduced in order, everything else runs on one thread:
// the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "aligned.h"
#include "philox.h"
#include "rank1.h"
#include "rank1_small.h"
#include "threads.h"

namespace rlk::rank1 {

enum class Status : int { ok = 0, zero, ill_defined, not_converged, not_finite };

struct Settings {
  double tol;
  int64_t max_passes, min_passes;  // Krylov steps
  int64_t rank;  // directions that are wanted
  uint64_t seed;
};

struct Result {
  double frobenius = 0, gap = 0, residual = 0, angle_bound = kHalfPi, changed = 0;
  int64_t passes = 1;  // Krylov steps
  Status status = Status::zero;
};

class Solver {
 public:
  Solver(const DeltaPair& pair, const Settings& settings, const Threads& threads)
      : pair_(pair), settings_(settings), threads_(threads), m_(pair.m), n_(pair.n),
        slots_(int(std::clamp<int64_t>(pair.m / 64, 1, 16))), panel_floats_(RLK_DISPATCH(rank1_panel_floats)(pair.n)),
        panels_(panel_floats_), partial_(size_t(panel_floats_) * slots_), work_(size_t(kBlock) * n_) {}

  // -> u [rank, m], v [rank, n] and sigma [rank], by descending sigma; they must hold zeros, and keep them where the
  // basis has no more directions. start [n] may be null.
  Result solve(const float* start, float* u, float* v, double* sigma) {
    start_block(start);
    Result out;
    double scale = 1;
    read(true, scale);
    const double square = total_.square;
    if (!(square >= 1e-24 && square <= 1e24) && !(square == 0 && total_.changed == 0)) {
      double exact = 0;  // squares leave float32, or something is not finite: look closely, then scale
      const double largest = RLK_DISPATCH(rank1_largest)(pair_, &exact);
      if (!(largest <= std::numeric_limits<float>::max())) return out.status = Status::not_finite, out;
      int exponent;
      std::frexp(largest, &exponent);
      scale = std::ldexp(1.0, std::clamp(-exponent, -126, 126));
      total_.square = exact;
      y_.clear(), z_.clear();
      read(false, scale);
    }
    out.frobenius = std::sqrt(total_.square);
    out.changed = double(total_.changed) / (double(m_) * double(n_));
    if (total_.changed == 0) return out;
    iterate(out, scale);
    finish(out, scale, u, v, sigma);
    return out;
  }

 private:
  // First block: the start and random columns, keyed by (seed, column, row).
  void start_block(const float* start) {
    const int width = int(std::min<int64_t>(kBlock, n_)), given = start && n_ > 1;
    randoms_ = width - given;
    for (int64_t i = 0; given && i < n_; ++i) work_[i] = start[i];
    for (int c = 0; c < randoms_; ++c)
      for (int64_t i = 0; i < n_; ++i)
        work_[(given + c) * n_ + i] = unit_interval(philox_word(settings_.seed, uint64_t(c), uint64_t(i))) - 0.5f;
    std::vector<double> least(kBlock, 0.0);
    new_columns_ = width;
    extend(gram(width), least.data());
    first_ = new_columns_ - randoms_;
    floor_ = hidden_floor(randoms_, n_);
  }

  // Y and Z of the newest columns of the basis.
  void read(bool stats, double scale) {
    const int columns = new_columns_, before = int(y_.size() / size_t(m_));
    y_.resize(size_t(before + columns) * m_);
    z_.resize(size_t(before + columns) * n_);
    float* y = y_.data() + size_t(before) * m_;
    RLK_DISPATCH(rank1_to_panels)(pair_, q_.data() + size_t(before) * n_, columns, float(scale), panels_.data());
    std::vector<DeltaStats> parts(slots_, DeltaStats{0, 0});
    const auto kernel = RLK_DISPATCH(rank1_read);
    hand_out(threads_, slots_, [&](int64_t s) {
      kernel(pair_, panels_.data(), columns, m_ * s / slots_, m_ * (s + 1) / slots_, y,
             partial_.data() + size_t(s) * panel_floats_, stats ? &parts[s] : nullptr);
    });
    RLK_DISPATCH(rank1_from_panels)(pair_, partial_.data(), slots_, columns, float(scale),
                                    z_.data() + size_t(before) * n_);
    if (!stats) return;
    total_ = {0, 0};
    for (const DeltaStats& part : parts) total_.square += part.square, total_.changed += part.changed;
  }

  int size() const { return int(q_.size() / size_t(n_)); }

  std::vector<double> gram(int k) {
    std::vector<double> out(size_t(k) * k);
    RLK_DISPATCH(rank1_gram)(work_.data(), k, n_, out.data());
    return out;
  }

  // Adds the columns of work_ to the basis, orthonormal (Cholesky QR, twice), leaving out those shorter than least.
  void extend(const std::vector<double>& square, const double* least) {
    std::vector<double> t;
    const int k = new_columns_;
    new_columns_ = cholesky_columns(square, k, least, t);
    RLK_DISPATCH(rank1_mix)(work_.data(), k, t.data(), n_);
    if (new_columns_ == 0) return;
    const std::vector<double> none(kBlock, 0.0);
    cholesky_columns(gram(new_columns_), new_columns_, none.data(), t);
    RLK_DISPATCH(rank1_mix)(work_.data(), new_columns_, t.data(), n_);
    q_.insert(q_.end(), work_.begin(), work_.begin() + size_t(new_columns_) * n_);
  }

  // Ritz pairs of the whole basis from the Gram matrix of Y.
  void ritz() {
    const int k = size(), fresh = new_columns_, old = k - fresh;
    std::vector<double> dots(size_t(k) * fresh), next(size_t(k) * k);
    RLK_DISPATCH(rank1_dots)(y_.data(), k, y_.data() + size_t(old) * m_, fresh, m_, dots.data());
    for (int a = 0; a < old; ++a)
      for (int b = 0; b < old; ++b) next[a * k + b] = gram_[a * old + b];
    for (int a = 0; a < k; ++a)
      for (int b = 0; b < fresh; ++b) next[a * k + old + b] = next[(old + b) * k + a] = dots[a * fresh + b];
    gram_ = next;
    symmetric_eigen(next, k, theta_, ritz_);
    for (double& t : theta_) t = std::max(t, 0.0);
  }

  // Coordinates of a Ritz vector in the basis.
  std::vector<double> coordinates(int column) const {
    const int k = size();
    std::vector<double> out(k);
    for (int a = 0; a < k; ++a) out[a] = ritz_[a * k + column];
    return out;
  }

  // work_ <- newest Z minus its part in the basis; returns the lengths of Z's columns.
  std::vector<double> next_block() {
    const int k = size(), fresh = new_columns_;
    const float* z = z_.data() + size_t(k - fresh) * n_;
    std::copy(z, z + size_t(fresh) * n_, work_.begin());
    std::vector<double> lengths(kBlock), square = gram(fresh), coef(size_t(k) * fresh);
    for (int b = 0; b < fresh; ++b) lengths[b] = std::sqrt(square[b * fresh + b]);
    for (int round = 0; round < 2; ++round) {
      RLK_DISPATCH(rank1_dots_mixed)(q_.data(), k, work_.data(), fresh, n_, coef.data());
      RLK_DISPATCH(rank1_project)(work_.data(), fresh, q_.data(), k, coef.data(), n_);
    }
    return lengths;
  }

  // |D^T u - sigma v| / sigma of the leading Ritz pair, from Z.
  double residual() {
    const int k = size();
    const std::vector<double> leading = coordinates(0);
    std::vector<double> image(n_), vector(n_);
    RLK_DISPATCH(rank1_combine)(z_.data(), k, leading.data(), n_, image.data());
    RLK_DISPATCH(rank1_combine)(q_.data(), k, leading.data(), n_, vector.data());
    double sum = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const double r = image[i] / theta_[0] - vector[i];
      sum += r * r;
    }
    return std::sqrt(sum);
  }

  void iterate(Result& out, double scale) {
    while (true) {
      ritz();
      std::vector<double> least = next_block();
      for (double& length : least) length *= kDrop;
      const std::vector<double> rest = gram(new_columns_);
      if (theta_[0] > 0) {
        out.residual = residual();
        out.gap = theta_.size() > 1 ? 1 - std::sqrt(theta_[1] / theta_[0]) : 1;
        out.angle_bound =
            Certificate{theta_, ritz_, rest, first_, first_ + randoms_, new_columns_, floor_}.angle_bound(out.residual);
        const bool flat = out.gap < kGapFloor && out.residual <= settings_.tol * kGapFloor;
        const bool known = flat || out.angle_bound <= settings_.tol;
        if ((known && out.passes >= settings_.min_passes) || out.passes >= settings_.max_passes) return;
      }
      extend(rest, least.data());
      if (new_columns_ == 0 || out.passes >= settings_.max_passes) return;  // the basis is invariant
      read(false, scale);
      ++out.passes;
    }
  }

  void finish(Result& out, double scale, float* u, float* v, double* sigma) {
    const int64_t found = std::min<int64_t>(settings_.rank, size());
    for (int r = 0; r < found; ++r) sigma[r] = direction(r, u + r * m_, v + r * n_) / scale;
    out.status = out.gap < kGapFloor                  ? Status::ill_defined
                 : out.angle_bound <= settings_.tol ? Status::ok
                                                    : Status::not_converged;
  }

  // Ritz vector number r; the entry of v largest in magnitude is positive -> its singular value.
  double direction(int r, float* u, float* v) {
    const double sigma = std::sqrt(theta_[r]);
    const std::vector<double> mix = coordinates(r);
    std::vector<double> right(n_), left(m_);
    RLK_DISPATCH(rank1_combine)(q_.data(), size(), mix.data(), n_, right.data());
    RLK_DISPATCH(rank1_combine)(y_.data(), size(), mix.data(), m_, left.data());
    int64_t peak = 0;
    for (int64_t i = 1; i < n_; ++i)
      if (std::fabs(right[i]) > std::fabs(right[peak])) peak = i;
    const double sign = right[peak] < 0 ? -1 : 1;
    for (int64_t i = 0; i < n_; ++i) v[i] = float(sign * right[i]);
    for (int64_t i = 0; i < m_; ++i) u[i] = sigma > 0 ? float(sign * left[i] / sigma) : 0.0f;
    return sigma;
  }

  const DeltaPair& pair_;
  const Settings& settings_;
  const Threads& threads_;
  const int64_t m_, n_;
  const int slots_;
  const int64_t panel_floats_;
  Aligned panels_, partial_;
  std::vector<float> q_, y_, z_;  // q_, z_: [columns][n]; y_: [columns][m]
  std::vector<double> work_, gram_, theta_, ritz_;
  DeltaStats total_{0, 0};
  int new_columns_ = 0, randoms_ = 0, first_ = 0;
  double floor_ = 0;
};

}  // namespace rlk::rank1
