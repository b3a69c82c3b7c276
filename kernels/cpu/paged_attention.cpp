// Causal attention over paged keys and values, for any mix of decode and prefill chunks. See attention.py for the meaning
// of every argument; this computes the same.
//
// A work item is one KV head of up to ROWS/G neighbouring queries of one sequence, times its G query heads: each tile of keys
// and values is fetched and widened once for all of them. Every (query, head) row goes through the same operations in the
// same order whatever else is in its item: scores are one chain of fused products over head_dim, tiles of TILE keys start at
// multiples of TILE and are merged from the first to the last. That makes a row's bits independent of chunking and batch.
#include "ops.h"
#include "simd.cpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int TILE = 32, TILE_VECTORS = TILE / LANES, PAIRS = 2 * LANES, ROWS = 64, BLOCK_ROWS = 4;
constexpr float NONE = -std::numeric_limits<float>::infinity();

typedef Attention Call;
typedef AttentionItem Item;

inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

struct AttentionScratch {
  std::vector<float> query, total, weight, keys, values, top, weight_sum, fetched;
  AttentionScratch(int64_t rows, int64_t width)
      : query(rows * width), total(rows * width), weight(rows * TILE), keys(TILE * width), values(TILE * width),
        top(rows), weight_sum(rows), fetched(TILE * width) {}
};

