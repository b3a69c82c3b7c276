// Which outputs of a matrix can have a row's largest score, from a copy of it in 8 bits: the screen.
//
// An output's weights are w = scale · q + e with whole numbers |q| ≤ MOST_WEIGHT, a row is x = unit · p + f. In units of `unit`,
// where X, F, E, W are the lengths |x|, |f|, |e|, |scale · q|, by Cauchy-Schwarz
//
//   | w · x − scale · (q · p) |  =  | e · x + scale q · f |  ≤  E X + W F.
//
// The score that counts is a float32 chain. Each of its terms goes through at most inputs + 2 roundings, and the partial
// sums are no larger than |w| |x|, so it is off w · x by at most n (W + E) X with n = (inputs + 8) · 2^-23, twice what
// rounding to nearest needs. Products of bfloat16 take subnormal numbers for 0 and give none: with lengths below 2^60 that
// is less than inputs · 2^-60. The approximation itself is rounded twice, which is 2 · 2^-24 W (X + F) at the most, and so
// are the bound and its sum with the approximation. With s = 2^-20 for all of these,
//
//   bound = E X' + W F' + inputs · 2^-60 / unit,   X' = (1 + s) (1 + n) X,   F' = (1 + s) (F + (n + s) X).
//
// An output whose approximation plus bound is below another's minus bound has a lower score. What is left are few: their
// scores are computed as they would be without a screen, and the largest is the row's best, the lower id of equals.
#include "screen.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "panels.cpp"
#include "screen_parts.h"

namespace {

constexpr int64_t LEAST_BEST = 8;  // rows that make it worth reading the copy besides the matrix itself
constexpr int CAPACITY = 256;      // outputs in question that a thread keeps for a row
constexpr float INFINITE = std::numeric_limits<float>::infinity();

const uint8_t* screen_panel(const Scores& s, int64_t number) {
  return (const uint8_t*)s.screen + number * screen_panel_bytes(s.matrix.inputs);
}

// How often the screen was in vain lately; behind the last panel. Only how fast results come depends on it.
class Doubt {
 public:
  explicit Doubt(const Scores& s) : value_(*(int32_t*)screen_panel(s, divided_up(s.matrix.outputs, PANEL))) {}
  bool is_large() const { return value_.load(std::memory_order_relaxed) > 64; }
  void add(int64_t change) {  // what others add meanwhile may be lost
    const int64_t sum = value_.load(std::memory_order_relaxed) + change;
    value_.store(int32_t(std::clamp<int64_t>(sum, 0, 512)), std::memory_order_relaxed);
  }
  static constexpr int64_t IN_VAIN = 8;  // that is, for one row: what eight others make up for

 private:
  std::atomic_ref<int32_t> value_;
};

struct Candidate { float most; int32_t id; };  // what the score, in the row's unit, cannot be above

// What a thread has found of one row.
struct Found {
  float least = -INFINITE;  // what the best score is not below; infinite: too much is in question
  int32_t count = 0;
  Candidate candidates[CAPACITY];

  void add(Candidate candidate) {
    if (count == CAPACITY) {
      const auto is_out = [&](const Candidate& c) { return c.most < least; };
      count = int32_t(std::remove_if(candidates, candidates + count, is_out) - candidates);
      if (count > CAPACITY * 3 / 4) least = INFINITE;
    }
    if (candidate.most >= least) candidates[count++] = candidate;
  }
};

}  // namespace

struct Screening {
  int64_t inputs;
  std::unique_ptr<int32_t[]> memory;      // [num_best, those of one row]
  std::unique_ptr<Row[]> rows;            // [num_best]
  std::unique_ptr<Found[]> found;         // [threads, num_best]
  std::unique_ptr<uint8_t[]> is_settled;  // [num_best]

  Values values(int64_t row) const { return values_in(memory.get() + row * values_width(inputs), inputs); }
};

namespace {

#if HEADRACE_SCREEN == 8
// sum += q · four bytes for each of the LANES outputs.
inline vu add_step(vu sum, const uint8_t* q, int32_t bytes) {
  return (vu)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(q), _mm512_set1_epi32(bytes));
}
#elif HEADRACE_SCREEN == 7
inline ru add_step(ru sum, const uint8_t* q, __m256i bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i*)q), bytes);  // at most 2 · 127 · 127
  return sum + (ru)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline vu add_step(vu sum, const uint8_t* q, int32_t bytes) {
  const __m256i all = _mm256_set1_epi32(bytes);
  return {add_step(sum.low, q, all), add_step(sum.high, q + REGISTER_BYTES, all)};
}
#else
inline vu add_step(vu sum, const uint8_t*, int32_t) { return sum; }  // there is no screen
#endif

