// Goes through the operations of a forward pass in one call. See program.py, which records them.
#include "ops.h"
#include "product.h"
#include "score.h"

namespace {

enum Kind : int32_t { ROWS_OF, NORM, PRODUCT, GATED_PRODUCT, GATE, ROTATE, ATTEND, ADD, EXPERTS };

// One recorded operation; program.py has the same fields. What a kind does not need is zero.
struct Operation {
  int32_t kind, bf16, cache_type, compressed, activation, whole_norm, down_compressed, normalised, group;
  float eps_or_scale, soft_cap, alpha, limit;
  const void *in, *residual, *weight, *bias;
  void *out, *total, *k_cache, *v_cache;
  const float *cos_sin, *query_norm, *key_norm, *sinks;
  const void *down, *down_bias;
  void *sorted, *gated, *fed;
  int32_t* routing;  // for the step's rows: chosen, place and weights, then start and active, as Experts has them
  int64_t top_k, experts, width;
  int64_t inputs, outputs, heads, kv_heads, head_dim, rotary_dim, block_size, window;
};

// Where the rows go, and what they see, in the blocks of one group of layers.
struct Placement {
  const int64_t* slots;
  const int32_t* block_table;
};

// What changes from one step to the next.
struct Step {
  const int64_t *token_ids, *positions;
  const int32_t *query_start, *kv_len;
  const void* result;  // [rows, width]
  int32_t* finite;     // 1 beforehand; whether all of the result is
  int64_t rows, sequences, table_width, width;
  int32_t bf16;
  Placement groups[2];
};

// Whether no exponent has all its bits set.
template <typename T>
bool all_finite(const T* values, int64_t count, T exponent) {
  T bad = 0;
  for (int64_t i = 0; i < count; i++) bad |= (values[i] & exponent) == exponent;
  return !bad;
}

void check(Member& member, const Step& s) {
  member.each(s.rows, 32, [&](int64_t row) {
    const bool good = s.bf16 ? all_finite((const uint16_t*)s.result + row * s.width, s.width, uint16_t(0x7f80))
                             : all_finite((const uint32_t*)s.result + row * s.width, s.width, uint32_t(0x7f800000));
    if (!good) std::atomic_ref<int32_t>(*s.finite).store(0, std::memory_order_relaxed);
  });
}

inline Matrix matrix(const Operation& o) { return {o.weight, o.outputs, o.inputs, o.bf16, o.compressed}; }
inline bool is_product(const Operation& o) { return o.kind == PRODUCT || o.kind == GATED_PRODUCT; }
inline Product of_product(const Operation& o, const Step& s) {
  return {o.in, matrix(o), o.bias, o.out, s.rows, o.eps_or_scale, o.activation};
}

inline Norm of_norm(const Operation& o, const Step& s) {
  return {o.in, o.residual, (const float*)o.weight, o.out, o.total, s.rows, o.inputs, o.eps_or_scale, o.bf16};
}

inline Attention of_attention(const Operation& o, const Step& s) {
  return {o.in, o.k_cache, o.v_cache, o.out, o.sinks, s.groups[o.group].block_table, s.query_start, s.kv_len, s.rows, s.sequences,
          s.table_width, o.heads, o.kv_heads, o.head_dim, o.block_size, o.window, o.eps_or_scale, o.soft_cap, o.bf16,
          o.cache_type};
}

inline Rotation of_rotation(const Operation& o, const Step& s) {
  return {o.in, s.positions, s.groups[o.group].slots, o.cos_sin, o.query_norm, o.key_norm, o.k_cache, o.v_cache, o.out,
          s.rows, o.heads, o.kv_heads, o.head_dim, o.rotary_dim, o.block_size, o.eps_or_scale, o.whole_norm, o.bf16,
          o.cache_type};
}

inline Experts of_experts(const Operation& o, const Step& s) {
  const int64_t choices = s.rows * o.top_k;
  int32_t *const chosen = o.routing, *const place = chosen + choices, *const start = place + 2 * choices;
  return {o.in, o.residual, matrix(o), {o.down, o.experts * o.inputs, o.width, o.bf16, o.down_compressed},
          o.bias, o.down_bias, o.sorted, o.gated, o.fed, o.out, chosen, place, (float*)(place + choices), start, start + o.experts + 1,
          s.rows, o.experts, o.top_k, o.normalised, o.alpha, o.limit};
}

inline bool same_plan(const Attention& a, const Operation& o) {
  return a.heads == o.heads && a.kv_heads == o.kv_heads && a.head_dim == o.head_dim && a.window == o.window;
}

// How attention is shared out, once for all layers of a kind.
struct Plans {
  std::vector<Attention> kinds;
  std::vector<AttentionPlan> plans;

