// The operations between the matrix products, but for the rotary embedding: norm, sum, gated activation, and the cap of scores.
// See rms_norm.py, gated.py and embedding.py for their meaning; arithmetic is float32 and each row stands alone.
#include "ops.h"
#include "simd.cpp"

#include <cmath>

namespace {

template <typename T>
void norm_row(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t hidden, float eps) {
  vf squares{};
  for (int64_t i = 0; i < hidden; i += LANES) {
    vf v = load_upto(x + i, hidden - i);
    if (residual) {
      v = rounded<T>(v + load_upto(residual + i, hidden - i));
      store_upto(total + i, v, hidden - i);
    }
    squares = fma(v, v, squares);
  }
  const float factor = 1.f / std::sqrt(sum(squares) / float(hidden) + eps);
  const T* from = residual ? total : x;
  for (int64_t i = 0; i < hidden; i += LANES)
    store_upto(out + i, load_upto(from + i, hidden - i) * factor * load_upto(weight + i, hidden - i), hidden - i);
}

template <typename T>
void norm_rows(Member& member, const Norm& n) {
  member.each(n.rows, rows_of_share(n.hidden), [&](int64_t r) {
    const int64_t at = r * n.hidden;
    norm_row((const T*)n.x + at, n.residual ? (const T*)n.residual + at : nullptr, n.weight, (T*)n.out + at,
             n.total ? (T*)n.total + at : nullptr, n.hidden, n.eps);
  });
}

template <typename T>
void add_rows(Member& member, const Sum& s) {
  member.each(s.rows, rows_of_share(s.width), [&](int64_t r) {
    const T *x = (const T*)s.x + r * s.width, *residual = (const T*)s.residual + r * s.width;
    for (int64_t i = 0; i < s.width; i += LANES) {
      const int64_t left = s.width - i;
      store_upto((T*)s.out + r * s.width + i, load_upto(x + i, left) + load_upto(residual + i, left), left);
    }
  });
}

template <typename T, int32_t ACTIVATION>
void gate_rows(Member& member, const Gate& g) {
  member.each(g.rows, rows_of_share(2 * g.width), [&](int64_t r) {
    const T *gate = (const T*)g.gate_up + 2 * r * g.width, *up = gate + g.width;
    for (int64_t i = 0; i < g.width; i += LANES) {
      const int64_t left = g.width - i;
      const vf activation = activated<ACTIVATION>(load_upto(gate + i, left));
      store_upto((T*)g.out + r * g.width + i, activation * load_upto(up + i, left), left);
    }
  });
}

void cap_scores(Member& member, float* scores, int64_t rows, int64_t width, float divisor, float cap) {
  const int64_t share = SHARE / LANES * LANES, shares = (width + share - 1) / share;
  member.each(rows * shares, 1, [&](int64_t number) {
    const int64_t begin = number % shares * share, end = std::min(begin + share, width);
    float* row = scores + number / shares * width;
    for (int64_t i = begin; i < end; i += LANES) {
      const vf x = load_upto(row + i, end - i) / divisor;
      store_upto(row + i, cap > 0 ? capped(x, cap) : x, end - i);
    }
  });
}

}  // namespace

void norm(Member& member, const Norm& n) { n.bf16 ? norm_rows<uint16_t>(member, n) : norm_rows<float>(member, n); }

void add(Member& member, const Sum& s) { s.bf16 ? add_rows<uint16_t>(member, s) : add_rows<float>(member, s); }

void gate(Member& member, const Gate& g) {
  if (g.activation == GELU) g.bf16 ? gate_rows<uint16_t, GELU>(member, g) : gate_rows<float, GELU>(member, g);
  else g.bf16 ? gate_rows<uint16_t, SILU>(member, g) : gate_rows<float, SILU>(member, g);
}

extern "C" void headrace_norm(const Norm* n, int threads) {
  with_team(threads_for(n->rows * n->hidden, threads), [&](Member& member) { norm(member, *n); });
}

extern "C" void headrace_add(const Sum* s, int threads) {
  with_team(threads_for(s->rows * s->width, threads), [&](Member& member) { add(member, *s); });
}

extern "C" void headrace_gate(const Gate* g, int threads) {
  with_team(threads_for(g->rows * g->width * 4, threads), [&](Member& member) { gate(member, *g); });
}

extern "C" void headrace_cap_scores(float* scores, int64_t rows, int64_t width, float divisor, float cap, int threads) {
  with_team(threads_for(rows * width * 4, threads),
            [&](Member& member) { cap_scores(member, scores, rows, width, divisor, cap); });
}
