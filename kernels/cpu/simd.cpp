// What the kernels compute with sixteen floats at a time: the same bits on every x86 and Arm machine that has fused
// multiply-add. Included by the kernels; not a translation unit by itself.
//
// Results must not depend on how many rows share a call, so nothing here is left to the compiler's reassociation or to a
// scalar remainder loop: short vectors are loaded padded, sums have one fixed order, products are fused where `fma` says so.
#pragma once
#include "vectors.h"

namespace {

inline vf max(vf a, vf b) { return select(a > b, a, b); }
inline vf min(vf a, vf b) { return select(a < b, a, b); }

// Sum and maximum over the lanes: halves are folded onto each other.
inline float sum(vf v) { return folded(v, [](auto a, auto b) { return a + b; }); }
inline float max(vf v) { return folded(v, [](auto a, auto b) { return select(a > b, a, b); }); }

// bfloat16 is the upper half of a float32. Rounds to nearest, ties to even; NaN stays NaN.
inline float from_bf16(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline uint16_t to_bf16(float f) {
  uint32_t u; std::memcpy(&u, &f, 4);
  return f != f ? uint16_t(0x7fc0) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline vf load(const uint16_t* p) { return (vf)(load_wide(p) << 16); }
inline void store(uint16_t* p, vf v) {
  const vu u = (vu)v, r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  store_narrow(p, select(v == v, r, all_of<vu>(0x7fc0u)));
}
inline vf load_part(const uint16_t* p, int n) { uint16_t t[LANES] = {}; std::memcpy(t, p, n * 2); return load(t); }
inline void store_part(uint16_t* p, vf v, int n) { uint16_t t[LANES]; store(t, v); std::memcpy(p, t, n * 2); }

inline vf load(const int8_t* p) { return converted<vf>(load_wide(p)); }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline vf load_part(const int8_t* p, int n) {
  return converted<vf>((vi)_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8((1u << n) - 1, p)));
}
#else
inline vf load_part(const int8_t* p, int n) { int8_t t[LANES] = {}; std::memcpy(t, p, n); return load(t); }
#endif
inline void store(int8_t* p, vf v) { store_narrow(p, converted<vi>(v)); }  // of whole numbers
inline void store_part(int8_t* p, vf v, int n) { int8_t t[LANES]; store(t, v); std::memcpy(p, t, n); }

template <typename T> inline vf load_upto(const T* p, int64_t left) { return left >= LANES ? load(p) : load_part(p, left); }
template <typename T> inline void store_upto(T* p, vf v, int64_t left) {
  if (left >= LANES) store(p, v); else store_part(p, v, left);
}

inline vf round_nearest(vf x) { const vf big = splat(12582912.f); return (x + big) - big; }  // for |x| < 2^22

// e^x within 2 units in the last place; 0 below -87.3; NaN stays NaN. Method: Cephes' expf.
inline vf exp(vf x) {
  const vf clamped = min(max(x, splat(-87.3f)), splat(88.3f));
  const vf n = round_nearest(clamped * 1.44269504088896341f);
  const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  vf y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.f;
  const vf power = (vf)((converted<vi>(n) + 127) << 23);
  return select(x < -87.3f, vf{}, select(x == x, y * power, x));
}

// ln x for positive normal x, within 2 units in the last place. Method: Cephes' logf.
inline vf log(vf x) {
  vi e = (((vi)x >> 23) & 255) - 126;
  vf m = (vf)(((vi)x & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  const vi small = m < 0.707106781186547524f;
  e = e + small;  // true is -1
  m = select(small, m + m - 1.f, m - 1.f);
  const vf z = m * m;
  vf y = splat(7.0376836292e-2f);
  y = fma(y, m, splat(-1.1514610310e-1f));
  y = fma(y, m, splat(1.1676998740e-1f));
  y = fma(y, m, splat(-1.2420140846e-1f));
  y = fma(y, m, splat(1.4249322787e-1f));
  y = fma(y, m, splat(-1.6668057665e-1f));
  y = fma(y, m, splat(2.0000714765e-1f));
  y = fma(y, m, splat(-2.4999993993e-1f));
  y = fma(y, m, splat(3.3333331174e-1f));
  const vf f = converted<vf>(e);
  y = fma(f, splat(-2.12194440e-4f), y * m * z);
  y = fma(z, splat(-0.5f), y);
  return fma(f, splat(0.693359375f), m + y);
}

// A sum as the result's type holds it: float32 as it is, bfloat16 after rounding.
template <typename T> inline vf rounded(vf x) { T t[LANES]; store(t, x); return load(t); }
template <> inline vf rounded<float>(vf x) { return x; }

enum Activation : int32_t { SILU, GELU };  // gated.py has the same, and their meaning

inline vf silu(vf x) { return x / (1.f + exp(-x)); }
inline vf gelu(vf x) {
  constexpr float two_roots = 1.5957691216057308f, cubic = 0.044715f;
  return x / (1.f + exp(x * fma(x * x, splat(-two_roots * cubic), splat(-two_roots))));
}
template <int32_t WHICH> inline vf activated(vf x) { return WHICH == GELU ? gelu(x) : silu(x); }

// gated.py's `clamped_mul`
inline vf clamped(vf gate, vf up, float alpha, float limit) {
  const vf most = splat(limit), low = select(gate > most, most, gate);  // NaN stays NaN
  const vf near = select(up > most, most, select(up < -most, -most, up));
  return low / (1.f + exp(-alpha * low)) * (near + 1.f);
}

// cap · tanh(x / cap)
inline vf capped(vf x, float cap) { return cap * (1.f - 2.f / (exp(x * (2.f / cap)) + 1.f)); }

}  // namespace
