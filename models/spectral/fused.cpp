// SPDX-License-Identifier: MIT
// The spectral operator of models/spectral/spectral.py, fused for CPUs: spectra, softening and its gradient.
//
// Plain C++ with vector extensions of GCC and Clang and a C interface; models/spectral/fused.py calls it. Equations and
// names are those of spectral.py, spectrum.py and matrix_power.py, which are its reference:
//
// - decompose: Householder tridiagonalisation and implicit QL steps (Golub and Van Loan, Matrix Computations, section
//   8.3), one matrix a SIMD lane. A lane works on its own unreduced block, so lanes do not wait for each other's
//   eigenvalues. Float32 first; an example whose spectrum float32 cannot tell is decomposed again in float64.
// - soften, soften_backward: an example's tokens are copied into aligned rows, and all products run in the cache.
//
// Shapes: B examples, T tokens of width D; n = min(T, D) rows of m = max(T, D) numbers (X, the tokens transposed where
// T > D). Q holds eigenvectors in rows, eigenvalues are sorted, largest first.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 6, COLUMNS = 4;
#elif defined(__AVX__)
constexpr int BYTES = 32, ROWS = 4, COLUMNS = 3;
#else
constexpr int BYTES = 16, ROWS = 4, COLUMNS = 3;
#endif
constexpr double SMALLEST = 1e-12;  // matrix_power.SMALLEST
constexpr double MIN_RATIO = 1e-3;  // matrix_power.MIN_RATIO

template <class T> struct Simd;
template <> struct Simd<float> {
  typedef float V __attribute__((vector_size(BYTES), may_alias));
  typedef float U __attribute__((vector_size(BYTES), may_alias, aligned(4)));  // anywhere in memory
  typedef int32_t M __attribute__((vector_size(BYTES), may_alias));
  static constexpr int W = BYTES / 4;
};
template <> struct Simd<double> {
  typedef double V __attribute__((vector_size(BYTES), may_alias));
  typedef double U __attribute__((vector_size(BYTES), may_alias, aligned(8)));
  typedef int64_t M __attribute__((vector_size(BYTES), may_alias));
  static constexpr int W = BYTES / 8;
};

// Aligned rows of zeros.
template <class T> class Buffer {
 public:
  explicit Buffer(size_t size) : memory_(size + BYTES / sizeof(T)) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = reinterpret_cast<T*>((address + BYTES - 1) / BYTES * BYTES);
  }
  operator T*() { return data_; }

 private:
  std::vector<T> memory_;
  T* data_;
};

template <class T> int padded(int size) { return (size + Simd<T>::W - 1) / Simd<T>::W * Simd<T>::W; }

// ---- products of one example, rows padded to whole vectors ----

template <class T, int SIZE> struct Sum {
  typedef T V __attribute__((vector_size(SIZE)));
  static inline T of(V v) {
    typedef typename Sum<T, SIZE / 2>::V Half;
    Half low, high;
    memcpy(&low, &v, SIZE / 2);
    memcpy(&high, reinterpret_cast<const char*>(&v) + SIZE / 2, SIZE / 2);
    return Sum<T, SIZE / 2>::of(low + high);
  }
};
template <> struct Sum<float, 16> {
  typedef float V __attribute__((vector_size(16)));
  static inline float of(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
};
template <> struct Sum<double, 16> {
  typedef double V __attribute__((vector_size(16)));
  static inline double of(V v) { return v[0] + v[1]; }
};

// out[i][j] = sum_k A(i, k) B[k][j] (+ the same of A2, B2): A(i, k) = A[i * si + k * sk], rows of B and out hold ld.
template <class T, int R, int C, bool TWO>
inline void tile(const T* const* a, int sk, const T* B, int inner, const T* const* a2, int sk2, const T* B2, int inner2,
                 int ld, T* const* out, int rows) {
  typedef typename Simd<T>::V V;
  typedef typename Simd<T>::U U;
  constexpr int W = Simd<T>::W;
  V acc[R][C] = {};
  for (int k = 0; k < inner; k++) {
    V b[C];
    for (int c = 0; c < C; c++) b[c] = *(const U*)(B + (size_t)k * ld + c * W);
    for (int r = 0; r < R; r++) {
      const T x = a[r][(size_t)k * sk];
      for (int c = 0; c < C; c++) acc[r][c] += x * b[c];
    }
  }
  if (TWO)
    for (int k = 0; k < inner2; k++) {
      V b[C];
      for (int c = 0; c < C; c++) b[c] = *(const U*)(B2 + (size_t)k * ld + c * W);
      for (int r = 0; r < R; r++) {
        const T x = a2[r][(size_t)k * sk2];
        for (int c = 0; c < C; c++) acc[r][c] += x * b[c];
      }
    }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < C; c++) *(U*)(out[r] + c * W) = acc[r][c];
}