namespace {

typedef AttentionScratch Scratch;

inline int64_t queries_of_item(const Call& c) { return std::max<int64_t>(1, ROWS / (c.heads / c.kv_heads)); }

// Calls visit(position, address of its values) for the positions [first, last) of one KV head, block after block.
template <typename T, typename F>
void each(const Call& c, const void* cache, const int32_t* blocks, int64_t kv_head, int64_t first, int64_t last, F visit) {
  for (int64_t position = first; position < last;) {
    const int64_t offset = position % c.block_size, end = std::min(last, position + c.block_size - offset);
    const int64_t slot = int64_t(blocks[position / c.block_size]) * c.block_size + offset;
    const T* from = (const T*)cache + (slot * c.kv_heads + kv_head) * c.head_dim;
    for (; position < end; position++, from += c.kv_heads * c.head_dim) visit(position, from);
  }
}

// Asks for a tile's values ahead of time: rows of one head lie too far apart for the hardware to foresee. Takes `heads` heads
// at once, which lie side by side.
template <typename T>
void prefetch(const Call& c, const int32_t* blocks, int64_t kv_head, int64_t heads, int64_t start, int64_t high) {
  for (const void* cache : {c.k_cache, c.v_cache})
    each<T>(c, cache, blocks, kv_head, start, std::min(start + TILE, high), [&](int64_t, const T* from) {
      for (int64_t d = 0; d < heads * c.head_dim; d += 64 / int64_t(sizeof(T))) {
        __builtin_prefetch(from + d, 0, 2);
        asm volatile("");  // or GCC takes the function for one without effect, and drops it
      }
    });
}

// Positions [start, start + TILE) of one KV head, one row of `width` values a position: as they are, or widened to float32.
// Zero outside [low, high) and beyond head_dim.
template <typename T, typename O>
void fetch(const Call& c, const void* cache, const int32_t* blocks, int64_t kv_head, int64_t start, int64_t low,
           int64_t high, int64_t width, O* to) {
  const int64_t first = std::max(start, low), last = std::min(start + TILE, high);
  std::memset(to, 0, (first - start) * width * sizeof(O));
  std::memset(to + (last - start) * width, 0, (start + TILE - last) * width * sizeof(O));
  each<T>(c, cache, blocks, kv_head, first, last, [&](int64_t position, const T* from) {
    O* row = to + (position - start) * width;
    if constexpr (std::is_same_v<T, O>) {
      constexpr int64_t step = sizeof(vf) / sizeof(T);
      int64_t d = 0;
      for (; d + step <= c.head_dim; d += step) std::memcpy(row + d, from + d, sizeof(vf));
      for (; d < width; d++) row[d] = d < c.head_dim ? from[d] : T(0);
    } else {
      for (int64_t d = 0; d < width; d += LANES) store(row + d, load_upto(from + d, c.head_dim - d));
    }
  });
}

// One of the four rounds that transpose 16 rows of 16 values: rows i and i + 8 are interleaved.
inline void interleave(const vf* from, vf* to) {
  for (int i = 0; i < LANES / 2; i++) {
    const vf a = from[i], b = from[i + LANES / 2];
    to[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

// [TILE][width] to float32 [width][TILE]; bfloat16 goes through in pairs, which halves the work.
template <typename T>
void transpose(const T* from, float* to, int64_t width) {
  constexpr int values = sizeof(float) / sizeof(T);  // of each 32 bits
  for (int64_t d = 0; d < width; d += LANES * values)
    for (int j = 0; j < TILE; j += LANES) {
      vf a[LANES], b[LANES];
      for (int i = 0; i < LANES; i++) std::memcpy(&a[i], from + (j + i) * width + d, sizeof(vf));
      interleave(a, b);
      interleave(b, a);
      interleave(a, b);
      interleave(b, a);
      for (int i = 0; i < LANES; i++) {
        float* row = to + (d + values * i) * TILE + j;
        if constexpr (values == 1) {
          store(row, a[i]);
        } else {
          store(row, (vf)((vu)a[i] << 16));
          store(row + TILE, (vf)((vu)a[i] & 0xffff0000u));
        }
      }
    }
}

// weight[r][j] = q[r] · k[j] for R rows and all TILE keys; keys are [width][TILE].
template <int R>
void scores(const float* query, const float* keys, float* weight, int64_t head_dim, int64_t width) {
  vf sum[R][TILE_VECTORS] = {};
  for (int64_t d = 0; d < head_dim; d++)
    for (int v = 0; v < TILE_VECTORS; v++) {
      const vf k = load(keys + d * TILE + v * LANES);
      for (int r = 0; r < R; r++) sum[r][v] = fma(splat(query[r * width + d]), k, sum[r][v]);
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < TILE_VECTORS; v++) store(weight + r * TILE + v * LANES, sum[r][v]);
}

// total[r][d] += weight[r][j] · v[j][d] over all TILE keys, for R rows and V vectors of the head.
template <int R, int V>
void accumulate(const float* weight, const float* values, float* total, int64_t width) {
  vf sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = load(total + r * width + v * LANES);
  for (int j = 0; j < TILE; j++)
    for (int v = 0; v < V; v++) {
      const vf x = load(values + j * width + v * LANES);
      for (int r = 0; r < R; r++) sum[r][v] = fma(splat(weight[r * TILE + j]), x, sum[r][v]);
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(total + r * width + v * LANES, sum[r][v]);
}

// Turns a row's scores into weights and merges the tile's maximum and sum into the row's. Sees keys [from, to) of the tile.
void soften(const Call& c, float* weight, int from, int to, float* total, int64_t width, float& top, float& weight_sum) {
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  vf score[TILE_VECTORS], best = splat(NONE);
  for (int v = 0; v < TILE_VECTORS; v++) {
    vf s = load(weight + v * LANES) * c.scale;
    if (c.soft_cap > 0) s = c.soft_cap * (1.f - 2.f / (exp(s * (2.f / c.soft_cap)) + 1.f));
    const vi key = lane + v * LANES;
    score[v] = ((key >= from) & (key < to)) ? s : splat(NONE);
    best = max(best, score[v]);
  }
  const float new_top = std::max(top, max(best));
  vf added{};
  for (int v = 0; v < TILE_VECTORS; v++) {
    const vf w = exp(score[v] - new_top);
    store(weight + v * LANES, w);
    added += w;
  }
  const float old = exp(splat(top - new_top))[0];
  weight_sum = weight_sum * old + sum(added);
  top = new_top;
  for (int64_t d = 0; d < width; d += LANES) store(total + d, load(total + d) * old);
}

template <int R>
void merge_rows(Scratch& s, int64_t row, int64_t width) {
  for (int64_t d = 0; d < width;) {
    float* total = s.total.data() + row * width + d;
    const float *weight = s.weight.data() + row * TILE, *values = s.values.data() + d;
    if (width - d >= 4 * LANES) { accumulate<R, 4>(weight, values, total, width); d += 4 * LANES; }
    else { accumulate<R, 1>(weight, values, total, width); d += LANES; }
  }
}

// Calls run with the number of rows as a constant, for [begin, end) in groups of up to BLOCK_ROWS.
template <typename F>
void by_rows(int64_t begin, int64_t end, F run) {
  for (; begin + BLOCK_ROWS <= end; begin += BLOCK_ROWS) run(begin, std::integral_constant<int, BLOCK_ROWS>());
  if (end - begin == 3) run(begin, std::integral_constant<int, 3>());
  else if (end - begin == 2) run(begin, std::integral_constant<int, 2>());
  else if (end - begin == 1) run(begin, std::integral_constant<int, 1>());
}

// One tile for the rows [begin, end) of an item.
void tile(const Call& c, Scratch& s, int64_t begin, int64_t end, int64_t start, int64_t position, int64_t per_kv,
          int64_t width) {
  float* weight = s.weight.data();
  by_rows(begin, end, [&](int64_t r, auto rows) {
    scores<decltype(rows)::value>(s.query.data() + r * width, s.keys.data(), weight + r * TILE, c.head_dim, width);
  });
  for (int64_t r = begin; r < end; r++) {
    const int64_t at = position + r / per_kv, seen_from = c.window ? std::max<int64_t>(0, at - c.window + 1) : 0;
    const int from = std::max<int64_t>(0, seen_from - start), to = std::min<int64_t>(TILE, at + 1 - start);
    soften(c, weight + r * TILE, from, to, s.total.data() + r * width, width, s.top[r], s.weight_sum[r]);
  }
  by_rows(begin, end, [&](int64_t r, auto rows) { merge_rows<decltype(rows)::value>(s, r, width); });
}

template <typename Q, typename T>
void attend(const Call& c, Scratch& s, const Item& item, bool heads_follow) {
  T* const fetched = (T*)s.fetched.data();
  const int64_t per_kv = c.heads / c.kv_heads, rows = item.count * per_kv;
  const int64_t width = rounded_up(c.head_dim, LANES), pair_width = rounded_up(c.head_dim, PAIRS);
  const int32_t* blocks = c.block_table + item.sequence * c.table_width;
  const int64_t position = c.kv_len[item.sequence] - c.query_start[item.sequence + 1] + item.first;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (item.first + r / per_kv) * c.heads + item.kv_head * per_kv + r % per_kv;
    const Q* from = (const Q*)c.query + at * c.head_dim;
    for (int64_t d = 0; d < width; d += LANES) store(&s.query[r * width + d], load_upto(from + d, c.head_dim - d));
    s.top[r] = NONE;
    s.weight_sum[r] = 0;
  }
  std::fill_n(s.total.begin(), rows * width, 0.f);
  const int64_t low = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0, high = position + item.count;
  for (int64_t start = low / TILE * TILE; start < high; start += TILE) {
    // queries that see a key of this tile: from the first at or behind its start to the last whose window reaches it
    const int64_t first = std::max<int64_t>(0, start - position);
    const int64_t last = c.window ? std::min<int64_t>(item.count, start + TILE + c.window - 1 - position) : item.count;
    if (first >= last) continue;
    if (!heads_follow) prefetch<T>(c, blocks, item.kv_head, 1, start + TILE, high);
    else if (item.kv_head == 0) prefetch<T>(c, blocks, 0, c.kv_heads, start + TILE, high);
    fetch<T>(c, c.k_cache, blocks, item.kv_head, start, low, high, pair_width, fetched);
    transpose(fetched, s.keys.data(), pair_width);
    fetch<T>(c, c.v_cache, blocks, item.kv_head, start, low, high, width, s.values.data());
    tile(c, s, first * per_kv, last * per_kv, start, position, per_kv, width);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (item.first + r / per_kv) * c.heads + item.kv_head * per_kv + r % per_kv;
    Q* to = (Q*)c.out + at * c.head_dim;
    for (int64_t d = 0; d < c.head_dim; d += LANES)
      store_upto(to + d, load(&s.total[r * width + d]) / s.weight_sum[r], c.head_dim - d);
  }
}

template <typename Q, typename T>
void run(Member& member, const Call& c, const std::vector<Item>& items, Scratch& scratch) {
  if (member.number == 0) {
    const int64_t done = c.query_start[c.sequences], row = c.heads * c.head_dim;
    std::memset((Q*)c.out + done * row, 0, (c.rows - done) * row * sizeof(Q));
  }
  // With enough to share out, a thread takes all heads of some queries one after the other: their keys lie side by side.
  const bool heads_follow = (int64_t)items.size() >= 4 * member.size * c.kv_heads;
  member.each(items.size(), heads_follow ? c.kv_heads : 1,
              [&](int64_t i) { attend<Q, T>(c, scratch, items[i], heads_follow); });
}

}  // namespace

std::vector<AttentionItem> attention_items(const Attention& a) {
  const int64_t group = queries_of_item(a);
  std::vector<Item> items;
  for (int32_t s = 0; s < a.sequences; s++)
    for (int32_t first = a.query_start[s]; first < a.query_start[s + 1]; first += group)
      for (int32_t h = 0; h < a.kv_heads; h++)
        items.push_back({s, first, int32_t(std::min<int64_t>(group, a.query_start[s + 1] - first)), h});
  return items;
}

void DropScratch::operator()(AttentionScratch* scratch) const { delete scratch; }

ScratchPointer attention_scratch(const Attention& a) {
  return ScratchPointer(new Scratch(queries_of_item(a) * (a.heads / a.kv_heads), rounded_up(a.head_dim, PAIRS)));
}

void paged_attention(Member& member, const Attention& a, const std::vector<AttentionItem>& items, AttentionScratch& scratch) {
  if (a.query_bf16)
    a.cache_bf16 ? run<uint16_t, uint16_t>(member, a, items, scratch) : run<uint16_t, float>(member, a, items, scratch);
  else
    a.cache_bf16 ? run<float, uint16_t>(member, a, items, scratch) : run<float, float>(member, a, items, scratch);
}

extern "C" void headrace_paged_attention(const Attention* a, int threads) {
  const std::vector<AttentionItem> items = attention_items(*a);
  with_team(threads, [&](Member& member) { paged_attention(member, *a, items, *attention_scratch(*a)); });
}
