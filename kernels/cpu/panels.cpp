// What the products are made of: blocks of rows times a panel of 64 outputs, and how blocks are shared out.
// Included by the units that multiply; not a translation unit by itself.
//
// What one step of the inner loop needs lies side by side, so a product of few rows reads its weights at the speed of the
// memory. Each output is one chain of fused products over the inputs, from the first to the last, whatever number of rows
// and panels is computed together: a row's bits depend on nothing but the row.
#pragma once
#include "product.h"
#include "simd.cpp"

namespace {

#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, COLUMNS = PANEL / LANES;  // 24 sums, 4 weights and a value of x fill the 32 registers
#else
constexpr int BLOCK_ROWS = 4, COLUMNS = 1;
#endif
constexpr int64_t MOST_ROWS = 96, LEAST_ROWS = 24;  // of a share: enough to be worth a panel's way to this core
constexpr int PACED_ROWS = 4, AHEAD = 32;  // with few rows memory sets the pace: it is asked some steps beforehand

template <typename T> constexpr int TOGETHER = sizeof(float) / sizeof(T);  // inputs of one step of the inner loop

inline int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// What to ask the memory for beside some steps of products, so that it has come when these are done: some lines a step.
class Ahead {
 public:
  static constexpr int LINE = 64;

  Ahead() = default;
  Ahead(const void* from, int64_t num_bytes, int64_t steps)
      : at_((const char*)from), end_(at_ + num_bytes), lines_(divided_up(divided_up(num_bytes, LINE), steps)) {}
  void step() {
    for (int64_t i = 0; i < lines_ && at_ < end_; i++, at_ += LINE) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t lines_ = 0;
};

inline vf weights(const float* p) { return load(p); }
inline vf multiply_add(const float* x, vf w, vf sum) { return fma(splat(*x), w, sum); }
#if defined(__AVX512BF16__)
inline __m512bh weights(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline vf multiply_add(const uint16_t* x, __m512bh w, vf sum) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), w);
}
#else
struct Pair { vf even, odd; };
inline Pair weights(const uint16_t* p) {
  vu u;
  std::memcpy(&u, p, sizeof u);
  return {(vf)(u << 16), (vf)(u & 0xffff0000u)};
}
inline vf multiply_add(const uint16_t* x, const Pair& w, vf sum) {
  return fma(splat(from_bf16(x[1])), w.odd, fma(splat(from_bf16(x[0])), w.even, sum));
}
#endif

