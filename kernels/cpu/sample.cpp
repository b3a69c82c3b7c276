// Draws a token a row. See sample.py for the rules and philox.py for the random words; this computes the same, with float32
// scores. A row is one thread's work from its first to its last operation, so nothing beside it can change its result.
#include "simd.cpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int SPREAD = 64;  // one counter serves four tokens, LANES apart

typedef uint64_t wide __attribute__((vector_size(128)));

struct Words { vu w[4]; };

inline void multiply(vu a, uint32_t m, vu& high, vu& low) {
  const wide product = __builtin_convertvector(a, wide) * uint64_t(m);
  low = a * m;
  high = __builtin_convertvector(product >> 32, vu);
}

// philox4x32-10 of 16 counters (place, position, choice, 0) under one key.
inline Words philox(uint64_t seed, vu place, uint32_t position, uint32_t choice) {
  vu c0 = place, c1 = vu{} + position, c2 = vu{} + choice, c3{};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vu high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
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
  vu lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return philox(seed, lane + group * LANES, position, choice);
}

// Gumbel noise: -ln E for E = -ln(1 - u) with u = (word + ½) / 2³². Small u, which decide races, keep all their bits; u stays
// below 1, so the noise is finite.
inline vf gumbel(vu word) {
  const vf u = min((__builtin_convertvector(word, vf) + 0.5f) * 0x1p-32f, splat(0x1.fffffep-1f));
  const vf series = u * (1.f + u * (0.5f + u * 0.33333334f));
  const vf e = u < 0x1p-10f ? series : -log(1.f - u);
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

// The winner of the race among all tokens.
int64_t race_all(const Row& row, float top) {
  vf best = splat(NONE);
  vi best_id{};
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int64_t first = 0; first < row.vocab; first += SPREAD) {
    const Words words = group_words(row.seed, uint32_t(first / SPREAD), row.position, row.choice);
    for (int k = 0; k < 4; k++) {
      const int64_t at = first + k * LANES;
      if (at >= row.vocab) break;
      const int64_t left = row.vocab - at;
      const vi id = lane + int32_t(at);
      const vf score = (load_upto(row.scores + at, left) - top) / row.temperature + gumbel(words.w[k]);
      const vi wins = (score > best) & (id < int32_t(row.vocab));
      best = wins ? score : best;
      best_id = wins ? id : best_id;
    }
  }
  int winner = 0;
  for (int i = 1; i < LANES; i++)
    if (best[i] > best[winner] || (best[i] == best[winner] && best_id[i] < best_id[winner])) winner = i;
  return best_id[winner];
}

// The winner of the race among some tokens.
int64_t race_some(const Row& row, float top, const std::vector<Candidate>& kept) {
  float best = NONE;
  int64_t best_id = kept.empty() ? 0 : kept[0].id;
  for (const Candidate& one : kept) {
    const Words words = group_words(row.seed, uint32_t(one.id / SPREAD), row.position, row.choice);
    const vf noise = gumbel(words.w[one.id % SPREAD / LANES]);
    const float score = (one.score - top) / row.temperature + noise[one.id % LANES];
    if (score > best || (score == best && one.id < best_id)) { best = score; best_id = one.id; }
  }
  return best_id;
}

inline double weight_of(const Row& row, float score, float top) { return std::exp(double((score - top) / row.temperature)); }

double weight_total(const Row& row, float top) {
  double total = 0;
  for (int64_t i = 0; i < row.vocab; i += LANES) {
    const int64_t left = std::min<int64_t>(LANES, row.vocab - i);
    vf w = exp((load_upto(row.scores + i, left) - top) / row.temperature);
    if (left < LANES)
      for (int64_t l = left; l < LANES; l++) w[l] = 0;
    total += sum(w);
  }
  return total;
}

// Everything that scores at least `floor`.
void collect(const Row& row, float floor, std::vector<Candidate>& kept) {
  for (int64_t i = 0; i < row.vocab; i++)
    if (row.scores[i] >= floor) kept.push_back({row.scores[i], int32_t(i)});
}

// Cuts a list down to its best whose weights reach top_p of the total, sorting only as far as it has to.
void cut_to_top_p(const Row& row, float top, double total, std::vector<Candidate>& kept) {
  double reached = 0;
  size_t sorted = 0;
  for (size_t want = 64; sorted < kept.size(); want *= 8) {
    const size_t end = std::min(want, kept.size());
    if (end < kept.size()) std::nth_element(kept.begin() + sorted, kept.begin() + end, kept.end(), better);
    std::sort(kept.begin() + sorted, kept.begin() + end, better);
    for (; sorted < end; sorted++) {
      if (sorted > 0 && reached >= row.top_p * total) { kept.resize(sorted); return; }
      reached += weight_of(row, kept[sorted].score, top);
    }
  }
}

int64_t draw(const Row& row, std::vector<Candidate>& kept) {
  const float top = best_score(row);
  if (row.temperature == 0 || !(top > NONE)) return first_with(row, top);
  const bool has_k = row.top_k > 0 && row.top_k < row.vocab, has_p = row.top_p < 1;
  if (!has_k && !has_p && row.min_p <= 0) return race_all(row, top);
  kept.clear();
  float floor = NONE;
  double total = 0;
  if (row.min_p > 0) floor = top + row.temperature * std::log(row.min_p) - 1e-3f * row.temperature;
  if (has_p && !has_k) {  // tokens below (1 - p)/vocab together weigh less than 1 - p, so the set never needs them
    total = weight_total(row, top);
    const double least = (1.0 - row.top_p) * total / double(row.vocab);
    floor = std::max(floor, float(top + row.temperature * std::log(std::max(least, 1e-37)) - 1e-3 * row.temperature));
  }
  collect(row, has_k ? NONE : floor, kept);
  if (has_k) {
    const size_t k = std::min<size_t>(row.top_k, kept.size());
    std::nth_element(kept.begin(), kept.begin() + k, kept.end(), better);
    kept.resize(k);
    for (const Candidate& one : kept) total += weight_of(row, one.score, top);
  }
  if (has_p) cut_to_top_p(row, top, total, kept);
  if (row.min_p > 0)
    kept.erase(std::remove_if(kept.begin(), kept.end(),
                              [&](const Candidate& one) { return weight_of(row, one.score, top) < row.min_p; }),
               kept.end());
  return race_some(row, top, kept);
}

}  // namespace

extern "C" void headrace_sample(const float* scores, const float* temperature, const int32_t* top_k, const float* top_p,
                                const float* min_p, const int64_t* seed, const int64_t* choice, const int64_t* position,
                                int64_t* token_ids, int64_t rows, int64_t vocab, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<Candidate> kept;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++)
      token_ids[r] = draw({scores + r * vocab, vocab, temperature[r], top_p[r], min_p[r], top_k[r], uint64_t(seed[r]),
                           uint32_t(choice[r]), uint32_t(position[r])}, kept);
  }
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
