// Sixteen lanes in one register: AVX-512. Included by vectors.h.

typedef Register<float, 64>::type vf;
typedef Register<int32_t, 64>::type vi;
typedef Register<uint32_t, 64>::type vu;

template <typename V, typename T> inline V all_of(T x) { return x - V{}; }
inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf load_part(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps((1u << n) - 1, p); }
inline void store_part(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, (__m512)v); }

// The whole numbers at `p`, and whole numbers to there.
inline vu load_wide(const uint32_t* p) { vu v; std::memcpy(&v, p, sizeof v); return v; }
inline vu load_wide(const uint16_t* p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline vi load_wide(const int8_t* p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline void store_narrow(uint16_t* p, vu v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v)); }
inline void store_narrow(int8_t* p, vi v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }

template <typename V> inline V select(vi mask, V a, V b) { return mask ? a : b; }
template <typename To, typename V> inline To converted(V v) { return __builtin_convertvector(v, To); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline bool any(vi mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask); }

// The upper halves of the products of 32 bits.
inline vu high_product(vu a, uint32_t m) {
  typedef Register<uint64_t, 128>::type wide;
  return __builtin_convertvector(__builtin_convertvector(a, wide) * uint64_t(m) >> 32, vu);
}

// All lanes folded into one: the upper half onto the lower one, and so on.
template <typename Fold> inline float folded(vf v, Fold fold) {
  v = fold(v, (vf)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = fold(v, (vf)__builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = fold(v, (vf)__builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = fold(v, (vf)__builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

// a0 b0 a1 b1 … of the lower halves, and of the upper ones.
inline Two<vf> interleaved(vf a, vf b) {
  return {(vf)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          (vf)__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}
