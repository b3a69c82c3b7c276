// Scores over a vocabulary, and the best of each row: by the screen where that settles it, else by all of the row's scores.
#include "score.h"

#include <cstring>
#include <limits>
#include <vector>

#include "panels.cpp"
#include "screen.h"
#include "screen_parts.h"

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// What a thread has seen of a row's scores, lane by lane. It meets the panels in order, so of equals the lower id is kept.
class Seen {
 public:
  vf best = splat(-INFINITE), zeros{};  // zeros: 0 · each score, so 0 if all are finite
  vi id{};

  void add(vf score, vi ids, vf absent) {
    zeros += score * 0.f;
    score += absent;
    const vi wins = score > best;
    best = select(wins, score, best);
    id = select(wins, ids, id);
  }
};

typedef std::vector<int64_t> Numbers;  // of rows among those of a call

template <typename T>
void score_all(Member& member, const Scores& s, const Numbers& numbers, Seen* seen) {
  const Matrix& m = s.matrix;
  const vi lane = lanes();
  each_share(member, divided_up(m.outputs, PANEL), numbers.size(), [&](int64_t panel, int64_t first, int64_t count) {
    float sums[MOST_ROWS * PANEL];
    const auto x = [&](int64_t r) { return (const T*)s.x + s.rows[numbers[first + r]] * m.inputs; };
    multiply_rows(x, count, panel_of<T>(m, panel), m.inputs, sums, panel_or_null<T>(m, panel + member.size));
    const int64_t begin = panel * PANEL, width = std::min<int64_t>(PANEL, m.outputs - begin);
    for (int64_t r = 0; r < count; r++) {
      const float* row = sums + r * PANEL;
      for (int64_t o = 0; o < width; o += LANES) {
        const vi ids = lane + int32_t(begin + o);
        const vf absent = select(ids < int32_t(m.outputs), vf{}, splat(-INFINITE));
        seen[numbers[first + r]].add(load(row + o), ids, absent);
      }
      const int64_t kept = numbers[first + r] - s.num_best;
      if (kept >= 0) std::memcpy(s.scores + kept * m.outputs + begin, row, width * sizeof(float));
    }
  });
}

// Brings together what the threads have seen of one row.
void conclude(const Scores& s, int64_t row, const Seen* seen, int threads) {
  vf zeros{};
  float best = -INFINITE;
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

}  // namespace

struct Scoring {
  std::unique_ptr<Seen[]> seen;  // [threads, num_rows]
  ScreeningPointer screening;    // null: no row is screened
};

void DropScoring::operator()(Scoring* scoring) const { delete scoring; }

ScoringPointer new_scoring(const Scores& s, int threads) {
  std::unique_ptr<Seen[]> seen(new Seen[s.num_rows * std::max(1, threads)]);
  return ScoringPointer(new Scoring{std::move(seen), new_screening(s, threads)});
}

void will_score(Member& member, const Scores& s, const Scoring& scoring) {
  if (!scoring.screening) return will_multiply(member, s.matrix, s.num_rows);
  const int64_t num_bytes = screen_panel_bytes(s.matrix.inputs);
  const bool has_one = (member.number + 1) * PANEL <= s.matrix.outputs && s.num_rows <= FEW_ROWS;
  if (has_one) member.will_read((const char*)s.screen + member.number * num_bytes, num_bytes);
}

void score(Member& member, const Scores& s, Scoring& scoring) {
  if (scoring.screening) screen(member, s, *scoring.screening);
  Numbers left;  // the same in all threads: what was settled does not change any more
  for (int64_t row = 0; row < s.num_rows; row++)
    if (row >= s.num_best || !scoring.screening || !settled(*scoring.screening, row)) left.push_back(row);
  if (left.empty()) return;
  Seen* own = scoring.seen.get() + member.number * s.num_rows;
  s.matrix.bf16 ? score_all<uint16_t>(member, s, left, own) : score_all<float>(member, s, left, own);
  member.each(left.size(), 8, [&](int64_t i) { conclude(s, left[i], scoring.seen.get(), member.size); });
}

extern "C" void headrace_scores(const Scores* s, int threads) {
  const ScoringPointer scoring = new_scoring(*s, threads);
  with_team(threads, [&](Member& member) { score(member, *s, *scoring); });
}