template <class T, bool TWO = false>
void product(const T* A, int si, int sk, const T* B, int inner, int n, int ld, T* out, const T* A2 = nullptr,
             int si2 = 0, int sk2 = 0, const T* B2 = nullptr, int inner2 = 0) {
  constexpr int W = Simd<T>::W;
  for (int j = 0; j < ld;) {
    const int left = (ld - j) / W, c = left >= COLUMNS ? COLUMNS : left;
    for (int i = 0; i < n; i += ROWS) {
      const T *a[ROWS], *a2[ROWS];
      T* o[ROWS];
      for (int r = 0; r < ROWS; r++) {
        const size_t row = std::min(i + r, n - 1);
        a[r] = A + row * si;
        a2[r] = TWO ? A2 + row * si2 : nullptr;
        o[r] = out + row * ld + j;
      }
      const int rows = std::min(ROWS, n - i);
      const T* b2 = TWO ? B2 + j : nullptr;
      if (c == COLUMNS)
        tile<T, ROWS, COLUMNS, TWO>(a, sk, B + j, inner, a2, sk2, b2, inner2, ld, o, rows);
      else if (c == 2)
        tile<T, ROWS, 2, TWO>(a, sk, B + j, inner, a2, sk2, b2, inner2, ld, o, rows);
      else if (c == 3)
        tile<T, ROWS, 3, TWO>(a, sk, B + j, inner, a2, sk2, b2, inner2, ld, o, rows);
      else
        tile<T, ROWS, 1, TWO>(a, sk, B + j, inner, a2, sk2, b2, inner2, ld, o, rows);
    }
    j += c * W;
  }
}

// out[i][j] = <A_i, B_j> over rows of ld numbers; symmetric: A is B, and one half is computed.
template <class T> void dots(const T* A, const T* B, int n, int ld, T* out, int ldo, bool symmetric) {
  typedef typename Simd<T>::V V;
  typedef typename Simd<T>::U U;
  constexpr int W = Simd<T>::W, R = 4, C = BYTES == 64 ? 4 : 3;
  for (int i = 0; i < n; i += R)
    for (int j = symmetric ? i / C * C : 0; j < n; j += C) {
      V acc[R][C] = {};
      const T *a[R], *b[C];
      for (int r = 0; r < R; r++) a[r] = A + (size_t)std::min(i + r, n - 1) * ld;
      for (int c = 0; c < C; c++) b[c] = B + (size_t)std::min(j + c, n - 1) * ld;
      for (int k = 0; k < ld; k += W) {
        V y[C];
        for (int c = 0; c < C; c++) y[c] = *(const U*)(b[c] + k);
        for (int r = 0; r < R; r++) {
          const V x = *(const U*)(a[r] + k);
          for (int c = 0; c < C; c++) acc[r][c] += x * y[c];
        }
      }
      for (int r = 0; r < R && i + r < n; r++)
        for (int c = 0; c < C && j + c < n; c++) {
          const T s = Sum<T, BYTES>::of(acc[r][c]);
          out[(i + r) * ldo + j + c] = s;
          if (symmetric) out[(j + c) * ldo + i + r] = s;
        }
    }
}

// Tokens (T, D) as rows of ld numbers, padded: in place where they are that, else copied into X.
template <class T> void load(const float* tokens, int n, int m, bool transposed, T* X, int ld);
inline const float* rows_of(const float* tokens, int n, int m, bool transposed, float* X, int ld) {
  if (!transposed && m == ld) return tokens;
  load<float>(tokens, n, m, transposed, X, ld);
  return X;
}

