// Sixteen lanes in registers of 32 or 16 bytes. Included by vectors.h; it has the meaning of what vectors_whole.h has too.

#if defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int REGISTER_LANES = REGISTER_BYTES / 4;
typedef Register<float, REGISTER_BYTES>::type rf;
typedef Register<int32_t, REGISTER_BYTES>::type ri;
typedef Register<uint32_t, REGISTER_BYTES>::type ru;

template <typename V> struct Lane { typedef std::remove_cvref_t<decltype(V{}[0])> type; };

template <typename Half> struct Pair {
  typedef typename Lane<Half>::type Scalar;
  Half low, high;

  template <typename Other> explicit operator Pair<Other>() const { return {(Other)low, (Other)high}; }
  Scalar operator[](int i) const {
    Scalar each[LANES];
    std::memcpy(each, this, sizeof *this);
    return each[i];
  }
};
template <typename Half> struct Lane<Pair<Half>> : Lane<Half> {};

template <typename T, int BYTES> struct Whole { typedef Pair<typename Whole<T, BYTES / 2>::type> type; };
template <typename T> struct Whole<T, REGISTER_BYTES> : Register<T, REGISTER_BYTES> {};
typedef Whole<float, 64>::type vf;
typedef Whole<int32_t, 64>::type vi;
typedef Whole<uint32_t, 64>::type vu;

template <typename V> constexpr bool IS_PAIR = false;
template <typename H> constexpr bool IS_PAIR<Pair<H>> = true;
template <typename V> using HalfOf = decltype(V::low);

template <typename V> inline V all_of(typename Lane<V>::type x) {
  if constexpr (IS_PAIR<V>) return {all_of<HalfOf<V>>(x), all_of<HalfOf<V>>(x)};
  else return x - V{};
}

#define HEADRACE_ON_HALVES(OP)                                                                                          \
  template <typename H> inline Pair<H> operator OP(Pair<H> a, Pair<H> b) { return {a.low OP b.low, a.high OP b.high}; } \
  template <typename H> inline Pair<H> operator OP(Pair<H> a, typename Lane<H>::type b) { return a OP all_of<Pair<H>>(b); } \
  template <typename H> inline Pair<H> operator OP(typename Lane<H>::type a, Pair<H> b) { return all_of<Pair<H>>(a) OP b; } \
  template <typename H> inline Pair<H>& operator OP##=(Pair<H>& a, Pair<H> b) { return a = a OP b; }                    \
  template <typename H> inline Pair<H>& operator OP##=(Pair<H>& a, typename Lane<H>::type b) { return a = a OP b; }
HEADRACE_ON_HALVES(+)
HEADRACE_ON_HALVES(-)
HEADRACE_ON_HALVES(*)
HEADRACE_ON_HALVES(/)
HEADRACE_ON_HALVES(&)
HEADRACE_ON_HALVES(|)
HEADRACE_ON_HALVES(^)
#undef HEADRACE_ON_HALVES

#define HEADRACE_COMPARES(OP)                                                                                    \
  template <typename H> inline auto operator OP(Pair<H> a, Pair<H> b) {                                          \
    return Pair<decltype(a.low OP b.low)>{a.low OP b.low, a.high OP b.high};                                     \
  }                                                                                                              \
  template <typename H> inline auto operator OP(Pair<H> a, typename Lane<H>::type b) { return a OP all_of<Pair<H>>(b); }
HEADRACE_COMPARES(<)
HEADRACE_COMPARES(<=)
HEADRACE_COMPARES(>)
HEADRACE_COMPARES(>=)
HEADRACE_COMPARES(==)
#undef HEADRACE_COMPARES

template <typename H> inline Pair<H> operator<<(Pair<H> a, int n) { return {a.low << n, a.high << n}; }
template <typename H> inline Pair<H> operator>>(Pair<H> a, int n) { return {a.low >> n, a.high >> n}; }
template <typename H> inline Pair<H> operator-(Pair<H> a) { return {-a.low, -a.high}; }

