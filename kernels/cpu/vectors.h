// Vectors of sixteen lanes on any CPU: one register where it has such, else two or four of those that it has.
//
// GCC keeps a vector that no register holds in memory, from each operation to the next. So it is a pair of halves there, which
// are registers or pairs themselves, and an operation is done on the halves. Lanes and their order are the same everywhere, and
// so are the bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

constexpr int LANES = 16;

template <typename T, int BYTES> struct Register { typedef T type __attribute__((vector_size(BYTES))); };
template <typename V> struct Two { V first, second; };

#if defined(__AVX512F__)
#include "vectors_whole.h"
#else
#include "vectors_pairs.h"
#endif

inline vf splat(float x) { return all_of<vf>(x); }
inline vi splat(int32_t x) { return all_of<vi>(x); }
inline vi lanes() {
  constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vi v;
  std::memcpy(&v, numbers, sizeof v);
  return v;
}

}  // namespace