// Tokens (T, D) into rows of X (n, ld), and back.
template <class T> void load(const float* tokens, int n, int m, bool transposed, T* X, int ld) {
  if (transposed) {
    for (int k = 0; k < m; k++)
      for (int i = 0; i < n; i++) X[(size_t)i * ld + k] = tokens[(size_t)k * n + i];
    return;
  }
  for (int i = 0; i < n; i++)
    for (int k = 0; k < m; k++) X[(size_t)i * ld + k] = tokens[(size_t)i * m + k];
}

void store(const float* X, int n, int m, bool transposed, float* tokens, int ld) {
  if (transposed) {
    for (int k = 0; k < m; k++)
      for (int i = 0; i < n; i++) tokens[(size_t)k * n + i] = X[(size_t)i * ld + k];
    return;
  }
  for (int i = 0; i < n; i++) memcpy(tokens + (size_t)i * m, X + (size_t)i * ld, sizeof(float) * m);
}

// ---- spectra, one matrix a lane ----

template <class T> inline typename Simd<T>::V root(typename Simd<T>::V a) {
  typename Simd<T>::V r;
  for (int i = 0; i < Simd<T>::W; i++) r[i] = std::sqrt(a[i]);
  return r;
}
template <class V> inline V magnitude(V a) { return a < 0 ? -a : a; }
template <class M> inline bool any(M mask) {
  int64_t words[BYTES / 8], all = 0;
  memcpy(words, &mask, BYTES);
  for (int64_t word : words) all |= word;
  return all != 0;
}

// The smallest pivot of a Cholesky factorisation bounds the smallest eigenvalue from above. A is destroyed.
template <class T> typename Simd<T>::V smallest_pivot(typename Simd<T>::V* A, int n) {
  typedef typename Simd<T>::V V;
  V least = V{} + std::numeric_limits<T>::max();
  for (int k = 0; k < n; k++) {
    const V pivot = A[k * n + k];
    least = pivot < least ? pivot : least;
    const V inverse = 1 / (pivot > 0 ? pivot : V{} + 1);
    for (int i = k + 1; i < n; i++) {
      const V factor = A[k * n + i] * inverse;
      for (int j = i; j < n; j++) A[i * n + j] -= factor * A[k * n + j];
    }
  }
  return least;
}

