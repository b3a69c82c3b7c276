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

// Rows of a block, and vectors of a panel's outputs that such rows meet at once: sums, weights and a value of x fill the
// registers, and there are sums enough that a product need not wait for the one before it.
constexpr int BLOCK_ROWS = 6;
#if defined(__AVX512F__)
template <int R> constexpr int COLUMNS = PANEL / LANES;
#else
template <int R> constexpr int COLUMNS = R == 1 ? 4 : R == 2 ? 2 : 1;
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
template <typename T> using Operand = T;  // what x is when it meets weights of T
inline __m512bh weights(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline vf multiply_add(const uint16_t* x, __m512bh w, vf sum) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), w);
}
#else
template <typename T> using Operand = float;
struct Widened { vf even, odd; };
inline Widened weights(const uint16_t* p) {
  const vu pairs = load_wide((const uint32_t*)p);
  return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
}
inline vf multiply_add(const float* x, const Widened& w, vf sum) {
  return fma(splat(x[1]), w.odd, fma(splat(x[0]), w.even, sum));
}
inline vf multiply_add(const uint16_t* x, const Widened& w, vf sum) {
  const float pair[2] = {from_bf16(x[0]), from_bf16(x[1])};
  return multiply_add(pair, w, sum);
}
#endif

// tile[r][c] = x[r] · output c, for R rows and C vectors of a panel's outputs; or added to what is there.
template <int R, int C, typename T>
void multiply(const Operand<T>* const* x, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& asks) {
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
      const Operand<T> pair[2] = {x[r][k], 0};
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
void multiply_panel(const Operand<T>* const* x, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& ahead) {
  constexpr int C = COLUMNS<R>;
  for (int c = 0; c < PANEL / LANES; c += C)
    multiply<R, C, T>(x, panel + c * LANES * TOGETHER<T>, inputs, tile + c * LANES, adds, ahead);
}

// The products of up to BLOCK_ROWS rows with one panel, or with some inputs of it.
template <typename T>
void block(const Operand<T>* const* x, int rows, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& ahead) {
  switch (rows) {
    case 1: return multiply_panel<1, T>(x, panel, inputs, tile, adds, ahead);
    case 2: return multiply_panel<2, T>(x, panel, inputs, tile, adds, ahead);
    case 3: return multiply_panel<3, T>(x, panel, inputs, tile, adds, ahead);
    case 4: return multiply_panel<4, T>(x, panel, inputs, tile, adds, ahead);
    case 5: return multiply_panel<5, T>(x, panel, inputs, tile, adds, ahead);
    default: return multiply_panel<6, T>(x, panel, inputs, tile, adds, ahead);
  }
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

constexpr int64_t WIDENED_INPUTS = 512;  // a multiple of LANES: the rows of a block stay in the first cache

inline const float* widen(const uint16_t* x, int64_t inputs, float* to) {
  for (int64_t k = 0; k < inputs; k += LANES) store(to + k, load_upto(x + k, inputs - k));
  return to;
}

// The same as `block`, for x as it is in memory.
template <typename T, typename X>
void multiply_block(X x, int rows, const T* panel, int64_t inputs, float* tile, bool adds, Ahead& ahead) {
  if constexpr (std::is_same_v<T, Operand<T>>) {
    const T* at[BLOCK_ROWS];
    for (int r = 0; r < rows; r++) at[r] = x(r);
    block<T>(at, rows, panel, inputs, tile, adds, ahead);
  } else {
    float widened[BLOCK_ROWS][WIDENED_INPUTS];
    const float* at[BLOCK_ROWS];
    for (int r = 0; r < rows; r++) at[r] = widen(x(r), inputs, widened[r]);
    block<T>(at, rows, panel, inputs, tile, adds, ahead);
  }
}

// sums[r][o] = x(r) · output o of a panel. Memory is asked for `next` meanwhile, the panel that probably follows on this
// thread, or null; with few rows, which wait for the memory anyway, for what is still to be read of this one.
template <typename T, typename X>
void multiply_rows(X x, int64_t rows, const T* panel, int64_t inputs, float* sums, const T* next) {
  const int64_t steps = divided_up(inputs, TOGETHER<T>), num_bytes = steps * PANEL * int64_t(sizeof(float));
  const int64_t blocks = divided_up(rows, BLOCK_ROWS);
  Ahead ahead = rows <= PACED_ROWS ? Ahead(panel + AHEAD * PANEL * TOGETHER<T>, num_bytes, steps)
                : next             ? Ahead(next, num_bytes, steps * blocks) : Ahead();
  const int64_t part = std::is_same_v<T, Operand<T>> ? inputs : WIDENED_INPUTS;
  for (int64_t from = 0; from < inputs; from += part)
    each_block(rows, BLOCK_ROWS, [&](int64_t first, int64_t count) {
      const auto at = [&](int64_t r) { return x(first + r) + from; };
      multiply_block(at, count, panel + from * PANEL, std::min(part, inputs - from), sums + first * PANEL, from > 0, ahead);
    });
}

}  // namespace
