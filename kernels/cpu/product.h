// Products of rows with the packed matrices of matrix.py.
#pragma once
#include <cstdint>

#include "team.h"

constexpr int PANEL = 64;  // outputs that lie together; matrix.py has the same

struct Matrix {
  const void* values;  // panels: [inputs][PANEL] in float32, [inputs / 2, rounded up][PANEL][2] in bfloat16
  int64_t outputs, inputs;
  int32_t bf16, compressed;  // the latter, only for products: as compressed.h has it
};

struct Product {
  const void* x;  // [rows, inputs]
  Matrix matrix;
  const void* bias;  // [outputs], or null
  void* out;         // [rows, outputs]
  int64_t rows;
  float scale;
  int32_t activation;  // of a gated product, as simd.cpp counts them
};

// What a thread reads of a matrix first: worth asking for beforehand where rows are few and memory sets the pace.
constexpr int64_t FEW_ROWS = 16;
void will_multiply(Member& member, const Matrix& matrix, int64_t rows);

// out = (x · matrixᵀ + bias) · scale
void product(Member& member, const Product& p);

// out [rows, outputs / 2] = activation(gate) · up, where gate is the first half of the outputs and up the second; half of the
// outputs must be whole panels. The same bits as a product and a gate after it.
void gated_product(Member& member, const Product& p);

// out [count, inputs] = rows of the matrix, times scale
void rows_of(Member& member, const Matrix& matrix, const int64_t* rows, int64_t count, float scale, void* out);