// A (n, n), symmetric, becomes tridiagonal: diagonal d, beside it e; Q gets the product of the reflectors, in rows.
template <class T>
void tridiagonalize(typename Simd<T>::V* A, typename Simd<T>::V* Q, typename Simd<T>::V* d, typename Simd<T>::V* e,
                    typename Simd<T>::V* v, typename Simd<T>::V* p, typename Simd<T>::V* beta, int n) {
  typedef typename Simd<T>::V V;
  for (int k = 0; k + 2 < n; k++) {
    V square{};
    for (int i = k + 1; i < n; i++) square += A[k * n + i] * A[k * n + i];
    const V first = A[k * n + k + 1], norm = root<T>(square), alpha = first > 0 ? -norm : norm;
    for (int i = k + 1; i < n; i++) v[i] = A[k * n + i];
    v[k + 1] -= alpha;
    const V length = 2 * (square + magnitude(first) * norm);
    const V b = length > std::numeric_limits<T>::min() ? 2 / length : V{};
    beta[k] = b;
    e[k] = alpha;
    V along{};
    int i = k + 1;
    for (; i + 3 < n; i += 4) {
      V s0{}, s1{}, s2{}, s3{};
      const V *a0 = A + i * n, *a1 = a0 + n, *a2 = a1 + n, *a3 = a2 + n;
      for (int j = k + 1; j < n; j++) s0 += a0[j] * v[j], s1 += a1[j] * v[j], s2 += a2[j] * v[j], s3 += a3[j] * v[j];
      p[i] = b * s0, p[i + 1] = b * s1, p[i + 2] = b * s2, p[i + 3] = b * s3;
      along += p[i] * v[i] + p[i + 1] * v[i + 1] + p[i + 2] * v[i + 2] + p[i + 3] * v[i + 3];
    }
    for (; i < n; i++) {
      V s{};
      for (int j = k + 1; j < n; j++) s += A[i * n + j] * v[j];
      p[i] = b * s;
      along += p[i] * v[i];
    }
    along *= b * T(0.5);
    for (i = k + 1; i < n; i++) p[i] -= along * v[i];
    i = k + 1;
    for (; i + 3 < n; i += 4) {
      const V v0 = v[i], v1 = v[i + 1], v2 = v[i + 2], v3 = v[i + 3];
      const V p0 = p[i], p1 = p[i + 1], p2 = p[i + 2], p3 = p[i + 3];
      V *a0 = A + i * n, *a1 = a0 + n, *a2 = a1 + n, *a3 = a2 + n;
      for (int j = k + 1; j < n; j++) {
        const V pj = p[j], vj = v[j];
        a0[j] -= v0 * pj + p0 * vj, a1[j] -= v1 * pj + p1 * vj;
        a2[j] -= v2 * pj + p2 * vj, a3[j] -= v3 * pj + p3 * vj;
      }
    }
    for (; i < n; i++)
      for (int j = k + 1; j < n; j++) A[i * n + j] -= v[i] * p[j] + p[i] * v[j];
    for (i = k + 1; i < n; i++) A[k * n + i] = v[i];
  }
  for (int i = 0; i < n; i++) d[i] = A[i * n + i];
  e[n - 1] = V{};
  if (n > 1) e[n - 2] = A[(n - 2) * n + n - 1];
  for (int i = 0; i < n * n; i++) Q[i] = V{};
  for (int i = 0; i < n; i++) Q[i * n + i] = V{} + 1;
  for (int k = n - 3; k >= 0; k--) {
    const V* w = A + k * n;
    int r = k + 1;
    for (; r + 3 < n; r += 4) {
      V *q0 = Q + r * n, *q1 = q0 + n, *q2 = q1 + n, *q3 = q2 + n, s0{}, s1{}, s2{}, s3{};
      for (int j = k + 1; j < n; j++) s0 += q0[j] * w[j], s1 += q1[j] * w[j], s2 += q2[j] * w[j], s3 += q3[j] * w[j];
      s0 *= beta[k], s1 *= beta[k], s2 *= beta[k], s3 *= beta[k];
      for (int j = k + 1; j < n; j++) q0[j] -= s0 * w[j], q1[j] -= s1 * w[j], q2[j] -= s2 * w[j], q3[j] -= s3 * w[j];
    }
    for (; r < n; r++) {
      V s{};
      for (int j = k + 1; j < n; j++) s += Q[r * n + j] * w[j];
      s *= beta[k];
      for (int j = k + 1; j < n; j++) Q[r * n + j] -= s * w[j];
    }
  }
}

