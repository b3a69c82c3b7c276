// Products of rows with compressed panels: the same sums in the same order as with whole ones, so the same bits.
// Included by the units that multiply; not a translation unit by itself.
#pragma once
#include "compressed.h"
#include "panels.cpp"

namespace {

#if defined(__AVX512BW__) && defined(__AVX512BF16__)

// Goes through the steps of a compressed panel.
class Steps {
 public:
  typedef __m512bh Weights[PANEL / LANES];

  Steps(const Matrix& m, int64_t number) : from_(compressed_panel(m, number)) {
    const PanelHead& head = *(const PanelHead*)from_;
    upper_ = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)head.upper));
    next_ = exceptions_of(m) + head.first, end_ = next_ + head.count;
    from_ += sizeof head;
  }

  // visit(weights) for each step in [begin, end). Steps must be gone through in order.
  template <typename Visit> inline __attribute__((always_inline)) void each(int64_t begin, int64_t end, Visit visit) {
    Weights w;
    for (int64_t step = begin; step < end; step++) {
      for (const int64_t stop = next_ < end_ ? std::min<int64_t>(next_->step, end) : end; step < stop; step++) {
        read(step, w);
        visit(w);
      }
      if (step == end) return;
      read_with_exceptions(step, w);
      visit(w);
    }
  }

 private:
  inline __attribute__((always_inline)) void read(int64_t step, Weights& w) const {
    const uint8_t* const at = from_ + step * STEP_BYTES;
    const __m512i four = _mm512_set1_epi8(15), numbers = _mm512_loadu_si512(at + STEP_VALUES);
    const __m512i even = _mm512_shuffle_epi8(upper_, _mm512_and_si512(numbers, four));
    const __m512i odd = _mm512_shuffle_epi8(upper_, _mm512_and_si512(_mm512_srli_epi16(numbers, 4), four));
    const __m512i low = _mm512_loadu_si512(at), more = _mm512_loadu_si512(at + STEP_VALUES / 2);
    w[0] = (__m512bh)_mm512_unpacklo_epi8(low, even), w[1] = (__m512bh)_mm512_unpackhi_epi8(low, even);
    w[2] = (__m512bh)_mm512_unpacklo_epi8(more, odd), w[3] = (__m512bh)_mm512_unpackhi_epi8(more, odd);
  }

  __attribute__((noinline)) void read_with_exceptions(int64_t step, Weights& w) {
    uint16_t values[STEP_VALUES];
    read(step, w);
    std::memcpy(values, w, sizeof values);
    for (; next_ < end_ && next_->step == step; next_++) values[next_->place] = next_->value;
    std::memcpy(w, values, sizeof values);
  }

  const uint8_t* from_;
  const Exception *next_, *end_;
  __m512i upper_;
};

// Rows that meet the weights as they come from the memory; with more, it pays to bring the weights to their whole form once.
constexpr int64_t AT_ONCE = 4, DIRECT_ROWS = 12;
constexpr int64_t MOST_STEPS = 512;  // that are whole at a time: in the second cache

// sums[r][o] = x[r] · output o over some steps, or added to what is there, with the weights going straight to the sums; and
// into their whole form as well where `whole` is not null.
template <int R>
void multiply_direct(const uint16_t* x, int64_t inputs, Steps& from, int64_t begin, int64_t end, float* sums, uint16_t* whole) {
  constexpr int C = PANEL / LANES;
  vf sum[R][C] = {};
  if (begin > 0)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = load(sums + r * PANEL + c * LANES);
  const auto add = [&](const Steps::Weights& w) __attribute__((always_inline)) {
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = multiply_add(x + r * inputs, w[c], sum[r][c]);
    x += 2;
  };
  if (whole)
    from.each(begin, end, [&](const Steps::Weights& w) __attribute__((always_inline)) {
      for (int c = 0; c < C; c++) _mm512_store_si512(whole + c * 2 * LANES, (__m512i)w[c]);
      whole += STEP_VALUES;
      add(w);
    });
  else from.each(begin, end, add);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(sums + r * PANEL + c * LANES, sum[r][c]);
}

typedef decltype(&multiply_direct<1>) MultiplyDirect;
constexpr MultiplyDirect DIRECT[AT_ONCE] = {multiply_direct<1>, multiply_direct<2>, multiply_direct<3>, multiply_direct<4>};

// The first rows meet the weights as they come from the memory, the others a copy in their whole form.
inline void multiply_many(const uint16_t* x, int64_t rows, const Matrix& m, int64_t panel, int64_t next, float* sums) {
  alignas(64) uint16_t whole[MOST_STEPS * STEP_VALUES];
  const int64_t steps = m.inputs / 2, at_once = divided_up(steps, divided_up(steps, MOST_STEPS));
  const bool has_next = next < divided_up(m.outputs, PANEL);
  Steps from(m, panel);
  const int64_t block_steps = steps * divided_up(rows - AT_ONCE, BLOCK_ROWS);
  Ahead ahead = has_next ? Ahead(compressed_panel(m, next), compressed_panel_bytes(m.inputs), block_steps) : Ahead();
  for (int64_t begin = 0; begin < steps; begin += at_once) {
    const int64_t end = std::min(begin + at_once, steps);
    DIRECT[AT_ONCE - 1](x + begin * 2, m.inputs, from, begin, end, sums, whole);
    each_block(rows - AT_ONCE, BLOCK_ROWS, [&](int64_t block_row, int64_t count) {
      const int64_t first = AT_ONCE + block_row;
      const uint16_t* at[BLOCK_ROWS];
      for (int64_t r = 0; r < count; r++) at[r] = x + (first + r) * m.inputs + begin * 2;
      block<uint16_t>(at, count, whole, (end - begin) * 2, sums + first * PANEL, begin > 0, ahead);
    });
  }
}

// sums[r][o] = x[r] · output o of a compressed panel; as `multiply_rows`.
inline void multiply_compressed(const uint16_t* x, int64_t rows, const Matrix& m, int64_t panel, int64_t next, float* sums) {
  if (rows > DIRECT_ROWS) return multiply_many(x, rows, m, panel, next, sums);
  each_block(rows, AT_ONCE, [&](int64_t first, int64_t count) {
    Steps from(m, panel);
    DIRECT[count - 1](x + first * m.inputs, m.inputs, from, 0, m.inputs / 2, sums + first * PANEL, nullptr);
  });
}

#else
inline void multiply_compressed(const uint16_t*, int64_t, const Matrix&, int64_t, int64_t, float*) {}
#endif

constexpr int64_t NO_PANEL = int64_t(1) << 40;  // beyond the last of any matrix

// Sums as the result's type holds them, after the bias and the scale.
template <typename T>
inline vf finished(const float* sum, const T* bias, int64_t left, float scale) {
  vf value = load(sum);
  if (bias) value += load_upto(bias, left);
  return rounded<T>(value * scale);
}

// sums[r][o] of rows [first, first + count) and one panel, in whichever form that is. `next` may be beyond the last.
template <typename T>
void sum_up(const Product& p, int64_t panel, int64_t next, int64_t first, int64_t count, float* sums) {
  const Matrix& m = p.matrix;
  const T* const x = (const T*)p.x + first * m.inputs;
  if constexpr (sizeof(T) == sizeof(uint16_t))
    if (m.compressed) return multiply_compressed(x, count, m, panel, next, sums);
  const auto row = [&](int64_t r) { return x + r * m.inputs; };
  multiply_rows(row, count, panel_of<T>(m, panel), m.inputs, sums, panel_or_null<T>(m, next));
}

}  // namespace
