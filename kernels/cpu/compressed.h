// Panels of bfloat16 in three quarters of their room, without losing a bit.
//
// A weight's upper byte is its sign and all but the last bit of its exponent. Nearly all weights of a panel share sixteen
// of them, so four bits tell which. A step of the inner loop, two inputs of all PANEL outputs, is 128 lower bytes and 128
// such halves of a byte. The few weights with another upper byte are kept whole behind the panels. Products of few rows wait
// for the memory, and for nothing else: a quarter less of it to read is a quarter less time.
#pragma once
#include <algorithm>
#include <cstdint>

#include "product.h"

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
constexpr bool HAS_COMPRESSED = true;
#else
constexpr bool HAS_COMPRESSED = false;
#endif

constexpr int STEP_VALUES = 2 * PANEL, STEP_BYTES = STEP_VALUES + STEP_VALUES / 2;
constexpr int UPPERS = 16;
constexpr int64_t VALUES_FOR_EXCEPTION = 1024;  // that a matrix has for each, at the least: they take time

// Stands before the steps of a panel.
struct PanelHead {
  uint8_t upper[UPPERS];
  uint32_t first, count;  // which of the exceptions are this panel's, in the order of steps
  uint8_t unused[40];
};

struct Exception {
  uint32_t step;
  uint16_t place, value;  // in the step as it was
};

inline int64_t compressed_panel_bytes(int64_t inputs) { return int64_t(sizeof(PanelHead)) + inputs / 2 * STEP_BYTES; }
inline const uint8_t* compressed_panel(const Matrix& m, int64_t number) {
  return (const uint8_t*)m.values + number * compressed_panel_bytes(m.inputs);
}
inline const Exception* exceptions_of(const Matrix& m) {
  return (const Exception*)compressed_panel(m, (m.outputs + PANEL - 1) / PANEL);
}