// Implicit QL steps until e is 0: d becomes the eigenvalues, rows of Q the eigenvectors. Returns whether all converged.
template <class T>
bool iterate(typename Simd<T>::V* d, typename Simd<T>::V* e, typename Simd<T>::V* Q, typename Simd<T>::V* cosines,
             typename Simd<T>::V* sines, int n) {
  typedef typename Simd<T>::V V;
  typedef typename Simd<T>::M M;
  const T eps = std::numeric_limits<T>::epsilon() / 2;
  const V one = V{} + 1;
  for (int step = 0; step < 40 * n; step++) {
    // The unreduced block with the smallest number, of each lane: from `low` to `high`.
    V low = V{} - 1, high{}, seen = V{} + T(n - 1), d_seen = d[n - 1], d_low{}, d_next{}, e_low = one, d_high{};
    for (int i = n - 2; i >= 0; i--) {
      const M small = magnitude(e[i]) <= eps * (magnitude(d[i]) + magnitude(d[i + 1])) + eps * T(1e-4);
      low = small ? low : V{} + T(i);
      high = small ? high : seen;
      d_high = small ? d_high : d_seen;
      d_low = small ? d_low : d[i];
      d_next = small ? d_next : d[i + 1];
      e_low = small ? e_low : e[i];
      seen = small ? V{} + T(i) : seen;
      d_seen = small ? d[i] : d_seen;
    }
    M alive = low >= 0;
    if (!any(alive)) return true;
    int top = 0, bottom = n;
    for (int lane = 0; lane < Simd<T>::W; lane++)
      if (low[lane] >= 0) top = std::max(top, (int)high[lane]), bottom = std::min(bottom, (int)low[lane]);
    V g = (d_next - d_low) / (2 * e_low), r = root<T>(g * g + 1);
    g = d_high - d_low + e_low / (g + (g < 0 ? -r : r));
    V s = one, c = one, p{};
    for (int i = top - 1; i >= bottom; i--) {
      const V place = V{} + T(i);
      const M on = alive & (place < high) & (place >= low);
      const V f = s * e[i], b = c * e[i];
      r = root<T>(f * f + g * g);
      const M fine = on & (r > 0), stuck = on & ~(r > 0);
      const V inverse = 1 / (r > 0 ? r : one);
      const V s1 = f * inverse, c1 = g * inverse;
      e[i + 1] = on ? r : e[i + 1];
      const V shifted = d[i + 1] - p, t = (d[i] - shifted) * s1 + 2 * c1 * b, moved = s1 * t;
      d[i + 1] = fine ? shifted + moved : (stuck ? shifted : d[i + 1]);
      g = fine ? c1 * t - b : g;
      p = fine ? moved : p;
      s = fine ? s1 : s;
      c = fine ? c1 : c;
      cosines[i] = fine ? c1 : one;
      sines[i] = fine ? s1 : V{};
      alive &= ~stuck;
    }
    for (int i = bottom; i <= top; i++) {
      const V place = V{} + T(i);
      const M first = alive & (place == low);
      d[i] = first ? d[i] - p : d[i];
      e[i] = first ? g : e[i];
      e[i] = ((low >= 0) & (place == high)) ? V{} : e[i];
    }
    constexpr int K = 4;
    int k = 0;
    for (; k + K <= n; k += K) {
      V h[K];
      for (int x = 0; x < K; x++) h[x] = Q[top * n + k + x];
      for (int i = top - 1; i >= bottom; i--) {
        const V ci = cosines[i], si = sines[i];
        V *here = Q + i * n + k, *above = here + n;
        for (int x = 0; x < K; x++) {
          const V a = here[x];
          above[x] = si * a + ci * h[x];
          h[x] = ci * a - si * h[x];
        }
      }
      for (int x = 0; x < K; x++) Q[bottom * n + k + x] = h[x];
    }
    for (; k < n; k++) {
      V h = Q[top * n + k];
      for (int i = top - 1; i >= bottom; i--) {
        const V a = Q[i * n + k];
        Q[(i + 1) * n + k] = sines[i] * a + cosines[i] * h;
        h = cosines[i] * a - sines[i] * h;
      }
      Q[bottom * n + k] = h;
    }
  }
  return false;
}