// tile[r][o] = q[o] · p[r] for C vectors of a panel's outputs.
template <int R, int C>
void count(const Row* rows, const Values* p, const uint8_t* panel, int64_t steps, int32_t* tile) {
  vu sum[R][C] = {};  // modulo 2^32: what is wanted fits
  for (int r = 0; r < R; r++) {
    for (int32_t i = 0; i < rows[r].num_high; i++)
      for (int c = 0; c < C; c++) {
        const uint8_t* const q = panel + (p[r].which[i] * PANEL + c * LANES) * QUAD;
        sum[r][c] = add_step(sum[r][c], q, p[r].high[i]);
      }
    if (rows[r].num_high)
      for (int c = 0; c < C; c++) sum[r][c] *= uint32_t(BASE);
  }
  for (int64_t k = 0; k < steps; k++, panel += PANEL * QUAD) {
    if (R <= PACED_ROWS)
      for (int c = 0; c < C; c++) __builtin_prefetch(panel + (AHEAD * PANEL + c * LANES) * QUAD, 0, 3);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sum[r][c] = add_step(sum[r][c], panel + c * LANES * QUAD, p[r].low[k]);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      const vu whole = sum[r][c] + uint32_t(rows[r].start);
      std::memcpy(tile + r * PANEL + c * LANES, &whole, sizeof whole);
    }
}

template <int R>
void count_panel(const Row* rows, const Values* p, const uint8_t* panel, int64_t steps, int32_t* tile) {
  for (int c = 0; c < PANEL / LANES; c += COLUMNS<R>)
    count<R, COLUMNS<R>>(rows, p, panel + c * LANES * QUAD, steps, tile + c * LANES);
}

void count_block(const Row* rows, const Values* p, int number, const uint8_t* panel, int64_t steps, int32_t* tile) {
  switch (number) {
    case 1: return count_panel<1>(rows, p, panel, steps, tile);
    case 2: return count_panel<2>(rows, p, panel, steps, tile);
    case 3: return count_panel<3>(rows, p, panel, steps, tile);
    case 4: return count_panel<4>(rows, p, panel, steps, tile);
    case 5: return count_panel<5>(rows, p, panel, steps, tile);
    default: return count_panel<6>(rows, p, panel, steps, tile);
  }
}

inline vf whole(const int32_t* p) { vi v; std::memcpy(&v, p, sizeof v); return converted<vf>(v); }

// Whether a vector of a panel has anything for a row. With the panel's largest bound, so it is never denied wrongly.
inline bool has_any(const int32_t* tile, const Facts& facts, vf bound, float least) {
  vf most = splat(-INFINITE);
  for (int o = 0; o < PANEL; o += LANES) most = max(most, fma(whole(tile + o), load(facts.scale + o), bound));
  return any(most >= splat(least));
}

// What the scores of a vector of a panel are not below and not above, in the row's unit.
struct Range { vf least, most; };
inline Range range(const int32_t* tile, const Facts& facts, const Row& row, int o) {
  const vf more = fma(load(facts.length + o), splat(row.length_by), splat(row.least_bound));
  const vf bound = fma(load(facts.error + o), splat(row.error_by), more), sum = whole(tile + o), scale = load(facts.scale + o);
  return {fma(sum, scale, -bound), fma(sum, scale, bound)};
}

void look(const int32_t* tile, const Facts& facts, const Row& row, int32_t begin, int64_t width, Found& found) {
  float most[PANEL];
  for (int o = 0; o < width; o += LANES) {
    const Range scores = range(tile, facts, row, o);
    const vi there = lanes() < int32_t(width - o);
    found.least = std::max(found.least, max(select(there, scores.least, splat(-INFINITE))));
    store(most + o, scores.most);
  }
  for (int o = 0; o < width; o++)
    if (most[o] >= found.least) found.add({most[o], begin + o});
}

void screen_all(Member& member, const Scores& s, Screening& screening) {
  Found* own = screening.found.get() + member.number * s.num_best;
  const int64_t steps = quads(screening.inputs);
  each_block(member, divided_up(s.matrix.outputs, PANEL), s.num_best, [&](int64_t number, int64_t first, int64_t count) {
    Values p[BLOCK_ROWS];
    int32_t tile[BLOCK_ROWS * PANEL];
    const uint8_t* panel = screen_panel(s, number);
    const Facts& facts = *(const Facts*)(panel + steps * PANEL * QUAD);
    const Row* rows = screening.rows.get() + first;
    for (int64_t r = 0; r < count; r++) p[r] = screening.values(first + r);
    count_block(rows, p, count, panel, steps, tile);
    for (int64_t r = 0; r < count; r++) {
      const Row& row = rows[r];
      const vf error = splat(facts.most_error), length = splat(facts.most_length);
      const vf bound = fma(error, splat(row.error_by), fma(length, splat(row.length_by), splat(row.least_bound)));
      if (!row.is_screened || !has_any(tile + r * PANEL, facts, bound, own[first + r].least)) continue;
      const int64_t begin = number * PANEL, width = std::min<int64_t>(PANEL, s.matrix.outputs - begin);
      look(tile + r * PANEL, facts, row, begin, width, own[first + r]);
    }
  });
}

