// Matrix products with weights in panels, for any number of rows. See linear.py, embedding.py and matrix.py for the meaning.
//
// What one step of the inner loop needs lies side by side, so a product of few rows reads its weights at the speed of the
// memory. Each output is one chain of fused products over the inputs, from the first to the last, whatever number of rows
// and panels is computed together: a row's bits depend on nothing but the row.
#include "product.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "simd.cpp"

namespace {

#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, COLUMNS = PANEL / LANES;  // 24 sums, 4 weights and a value of x fill the 32 registers
#else
constexpr int BLOCK_ROWS = 4, COLUMNS = 1;
#endif
constexpr int64_t MOST_ROWS = 96, LEAST_ROWS = 24;  // of a share: enough to be worth a panel's way to this core
constexpr int PACED_ROWS = 4, AHEAD = 32;  // with few rows memory sets the pace: weights are asked for some steps ahead

template <typename T> constexpr int TOGETHER = sizeof(float) / sizeof(T);  // inputs of one step of the inner loop

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

// tile[r][c] = x[r] · output c, for R rows and C vectors of a panel's outputs.
template <int R, int C, typename T>
void multiply(const T* const* x, const T* panel, int64_t inputs, float* tile) {
  constexpr int together = TOGETHER<T>;
  vf sum[R][C] = {};
  int64_t k = 0;
  for (; k + together <= inputs; k += together, panel += PANEL * together) {
    decltype(weights(panel)) w[C];
    for (int c = 0; c < C; c++) {
      w[c] = weights(panel + c * LANES * together);
      if (R <= PACED_ROWS) __builtin_prefetch(panel + (AHEAD * PANEL + c * LANES) * together, 0, 3);
    }
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
}

template <int R, typename T>
void multiply_panel(const T* const* x, const T* panel, int64_t inputs, float* tile) {
  for (int c = 0; c < PANEL / LANES; c += COLUMNS)
    multiply<R, COLUMNS>(x, panel + c * LANES * TOGETHER<T>, inputs, tile + c * LANES);
}

// The products of up to BLOCK_ROWS rows with one panel.
template <typename T>
void block(const T* const* x, int rows, const T* panel, int64_t inputs, float* tile) {
  if (rows == 1) return multiply_panel<1>(x, panel, inputs, tile);
  if (rows == 2) return multiply_panel<2>(x, panel, inputs, tile);
  if (rows == 3) return multiply_panel<3>(x, panel, inputs, tile);
  if constexpr (BLOCK_ROWS > 4) {
    if (rows == 5) return multiply_panel<5>(x, panel, inputs, tile);
    if (rows == 6) return multiply_panel<6>(x, panel, inputs, tile);
  }
  multiply_panel<4>(x, panel, inputs, tile);
}

inline int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// visit(panel, first row, number of rows) for blocks of rows of about equal size, until all panels have met all rows. A
// share is one panel with some of the rows; there are several for each thread.
template <typename Visit>
void each_block(Member& member, int64_t panels, int64_t rows, Visit visit) {
  const int64_t wanted = divided_up(8 * member.size, panels);
  const int64_t share_rows = std::clamp(divided_up(rows, wanted), std::min(LEAST_ROWS, rows), MOST_ROWS);
  const int64_t shares = divided_up(rows, share_rows);
  member.each(panels * shares, 1, [&](int64_t i) {
    const int64_t begin = i % shares * rows / shares, end = (i % shares + 1) * rows / shares;
    const int64_t blocks = divided_up(end - begin, BLOCK_ROWS);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t first = begin + b * (end - begin) / blocks;
      visit(i / shares, first, begin + (b + 1) * (end - begin) / blocks - first);
    }
  });
}

// Values of a panel for each output: pairs are filled up.
template <typename T> int64_t stride(int64_t inputs) { return divided_up(inputs, TOGETHER<T>) * TOGETHER<T>; }

template <typename T>
T* panel_of(const Matrix& m, int64_t number) { return (T*)m.values + number * PANEL * stride<T>(m.inputs); }

// Sums as the result's type holds them, after the bias.
template <typename T>
inline vf finished(const float* sum, const T* bias, int64_t left) {
  vf value = load(sum);
  if (bias) value += load_upto(bias, left);
  return rounded<T>(value);
}

template <typename T>
void multiply_all(Member& member, const Product& p) {
  const Matrix& m = p.matrix;
  each_block(member, divided_up(m.outputs, PANEL), p.rows, [&](int64_t panel, int64_t first, int64_t count) {
    const T* x[BLOCK_ROWS];
    float tile[BLOCK_ROWS * PANEL];
    for (int64_t r = 0; r < count; r++) x[r] = (const T*)p.x + (first + r) * m.inputs;
    block(x, count, panel_of<T>(m, panel), m.inputs, tile);
    const int64_t begin = panel * PANEL, end = std::min(begin + PANEL, m.outputs);
    for (int64_t r = 0; r < count; r++)
      for (int64_t o = begin; o < end; o += LANES) {
        const T* bias = p.bias ? (const T*)p.bias + o : nullptr;
        store_upto((T*)p.out + (first + r) * m.outputs + o, finished(tile + r * PANEL + o - begin, bias, end - o), end - o);
      }
  });
}

template <typename T>
void multiply_gated(Member& member, const Product& p) {
  const Matrix& m = p.matrix;
  const int64_t width = m.outputs / 2, panels = width / PANEL;
  each_block(member, panels, p.rows, [&](int64_t panel, int64_t first, int64_t count) {
    const T* x[BLOCK_ROWS];
    float gates[BLOCK_ROWS * PANEL], ups[BLOCK_ROWS * PANEL];
    for (int64_t r = 0; r < count; r++) x[r] = (const T*)p.x + (first + r) * m.inputs;
    block(x, count, panel_of<T>(m, panel), m.inputs, gates);
    block(x, count, panel_of<T>(m, panels + panel), m.inputs, ups);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const int64_t o = panel * PANEL + i;
        const T *bias = p.bias ? (const T*)p.bias + o : nullptr, *up_bias = p.bias ? bias + width : nullptr;
        const vf gate = finished(gates + r * PANEL + i, bias, LANES), up = finished(ups + r * PANEL + i, up_bias, LANES);
        store((T*)p.out + (first + r) * width + o, silu(gate) * up);
      }
  });
}

}  // namespace