// Decomposes examples in lanes. Returns false for a group that did not converge.
template <class T> class Solver {
  typedef typename Simd<T>::V V;

 public:
  static constexpr int LANES = Simd<T>::W;
  explicit Solver(int n)
      : n_(n), A_(LANES * n * n), copy_(LANES * n * n), Q_(LANES * n * n), work_(LANES * 7 * n), scale_(LANES) {}

  // One lane's Gram matrix, scaled by a power of two so that its largest diagonal entry is about 1.
  // Returns whether it is finite; the identity takes the place of one that is not.
  bool set(int lane, const T* gram, int ld) {
    T largest = 0;
    bool finite = true;
    for (int i = 0; i < n_; i++) {
      largest = std::max(largest, gram[i * ld + i]);
      for (int j = 0; j < n_; j++) finite &= std::isfinite(gram[i * ld + j]);
    }
    int exponent = 0;
    if (finite && largest > 0) std::frexp(largest, &exponent);
    const T factor = std::ldexp(T(1), -exponent);
    T* a = A_;
    for (int i = 0; i < n_; i++)
      for (int j = 0; j < n_; j++)
        a[(i * n_ + j) * LANES + lane] = finite ? gram[i * ld + j] * factor : T(i == j);
    scale_[lane] = std::ldexp(T(1), exponent);
    return finite;
  }

  // Whether a lane's smallest eigenvalue may be above MIN_RATIO times the largest.
  void check(bool* may) {
    memcpy(copy_, A_, sizeof(V) * n_ * n_);
    const V least = smallest_pivot<T>((V*)(T*)copy_, n_);
    const T* a = A_;
    for (int lane = 0; lane < LANES; lane++) {
      T largest = 0;
      for (int i = 0; i < n_; i++) largest = std::max(largest, a[(i * n_ + i) * LANES + lane]);
      may[lane] = least[lane] > T(MIN_RATIO) * largest;
    }
  }

  bool solve() {
    V* work = (V*)(T*)work_;
    V *d = work, *e = d + n_, *v = e + n_, *p = v + n_, *beta = p + n_, *c = beta + n_, *s = c + n_;
    tridiagonalize<T>((V*)(T*)A_, (V*)(T*)Q_, d, e, v, p, beta, n_);
    return iterate<T>(d, e, (V*)(T*)Q_, c, s, n_);
  }

  // Writes a lane's eigenvalues, largest first, and its eigenvectors in rows.
  template <class O> void get(int lane, O* values, O* vectors) {
    const T *d = work_, *q = Q_;
    std::vector<int> order(n_);
    for (int i = 0; i < n_; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int i, int j) { return d[i * LANES + lane] > d[j * LANES + lane]; });
    for (int k = 0; k < n_; k++) {
      values[k] = (O)std::max(d[order[k] * LANES + lane] * scale_[lane], T(0));
      for (int i = 0; i < n_; i++) vectors[k * n_ + i] = (O)q[(order[k] * n_ + i) * LANES + lane];
    }
  }

  bool is_narrow(int lane) const {
    const T* d = const_cast<Solver*>(this)->work_;
    T least = d[lane], most = d[lane];
    for (int i = 1; i < n_; i++) {
      least = std::min(least, d[i * LANES + lane]);
      most = std::max(most, d[i * LANES + lane]);
    }
    return least > T(MIN_RATIO) * most;
  }

 private:
  int n_;
  Buffer<T> A_, copy_, Q_, work_;
  Buffer<T> scale_;
};

double floor_of(double largest, double floor) { return std::max(floor * largest, SMALLEST); }

template <class T>
void soften_examples(const float* tokens, int64_t batch, int n, int m, bool transposed, const T* values, const T* vectors,
                     double exponent, double floor, float* power, float* softened) {
  const int ld = padded<float>(m), lq = padded<T>(n);
  Buffer<float> X((size_t)n * ld), Y((size_t)n * ld);
  Buffer<T> Q((size_t)n * lq), S((size_t)n * lq), P((size_t)n * lq);
  for (int64_t b = 0; b < batch; b++) {
    const T *lambda = values + b * n, *q = vectors + b * n * n;
    const double lowest = floor_of(lambda[0], floor);
    for (int k = 0; k < n; k++) {
      const T factor = (T)std::pow(std::max((double)lambda[k], lowest), exponent);
      for (int i = 0; i < n; i++) Q[k * lq + i] = q[k * n + i], S[k * lq + i] = factor * q[k * n + i];
    }
    product<T>(S, 1, lq, Q, n, n, lq, P);
    float* own = power + b * n * n;
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) own[i * n + j] = (float)P[i * lq + j];
    const float* x = rows_of(tokens + b * n * m, n, m, transposed, X, ld);
    const bool in_place = x != X;
    product<float>(own, n, 1, x, n, n, ld, in_place ? softened + b * n * m : Y);
    if (!in_place) store(Y, n, m, transposed, softened + b * n * m, ld);
  }
}

