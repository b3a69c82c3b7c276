// Causal attention over paged keys and values, for any mix of decode and prefill chunks. See attention.py for the meaning
// of every argument; this computes the same.
//
// A row, one head of one query, gives the same bits whatever shares the step: tiles of TILE positions start at multiples of
// TILE and are merged from the first to the last of a span of SPAN positions, which starts at a multiple of SPAN; then spans
// are merged from the first to the last. Where there is little else to do, threads share the spans of a long sequence.
#include "ops.h"
#include "attention_tile.cpp"

#include <cmath>
#include <vector>

namespace {

constexpr int64_t SPAN = ATTENTION_SPAN;

typedef Attention Call;
typedef AttentionItem Item;
typedef AttentionLine Line;

inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t heads_per_kv(const Call& c) { return c.heads / c.kv_heads; }

struct Room {
  std::vector<Line> lines;
  explicit Room(int64_t floats) : lines(rounded_up(floats, LANES) / LANES) {}
  float* data() { return lines.data()->values; }
};

}  // namespace

struct AttentionScratch {
  Room query, state, merged, keys, values;
  std::vector<int32_t> from, to;
  float key_scales[TILE] = {}, value_scales[TILE] = {};

  AttentionScratch(int64_t rows, int64_t width)
      : query(rows * width), state(rows * state_stride(width)), merged(rows * state_stride(width)), keys(TILE * width),
        values(TILE * width), from(rows), to(rows) {}
};

namespace {

// The positions that an item's rows see, those of a span alone if it is for one, and where its sequence's blocks are.
struct Reach {
  int64_t position, low, high, begin, end;  // of the first query; seen [low, high); tiles from begin on, up to end
  const int32_t* blocks;