  Plans(const Operation* operations, int64_t count, const Step& step, int threads) {
    for (int64_t i = 0; i < count; i++)
      if (operations[i].kind == ATTEND && find(operations[i]) == kinds.size()) {
        kinds.push_back(of_attention(operations[i], step));
        plans.push_back(attention_plan(kinds.back(), threads));
      }
  }
  size_t find(const Operation& o) const {
    size_t at = 0;
    while (at < kinds.size() && !same_plan(kinds[at], o)) at++;
    return at;
  }
};

struct Worker {
  Member& member;
  const Step& step;
  const Plans& plans;
  ScratchPointer scratch;
  int64_t scratch_heads = 0, scratch_head_dim = 0, scratch_kv_heads = 0;

  void attend(const Operation& o) {
    const Attention a = of_attention(o, step);
    if (scratch_heads != o.heads || scratch_kv_heads != o.kv_heads || scratch_head_dim != o.head_dim) {
      scratch = attention_scratch(a);
      scratch_heads = o.heads, scratch_kv_heads = o.kv_heads, scratch_head_dim = o.head_dim;
    }
    paged_attention(member, a, plans.plans[plans.find(o)], *scratch);
  }

  void run(const Operation& o) {
    switch (o.kind) {
      case ROWS_OF: return rows_of(member, matrix(o), step.token_ids, step.rows, o.eps_or_scale, o.out);
      case NORM: return norm(member, of_norm(o, step));
      case PRODUCT: return product(member, of_product(o, step));
      case GATED_PRODUCT: return gated_product(member, of_product(o, step));
      case GATE: return gate(member, {o.in, o.out, step.rows, o.outputs, o.activation, o.bf16});
      case ROTATE: return rotate_and_store(member, of_rotation(o, step));
      case ATTEND: return attend(o);
      case EXPERTS: return experts(member, of_experts(o, step));
      case ADD: return add(member, {o.in, o.residual, o.out, step.rows, o.inputs, o.bf16});
    }
  }
};

// A step that is being computed.
struct Flight {
  const Operation* operations;
  const int64_t count;
  const Step step;
  const Scores scores;  // of the result, if any rows ask
  const Plans plans;
  const ScoringPointer scoring;
  TeamWork work;  // the last, for its threads begin at once

  Flight(const Operation* operations, int64_t count, const Step& step, const Scores* asked, int threads)
      : operations(operations), count(count), step(step), scores(asked ? *asked : Scores{}),
        plans(operations, count, this->step, threads), scoring(new_scoring(scores, threads)),
        work(threads, [this](Member& member) { go(member); }) {}

  void go(Member& member) const {
    Worker worker{member, step, plans, nullptr};
    for (int64_t i = 0, next = 0; i < count; i++) {
      while (next < count && (next <= i || !is_product(operations[next]))) next++;
      if (next < count) will_multiply(member, matrix(operations[next]), step.rows);
      else if (scores.num_rows) will_score(member, scores, *scoring);
      worker.run(operations[i]);
    }
    check(member, step);
    if (scores.num_rows) score(member, scores, *scoring);
  }
};

}  // namespace

// Begins a step on all threads but the caller's. What is pointed to, but for `step` and `scores` themselves, must stay.
extern "C" Flight* headrace_begin(const Operation* operations, int64_t count, const Step* step, const Scores* scores, int threads) {
  return new Flight(operations, count, *step, scores, threads);
}

// Helps with what is left of it, and returns when all is done.
extern "C" void headrace_finish(Flight* flight) { delete flight; }