// K of matrix_power.divided_differences, times S, into mixed.
template <class T>
void divided_differences(const T* lambda, const double* raised, const double* logs, const double* powers,
                         const double* halves, double exponent, bool floored, const T* inner, int ld, int n, T* mixed) {
  const double curve = (exponent * exponent - 1) / 24;
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) {
      const double gap = logs[i] - logs[j], near = exponent * halves[i] * halves[j] * (1 + curve * gap * gap);
      const bool close = gap < 1e-3 && gap > -1e-3;
      const double distance = close ? 1.0 : raised[i] - raised[j];
      const double far = (powers[i] - powers[j]) / distance;
      mixed[i * ld + j] = (T)(close ? near : far) * (inner[i * ld + j] + inner[j * ld + i]);
    }
    if (floored)
      for (int j = 0; j < n; j++) {
        const double distance = (double)lambda[i] - (double)lambda[j];
        const double part = distance == 0 ? double(lambda[i] >= raised[i]) : (raised[i] - raised[j]) / distance;
        mixed[i * ld + j] *= (T)part;
      }
  }
}

template <class T>
double soften_gradient(const float* grad, const float* tokens, int64_t batch, int n, int m, bool transposed,
                       const T* values, const T* vectors, const float* power, const T* along, double exponent,
                       double floor, float* out) {
  const int ld = padded<float>(m), lq = padded<T>(n);
  Buffer<float> X((size_t)n * ld), G((size_t)n * ld), dX((size_t)n * ld), C((size_t)n * n), gram((size_t)n * n);
  Buffer<T> Q((size_t)n * lq), Qt((size_t)n * lq), M((size_t)n * lq), U((size_t)n * lq), N((size_t)n * lq);
  std::vector<double> raised(n), logs(n), powers(n), halves(n);
  double total = 0;
  for (int64_t b = 0; b < batch; b++) {
    const float* x = rows_of(tokens + b * n * m, n, m, transposed, X, ld);
    const float* g = rows_of(grad + b * n * m, n, m, transposed, G, ld);
    const bool in_place = x != X;
    dots<float>(g, x, n, ld, gram, n, false);
    const T *lambda = values + b * n, *q = vectors + b * n * n;
    for (int k = 0; k < n; k++)
      for (int i = 0; i < n; i++) {
        Q[k * lq + i] = Qt[i * lq + k] = q[k * n + i];
        M[k * lq + i] = gram[k * n + i];
      }
    product<T>(Q, lq, 1, M, n, n, lq, U);
    product<T>(U, lq, 1, Qt, n, n, lq, N);
    const double lowest = floor_of(lambda[0], floor);
    double slope = 0, moved = 0;
    bool floored = false;
    for (int k = 0; k < n; k++) {
      raised[k] = std::max((double)lambda[k], lowest);
      logs[k] = std::log(raised[k]);
      powers[k] = std::exp(exponent * logs[k]);
      halves[k] = std::exp(0.5 * (exponent - 1) * logs[k]);
      const double share = N[k * lq + k] * powers[k];
      slope += share * logs[k];
      if (lambda[k] < raised[k]) {
        floored = true;
        if (floor * lambda[0] > SMALLEST) moved += 2 * exponent * share;
      }
    }
    total += slope;
    divided_differences<T>(lambda, raised.data(), logs.data(), powers.data(), halves.data(), exponent, floored, N, lq,
                           n, M);
    for (int k = 0; k < n; k++) M[k * lq + k] += along[b * n + k];
    M[0] += (T)(moved / std::max((double)lambda[0], SMALLEST));
    product<T>(M, lq, 1, Q, n, n, lq, U);
    product<T>(Q, 1, lq, U, n, n, lq, N);
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) C[i * n + j] = (float)N[i * lq + j];
    const float* own = power + b * n * n;
    float* target = in_place ? out + b * n * m : dX;
    product<float, true>(own, n, 1, g, n, n, ld, target, C, n, 1, x, n);
    if (!in_place) store(dX, n, m, transposed, out + b * n * m, ld);
  }
  return total;
}

}  // namespace