// What a thread has seen of a row's scores, lane by lane. It meets the panels in order, so of equals the lower id is kept.
class Seen {
 public:
  vf best = splat(-std::numeric_limits<float>::infinity()), zeros{};  // zeros: 0 · each score, so 0 if all are finite
  vi id{};

  void add(vf score, vi ids, vf absent) {
    zeros += score * 0.f;
    score += absent;
    const vi wins = score > best;
    best = wins ? score : best;
    id = wins ? ids : id;
  }
};

namespace {

template <typename T>
void score_all(Member& member, const Scores& s, Seen* seen) {
  const Matrix& m = s.matrix;
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  each_block(member, divided_up(m.outputs, PANEL), s.num_rows, [&](int64_t panel, int64_t first, int64_t count) {
    const T* x[BLOCK_ROWS];
    float tile[BLOCK_ROWS * PANEL];
    for (int64_t r = 0; r < count; r++) x[r] = (const T*)s.x + s.rows[first + r] * m.inputs;
    block(x, count, panel_of<T>(m, panel), m.inputs, tile);
    const int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, m.outputs - begin);
    for (int64_t r = 0; r < count; r++) {
      const float* row = tile + r * PANEL;
      for (int64_t o = 0; o < width; o += LANES) {
        const vi ids = lane + int32_t(begin + o);
        const vf absent = ids < int32_t(m.outputs) ? vf{} : splat(-std::numeric_limits<float>::infinity());
        seen[first + r].add(load(row + o), ids, absent);
      }
      const int64_t kept = first + r - s.num_best;
      if (kept >= 0) std::memcpy(s.scores + kept * m.outputs + begin, row, width * sizeof(float));
    }
  });
}

