// A mixture of experts. See experts.py for the meaning.
//
// Rows are sorted by expert, so that each expert's weights are read once for all of its rows. How many shares a phase has
// follows from the number of rows alone, for every thread must count the same; what was chosen is only read within shares.
#include "ops.h"
#include "steps.cpp"

#include <cmath>
#include <vector>

namespace {

// The experts of one row, best first, and their weights.
template <typename T>
void route(const Experts& e, int64_t row) {
  const T* from = (const T*)e.scores + row * e.count;
  std::vector<float> scores(e.count);
  for (int64_t i = 0; i < e.count; i += LANES) store_upto(&scores[i], load_upto(from + i, e.count - i), e.count - i);
  const float most = *std::max_element(scores.begin(), scores.end());
  const auto likely = [&](float score) { return exp(splat(score - most))[0]; };
  float of_all = 0, of_chosen = 0;
  for (const float score : scores) of_all += likely(score);
  float* weights = e.weights + row * e.top_k;
  for (int64_t k = 0; k < e.top_k; k++) {
    const auto best = std::max_element(scores.begin(), scores.end());  // the first of equal ones
    e.chosen[row * e.top_k + k] = int32_t(best - scores.begin());
    of_chosen += weights[k] = likely(*best);
    *best = -INFINITY;
  }
  // a score that is not finite makes `of_all` so, wherever it is
  const float by = e.normalised ? of_chosen + (of_all - of_all) : of_all;
  for (int64_t k = 0; k < e.top_k; k++) weights[k] /= by;
}

// Where each row and choice goes, sorted by expert: start [count + 1], active [count], place [rows · top_k].
void sort(const Experts& e) {
  std::fill_n(e.start, e.count + 1, 0);
  for (int64_t i = 0; i < e.rows * e.top_k; i++) e.start[e.chosen[i] + 1]++;
  int32_t num_active = 0;
  for (int64_t i = 0; i < e.count; i++) {
    if (e.start[i + 1] > 0) e.active[num_active++] = int32_t(i);
    e.start[i + 1] += e.start[i];
  }
  std::fill(e.active + num_active, e.active + e.count, -1);
  for (int64_t i = 0; i < e.rows * e.top_k; i++) e.place[i] = e.start[e.chosen[i]]++;
  for (int64_t i = e.count; i > 0; i--) e.start[i] = e.start[i - 1];
  e.start[0] = 0;
}

// work(expert, panel, first, count) for the panels of each expert that has rows, with rows in groups.
template <typename Work>
void each_panel(Member& member, const Experts& e, int64_t panels, Work work) {
  member.each(std::min(e.count, e.rows * e.top_k) * panels, 1, [&](int64_t share) {
    const int32_t expert = e.active[share / panels];
    if (expert < 0) return;
    for (int64_t first = e.start[expert], end = e.start[expert + 1]; first < end; first += MOST_ROWS)
      work(expert, share % panels, first, std::min(MOST_ROWS, end - first));
  });
}

// Sums as an expert's result holds them; `bias`, which may be null, is of all experts, and `at` the place of the output in it.
template <typename T>
inline vf with_bias(const float* sum, const void* bias, int64_t at) {
  return finished(sum, bias ? (const T*)bias + at : nullptr, LANES, 1.f);
}

template <typename T>
void compute(Member& member, const Experts& e) {
  const int64_t hidden = e.gate_up.inputs, width = e.down.inputs, panels = width / PANEL, out_panels = hidden / PANEL;
  member.each(e.rows, 8, [&](int64_t row) { route<T>(e, row); });
  member.each(1, 1, [&](int64_t) { sort(e); });
  member.each(e.rows * e.top_k, rows_of_share(hidden), [&](int64_t i) {
    std::copy_n((const T*)e.x + i / e.top_k * hidden, hidden, (T*)e.sorted + e.place[i] * hidden);
  });
  const Product to_gated{e.sorted, e.gate_up, nullptr, e.gated, 0, 1.f, SILU};
  each_panel(member, e, panels, [&](int64_t expert, int64_t panel, int64_t first, int64_t count) {
    float gates[MOST_ROWS * PANEL], ups[MOST_ROWS * PANEL];
    const int64_t at = expert * 2 * panels + panel;
    sum_up<T>(to_gated, at, at + panels, first, count, gates);
    sum_up<T>(to_gated, at + panels, panel + member.size < panels ? at + member.size : NO_PANEL, first, count, ups);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const vf gate = with_bias<T>(gates + r * PANEL + i, e.gate_up_bias, at * PANEL + i);
        const vf up = with_bias<T>(ups + r * PANEL + i, e.gate_up_bias, (at + panels) * PANEL + i);
        const vf made = e.limit > 0 ? clamped(gate, up, e.alpha, e.limit) : silu(gate) * up;
        store((T*)e.gated + (first + r) * width + panel * PANEL + i, made);
      }
  });
  const Product to_fed{e.gated, e.down, nullptr, e.fed, 0, 1.f, SILU};
  each_panel(member, e, out_panels, [&](int64_t expert, int64_t panel, int64_t first, int64_t count) {
    float sums[MOST_ROWS * PANEL];
    const int64_t at = expert * out_panels + panel;
    sum_up<T>(to_fed, at, panel + member.size < out_panels ? at + member.size : NO_PANEL, first, count, sums);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < PANEL; i += LANES) {
        const vf made = with_bias<T>(sums + r * PANEL + i, e.down_bias, at * PANEL + i);
        store((T*)e.fed + (first + r) * hidden + panel * PANEL + i, made);
      }
  });
  member.each(e.rows, rows_of_share(hidden * e.top_k), [&](int64_t row) {
    for (int64_t i = 0; i < hidden; i += LANES) {
      vf sum{};
      for (int64_t k = row * e.top_k; k < (row + 1) * e.top_k; k++)
        sum += load((const T*)e.fed + e.place[k] * hidden + i) * e.weights[k];
      store((T*)e.out + row * hidden + i, sum);
    }
  });
}

}  // namespace

void experts(Member& member, const Experts& e) {
  e.gate_up.bf16 ? compute<uint16_t>(member, e) : compute<float>(member, e);
}

extern "C" void headrace_experts(const Experts* e, int threads) {
  with_team(threads, [&](Member& member) { experts(member, *e); });
}