extern "C" {

// Eigenvalues and eigenvectors (in rows) of X Xᵀ. `narrow` (B) says which examples float32 was enough for; those are
// in values and vectors, the others in the wide ones, whose place `wide` (B) names. Returns the number of wide
// examples, at most `room`: more than that is -1, with nothing to be read; -2 where an iteration did not converge.
int64_t fullrank_decompose(const float* tokens, int64_t batch, int n, int m, int transposed, float* values,
                           float* vectors, uint8_t* narrow) {
  const int ld = padded<float>(m);
  constexpr int LANES = Solver<float>::LANES;
  Buffer<float> X((size_t)n * ld), gram((size_t)n * n);
  Solver<float> solver(n);
  int64_t num_wide = 0;
  for (int64_t first = 0; first < batch; first += LANES) {
    bool may[LANES];
    bool finite[LANES];
    for (int lane = 0; lane < LANES; lane++) {
      const int64_t b = std::min(first + lane, batch - 1);
      const float* x = rows_of(tokens + b * n * m, n, m, transposed != 0, X, ld);
      dots<float>(x, x, n, ld, gram, n, true);
      finite[lane] = solver.set(lane, gram, n);
    }
    solver.check(may);
    bool useful = false;
    for (int lane = 0; lane < LANES; lane++) useful |= may[lane] &= finite[lane];
    const bool converged = useful && solver.solve();
    for (int lane = 0; lane < LANES && first + lane < batch; lane++) {
      const int64_t b = first + lane;
      narrow[b] = converged && may[lane] && solver.is_narrow(lane);
      if (narrow[b])
        solver.get(lane, values + b * n, vectors + b * n * n);
      else
        num_wide++;
    }
  }
  return num_wide;
}

// The same in float64, of the examples that are not `narrow`; narrow ones are left alone. Returns 0, or -1 where an
// iteration did not converge.
int64_t fullrank_decompose_wide(const float* tokens, int64_t batch, int n, int m, int transposed, double* values,
                                double* vectors, const uint8_t* narrow) {
  const int ld = padded<double>(m);
  constexpr int LANES = Solver<double>::LANES;
  Buffer<double> X((size_t)n * ld), gram((size_t)n * n);
  Solver<double> solver(n);
  std::vector<int64_t> wanted;
  for (int64_t b = 0; b < batch; b++)
    if (!narrow[b]) wanted.push_back(b);
  for (size_t first = 0; first < wanted.size(); first += LANES) {
    for (int lane = 0; lane < LANES; lane++) {
      const int64_t b = wanted[std::min(first + lane, wanted.size() - 1)];
      load<double>(tokens + b * n * m, n, m, transposed != 0, X, ld);
      dots<double>(X, X, n, ld, gram, n, true);
      solver.set(lane, gram, n);
    }
    if (!solver.solve()) return -1;
    for (int lane = 0; lane < LANES && first + lane < wanted.size(); lane++) {
      const int64_t b = wanted[first + lane];
      solver.get(lane, values + b * n, vectors + b * n * n);
    }
  }
  return 0;
}

// Softened tokens and the power of the Gram matrix (B, n, n); wide: values and vectors are float64.
void fullrank_soften(const float* tokens, int64_t batch, int n, int m, int transposed, int wide, const void* values,
                     const void* vectors, double exponent, double floor, float* power, float* softened) {
  if (wide)
    soften_examples<double>(tokens, batch, n, m, transposed != 0, (const double*)values, (const double*)vectors, exponent,
                            floor, power, softened);
  else
    soften_examples<float>(tokens, batch, n, m, transposed != 0, (const float*)values, (const float*)vectors, exponent,
                           floor, power, softened);
}

// The tokens' gradient from that of the softened tokens and `along` (B, n), as matrix_power_backward takes it. Returns
// the gradient of the exponent.
double fullrank_soften_backward(const float* grad, const float* tokens, int64_t batch, int n, int m, int transposed,
                                int wide, const void* values, const void* vectors, const float* power,
                                const void* along, double exponent, double floor, float* out) {
  if (wide)
    return soften_gradient<double>(grad, tokens, batch, n, m, transposed != 0, (const double*)values,
                                   (const double*)vectors, power, (const double*)along, exponent, floor, out);
  return soften_gradient<float>(grad, tokens, batch, n, m, transposed != 0, (const float*)values, (const float*)vectors,
                                power, (const float*)along, exponent, floor, out);
}

}  // extern "C"
