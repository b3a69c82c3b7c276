// Where keys and values lie in a block of the cache: "by_head" of kv_layout.py.
//
// What attention reads for one head lies side by side, and the values of a dimension for 16 neighbouring positions fill a
// vector, so keys need no transposing.
#pragma once
#include <cstdint>

enum CacheType : int32_t { CACHE_FLOAT32, CACHE_BF16, CACHE_INT8 };

// The keys of one layer, or its values: float, uint16_t for bfloat16, or int8_t with a scale for each position and head.
template <typename T> struct KvCache {
  static constexpr int TOGETHER = sizeof(T) == 2 ? 2 : 1;  // dimensions of a key that lie together
  static constexpr bool SCALED = sizeof(T) == 1;

  const void* base;
  int64_t block_size, kv_heads, head_dim;

  // [head_dim / TOGETHER][block_size][TOGETHER] for keys, [block_size][head_dim] for values.
  T* head(int64_t block, int64_t number) const { return (T*)at(block) + number * block_size * head_dim; }

  // [block_size] float32, behind the values of all heads; not aligned.
  char* scales(int64_t block, int64_t number) const {
    return at(block) + block_size * (kv_heads * head_dim + number * int64_t(sizeof(float)));
  }

 private:
  char* at(int64_t block) const {
    return (char*)base + block * block_size * kv_heads * (head_dim * int64_t(sizeof(T)) + (SCALED ? int64_t(sizeof(float)) : 0));
  }
};
