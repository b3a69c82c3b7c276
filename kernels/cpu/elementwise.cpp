// The operations between the matrix products: norm, rotary embedding with the store into the cache, gated activation.
// See rms_norm.py, rotary.py and silu_mul.py for their meaning; arithmetic is float32 and each row stands alone.
#include "kv_cache.h"
#include "ops.h"
#include "simd.cpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t SHARE = 8192;  // values of a share; with fewer, handing out takes longer than the work

inline int64_t rows_of_share(int64_t width) { return std::max<int64_t>(1, SHARE / width); }

template <typename T>
void norm_row(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t hidden, float eps) {
  vf squares{};
  for (int64_t i = 0; i < hidden; i += LANES) {
    vf v = load_upto(x + i, hidden - i);
    if (residual) {
      v = rounded<T>(v + load_upto(residual + i, hidden - i));
      store_upto(total + i, v, hidden - i);
    }
    squares = fma(v, v, squares);
  }
  const float factor = 1.f / std::sqrt(sum(squares) / float(hidden) + eps);
  const T* from = residual ? total : x;
  for (int64_t i = 0; i < hidden; i += LANES)
    store_upto(out + i, load_upto(from + i, hidden - i) * factor * load_upto(weight + i, hidden - i), hidden - i);
}

template <typename T>
void norm_rows(Member& member, const Norm& n) {
  member.each(n.rows, rows_of_share(n.hidden), [&](int64_t r) {
    const int64_t at = r * n.hidden;
    norm_row((const T*)n.x + at, n.residual ? (const T*)n.residual + at : nullptr, (const T*)n.weight, (T*)n.out + at,
             n.total ? (T*)n.total + at : nullptr, n.hidden, n.eps);
  });
}

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

  void row(const F* key, const F* value, const float* cos, int64_t slot) {
    const int64_t block = slot / a.block_size, offset = slot % a.block_size, n = a.head_dim;
    for (int64_t h = 0; h < a.kv_heads; h++, key += n, value += n) {
      T* const stored = values.head(block, h) + offset * n;
      if constexpr (KvCache<T>::SCALED) {
        rotate(key, wide.data(), cos, cos + n / 2, n / 2);
        const float key_scale = encode(wide.data(), narrow.data(), n);
        copy(value, wide.data(), n);
        const float value_scale = encode(wide.data(), stored, n);
        std::memcpy(keys.scales(block, h) + offset * sizeof(float), &key_scale, sizeof(float));
        std::memcpy(values.scales(block, h) + offset * sizeof(float), &value_scale, sizeof(float));
      } else {
        rotate(key, narrow.data(), cos, cos + n / 2, n / 2);
        copy(value, stored, n);
      }
      scatter(keys.head(block, h), offset);
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
  const int64_t head_dim = a.head_dim, half = head_dim / 2, row = (a.heads + 2 * a.kv_heads) * head_dim;
  Store<F, T> store{a};
  // neighbouring rows of a prompt share lines of the cache: one thread takes several blocks of them
  const int64_t least = rows_of_share(row), share = std::clamp(a.rows / (4 * member.size), least, std::max<int64_t>(64, least));
  member.each(a.rows, share, [&](int64_t r) {
    const float* cos = a.cos_sin + a.positions[r] * head_dim;
    const F *from = (const F*)a.qkv + r * row, *key = from + a.heads * head_dim;
    for (int64_t h = 0; h < a.heads; h++)
      rotate(from + h * head_dim, (F*)a.query + (r * a.heads + h) * head_dim, cos, cos + half, half);
    if (a.slots[r] >= 0) store.row(key, key + a.kv_heads * head_dim, cos, a.slots[r]);
  });
}

template <typename F>
void rotate_into(Member& member, const Rotation& r) {
  if (r.cache_type == CACHE_INT8) rotate_rows<F, int8_t>(member, r);
  else if (r.cache_type == CACHE_BF16) rotate_rows<F, uint16_t>(member, r);
  else rotate_rows<F, float>(member, r);
}

template <typename T>
void gate_rows(Member& member, const Gate& g) {
  member.each(g.rows, rows_of_share(2 * g.width), [&](int64_t r) {
    const T *gate = (const T*)g.gate_up + 2 * r * g.width, *up = gate + g.width;
    for (int64_t i = 0; i < g.width; i += LANES) {
      const int64_t left = g.width - i;
      store_upto((T*)g.out + r * g.width + i, silu(load_upto(gate + i, left)) * load_upto(up + i, left), left);
    }
  });
}

}  // namespace

void norm(Member& member, const Norm& n) { n.bf16 ? norm_rows<uint16_t>(member, n) : norm_rows<float>(member, n); }

void rotate_and_store(Member& member, const Rotation& r) {
  r.bf16 ? rotate_into<uint16_t>(member, r) : rotate_into<float>(member, r);
}

void silu_mul(Member& member, const Gate& g) { g.bf16 ? gate_rows<uint16_t>(member, g) : gate_rows<float>(member, g); }

// One operation by itself. With little to do, waking threads takes longer than the work.
namespace {
constexpr int64_t WORTH_A_WAKE = 32768;  // values
inline int threads_for(int64_t values, int threads) { return values < WORTH_A_WAKE ? 1 : threads; }
}  // namespace

extern "C" void headrace_norm(const Norm* n, int threads) {
  with_team(threads_for(n->rows * n->hidden, threads), [&](Member& member) { norm(member, *n); });
}

extern "C" void headrace_rotate_and_store(const Rotation* r, int threads) {
  const int64_t values = r->rows * (r->heads + 2 * r->kv_heads) * r->head_dim;
  with_team(threads_for(values, threads), [&](Member& member) { rotate_and_store(member, *r); });
}

extern "C" void headrace_silu_mul(const Gate* g, int threads) {
  with_team(threads_for(g->rows * g->width * 4, threads), [&](Member& member) { silu_mul(member, *g); });
}
