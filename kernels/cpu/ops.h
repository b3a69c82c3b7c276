// The operations between the products, each done by a team. Types are float32, or bfloat16 where a flag says so.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "product.h"
#include "team.h"

constexpr int64_t SHARE = 8192;  // values of a share; with fewer, handing out takes longer than the work
inline int64_t rows_of_share(int64_t width) { return std::max<int64_t>(1, SHARE / width); }

// Of one operation by itself. With little to do, waking threads takes longer than the work.
constexpr int64_t WORTH_A_WAKE = 32768;  // values
inline int threads_for(int64_t values, int threads) { return values < WORTH_A_WAKE ? 1 : threads; }

// rms_norm.py: out = norm(x), or with a residual total = x + residual and out = norm(total). out may be x, total residual.
struct Norm {
  const void *x, *residual;
  const float* weight;
  void *out, *total;
  int64_t rows, hidden;
  float eps;
  int32_t bf16;
};
void norm(Member& member, const Norm& n);

// rms_norm.py: out = x + residual, and out may be either.
struct Sum {
  const void *x, *residual;
  void* out;
  int64_t rows, width;
  int32_t bf16;
};
void add(Member& member, const Sum& s);

// rotary.py
struct Rotation {
  const void* qkv;
  const int64_t *positions, *slots;
  const float *cos_sin, *query_norm, *key_norm;  // null where nothing turns, or is normed
  void *k_cache, *v_cache, *query;
  int64_t rows, heads, kv_heads, head_dim, rotary_dim, block_size;
  float eps;
  int32_t whole_norm;        // norms are of all heads together, not of each
  int32_t bf16, cache_type;  // CacheType of kv_cache.h
};
void rotate_and_store(Member& member, const Rotation& r);

// gated.py
struct Gate {
  const void* gate_up;
  void* out;
  int64_t rows, width;
  int32_t activation, bf16;  // the former as simd.cpp counts them
};
void gate(Member& member, const Gate& g);

// experts.py. Of all experts, `gate_up` has 2 · width outputs each and `down` hidden ones, all of them whole panels.
struct Experts {
  const void *x, *scores;            // [rows, hidden], [rows, count]
  Matrix gate_up, down;
  const void *gate_up_bias, *down_bias;  // of each output; null where there is none
  void *sorted, *gated, *fed, *out;  // rows · top_k of hidden, width and hidden to work in; [rows, hidden]
  int32_t *chosen, *place;           // [rows, top_k]
  float* weights;                    // [rows, top_k]
  int32_t *start, *active;           // [count + 1], [count]
  int64_t rows, count, top_k;
  int32_t normalised;
  float alpha, limit;                // of the activation; 0 where nothing is clamped
};
void experts(Member& member, const Experts& e);

// attention.py
struct Attention {
  const void *query, *k_cache, *v_cache;
  void* out;
  const float* sinks;  // [heads], or null
  const int32_t *block_table, *query_start, *kv_len;
  int64_t rows, sequences, table_width, heads, kv_heads, head_dim, block_size, window;
  float scale, soft_cap;
  int32_t query_bf16, cache_type;  // CacheType of kv_cache.h
};

constexpr int64_t ATTENTION_SPAN = 256;  // positions whose part in a result can be found by itself

// Queries [first, first + count) of the batch, of one sequence, for KV heads [kv_head, kv_head + kv_heads); over all their
// keys, or over those of one span alone, with the result in a row of `partial` for each query and head.
struct AttentionItem {
  int32_t sequence, first, count, kv_head, kv_heads, span;
  int64_t partial, cost;
};

struct alignas(64) AttentionLine { float values[16]; };

// How the attention of a step is shared out: the same for every layer with as many heads and the same window.
struct AttentionPlan {
  std::vector<AttentionItem> items;   // the costly ones first
  std::vector<int32_t> shares;        // share i is the items [shares[i], shares[i + 1])
  std::vector<AttentionItem> joined;  // to be merged from `span` spans that are items of their own
  std::unique_ptr<AttentionLine[]> partial;
};
AttentionPlan attention_plan(const Attention& a, int threads);
int64_t most_attention_rows(const Attention& a);   // queries times heads of an item
int64_t attention_row_lines(const Attention& a);   // of one row in `partial`

struct AttentionScratch;  // what one thread works in; for one pair of numbers of heads and one head size
struct DropScratch { void operator()(AttentionScratch* scratch) const; };
typedef std::unique_ptr<AttentionScratch, DropScratch> ScratchPointer;
ScratchPointer attention_scratch(const Attention& a);
void paged_attention(Member& member, const Attention& a, const AttentionPlan& plan, AttentionScratch& scratch);