void bounds_of(const Scores& s, const Row& row, const Values& p, float* least, float* most) {
  int32_t tile[PANEL];
  for (int64_t begin = 0; begin < s.matrix.outputs; begin += PANEL) {
    const uint8_t* panel = screen_panel(s, begin / PANEL);
    const Facts& facts = *(const Facts*)(panel + quads(s.matrix.inputs) * PANEL * QUAD);
    count_panel<1>(&row, &p, panel, quads(s.matrix.inputs), tile);
    for (int64_t o = begin; o < std::min(begin + PANEL, s.matrix.outputs); o += LANES) {
      const Range scores = range(tile, facts, row, o - begin);
      store_upto(least + o, scores.least, s.matrix.outputs - o), store_upto(most + o, scores.most, s.matrix.outputs - o);
    }
  }
}

// Those of one row that all threads together leave in question, the most promising first. None if they are too many.
std::vector<Candidate> in_question(const Scores& s, const Screening& screening, int64_t row, int threads) {
  std::vector<Candidate> all;
  float least = -INFINITE;
  const Found* const found = screening.found.get() + row;
  for (int t = 0; t < threads; t++) least = std::max(least, found[t * s.num_best].least);
  for (int t = 0; t < threads; t++)
    for (int i = 0; i < found[t * s.num_best].count; i++)
      if (found[t * s.num_best].candidates[i].most >= least) all.push_back(found[t * s.num_best].candidates[i]);
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.most > b.most; });
  return all;
}

// The best of one row, from the scores of those in question, until none that is left can reach what was found.
template <typename T>
void settle(const Scores& s, Screening& screening, int64_t row, int threads) {
  constexpr int N = 4;
  const std::vector<Candidate> all = in_question(s, screening, row, threads);
  screening.is_settled[row] = !all.empty();
  Doubt(s).add(all.empty() ? Doubt::IN_VAIN : -1);
  const T* x = (const T*)s.x + s.rows[row] * s.matrix.inputs;
  float best = -INFINITE;
  int32_t id = 0;
  for (size_t first = 0; first < all.size(); first += N) {
    if (double(all[first].most) * screening.rows[row].unit < best) break;
    const T* at[N];
    vf scores[N];
    for (size_t i = 0; i < N; i++) {
      const int32_t output = all[std::min(first + i, all.size() - 1)].id;
      at[i] = panel_of<T>(s.matrix, output / PANEL) + output % PANEL / LANES * LANES * TOGETHER<T>;
    }
    multiply_apart<N>(x, at, s.matrix.inputs, scores);
    for (size_t i = 0; i < std::min<size_t>(N, all.size() - first); i++) {
      const int32_t output = all[first + i].id;
      const float score = scores[i][output % LANES];
      if (score > best || (score == best && output < id)) best = score, id = output;
    }
  }
  if (all.empty()) return;
  s.best[row] = id;
  s.finite[row] = 1;
}

template <typename T>
void screen_rows(Member& member, const Scores& s, Screening& screening) {
  member.each(s.num_best, 4, [&](int64_t row) {
    const T* x = (const T*)s.x + s.rows[row] * s.matrix.inputs;
    screening.rows[row] = quantised(x, s.matrix.bf16, s.matrix.inputs, screening.values(row));
  });
  screen_all(member, s, screening);
  member.each(s.num_best, 1, [&](int64_t row) { settle<T>(s, screening, row, member.size); });
}

}  // namespace

void DropScreening::operator()(Screening* screening) const { delete screening; }

ScreeningPointer new_screening(const Scores& s, int threads) {
  if (!s.screen || s.num_best == 0 || (s.num_best < s.num_rows && s.num_best < LEAST_BEST)) return nullptr;
  if (Doubt doubt(s); doubt.is_large()) {
    doubt.add(-s.num_best);
    return nullptr;
  }
  ScreeningPointer made(new Screening);
  made->inputs = s.matrix.inputs;
  made->memory.reset(new int32_t[s.num_best * values_width(made->inputs)]);
  made->rows.reset(new Row[s.num_best]);
  made->found.reset(new Found[s.num_best * std::max(1, threads)]);
  made->is_settled.reset(new uint8_t[s.num_best]);
  return made;
}

void screen(Member& member, const Scores& s, Screening& screening) {
  s.matrix.bf16 ? screen_rows<uint16_t>(member, s, screening) : screen_rows<float>(member, s, screening);
}

bool settled(const Screening& screening, int64_t row) { return screening.is_settled[row]; }

// What the scores of the first row that is asked for are not below and not above [outputs], in the unit that is given; for
// tests. 0 if the row is not screened.
extern "C" float headrace_score_bounds(const Scores* s, float* least, float* most) {
  std::vector<int32_t> memory(values_width(s->matrix.inputs));
  const Values p = values_in(memory.data(), s->matrix.inputs);
  const char* x = (const char*)s->x + s->rows[0] * s->matrix.inputs * (s->matrix.bf16 ? 2 : 4);
  const Row row = quantised(x, s->matrix.bf16, s->matrix.inputs, p);
  if (row.is_screened) bounds_of(*s, row, p, least, most);
  return row.is_screened ? row.unit : 0;
}