  Reach(const Call& c, const Item& item) {
    position = c.kv_len[item.sequence] - c.query_start[item.sequence + 1] + item.first;
    low = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0;
    high = position + item.count;
    begin = (item.span < 0 ? low : std::max(low, item.span * SPAN)) / TILE * TILE;
    end = item.span < 0 ? high : std::min(high, (item.span + 1) * SPAN);
    blocks = c.block_table + item.sequence * c.table_width;
  }
};

template <typename Q, typename Kind> class Worker {
 public:
  typedef typename Kind::Value T;
  typedef typename Kind::Query Query;

  Worker(const Call& c, AttentionScratch& scratch)
      : c_(c), scratch_(scratch), keys_{c.k_cache, c.block_size, c.kv_heads, c.head_dim},
        values_{c.v_cache, c.block_size, c.kv_heads, c.head_dim},
        sizes_{c.head_dim, rounded_up(c.head_dim, CHUNK), rounded_up(c.head_dim, CHUNK), c.scale, c.soft_cap},
        stride_(state_stride(sizes_.width)), in_place_(c.block_size % LANES == 0) {}

  // Attention of an item; what it finds goes to the result, or to `partial`. Asks for the beginning of the one after it.
  void attend(const Item& item, const Item* next, float* partial) {
    const Reach reach(c_, item);
    const int64_t rows = prepare(item, reach), rows_of_head = rows / item.kv_heads, per_kv = heads_per_kv(c_);
    float* const state = item.span < 0 ? scratch_.state.data() : partial + item.partial * stride_;
    reset(state, rows);
    bool merging = false;
    Tile<T> tile{}, ahead = locate_first(item);
    for (int64_t start = reach.begin; start < reach.end; start += TILE) {
      if (start % SPAN == 0 && start > reach.begin) {
        if (!merging) reset(scratch_.merged.data(), rows);
        merging = true;
        merge(scratch_.merged.data(), state, rows);
        reset(state, rows);
      }
      // queries that see a position of this tile: from the first at or behind its start to the last whose window reaches it
      const int64_t first = std::max<int64_t>(0, start - reach.position) * per_kv;
      const int64_t reaching = start + TILE + c_.window - 1 - reach.position;
      const int64_t seeing = c_.window ? std::min<int64_t>(item.count, reaching) : item.count;
      for (int64_t h = 0; h < item.kv_heads; h++) {
        tile = ahead;
        if (h + 1 < item.kv_heads) ahead = locate(reach, item.kv_head + h + 1, start);
        else if (start + TILE < reach.end) ahead = locate(reach, item.kv_head, start + TILE);
        else if (next) ahead = locate_first(*next);
        if (!in_place_) tile = ahead = gather(reach, item.kv_head + h, start);
        const int64_t row = h * rows_of_head + first;
        by_rows(seeing * per_kv - first, [&](int64_t r, auto count) {
          const int64_t at = row + r;
          tile_rows<Kind, decltype(count)::value>(sizes_, query() + at * sizes_.query_stride, state + at * stride_,
                                                  &scratch_.from[at], &scratch_.to[at], start, tile, ahead);
        });
      }
    }
    if (merging) merge(scratch_.merged.data(), state, rows);
    if (item.span < 0) finish(item, merging ? scratch_.merged.data() : state);
  }

  // The result of an item whose spans have all been attended to.
  void join(const Item& item, const float* partial) {
    const int64_t rows = item.count * item.kv_heads * heads_per_kv(c_);
    float* merged = scratch_.merged.data();
    reset(merged, rows);
    for (int64_t span = 0; span < item.span; span++) merge(merged, partial + (item.partial + span * rows) * stride_, rows);
    finish(item, merged);
  }

 private:
  Query* query() { return (Query*)scratch_.query.data(); }

  // Row of the batch's queries and results for each row of an item: heads of one KV head after heads of another.
  template <typename Visit> void each_row(const Item& item, Visit visit) {
    const int64_t per_kv = heads_per_kv(c_);
    int64_t row = 0;
    for (int64_t h = 0; h < item.kv_heads; h++)
      for (int64_t q = 0; q < item.count; q++)
        for (int64_t g = 0; g < per_kv; g++)
          visit(row++, q, ((item.first + q) * c_.heads + (item.kv_head + h) * per_kv + g) * c_.head_dim);
  }

  int64_t prepare(const Item& item, const Reach& reach) {
    each_row(item, [&](int64_t row, int64_t q, int64_t at) {
      const Q* from = (const Q*)c_.query + at;
      Query* to = query() + row * sizes_.query_stride;
      if constexpr (std::is_same_v<Q, Query>)
        std::memcpy(to, from, c_.head_dim * sizeof(Q));
      else
        for (int64_t d = 0; d < c_.head_dim; d += LANES)
          store_upto(to + d, load_upto(from + d, c_.head_dim - d), c_.head_dim - d);
      const int64_t position = reach.position + q;
      scratch_.from[row] = c_.window ? std::max<int64_t>(0, position - c_.window + 1) : 0;
      scratch_.to[row] = position + 1;
    });
    return item.count * item.kv_heads * heads_per_kv(c_);
  }

  void reset(float* state, int64_t rows) {
    std::memset(state, 0, rows * stride_ * sizeof(float));
    for (int64_t r = 0; r < rows; r++) state[r * stride_ + sizes_.width + LANES] = NONE;
  }

  // Brings what rows know of a later span into what they know of those before it.
  void merge(float* into, const float* from, int64_t rows) {
    const int64_t known = sizes_.width + LANES;  // values and weights
    for (int64_t r = 0; r < rows; r++, into += stride_, from += stride_) {
      const float top = into[known], other = from[known];
      if (other == NONE) continue;  // sees nothing of the span
      if (top == NONE) {
        std::memcpy(into, from, stride_ * sizeof(float));
        continue;
      }
      const float new_top = std::max(top, other);
      const vf kept = exp(splat(top - new_top)), added = exp(splat(other - new_top));
      for (int64_t d = 0; d < known; d += LANES) store(into + d, fma(load(from + d), added, load(into + d) * kept));
      into[known] = new_top;
    }
  }

  void finish(const Item& item, const float* state) {
    each_row(item, [&](int64_t row, int64_t, int64_t at) {
      const float* known = state + row * stride_;
      float sum_of_weights = sum(load(known + sizes_.width));
      if (c_.sinks) {
        const float sink = c_.sinks[at / c_.head_dim % c_.heads];
        sum_of_weights += exp(splat(sink - known[sizes_.width + LANES]))[0];
      }
      const vf weights = splat(sum_of_weights);
      Q* to = (Q*)c_.out + at;
      for (int64_t d = 0; d < c_.head_dim; d += CHUNK) {
        vf a = load(known + d) / weights, b = load(known + d + LANES) / weights;
        in_order((const T*)nullptr, a, b);
        store_upto(to + d, a, c_.head_dim - d);
        if (d + LANES < c_.head_dim) store_upto(to + d + LANES, b, c_.head_dim - d - LANES);
      }
    });
  }

  Tile<T> locate_first(const Item& item) {
    const Reach reach(c_, item);
    return reach.begin < reach.end ? locate(reach, item.kv_head, reach.begin) : Tile<T>{};
  }

  // Where a tile lies. Vectors outside [low, high) are not looked up: their blocks may not be there.
  Tile<T> locate(const Reach& reach, int64_t head, int64_t start) {
    Tile<T> tile{};
    if (!in_place_) return tile;
    tile.key_stride = c_.block_size * KvCache<T>::TOGETHER;
    bool there[2];
    for (int v = 0; v < 2; v++) {
      const int64_t position = start + v * LANES, offset = position % c_.block_size;
      there[v] = position < reach.high && position + LANES > reach.low;
      if (!there[v]) continue;
      const int64_t block = reach.blocks[position / c_.block_size];
      tile.keys[v] = keys_.head(block, head) + offset * KvCache<T>::TOGETHER;
      tile.values[v] = values_.head(block, head) + offset * c_.head_dim;
      if constexpr (KvCache<T>::SCALED) {
        tile.key_scales[v] = keys_.scales(block, head) + offset * sizeof(float);
        tile.value_scales[v] = values_.scales(block, head) + offset * sizeof(float);
      }
    }
    for (int v = 0; v < 2; v++)
      if (!there[v]) {
        tile.keys[v] = tile.keys[1 - v], tile.values[v] = tile.values[1 - v];
        tile.key_scales[v] = tile.key_scales[1 - v], tile.value_scales[v] = tile.value_scales[1 - v];
      }
    return tile;
  }

  // A tile of blocks that are no multiples of a vector: copied together.
  Tile<T> gather(const Reach& reach, int64_t head, int64_t start) {
    constexpr int64_t together = KvCache<T>::TOGETHER;
    T *keys = (T*)scratch_.keys.data(), *values = (T*)scratch_.values.data();
    for (int64_t at = std::max(start, reach.low), end = std::min(start + TILE, reach.high), run; at < end; at += run) {
      const int64_t offset = at % c_.block_size, block = reach.blocks[at / c_.block_size], to = at - start;
      run = std::min(end - at, c_.block_size - offset);
      const T* from = keys_.head(block, head) + offset * together;
      for (int64_t d = 0; d < c_.head_dim / together; d++)
        std::memcpy(keys + (d * TILE + to) * together, from + d * c_.block_size * together, run * together * sizeof(T));
      std::memcpy(values + to * c_.head_dim, values_.head(block, head) + offset * c_.head_dim, run * c_.head_dim * sizeof(T));
      if constexpr (KvCache<T>::SCALED) {
        const int64_t size = sizeof(float);
        std::memcpy(scratch_.key_scales + to, keys_.scales(block, head) + offset * size, run * size);
        std::memcpy(scratch_.value_scales + to, values_.scales(block, head) + offset * size, run * size);
      }
    }
    const char *key_scales = (const char*)scratch_.key_scales, *value_scales = (const char*)scratch_.value_scales;
    const int64_t second = LANES * sizeof(float);
    return {{keys, keys + LANES * together}, {values, values + LANES * c_.head_dim}, {key_scales, key_scales + second},
            {value_scales, value_scales + second}, TILE * together};
  }

  const Call& c_;
  AttentionScratch& scratch_;
  const KvCache<T> keys_, values_;
  const Sizes sizes_;
  const int64_t stride_;
  const bool in_place_;
};

template <typename Q, typename Kind>
void run(Member& member, const Call& c, const AttentionPlan& plan, AttentionScratch& scratch) {
  if (member.number == 0) {
    const int64_t done = c.query_start[c.sequences], row = c.heads * c.head_dim;
    std::memset((Q*)c.out + done * row, 0, (c.rows - done) * row * sizeof(Q));
  }
  Worker<Q, Kind> worker(c, scratch);
  float* const partial = plan.partial ? plan.partial.get()->values : nullptr;
  member.each(plan.shares.size() - 1, 1, [&](int64_t share) {
    for (int32_t i = plan.shares[share]; i < plan.shares[share + 1]; i++)
      worker.attend(plan.items[i], i + 1 < plan.shares[share + 1] ? &plan.items[i + 1] : nullptr, partial);
  });
  if (!plan.joined.empty())
    member.each(plan.joined.size(), 1, [&](int64_t i) { worker.join(plan.joined[i], partial); });
}

template <typename Q, typename Bf16Keys>
void run_on(Member& member, const Call& c, const AttentionPlan& plan, AttentionScratch& scratch) {
  if (c.cache_type == CACHE_INT8) run<Q, SingleKeys<int8_t>>(member, c, plan, scratch);
  else if (c.cache_type == CACHE_BF16) run<Q, Bf16Keys>(member, c, plan, scratch);
  else run<Q, SingleKeys<float>>(member, c, plan, scratch);
}

}  // namespace

void DropScratch::operator()(AttentionScratch* scratch) const { delete scratch; }

ScratchPointer attention_scratch(const Attention& a) {
  return ScratchPointer(new AttentionScratch(most_attention_rows(a), rounded_up(a.head_dim, CHUNK)));
}

int64_t attention_row_lines(const Attention& a) { return state_stride(rounded_up(a.head_dim, CHUNK)) / LANES; }

void paged_attention(Member& member, const Attention& a, const AttentionPlan& plan, AttentionScratch& scratch) {
  if (a.query_bf16) run_on<uint16_t, PairedKeys>(member, a, plan, scratch);
  else run_on<float, WidenedKeys>(member, a, plan, scratch);
}
