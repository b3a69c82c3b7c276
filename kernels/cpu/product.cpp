// Matrix products with weights in panels, for any number of rows. See linear.py and matrix.py for the meaning.
#include "product.h"

#include <cstring>
#include <vector>

#include "steps.cpp"

namespace {

template <typename T>
void multiply_all(Member& member, const Product& p) {
  const int64_t outputs = p.matrix.outputs;
  each_share(member, divided_up(outputs, PANEL), p.rows, [&](int64_t panel, int64_t first, int64_t count) {
    float sums[MOST_ROWS * PANEL];
    sum_up<T>(p, panel, panel + member.size, first, count, sums);
    const int64_t begin = panel * PANEL, end = std::min(begin + PANEL, outputs);
    for (int64_t r = 0; r < count; r++)
      for (int64_t o = begin; o < end; o += LANES) {
        const T* bias = p.bias ? (const T*)p.bias + o : nullptr;
        const vf value = finished(sums + r * PANEL + o - begin, bias, end - o, p.scale);
        store_upto((T*)p.out + (first + r) * outputs + o, value, end - o);
      }
  });
}

template <typename T, int32_t ACTIVATION>
void multiply_gated(Member& member, const Product& p) {
  const int64_t width = p.matrix.outputs / 2, panels = width / PANEL;
  each_share(member, panels, p.rows, [&](int64_t panel, int64_t first, int64_t count) {
    float gates[MOST_ROWS * PANEL], ups[MOST_ROWS * PANEL];
    sum_up<T>(p, panel, panels + panel, first, count, gates);
    sum_up<T>(p, panels + panel, panel + member.size, first, count, ups);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const int64_t o = panel * PANEL + i;
        const T *bias = p.bias ? (const T*)p.bias + o : nullptr, *up_bias = p.bias ? bias + width : nullptr;
        const vf gate = finished(gates + r * PANEL + i, bias, LANES, p.scale);
        const vf up = finished(ups + r * PANEL + i, up_bias, LANES, p.scale);
        store((T*)p.out + (first + r) * width + o, activated<ACTIVATION>(gate) * up);
      }
  });
}

template <typename T>
void gather(const Matrix& m, int64_t row, float scale, T* out) {
  constexpr int together = TOGETHER<T>;
  const T* from = panel_of<T>(m, row / PANEL) + row % PANEL * together;
  int64_t k = 0;
  for (; k + together <= m.inputs; k += together, from += PANEL * together) std::memcpy(out + k, from, sizeof(float));
  if (k < m.inputs) out[k] = *from;
  if (scale == 1.f) return;
  for (k = 0; k < m.inputs; k += LANES) store_upto(out + k, load_upto(out + k, m.inputs - k) * scale, m.inputs - k);
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
  const int64_t whole_bytes = PANEL * (m.bf16 ? stride<uint16_t>(m.inputs) * 2 : m.inputs * 4);
  const int64_t num_bytes = m.compressed ? compressed_panel_bytes(m.inputs) : whole_bytes;
  if ((member.number + 1) * PANEL <= m.outputs) member.will_read((const char*)m.values + member.number * num_bytes, num_bytes);
}

void product(Member& member, const Product& p) {
  p.matrix.bf16 ? multiply_all<uint16_t>(member, p) : multiply_all<float>(member, p);
}

void gated_product(Member& member, const Product& p) {
  if (p.activation == GELU) p.matrix.bf16 ? multiply_gated<uint16_t, GELU>(member, p) : multiply_gated<float, GELU>(member, p);
  else p.matrix.bf16 ? multiply_gated<uint16_t, SILU>(member, p) : multiply_gated<float, SILU>(member, p);
}

void rows_of(Member& member, const Matrix& matrix, const int64_t* rows, int64_t count, float scale, void* out) {
  member.each(count, 8, [&](int64_t r) {
    if (matrix.bf16) gather(matrix, rows[r], scale, (uint16_t*)out + r * matrix.inputs);
    else gather(matrix, rows[r], scale, (float*)out + r * matrix.inputs);
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

extern "C" void headrace_rows(const Matrix* matrix, const int64_t* rows, int64_t count, float scale, void* out, int threads) {
  with_team(threads, [&](Member& member) { rows_of(member, *matrix, rows, count, scale, out); });
}
