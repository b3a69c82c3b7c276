// One tile of keys and values for some rows of queries: scores, softmax and the weighted sum of values.
// Included by paged_attention.cpp; not a translation unit by itself.
//
// A row is one head of one query. It goes through the same operations in the same order whatever other rows are computed with
// it: scores are one chain of fused products over head_dim, and values are added up one position after the other.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "kv_cache.h"
#include "simd.cpp"

namespace {

constexpr int TILE = 2 * LANES, CHUNK = 2 * LANES;  // positions taken together; dimensions of a value taken together
#define ALWAYS_INLINE __attribute__((always_inline)) inline  // or a call in the midst of it would spill all sums
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int BLOCK_ROWS = 6;
#if defined(__AVX512F__)
constexpr int KEY_VECTORS = 2, VALUE_VECTORS = 4;  // taken together: sums, these and a weight fill the 32 registers
#else
constexpr int KEY_VECTORS = 1, VALUE_VECTORS = 1;  // in two registers each, of 16
#endif

// Where the two vectors of positions of a tile lie, for one KV head. A vector that nobody sees lies where the other does.
template <typename T> struct Tile {
  const T *keys[2], *values[2];
  const char *key_scales[2], *value_scales[2];  // int8 only
  int64_t key_stride;                           // from one dimension of the keys, or pair of them, to the next
};

// What is the same for all rows of a call.
struct Sizes {
  int64_t head_dim, width, query_stride;  // width: head_dim rounded up to whole chunks
  float scale, soft_cap;
};

// What is known of a row: the values added up so far, `width` of them in the order of the chunks' vectors; the sum of the
// weights, lane by lane; the largest score.
inline int64_t state_stride(int64_t width) { return width + 2 * LANES; }

inline vf even(vu pairs) { return (vf)(pairs << 16); }
inline vf odd(vu pairs) { return (vf)(pairs & 0xffff0000u); }

inline vu load_pairs(const uint16_t* p) { return load_wide((const uint32_t*)p); }
inline vu load_pairs(const uint16_t* p, int64_t num_values) {
#if defined(__AVX512BW__)
  return (vu)_mm512_maskz_loadu_epi16((1u << num_values) - 1, p);
#else
  uint16_t values[CHUNK] = {};
  std::memcpy(values, p, num_values * sizeof *p);
  return load_pairs(values);
#endif
}

// N vectors of a value, of which `left` dimensions are there: one of a chunk, which ODD tells, or whole chunks. In bfloat16
// a chunk is its even dimensions, then its odd ones: half the work of widening in order.
template <int N, bool ODD, typename T> inline void load_value(const T* p, int64_t left, vf* to) {
  if constexpr (N == 1 && ODD) {
    to[0] = left > LANES ? load_upto(p + LANES, left - LANES) : vf{};
  } else {
    to[0] = load_upto(p, left);
    if constexpr (N > 1) to[1] = left > LANES ? load_upto(p + LANES, left - LANES) : vf{};
    if constexpr (N > 2) load_value<N - 2, false>(p + CHUNK, left - CHUNK, to + 2);
  }
}
template <int N, bool ODD> inline void load_value(const uint16_t* p, int64_t left, vf* to) {
  const vu pairs = left >= CHUNK ? load_pairs(p) : load_pairs(p, left);
  if constexpr (N == 1) {
    to[0] = ODD ? odd(pairs) : even(pairs);
  } else {
    to[0] = even(pairs), to[1] = odd(pairs);
    if constexpr (N > 2) load_value<N - 2, false>(p + CHUNK, left - CHUNK, to + 2);
  }
}

template <typename T> inline void in_order(const T*, vf&, vf&) {}
inline void in_order(const uint16_t*, vf& a, vf& b) {
  const Two<vf> both = interleaved(a, b);
  a = both.first, b = both.second;
}

// How keys of a type meet queries of a type. Float32 keys and int8 ones, one dimension at a time:
template <typename T> struct SingleKeys {
  typedef T Value;
  typedef float Query;
  typedef vf Keys;
  static Keys load_keys(const T* p) { return load(p); }
  static vf add(const float* query, vf keys, vf sum) { return fma(splat(*query), keys, sum); }
};

// bfloat16 keys, a pair of dimensions at a time, with float32 queries:
struct WidenedKeys {
  typedef uint16_t Value;
  typedef float Query;
  struct Keys { vf even, odd; };
  static Keys load_keys(const uint16_t* p) {
    const vu pairs = load_pairs(p);
    return {even(pairs), odd(pairs)};
  }
  static vf add(const float* query, const Keys& keys, vf sum) {
    return fma(splat(query[1]), keys.odd, fma(splat(query[0]), keys.even, sum));
  }
};

// and with bfloat16 queries, where the CPU multiplies such pairs.
#if defined(__AVX512BF16__)
struct PairedKeys {
  typedef uint16_t Value;
  typedef uint16_t Query;
  typedef __m512bh Keys;
  static Keys load_keys(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static vf add(const uint16_t* query, Keys keys, vf sum) {
    int32_t pair;
    std::memcpy(&pair, query, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), keys);
  }
};
#else
typedef WidenedKeys PairedKeys;
#endif

template <typename T> inline void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 1);
  asm volatile("");  // or GCC may take the calling function for one without effect, and drop it
}