template <typename M, typename V> inline V select(M mask, V a, V b) {
  if constexpr (IS_PAIR<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else return mask ? a : b;
}

template <typename To, typename V> inline To converted(V v) {
  if constexpr (IS_PAIR<V>) return {converted<HalfOf<To>>(v.low), converted<HalfOf<To>>(v.high)};
  else return __builtin_convertvector(v, To);
}

// From and to memory, register by register.
template <typename V> inline V loaded(const typename Lane<V>::type* p) {
  constexpr int half = sizeof(V) / sizeof *p / 2;
  if constexpr (IS_PAIR<V>) return {loaded<HalfOf<V>>(p), loaded<HalfOf<V>>(p + half)};
  else { V v; std::memcpy(&v, p, sizeof v); return v; }
}
template <typename V> inline void store(typename Lane<V>::type* p, V v) {
  constexpr int half = sizeof(V) / sizeof *p / 2;
  if constexpr (IS_PAIR<V>) store(p, v.low), store(p + half, v.high);
  else std::memcpy(p, &v, sizeof v);
}
inline vf load(const float* p) { return loaded<vf>(p); }
inline vf load_part(const float* p, int n) { float t[LANES] = {}; std::memcpy(t, p, n * sizeof *p); return load(t); }
inline void store_part(float* p, vf v, int n) { float t[LANES]; store(t, v); std::memcpy(p, t, n * sizeof *p); }

template <typename V, typename T> inline V widened(const T* p) {
  constexpr int num = sizeof(V) / sizeof(typename Lane<V>::type);
  if constexpr (IS_PAIR<V>) return {widened<HalfOf<V>>(p), widened<HalfOf<V>>(p + num / 2)};
#if defined(__AVX2__)
  else if constexpr (sizeof(T) == 2) return (V)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  else return (V)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  else {
    typename Register<T, num * sizeof(T)>::type few;
    std::memcpy(&few, p, sizeof few);
    return __builtin_convertvector(few, V);
  }
#endif
}
inline vu load_wide(const uint32_t* p) { return loaded<vu>(p); }
inline vu load_wide(const uint16_t* p) { return widened<vu>(p); }
inline vi load_wide(const int8_t* p) { return widened<vi>(p); }

template <typename T, typename V> inline void store_narrow(T* p, V v) {
  constexpr int num = sizeof(V) / sizeof(typename Lane<V>::type);
  if constexpr (IS_PAIR<V>) {
    store_narrow(p, v.low), store_narrow(p + num / 2, v.high);
  } else {
    typedef typename Register<T, num * sizeof(T)>::type Few;
    const Few few = __builtin_convertvector(v, Few);
    std::memcpy(p, &few, sizeof few);
  }
}

template <typename V> inline V fma(V a, V b, V c) {
  if constexpr (IS_PAIR<V>) return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
#if defined(__AVX2__) && defined(__FMA__)
  else return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
  else return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  else return a * b + c;
#endif
}

template <typename V> inline bool any(V mask) {
  if constexpr (IS_PAIR<V>) return any(mask.low | mask.high);
#if defined(__AVX2__)
  else return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  else return mask[0] | mask[1] | mask[2] | mask[3];
#endif
}

template <typename V> inline V high_product(V a, uint32_t m) {
  if constexpr (IS_PAIR<V>) {
    return {high_product(a.low, m), high_product(a.high, m)};
  } else {
#if defined(__AVX2__)
    const __m256i by = _mm256_set1_epi32(int32_t(m)), even = _mm256_mul_epu32((__m256i)a, by);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), by);
    return (V)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
    for (int i = 0; i < REGISTER_LANES; i++) a[i] = uint32_t(uint64_t(a[i]) * m >> 32);
    return a;
#endif
  }
}

template <typename V, typename Fold> inline float folded(V v, Fold fold) {
  if constexpr (IS_PAIR<V>) {
    return folded(fold(v.low, v.high), fold);
  } else {
    if constexpr (REGISTER_LANES == 8) v = fold(v, (V)__builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    if constexpr (REGISTER_LANES == 8) v = fold(v, (V)__builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    else v = fold(v, (V)__builtin_shufflevector(v, v, 2, 3, 0, 1));
    if constexpr (REGISTER_LANES == 8) v = fold(v, (V)__builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
    else v = fold(v, (V)__builtin_shufflevector(v, v, 1, 0, 3, 2));
    return v[0];
  }
}

template <typename V> inline Two<V> interleaved(V a, V b) {
  if constexpr (IS_PAIR<V>) {
    const auto low = interleaved(a.low, b.low), high = interleaved(a.high, b.high);
    return {{low.first, low.second}, {high.first, high.second}};
  } else if constexpr (REGISTER_LANES == 8) {
    return {(V)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11), (V)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)};
  } else {
    return {(V)__builtin_shufflevector(a, b, 0, 4, 1, 5), (V)__builtin_shufflevector(a, b, 2, 6, 3, 7)};
  }
}
