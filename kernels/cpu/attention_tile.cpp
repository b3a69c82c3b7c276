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
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6;  // 24 sums, a chunk or two of a value and a weight fill the 32 registers
#else
constexpr int BLOCK_ROWS = 3;
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

template <typename T> inline void load_chunk(const T* p, int64_t left, vf* to) {
  to[0] = load_upto(p, left);
  to[1] = left > LANES ? load_upto(p + LANES, left - LANES) : vf{};
}

inline vf even(vu pairs) { return (vf)(pairs << 16); }
inline vf odd(vu pairs) { return (vf)(pairs & 0xffff0000u); }

// Even dimensions in the first vector, odd ones in the second: half the work of widening in order.
inline void load_chunk(const uint16_t* p, int64_t left, vf* to) {
  vu pairs{};
  if (left >= CHUNK) {
    std::memcpy(&pairs, p, sizeof pairs);
  } else {
#if defined(__AVX512BW__)
    pairs = (vu)_mm512_maskz_loadu_epi16((1u << left) - 1, p);
#else
    std::memcpy(&pairs, p, left * sizeof *p);
#endif
  }
  to[0] = even(pairs);
  to[1] = odd(pairs);
}

template <typename T> inline void in_order(const T*, vf&, vf&) {}
inline void in_order(const uint16_t*, vf& a, vf& b) {
  const vf low = (vf)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  b = (vf)__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  a = low;
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
    vu pairs;
    std::memcpy(&pairs, p, sizeof pairs);
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

// sum[r][v] = query r · the keys of vector v. On the way, asks for the keys of the tile after this one.
template <typename Kind, int R>
ALWAYS_INLINE void scores(const Sizes& s, const typename Kind::Query* query, const Tile<typename Kind::Value>& tile,
                          const Tile<typename Kind::Value>& ahead, vf (*sum)[2]) {
  typedef typename Kind::Value T;
  constexpr int together = KvCache<T>::TOGETHER, line = 64 / (LANES * together * int(sizeof(T)));  // dimensions that fill one
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = vf{};
  if constexpr (KvCache<T>::SCALED)
    for (int v = 0; v < 2; v++) prefetch(ahead.key_scales[v]), prefetch(ahead.value_scales[v]);
  const T *first = tile.keys[0], *second = tile.keys[1], *ahead_first = ahead.keys[0], *ahead_second = ahead.keys[1];
  for (int64_t d = 0; d < s.head_dim; d += together) {
    const auto a = Kind::load_keys(first), b = Kind::load_keys(second);
    if (line == 1 || d % line == 0) {
      prefetch(ahead_first);
      prefetch(ahead_second);
    }
    for (int r = 0; r < R; r++) {
      const auto* at = query + r * s.query_stride + d;
      sum[r][0] = Kind::add(at, a, sum[r][0]);
      sum[r][1] = Kind::add(at, b, sum[r][1]);
    }
    first += tile.key_stride, second += tile.key_stride;
    ahead_first += tile.key_stride, ahead_second += tile.key_stride;
  }
}

// e^x for x up to 0, as `exp` gives it but with fewer steps; NaN stays NaN.
ALWAYS_INLINE vf exp_below_zero(vf x) {
  const vf lowest = splat(-87.3f), big = splat(12582912.f);
  const vf clamped = lowest > x ? lowest : x;
  const vf shifted = fma(clamped, splat(1.44269504088896341f), big), n = shifted - big;
  const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  vf y = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.f;
  const vf power = (vf)(((vi)shifted << 23) + (127 << 23));  // the lowest bits of `shifted` are n
  return x < lowest ? vf{} : y * power;
}

// A row's scores as they count: scaled, capped, and without the positions outside [from, to). `start` is the tile's first.
template <typename T>
ALWAYS_INLINE void mask(const Sizes& s, const Tile<T>& tile, int32_t start, int32_t from, int32_t to, vf* score) {
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int v = 0; v < 2; v++) {
    vf factor = splat(s.scale);
    if constexpr (KvCache<T>::SCALED) factor *= load((const float*)tile.key_scales[v]);
    vf x = score[v] * factor;
    if (s.soft_cap > 0) x = capped(x, s.soft_cap);
    const vi position = lane + (start + v * LANES);
    const bool all = from <= start && to >= start + TILE;
    score[v] = all ? x : ((position >= from) & (position < to)) ? x : splat(NONE);
  }
}

// total[r][d] = old[r] · total[r][d] + Σ weight[r][j] · v[j][d] over positions [first, last) of the tile, for C chunks.
template <typename T, int R, int C>
ALWAYS_INLINE void accumulate(const Sizes& s, const float (*weight)[TILE], const float* old, float* total, int64_t d,
                              const Tile<T>& tile, const Tile<T>& ahead, int first, int last) {
  vf sum[R][2 * C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2 * C; c++) sum[r][c] = load(total + r * state_stride(s.width) + c * LANES) * old[r];
  for (int half = 0; half < 2; half++)
    for (int j = std::max(first - half * LANES, 0); j < std::min(last - half * LANES, LANES); j++) {
      const T *value = tile.values[half] + j * s.head_dim + d, *next = ahead.values[half] + j * s.head_dim + d;
      vf x[2 * C];
      for (int c = 0; c < C; c++) load_chunk(value + c * CHUNK, s.head_dim - d - c * CHUNK, x + 2 * c);
      for (int i = 0; i < C * CHUNK * int(sizeof(T)); i += 64) prefetch((const char*)next + i);
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 2 * C; c++) sum[r][c] = fma(splat(weight[r][half * LANES + j]), x[c], sum[r][c]);
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2 * C; c++) store(total + r * state_stride(s.width) + c * LANES, sum[r][c]);
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
    const bool two = s.width - d >= 2 * CHUNK;
    if (two) accumulate<T, R, 2>(s, weight, old, state + d, d, tile, ahead, first, last);
    else accumulate<T, R, 1>(s, weight, old, state + d, d, tile, ahead, first, last);
    d += two ? 2 * CHUNK : CHUNK;
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