// sum[r][v] = query r · the keys of vector v, for N vectors from FIRST on. On the way, asks for those of the tile after this one.
template <typename Kind, int R, int FIRST, int N>
ALWAYS_INLINE void scores(const Sizes& s, const typename Kind::Query* query, const Tile<typename Kind::Value>& tile,
                          const Tile<typename Kind::Value>& ahead, vf (*sum)[2]) {
  typedef typename Kind::Value T;
  constexpr int together = KvCache<T>::TOGETHER, line = 64 / (LANES * together * int(sizeof(T)));  // dimensions that fill one
  const T *keys[N], *next[N];
  for (int v = 0; v < N; v++) keys[v] = tile.keys[FIRST + v], next[v] = ahead.keys[FIRST + v];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) sum[r][FIRST + v] = vf{};
  for (int64_t d = 0; d < s.head_dim; d += together) {
    typename Kind::Keys k[N];
    for (int v = 0; v < N; v++) k[v] = Kind::load_keys(keys[v]);
    if (line == 1 || d % line == 0)
      for (int v = 0; v < N; v++) prefetch(next[v]);
    for (int r = 0; r < R; r++) {
      const auto* at = query + r * s.query_stride + d;
      for (int v = 0; v < N; v++) sum[r][FIRST + v] = Kind::add(at, k[v], sum[r][FIRST + v]);
    }
    for (int v = 0; v < N; v++) keys[v] += tile.key_stride, next[v] += tile.key_stride;
  }
}

template <typename Kind, int R>
ALWAYS_INLINE void scores(const Sizes& s, const typename Kind::Query* query, const Tile<typename Kind::Value>& tile,
                          const Tile<typename Kind::Value>& ahead, vf (*sum)[2]) {
  if constexpr (KvCache<typename Kind::Value>::SCALED)
    for (int v = 0; v < 2; v++) prefetch(ahead.key_scales[v]), prefetch(ahead.value_scales[v]);
  scores<Kind, R, 0, KEY_VECTORS>(s, query, tile, ahead, sum);
  if constexpr (KEY_VECTORS == 1) scores<Kind, R, 1, 1>(s, query, tile, ahead, sum);
}

// e^x for x up to 0, as `exp` gives it but with fewer steps; NaN stays NaN.
ALWAYS_INLINE vf exp_below_zero(vf x) {
  const vf lowest = splat(-87.3f), big = splat(12582912.f);
  const vf clamped = select(x < lowest, lowest, x);
  const vf shifted = fma(clamped, splat(1.44269504088896341f), big), n = shifted - big;
  const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  vf y = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.f;
  const vf power = (vf)(((vi)shifted << 23) + (127 << 23));  // the lowest bits of `shifted` are n
  return select(x < lowest, vf{}, y * power);
}

// A row's scores as they count: scaled, capped, and without the positions outside [from, to). `start` is the tile's first.
template <typename T>
ALWAYS_INLINE void mask(const Sizes& s, const Tile<T>& tile, int32_t start, int32_t from, int32_t to, vf* score) {
  const vi lane = lanes();
  for (int v = 0; v < 2; v++) {
    vf factor = splat(s.scale);
    if constexpr (KvCache<T>::SCALED) factor *= load((const float*)tile.key_scales[v]);
    vf x = score[v] * factor;
    if (s.soft_cap > 0) x = capped(x, s.soft_cap);
    const vi position = lane + (start + v * LANES);
    const bool all = from <= start && to >= start + TILE;
    score[v] = all ? x : select((position >= from) & (position < to), x, splat(NONE));
  }
}

