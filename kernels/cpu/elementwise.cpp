// The operations between the matrix products: norm, rotary embedding with the store into the cache, gated activation.
// See rms_norm.py, rotary.py and silu_mul.py for their meaning; arithmetic is float32 and each row stands alone.
#include "simd.cpp"

#include <cmath>

namespace {

constexpr int64_t WORTH_A_WAKE = 32768;  // values; with fewer, waking threads takes longer than the work

// One or all: libgomp ends the threads that a smaller team leaves over, and starting them again is dear.
inline int threads_for(int64_t values, int threads) { return values < WORTH_A_WAKE ? 1 : threads; }

// The sum as the result's type holds it: float32 as it is, bfloat16 after rounding.
template <typename T> inline vf rounded(vf x) { T t[LANES]; store(t, x); return load(t); }
template <> inline vf rounded<float>(vf x) { return x; }

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
void norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t hidden, float eps,
          int threads) {
#pragma omp parallel for num_threads(threads_for(rows * hidden, threads))
  for (int64_t r = 0; r < rows; r++)
    norm_row(x + r * hidden, residual ? residual + r * hidden : nullptr, weight, out + r * hidden,
             total ? total + r * hidden : nullptr, hidden, eps);
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
void rotate_and_store(const F* qkv, const int64_t* positions, const float* cos_sin, T* k_cache, T* v_cache,
                      const int64_t* slots, F* query, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int threads) {
  const int64_t half = head_dim / 2, row = (heads + 2 * kv_heads) * head_dim, cached = kv_heads * head_dim;
#pragma omp parallel for num_threads(threads_for(rows * row, threads))
  for (int64_t r = 0; r < rows; r++) {
    const float *cos = cos_sin + positions[r] * head_dim, *sin = cos + half;
    const F *from = qkv + r * row, *key = from + heads * head_dim, *value = key + cached;
    for (int64_t h = 0; h < heads; h++)
      rotate(from + h * head_dim, query + (r * heads + h) * head_dim, cos, sin, half);
    if (slots[r] < 0) continue;
    for (int64_t h = 0; h < kv_heads; h++)
      rotate(key + h * head_dim, k_cache + slots[r] * cached + h * head_dim, cos, sin, half);
    for (int64_t i = 0; i < cached; i += LANES)
      store_upto(v_cache + slots[r] * cached + i, load_upto(value + i, cached - i), cached - i);
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width * 4, threads))
  for (int64_t r = 0; r < rows; r++) {
    const T *gate = gate_up + 2 * r * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += LANES) {
      const vf g = load_upto(gate + i, width - i);
      store_upto(out + r * width + i, g / (1.f + exp(-g)) * load_upto(up + i, width - i), width - i);
    }
  }
}

}  // namespace

// `bf16` says the type of all activations and weights: bfloat16, or float32; `cache_bf16` that of the KV cache.
extern "C" void headrace_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* total,
                                  int64_t rows, int64_t hidden, float eps, int bf16, int threads) {
  if (bf16)
    norm((const uint16_t*)x, (const uint16_t*)residual, (const uint16_t*)weight, (uint16_t*)out, (uint16_t*)total, rows,
         hidden, eps, threads);
  else
    norm((const float*)x, (const float*)residual, (const float*)weight, (float*)out, (float*)total, rows, hidden, eps,
         threads);
}

extern "C" void headrace_rotate_and_store(const void* qkv, const int64_t* positions, const float* cos_sin, void* k_cache,
                                          void* v_cache, const int64_t* slots, void* query, int64_t rows, int64_t heads,
                                          int64_t kv_heads, int64_t head_dim, int bf16, int cache_bf16, int threads) {
#define RUN(F, T)                                                                                                     \
  rotate_and_store((const F*)qkv, positions, cos_sin, (T*)k_cache, (T*)v_cache, slots, (F*)query, rows, heads, kv_heads, \
                   head_dim, threads)
  if (bf16) { if (cache_bf16) RUN(uint16_t, uint16_t); else RUN(uint16_t, float); }
  else { if (cache_bf16) RUN(float, uint16_t); else RUN(float, float); }
#undef RUN
}

extern "C" void headrace_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int bf16, int threads) {
  if (bf16) silu_mul((const uint16_t*)gate_up, (uint16_t*)out, rows, width, threads);
  else silu_mul((const float*)gate_up, (float*)out, rows, width, threads);
}
