// What the screen is made of: a matrix and rows in 8 bits. See screen.cpp for what the lengths are for.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "score.h"

// Weights in 8 bits where one instruction adds four products of bytes to a sum; in 7 bits where it takes a step in between,
// whose sums of two must fit into 16 bits.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HEADRACE_SCREEN 8
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HEADRACE_SCREEN 7
#else
#define HEADRACE_SCREEN 0
#endif
constexpr bool HAS_SCREEN = HEADRACE_SCREEN != 0;
constexpr int32_t MOST_WEIGHT = HEADRACE_SCREEN == 8 ? 127 : 63;

constexpr int QUAD = 4;                   // inputs of a step
constexpr int64_t MOST_INPUTS = 1 << 16;  // so that sums of products of bytes fit into 32 bits
constexpr int32_t BASE = 255;             // of numbers with a high part, of 8 bits as well
constexpr int64_t MOST_HIGH = 64;         // so many that 32 bits hold these sums too
constexpr int32_t MIDDLE = MOST_WEIGHT + 1;  // a copy holds q + MIDDLE, unsigned
constexpr double MOST_SQUARE = 0x1p120;   // of a length: no score and no part of one overflows

inline int64_t quads(int64_t inputs) { return (inputs + QUAD - 1) / QUAD; }
inline int64_t most_high(int64_t inputs) { return std::min<int64_t>(quads(inputs) / 16 + 1, MOST_HIGH); }
inline float rounded_up(double length) { return float(length * (1 + 0x1p-22)) + FLT_MIN; }

// What a panel of the copy says of its outputs, behind their values [quads][PANEL][QUAD]; lengths are rounded up.
struct Facts {
  float scale[PANEL], error[PANEL], length[PANEL];  // E and W in screen.cpp
  float most_error, most_length;
  float unused[14];
};

// Bytes of one panel of the copy.
inline int64_t screen_panel_bytes(int64_t inputs) { return quads(inputs) * PANEL * QUAD + int64_t(sizeof(Facts)); }
constexpr int64_t SCREEN_END_BYTES = 64;  // behind the last panel

// A row in 8 bits. Lengths are in its unit.
struct Row {
  bool is_screened;
  int32_t start;                    // - MIDDLE · the sum of p: what the sums are short of
  int32_t num_high;                 // steps with high parts
  float unit, error_by, length_by;  // X' and F' there
  float least_bound;                // what bounds have besides
};

// What goes with it. A few large values would make the unit large for all: steps that have some are p = low + BASE · high.
struct Values {
  int32_t *low, *high, *which;  // [quads], [most_high], [most_high]: which steps; four bytes for each step
};

inline int64_t values_width(int64_t inputs) { return quads(inputs) + 2 * most_high(inputs); }
inline Values values_in(int32_t* memory, int64_t inputs) {
  return {memory, memory + quads(inputs), memory + quads(inputs) + most_high(inputs)};
}

// x [inputs], float32 or bfloat16, in 8 bits. It is not screened if it has values that are not finite, or none but 0.
Row quantised(const void* x, bool bf16, int64_t inputs, const Values& to);
