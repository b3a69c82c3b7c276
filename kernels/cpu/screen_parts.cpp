// Makes the parts of the screen: matrices and rows in 8 bits, with how far off they are. See screen.cpp.
#include "screen_parts.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <vector>

#include "panels.cpp"

namespace {

inline float value(float x) { return x; }
inline float value(uint16_t x) { return from_bf16(x); }

// One panel of a matrix as float32 [inputs][PANEL].
template <typename T>
void unpack(const Matrix& m, int64_t number, float* to) {
  constexpr int together = TOGETHER<T>;
  const T* panel = panel_of<T>(m, number);
  for (int64_t k = 0; k < m.inputs; k++)
    for (int64_t o = 0; o < PANEL; o++)
      to[k * PANEL + o] = value(panel[(k - k % together) * PANEL + o * together + k % together]);
}

// The copy of a panel w [inputs][PANEL]. False if a weight is not finite or an output's length is beyond use.
bool make_panel(const float* w, int64_t inputs, uint8_t* to) {
  Facts facts{};
  float inverse[PANEL];
  double all[PANEL] = {}, error[PANEL] = {}, length[PANEL] = {};  // sums of squares
  for (int64_t k = 0; k < inputs; k++)
    for (int o = 0; o < PANEL; o++) {
      all[o] += double(w[k * PANEL + o]) * w[k * PANEL + o];
      facts.scale[o] = std::max(facts.scale[o], std::fabs(w[k * PANEL + o]));
    }
  for (int o = 0; o < PANEL; o++) {
    if (!(all[o] <= MOST_SQUARE)) return false;
    facts.scale[o] = facts.scale[o] / MOST_WEIGHT >= FLT_MIN ? facts.scale[o] / MOST_WEIGHT : 0;
    inverse[o] = facts.scale[o] > 0 ? 1 / facts.scale[o] : 0;
  }
  for (int64_t k = 0; k < inputs; k++)
    for (int o = 0; o < PANEL; o++) {
      const float most = MOST_WEIGHT, q = std::clamp(std::nearbyint(w[k * PANEL + o] * inverse[o]), -most, most);
      const double scaled = double(facts.scale[o]) * q, e = w[k * PANEL + o] - scaled;  // both exact
      error[o] += e * e;
      length[o] += scaled * scaled;
      to[(k - k % QUAD) * PANEL + o * QUAD + k % QUAD] = uint8_t(int32_t(q) + MIDDLE);
    }
  for (int o = 0; o < PANEL; o++) {
    facts.error[o] = rounded_up(std::sqrt(error[o])), facts.length[o] = rounded_up(std::sqrt(length[o]));
    facts.most_error = std::max(facts.most_error, facts.error[o]);
    facts.most_length = std::max(facts.most_length, facts.length[o]);
  }
  std::memcpy(to + quads(inputs) * PANEL * QUAD, &facts, sizeof facts);
  return true;
}

template <typename T>
void make(Member& member, const Matrix& m, uint8_t* to, std::atomic<bool>& is_of_use) {
  std::vector<float> copy(PANEL * m.inputs);
  member.each(divided_up(m.outputs, PANEL), 1, [&](int64_t number) {
    unpack<T>(m, number, copy.data());
    if (!make_panel(copy.data(), m.inputs, to + number * screen_panel_bytes(m.inputs))) is_of_use = false;
  });
}

// A unit that is fit for most steps: the largest of a row, or smaller if that takes a few high parts and is worth it.
template <typename T>
float chosen_unit(const T* x, int64_t inputs) {
  std::vector<float> most(quads(inputs));
  for (int64_t k = 0; k < inputs; k++) most[k / QUAD] = std::max(most[k / QUAD], std::fabs(value(x[k])));
  const size_t last = std::min<size_t>(most_high(inputs), most.size() - 1);
  std::partial_sort(most.begin(), most.begin() + last + 1, most.end(), std::greater<float>());
  const float wanted = std::max(most[last], most[0] / BASE);
  if (most[0] <= 2 * wanted) return most[0] / 127;
  return std::max(wanted, *std::find_if(most.begin(), most.end(), [&](float m) { return m < 1.5f * wanted; })) / 127;
}

// Puts one step of x where it belongs, in whole numbers of the unit, and adds the squares of what is left over.
template <typename T>
void put_step(const T* x, int64_t width, int64_t step, int64_t most_high, Row& row, const Values& to, double& rest) {
  double p[QUAD] = {};
  bool is_large = false;
  for (int64_t i = 0; i < width; i++) {
    p[i] = std::nearbyint(double(value(x[i])) / row.unit);
    is_large |= std::fabs(p[i]) > 127;
  }
  const bool has_high = is_large && row.num_high < most_high;
  int8_t low[QUAD] = {}, high[QUAD] = {};
  for (int64_t i = 0; i < width; i++) {
    if (has_high) high[i] = int8_t(std::clamp(std::nearbyint(p[i] / BASE), -127., 127.));
    low[i] = int8_t(std::clamp(p[i] - BASE * high[i], -127., 127.));
    const int32_t whole = low[i] + BASE * high[i];
    const double f = value(x[i]) - double(whole) * row.unit;
    row.start -= MIDDLE * whole;
    rest += f * f;
  }
  std::memcpy(to.low + step, low, sizeof low);
  if (!has_high) return;
  std::memcpy(to.high + row.num_high, high, sizeof high);
  to.which[row.num_high++] = int32_t(step);
}

template <typename T>
Row quantise(const T* x, int64_t inputs, const Values& to) {
  double all = 0, rest = 0;  // sums of squares
  for (int64_t k = 0; k < inputs; k++) all += double(value(x[k])) * value(x[k]);
  Row row{};
  std::fill_n(to.low, quads(inputs), 0);
  if (!(all <= MOST_SQUARE)) return row;
  row.unit = chosen_unit(x, inputs);
  if (!(row.unit >= FLT_MIN)) return row;
  for (int64_t step = 0; step < quads(inputs); step++)
    put_step(x + step * QUAD, std::min<int64_t>(QUAD, inputs - step * QUAD), step, most_high(inputs), row, to, rest);
  const double n = double(inputs + 8) * 0x1p-23, s = 0x1p-20;
  const double length = std::sqrt(all) / row.unit, left = std::sqrt(rest) / row.unit;
  row.is_screened = true;
  row.error_by = rounded_up((1 + s) * (1 + n) * length);
  row.length_by = rounded_up((1 + s) * (left + (n + s) * length));
  row.least_bound = rounded_up(double(inputs) * 0x1p-60 / row.unit);
  return row;
}

}  // namespace

Row quantised(const void* x, bool bf16, int64_t inputs, const Values& to) {
  return bf16 ? quantise((const uint16_t*)x, inputs, to) : quantise((const float*)x, inputs, to);
}

// Bytes of a matrix's copy; 0 if there can be none, by its size or on this kind of CPU.
extern "C" int64_t headrace_screen_bytes(int64_t outputs, int64_t inputs) {
  return HAS_SCREEN && inputs <= MOST_INPUTS ? divided_up(outputs, PANEL) * screen_panel_bytes(inputs) + SCREEN_END_BYTES : 0;
}

// Makes the copy of a matrix in panels. 0 if its values do not allow one.
extern "C" int headrace_screen(const Matrix* matrix, void* to, int threads) {
  std::atomic<bool> is_of_use = true;
  with_team(threads, [&](Member& member) {
    uint8_t* const bytes = (uint8_t*)to;
    matrix->bf16 ? make<uint16_t>(member, *matrix, bytes, is_of_use) : make<float>(member, *matrix, bytes, is_of_use);
  });
  return is_of_use;
}
