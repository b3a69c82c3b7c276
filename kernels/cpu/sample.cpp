// Draws a token a row. See sample.py for the rules and philox.py for the random words; this computes the same, with float32
// scores. A row is one thread's work from its first to its last operation, so nothing beside it can change its result.
#include "simd.cpp"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int SPREAD = 64;  // one counter serves four tokens, LANES apart

struct Words { vu w[4]; };

// philox4x32-10 of 16 counters (place, position, choice, 0) under one key.
inline Words philox(uint64_t seed, vu place, uint32_t position, uint32_t choice) {
  vu c0 = place, c1 = vu{} + position, c2 = vu{} + choice, c3{};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const vu high0 = high_product(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const vu high1 = high_product(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

inline Words group_words(uint64_t seed, uint32_t group, uint32_t position, uint32_t choice) {
  return philox(seed, (vu)lanes() + group * LANES, position, choice);
}

// Gumbel noise: -ln E for E = -ln(1 - u) with u = (word + ½) / 2³². Small u, which decide races, keep all their bits; u stays
// below 1, so the noise is finite.
inline vf gumbel(vu word) {
  const vf u = min((converted<vf>(word) + 0.5f) * 0x1p-32f, splat(0x1.fffffep-1f));
  const vf series = u * (1.f + u * (0.5f + u * 0.33333334f));
  const vf e = select(u < 0x1p-10f, series, -log(1.f - u));
  return -log(e);
}

struct Row {
  const float* scores;
  int64_t vocab;
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t choice, position;
};

struct Candidate { float score; int32_t id; };
inline bool better(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}

float best_score(const Row& row) {
  vf best = splat(NONE);
  for (int64_t i = 0; i + LANES <= row.vocab; i += LANES) best = max(best, load(row.scores + i));
  float top = max(best);
  for (int64_t i = row.vocab / LANES * LANES; i < row.vocab; i++) top = std::max(top, row.scores[i]);
  return top;
}

int64_t first_with(const Row& row, float score) {
  for (int64_t i = 0; i < row.vocab; i++)
    if (row.scores[i] == score) return i;
  return 0;  // every score is NaN
}

// The worst token that is kept: of equal scores the lower id is the better.
struct Cut { float score = NONE; int32_t id = std::numeric_limits<int32_t>::max(); };

inline double weight_of(const Row& row, float score, float top) { return std::exp(double((score - top) / row.temperature)); }

// visit(first id, scores, how many of them there are) for every LANES tokens; what is not there scores NONE.
template <typename Visit>
void each_vector(const Row& row, Visit visit) {
  int64_t i = 0;
  for (; i + LANES <= row.vocab; i += LANES) visit(i, load(row.scores + i));
  if (i == row.vocab) return;
  float rest[LANES];
  store(rest, splat(NONE));
  std::copy(row.scores + i, row.scores + row.vocab, rest);
  visit(i, load(rest));
}

// The tokens with from <= score <= to that the cut keeps.
void collect(const Row& row, float from, float to, const Cut& cut, std::vector<Candidate>& found) {
  found.clear();
  each_vector(row, [&](int64_t first, vf scores) {
    if (!any((scores >= from) & (scores <= to))) return;
    for (int i = 0; i < LANES && first + i < row.vocab; i++) {
      const Candidate one{scores[i], int32_t(first + i)};
      if (one.score >= from && one.score <= to && !better({cut.score, cut.id}, one)) found.push_back(one);
    }
  });
}

// The k-th best token. There are k groups of tokens whose best is at least as good as that of the k-th best group, so whatever
// scores less than that is out; few tokens are left to look at.
Cut cut_at_top_k(const Row& row, size_t k, std::vector<Candidate>& found, std::vector<float>& bests) {
  constexpr int group = 8;  // vectors whose maximum is taken lane by lane
  bests.clear();
  vf best = splat(NONE);
  each_vector(row, [&](int64_t first, vf scores) {
    const int64_t number = first / LANES % group;
    best = number == 0 ? scores : max(best, scores);
    if (number < group - 1 && first + LANES < row.vocab) return;
    bests.resize(bests.size() + LANES);
    store(&*bests.end() - LANES, best);
  });
  float floor = NONE;
  if (k <= bests.size()) {
    std::nth_element(bests.begin(), bests.begin() + (k - 1), bests.end(), std::greater<float>());
    floor = bests[k - 1];
  }
  collect(row, floor, std::numeric_limits<float>::infinity(), Cut(), found);
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), better);
  return {found[k - 1].score, found[k - 1].id};
}

// How many tokens score at least a floor, which must be above the cut, and what they weigh.
struct Share { double weight = 0; int64_t count = 0; };
constexpr int FLOORS = 4, ROUNDS = 8, FEW = 256;  // 90 temperatures are narrowed to 90 / 5^8 of one

void weigh(const Row& row, float top, const float (&floors)[FLOORS], Share (&shares)[FLOORS]) {
  vf sums[FLOORS] = {};
  vi counts[FLOORS] = {};
  std::fill_n(shares, FLOORS, Share());
  each_vector(row, [&](int64_t first, vf scores) {
    const vf weight = exp((scores - top) / row.temperature);
    for (int f = 0; f < FLOORS; f++) {
      const vi reached = scores >= floors[f];  // true is -1
      sums[f] += (vf)((vi)weight & reached);
      counts[f] -= reached;
    }
    if (first % (64 * LANES) < 63 * LANES && first + LANES < row.vocab) return;
    for (int f = 0; f < FLOORS; f++) shares[f].weight += sum(sums[f]), sums[f] = vf{};
  });
  for (int f = 0; f < FLOORS; f++)
    for (int i = 0; i < LANES; i++) shares[f].count += counts[f][i];
}

// The last token of the best whose weights together reach top_p of what the cut keeps. Bounds on its score are narrowed until
// few tokens are left between them, and those are put in order.
Cut cut_at_top_p(const Row& row, float top, const Cut& cut, std::vector<Candidate>& found) {
  float floors[FLOORS];
  Share shares[FLOORS];
  std::fill_n(floors, FLOORS, std::nextafter(cut.score, top));
  weigh(row, top, floors, shares);
  double total = shares[0].weight;
  int64_t left = shares[0].count;  // between the bounds, about
  if (cut.score > NONE) collect(row, cut.score, cut.score, cut, found);
  else found.clear();
  for (const Candidate& one : found) total += weight_of(row, one.score, top);
  const double wanted = row.top_p * total;
  Share above;  // what scores more than `high`
  float low = std::max(cut.score, top - 90 * row.temperature), high = top;  // e^-90 is no weight
  for (int round = 0; round < ROUNDS && left > FEW && low < high; round++) {
    for (int f = 0; f < FLOORS; f++)
      floors[f] = std::max(high - (high - low) * (f + 1) / (FLOORS + 1), std::nextafter(low, top));
    weigh(row, top, floors, shares);
    int f = 0;
    while (f < FLOORS && shares[f].weight < wanted) f++;
    left = (f < FLOORS ? shares[f].count : left + above.count) - (f > 0 ? shares[f - 1].count : above.count);
    if (f < FLOORS) low = floors[f];
    if (f > 0) high = std::nextafter(floors[f - 1], NONE), above = shares[f - 1];
  }
  collect(row, low, high, cut, found);
  std::sort(found.begin(), found.end(), better);
  for (const Candidate& one : found)
    if ((above.weight += weight_of(row, one.score, top)) >= wanted) return {one.score, one.id};
  return found.empty() ? cut : Cut{found.back().score, found.back().id};
}

// The winner of the race among the tokens that are kept.
int64_t race(const Row& row, float top, const Cut& cut) {
  vf best = splat(NONE);
  vi best_id{};
  const vi lane = lanes();
  // min_p is a bound on weights; close to it they are computed exactly
  const float low = row.min_p > 0 ? top + row.temperature * (std::log(row.min_p) - 1e-3f) : NONE;
  const float sure = row.min_p > 0 ? top + row.temperature * (std::log(row.min_p) + 1e-3f) : NONE;
  const float floor = std::max(low, cut.score);
  for (int64_t first = 0; first < row.vocab; first += SPREAD) {
    vi kept[4];
    vf scores[4];
    vi some{};
    for (int k = 0; k < 4; k++) {
      const int64_t at = first + k * LANES, left = row.vocab - at;
      const vi id = lane + int32_t(at);
      scores[k] = left > 0 ? load_upto(row.scores + at, left) : splat(NONE);
      kept[k] = (scores[k] >= floor) & (id < int32_t(row.vocab)) & ((scores[k] > cut.score) | (id <= cut.id));
      some |= kept[k];
    }
    if (!any(some)) continue;
    const Words words = group_words(row.seed, uint32_t(first / SPREAD), row.position, row.choice);
    for (int k = 0; k < 4; k++) {
      const vi id = lane + int32_t(first + k * LANES);
      if (row.min_p > 0 && any(kept[k] & (scores[k] < sure))) {
        int32_t keeps[LANES];
        std::memcpy(keeps, &kept[k], sizeof keeps);
        for (int i = 0; i < LANES; i++)
          if (keeps[i] && weight_of(row, scores[k][i], top) < row.min_p) keeps[i] = 0;
        std::memcpy(&kept[k], keeps, sizeof keeps);
      }
      const vf score = (scores[k] - top) / row.temperature + gumbel(words.w[k]);
      const vi wins = (score > best) & kept[k];
      best = select(wins, score, best);
      best_id = select(wins, id, best_id);
    }
  }
  int winner = 0;
  for (int i = 1; i < LANES; i++)
    if (best[i] > best[winner] || (best[i] == best[winner] && best_id[i] < best_id[winner])) winner = i;
  return best_id[winner];
}

struct Scratch {
  std::vector<Candidate> found;
  std::vector<float> bests;
};

int64_t draw(const Row& row, Scratch& scratch) {
  const float top = best_score(row);
  if (row.temperature == 0 || !(top > NONE)) return first_with(row, top);
  Cut cut;
  if (row.top_k > 0 && row.top_k < row.vocab) cut = cut_at_top_k(row, row.top_k, scratch.found, scratch.bests);
  if (row.top_p < 1) cut = cut_at_top_p(row, top, cut, scratch.found);
  return race(row, top, cut);
}

}  // namespace

extern "C" void headrace_sample(const float* scores, const float* temperature, const int32_t* top_k, const float* top_p,
                                const float* min_p, const int64_t* seed, const int64_t* choice, const int64_t* position,
                                int64_t* token_ids, int64_t rows, int64_t vocab, int threads) {
  with_team(threads, [&](Member& member) {
    Scratch scratch;
    member.each(rows, 1, [&](int64_t r) {
      token_ids[r] = draw({scores + r * vocab, vocab, temperature[r], top_p[r], min_p[r], top_k[r], uint64_t(seed[r]),
                           uint32_t(choice[r]), uint32_t(position[r])}, scratch);
    });
  });
}

// The words behind the noise, for comparison with the reference: one a token id.
extern "C" void headrace_token_words(int64_t seed, int64_t choice, int64_t position, const int64_t* token_ids, int64_t n,
                                     int64_t* words) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t id = token_ids[i];
    words[i] = group_words(uint64_t(seed), uint32_t(id / SPREAD), uint32_t(position), uint32_t(choice))
                   .w[id % SPREAD / LANES][id % LANES];
  }
}