// tile[r][c] = x[r] · output c, for R rows and C vectors of a panel's outputs; or added to what is there.
template <int R, int C, typename T>
void multiply(const T* const* x, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& asks) {
  constexpr int together = TOGETHER<T>;
  Ahead ahead = asks;
  vf sum[R][C] = {};
  if (adds)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = load(tile + r * PANEL + c * LANES);
  int64_t k = 0;
  for (; k + together <= inputs; k += together, panel += PANEL * together) {
    decltype(weights(panel)) w[C];
    for (int c = 0; c < C; c++) w[c] = weights(panel + c * LANES * together);
    ahead.step();
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = multiply_add(x[r] + k, w[c], sum[r][c]);
  }
  if (k < inputs)  // the last of an odd number of inputs in pairs
    for (int r = 0; r < R; r++) {
      const T pair[2] = {x[r][k], 0};
      for (int c = 0; c < C; c++) sum[r][c] = multiply_add(pair, weights(panel + c * LANES * together), sum[r][c]);
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(tile + r * PANEL + c * LANES, sum[r][c]);
  asks = ahead;
}

// sum[n] = x · the LANES outputs at[n], anywhere in panels: the same chains.
template <int N, typename T>
void multiply_apart(const T* x, const T* const* at, int64_t inputs, vf* sums) {
  constexpr int together = TOGETHER<T>;
  vf sum[N] = {};
  int64_t k = 0;
  for (; k + together <= inputs; k += together)
    for (int n = 0; n < N; n++) sum[n] = multiply_add(x + k, weights(at[n] + k * PANEL), sum[n]);
  if (k < inputs) {
    const T pair[2] = {x[k], 0};
    for (int n = 0; n < N; n++) sum[n] = multiply_add(pair, weights(at[n] + k * PANEL), sum[n]);
  }
  for (int n = 0; n < N; n++) sums[n] = sum[n];
}

template <int R, typename T>
void multiply_panel(const T* const* x, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& ahead) {
  for (int c = 0; c < PANEL / LANES; c += COLUMNS)
    multiply<R, COLUMNS>(x, panel + c * LANES * TOGETHER<T>, inputs, tile + c * LANES, adds, ahead);
}

// The products of up to BLOCK_ROWS rows with one panel, or with some inputs of it.
template <typename T>
void block(const T* const* x, int rows, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& ahead) {
  if (rows == 1) return multiply_panel<1>(x, panel, inputs, tile, adds, ahead);
  if (rows == 2) return multiply_panel<2>(x, panel, inputs, tile, adds, ahead);
  if (rows == 3) return multiply_panel<3>(x, panel, inputs, tile, adds, ahead);
  if constexpr (BLOCK_ROWS > 4) {
    if (rows == 5) return multiply_panel<5>(x, panel, inputs, tile, adds, ahead);
    if (rows == 6) return multiply_panel<6>(x, panel, inputs, tile, adds, ahead);
  }
  multiply_panel<4>(x, panel, inputs, tile, adds, ahead);
}

// visit(first row, number of rows) for blocks of rows of about equal size.
template <typename Visit>
void each_block(int64_t rows, int64_t most, Visit visit) {
  const int64_t blocks = divided_up(rows, most);
  for (int64_t b = 0; b < blocks; b++) visit(b * rows / blocks, (b + 1) * rows / blocks - b * rows / blocks);
}

// visit(panel, first row, number of rows) for shares, until all panels have met all rows. A share is one panel with some of
// the rows, at most MOST_ROWS; there are several for each thread.
template <typename Visit>
void each_share(Member& member, int64_t panels, int64_t rows, Visit visit) {
  const int64_t wanted = divided_up(8 * member.size, panels);
  const int64_t share_rows = std::clamp(divided_up(rows, wanted), std::min(LEAST_ROWS, rows), MOST_ROWS);
  const int64_t shares = divided_up(rows, share_rows);
  member.each(panels * shares, 1, [&](int64_t i) {
    const int64_t begin = i % shares * rows / shares, end = (i % shares + 1) * rows / shares;
    visit(i / shares, begin, end - begin);
  });
}

// The same for each block of a share.
template <typename Visit>
void each_block(Member& member, int64_t panels, int64_t rows, Visit visit) {
  each_share(member, panels, rows, [&](int64_t panel, int64_t begin, int64_t number) {
    each_block(number, BLOCK_ROWS, [&](int64_t first, int64_t count) { visit(panel, begin + first, count); });
  });
}

// Values of a panel for each output: pairs are filled up.
template <typename T> int64_t stride(int64_t inputs) { return divided_up(inputs, TOGETHER<T>) * TOGETHER<T>; }

template <typename T>
T* panel_of(const Matrix& m, int64_t number) { return (T*)m.values + number * PANEL * stride<T>(m.inputs); }

// Null beyond the last.
template <typename T>
const T* panel_or_null(const Matrix& m, int64_t number) {
  return number < divided_up(m.outputs, PANEL) ? panel_of<T>(m, number) : nullptr;
}

// sums[r][o] = x(r) · output o of a panel. Memory is asked for `next` meanwhile, the panel that probably follows on this
// thread, or null; with few rows, which wait for the memory anyway, for what is still to be read of this one.
template <typename T, typename X>
void multiply_rows(X x, int64_t rows, const T* panel, int64_t inputs, float* sums, const T* next) {
  const int64_t steps = divided_up(inputs, TOGETHER<T>), num_bytes = steps * PANEL * int64_t(sizeof(float));
  const int64_t blocks = divided_up(rows, BLOCK_ROWS);
  Ahead ahead = rows <= PACED_ROWS ? Ahead(panel + AHEAD * PANEL * TOGETHER<T>, num_bytes, steps)
                : next             ? Ahead(next, num_bytes, steps * blocks) : Ahead();
  each_block(rows, BLOCK_ROWS, [&](int64_t first, int64_t count) {
    const T* at[BLOCK_ROWS];
    for (int64_t r = 0; r < count; r++) at[r] = x(first + r);
    block(at, count, panel, inputs, sums + first * PANEL, false, ahead);
  });
}

}  // namespace
