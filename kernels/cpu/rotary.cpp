// Queries and keys on their way from a product to attention: norm, rotary embedding, store into the cache.
// See rotary.py for the meaning; arithmetic is float32 and each row stands alone.
#include "kv_cache.h"
#include "ops.h"
#include "simd.cpp"

#include <cmath>
#include <vector>

namespace {

// One head of `half` pairs. Products are rounded before they are added, as in the reference.
template <typename F, typename T>
void rotate(const F* from, T* to, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    const vf a = load_upto(from + i, left), b = load_upto(from + half + i, left);
    const vf c = load_upto(cos + i, left), s = load_upto(sin + i, left);
    store_upto(to + i, a * c - b * s, left);
    store_upto(to + half + i, b * c + a * s, left);
  }
}

template <typename F, typename T>
void copy(const F* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store_upto(to + i, load_upto(from + i, n - i), n - i);
}

// One head, of which a part turns, or nothing.
template <typename F, typename T>
void turn(const Rotation& a, const F* from, T* to, const float* cos) {
  const int64_t half = a.rotary_dim / 2;
  rotate(from, to, cos, cos + half, half);
  copy(from + 2 * half, to + 2 * half, a.head_dim - 2 * half);
}

template <typename F>
float norm_factor(const F* x, int64_t n, float eps) {
  vf squares{};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf v = load_upto(x + i, n - i);
    squares = fma(v, v, squares);
  }
  return 1.f / std::sqrt(sum(squares) / float(n) + eps);
}

// use(h, head) for each head of a row: as it is, or as floats where a norm brings it into `room`.
template <typename F, typename Use>
void each_head(const Rotation& a, const F* from, int64_t heads, const float* weight, float* room, Use use) {
  const int64_t n = a.head_dim;
  const float of_all = weight && a.whole_norm ? norm_factor(from, heads * n, a.eps) : 0;
  for (int64_t h = 0; h < heads; h++, from += n) {
    if (!weight) {
      use(h, from);
      continue;
    }
    const float factor = a.whole_norm ? of_all : norm_factor(from, n, a.eps);
    const float* w = a.whole_norm ? weight + h * n : weight;
    for (int64_t i = 0; i < n; i += LANES)
      store_upto(room + i, load_upto(from + i, n - i) * factor * load_upto(w + i, n - i), n - i);
    use(h, (const float*)room);
  }
}

// Brings a vector to int8 and gives its scale, which is NaN unless all of it is finite.
float encode(const float* from, int8_t* to, int64_t n) {
  vf largest{}, zeros{};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf x = load_upto(from + i, n - i);
    largest = max(largest, max(x, -x));
    zeros += x * 0.f;
  }
  const float most = max(largest) + sum(zeros), steps = most > 0 ? 127.f / most : 0.f;
  for (int64_t i = 0; i < n; i += LANES) {
    const vf whole = round_nearest(load_upto(from + i, n - i) * steps);
    store_upto(to + i, min(max(whole, splat(-127.f)), splat(127.f)), n - i);
  }
  return most / 127.f;
}

// A row's keys and values of one layer, on their way to a slot through room for one vector.
template <typename F, typename T> struct Store {
  const Rotation& a;
  const KvCache<T> keys{a.k_cache, a.block_size, a.kv_heads, a.head_dim};
  const KvCache<T> values{a.v_cache, a.block_size, a.kv_heads, a.head_dim};
  std::vector<T> narrow = std::vector<T>(a.head_dim);
  std::vector<float> wide = std::vector<float>(a.head_dim);

  void row(const F* key, const F* value, const float* cos, int64_t slot, float* room) {
    const int64_t block = slot / a.block_size, offset = slot % a.block_size, n = a.head_dim;
    each_head(a, key, a.kv_heads, a.key_norm, room, [&](int64_t h, const auto* head) {
      if constexpr (KvCache<T>::SCALED) {
        turn(a, head, wide.data(), cos);
        const float scale = encode(wide.data(), narrow.data(), n);
        std::memcpy(keys.scales(block, h) + offset * sizeof(float), &scale, sizeof(float));
      } else {
        turn(a, head, narrow.data(), cos);
      }
      scatter(keys.head(block, h), offset);
    });
    for (int64_t h = 0; h < a.kv_heads; h++, value += n) {
      T* const stored = values.head(block, h) + offset * n;
      if constexpr (KvCache<T>::SCALED) {
        copy(value, wide.data(), n);
        const float scale = encode(wide.data(), stored, n);
        std::memcpy(values.scales(block, h) + offset * sizeof(float), &scale, sizeof(float));
      } else {
        copy(value, stored, n);
      }
    }
  }

  // Puts `narrow` where the keys of a position belong.
  void scatter(T* head, int64_t offset) {
    constexpr int together = KvCache<T>::TOGETHER;
    T* to = head + offset * together;
    for (int64_t d = 0; d < a.head_dim; d += together, to += a.block_size * together)
      std::memcpy(to, narrow.data() + d, together * sizeof(T));
  }
};

template <typename F, typename T>
void rotate_rows(Member& member, const Rotation& a) {
  const int64_t head_dim = a.head_dim, row = (a.heads + 2 * a.kv_heads) * head_dim;
  Store<F, T> store{a};
  std::vector<float> room(head_dim);
  // neighbouring rows of a prompt share lines of the cache: one thread takes several blocks of them
  const int64_t least = rows_of_share(row), share = std::clamp(a.rows / (4 * member.size), least, std::max<int64_t>(64, least));
  member.each(a.rows, share, [&](int64_t r) {
    const float* cos = a.cos_sin ? a.cos_sin + a.positions[r] * a.rotary_dim : nullptr;
    const F *from = (const F*)a.qkv + r * row, *key = from + a.heads * head_dim;
    F* query = (F*)a.query + r * a.heads * head_dim;
    each_head(a, from, a.heads, a.query_norm, room.data(),
              [&](int64_t h, const auto* head) { turn(a, head, query + h * head_dim, cos); });
    if (a.slots[r] >= 0) store.row(key, key + a.kv_heads * head_dim, cos, a.slots[r], room.data());
  });
}

template <typename F>
void rotate_into(Member& member, const Rotation& r) {
  if (r.cache_type == CACHE_INT8) rotate_rows<F, int8_t>(member, r);
  else if (r.cache_type == CACHE_BF16) rotate_rows<F, uint16_t>(member, r);
  else rotate_rows<F, float>(member, r);
}

}  // namespace

void rotate_and_store(Member& member, const Rotation& r) {
  r.bf16 ? rotate_into<uint16_t>(member, r) : rotate_into<float>(member, r);
}

extern "C" void headrace_rotate_and_store(const Rotation* r, int threads) {
  const int64_t values = r->rows * (r->heads + 2 * r->kv_heads) * r->head_dim;
  with_team(threads_for(values, threads), [&](Member& member) { rotate_and_store(member, *r); });
}