// total[r][d] = old[r] · total[r][d] + Σ weight[r][j] · v[j][d] over positions [first, last) of the tile, for N vectors of
// values: see `load_value`. d is a multiple of a chunk.
template <typename T, int R, int N, bool ODD>
ALWAYS_INLINE void accumulate(const Sizes& s, const float (*weight)[TILE], const float* old, float* total, int64_t d,
                              const Tile<T>& tile, const Tile<T>& ahead, int first, int last) {
  vf sum[R][N];
  total += d + (ODD ? LANES : 0);
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sum[r][n] = load(total + r * state_stride(s.width) + n * LANES) * old[r];
  for (int half = 0; half < 2; half++)
    for (int j = std::max(first - half * LANES, 0); j < std::min(last - half * LANES, LANES); j++) {
      const T *value = tile.values[half] + j * s.head_dim + d, *next = ahead.values[half] + j * s.head_dim + d;
      vf x[N];
      load_value<N, ODD>(value, s.head_dim - d, x);
      for (int i = 0; i < N * LANES * int(sizeof(T)); i += 64) prefetch((const char*)next + i);
      for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = fma(splat(weight[r][half * LANES + j]), x[n], sum[r][n]);
    }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) store(total + r * state_stride(s.width) + n * LANES, sum[r][n]);
}

// One tile for R rows, of which each sees at least one of its positions; row r sees positions [from[r], to[r]).
template <typename Kind, int R>
__attribute__((noinline)) void tile_rows(const Sizes& s, const typename Kind::Query* query, float* state,
                                         const int32_t* from, const int32_t* to, int32_t start,
                                         const Tile<typename Kind::Value>& tile,
                                         const Tile<typename Kind::Value>& ahead) {
  typedef typename Kind::Value T;
  const int64_t stride = state_stride(s.width);
  vf score[R][2];
  scores<Kind, R>(s, query, tile, ahead, score);
  float old[LANES] = {}, weight[R][TILE];
  int first = TILE, last = 0;
  for (int r = 0; r < R; r++) {
    mask(s, tile, start, from[r], to[r], score[r]);
    float& top = state[r * stride + s.width + LANES];
    const float new_top = std::max(top, max(max(score[r][0], score[r][1])));
    old[r] = top - new_top;
    top = new_top;
    first = std::min(first, from[r] - start);
    last = std::max(last, to[r] - start);
  }
  store(old, exp_below_zero(load(old)));
  for (int r = 0; r < R; r++) {
    float* weight_sum = state + r * stride + s.width;
    vf w[2];
    for (int v = 0; v < 2; v++) w[v] = exp_below_zero(score[r][v] - weight_sum[LANES]);
    store(weight_sum, fma(load(weight_sum), splat(old[r]), w[0] + w[1]));
    for (int v = 0; v < 2; v++) {
      if constexpr (KvCache<T>::SCALED) w[v] *= load((const float*)tile.value_scales[v]);
      store(weight[r] + v * LANES, w[v]);
    }
  }
  first = std::max(first, 0), last = std::min(last, TILE);
  for (int64_t d = 0; d < s.width;) {
    if constexpr (VALUE_VECTORS == 1) {
      accumulate<T, R, 1, false>(s, weight, old, state, d, tile, ahead, first, last);
      accumulate<T, R, 1, true>(s, weight, old, state, d, tile, ahead, first, last);
      d += CHUNK;
    } else {
      const bool two = s.width - d >= 2 * CHUNK;
      if (two) accumulate<T, R, 4, false>(s, weight, old, state, d, tile, ahead, first, last);
      else accumulate<T, R, 2, false>(s, weight, old, state, d, tile, ahead, first, last);
      d += two ? 2 * CHUNK : CHUNK;
    }
  }
}

// Calls run(first row, number of rows as a constant) until all rows are done, in blocks of about the same size.
template <typename F>
inline void by_rows(int64_t rows, F run) {
  const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b * rows / blocks;
    switch ((b + 1) * rows / blocks - first) {
      case 1: run(first, std::integral_constant<int, 1>()); break;
      case 2: run(first, std::integral_constant<int, 2>()); break;
      case 3: run(first, std::integral_constant<int, 3>()); break;
      case 4: run(first, std::integral_constant<int, std::min(BLOCK_ROWS, 4)>()); break;
      case 5: run(first, std::integral_constant<int, std::min(BLOCK_ROWS, 5)>()); break;
      default: run(first, std::integral_constant<int, BLOCK_ROWS>());
    }
  }
}

}  // namespace