// Brings together what the threads have seen of one row.
void conclude(const Scores& s, int64_t row, const Seen* seen, int threads) {
  vf zeros{};
  float best = -std::numeric_limits<float>::infinity();
  int32_t id = 0;
  for (int64_t at = row; at < s.num_rows * threads; at += s.num_rows) {
    zeros += seen[at].zeros;
    for (int i = 0; i < LANES; i++) {
      const float score = seen[at].best[i];
      if (score > best || (score == best && seen[at].id[i] < id)) best = score, id = seen[at].id[i];
    }
  }
  s.finite[row] = sum(zeros) == 0.f;
  if (row < s.num_best) s.best[row] = id;
}

template <typename T>
void gather(const Matrix& m, int64_t row, T* out) {
  constexpr int together = TOGETHER<T>;
  const T* from = panel_of<T>(m, row / PANEL) + row % PANEL * together;
  int64_t k = 0;
  for (; k + together <= m.inputs; k += together, from += PANEL * together) std::memcpy(out + k, from, sizeof(float));
  if (k < m.inputs) out[k] = *from;
}

template <typename T>
void pack_all(Member& member, const Matrix& m) {
  constexpr int together = TOGETHER<T>;
  const int64_t row = stride<T>(m.inputs);
  std::vector<T> copy(PANEL * row);
  member.each(divided_up(m.outputs, PANEL), 1, [&](int64_t number) {
    T* panel = panel_of<T>(m, number);
    std::copy_n(panel, PANEL * row, copy.data());
    for (int64_t k = 0; k < row; k += together)
      for (int64_t o = 0; o < PANEL; o++)
        std::memcpy(panel + k * PANEL + o * together, copy.data() + o * row + k, sizeof(float));
  });
}

}  // namespace

void will_multiply(Member& member, const Matrix& m, int64_t rows) {
  if (rows > FEW_ROWS) return;
  const int64_t num_bytes = PANEL * (m.bf16 ? stride<uint16_t>(m.inputs) * 2 : m.inputs * 4);
  if ((member.number + 1) * PANEL <= m.outputs) member.will_read((const char*)m.values + member.number * num_bytes, num_bytes);
}

void product(Member& member, const Product& p) {
  p.matrix.bf16 ? multiply_all<uint16_t>(member, p) : multiply_all<float>(member, p);
}

void gated_product(Member& member, const Product& p) {
  p.matrix.bf16 ? multiply_gated<uint16_t>(member, p) : multiply_gated<float>(member, p);
}

void rows_of(Member& member, const Matrix& matrix, const int64_t* rows, int64_t count, void* out) {
  member.each(count, 8, [&](int64_t r) {
    if (matrix.bf16) gather(matrix, rows[r], (uint16_t*)out + r * matrix.inputs);
    else gather(matrix, rows[r], (float*)out + r * matrix.inputs);
  });
}

extern "C" void headrace_pack(const Matrix* matrix, int threads) {
  with_team(threads, [&](Member& member) {
    matrix->bf16 ? pack_all<uint16_t>(member, *matrix) : pack_all<float>(member, *matrix);
  });
}

extern "C" void headrace_product(const Product* p, int gated, int threads) {
  with_team(threads, [&](Member& member) { gated ? gated_product(member, *p) : product(member, *p); });
}

extern "C" void headrace_rows(const Matrix* matrix, const int64_t* rows, int64_t count, void* out, int threads) {
  with_team(threads, [&](Member& member) { rows_of(member, *matrix, rows, count, out); });
}

void DropSeen::operator()(Seen* seen) const { delete[] seen; }

SeenPointer nothing_seen(const Scores& s, int threads) { return SeenPointer(new Seen[s.num_rows * std::max(1, threads)]); }

void score(Member& member, const Scores& s, Seen* seen) {
  Seen* own = seen + member.number * s.num_rows;
  s.matrix.bf16 ? score_all<uint16_t>(member, s, own) : score_all<float>(member, s, own);
  member.each(s.num_rows, 8, [&](int64_t row) { conclude(s, row, seen, member.size); });
}

extern "C" void headrace_scores(const Scores* s, int threads) {
  const SeenPointer seen = nothing_seen(*s, threads);
  with_team(threads, [&](Member& member) { score(member, *s, seen.get()); });
}
