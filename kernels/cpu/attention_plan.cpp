// How the attention of a step is shared out among threads. The plan decides who computes what, never what comes out: every
// row's tiles and spans lie where its own sequence has them.
#include "ops.h"

#include <algorithm>

namespace {

constexpr int64_t ROWS = 60;              // of an item: whole blocks of rows for the usual numbers of heads
constexpr int64_t ITEMS = 4, SHARES = 8;  // of about equal cost that each thread should find
constexpr int64_t KEY_COST = 4;           // of fetching a key and its value, in what one row's work on them costs

inline int64_t heads_per_kv(const Attention& a) { return a.heads / a.kv_heads; }

struct Spans {
  int64_t first, end;
  Spans(const Attention& a, const AttentionItem& item) {
    const int64_t position = a.kv_len[item.sequence] - a.query_start[item.sequence + 1] + item.first;
    first = a.window ? std::max<int64_t>(0, position - a.window + 1) / ATTENTION_SPAN : 0;
    end = (position + item.count + ATTENTION_SPAN - 1) / ATTENTION_SPAN;
  }
};

int64_t cost(const Attention& a, const AttentionItem& item) {
  const int64_t high = a.kv_len[item.sequence] - a.query_start[item.sequence + 1] + item.first + item.count;
  const int64_t seen = a.window ? std::min(high, a.window + item.count) : high;
  return (item.span < 0 ? seen : ATTENTION_SPAN) * item.kv_heads * (KEY_COST + item.count * heads_per_kv(a));
}

// Items as large as scratch allows: some queries of a sequence, and all heads where there is room for their rows, because
// the heads of a block lie one behind the other.
std::vector<AttentionItem> whole_items(const Attention& a) {
  const int64_t group = std::max<int64_t>(1, ROWS / heads_per_kv(a));
  std::vector<AttentionItem> items;
  for (int32_t s = 0; s < a.sequences; s++)
    for (int64_t first = a.query_start[s], end = a.query_start[s + 1]; first < end; first += group) {
      const int64_t count = std::min(group, end - first);
      const int64_t heads = count * a.heads <= most_attention_rows(a) ? a.kv_heads : 1;
      for (int64_t h = 0; h < a.kv_heads; h += heads) {
        items.push_back({s, int32_t(first), int32_t(count), int32_t(h), int32_t(heads), -1, 0, 0});
        items.back().cost = cost(a, items.back());
      }
    }
  return items;
}

struct Splitter {
  const Attention& a;
  const int64_t most;  // that an item should cost
  AttentionPlan& plan;
  int64_t partial_rows = 0;

  void add(AttentionItem item) {
    if (item.cost > most && item.kv_heads > 1) return split_heads(item);
    const Spans spans(a, item);
    if (item.cost > most && spans.end - spans.first > 1) return split_spans(item, spans);
    plan.items.push_back(item);
  }

  void split_heads(const AttentionItem& item) {
    const int64_t parts = std::min<int64_t>(item.kv_heads, (item.cost + most - 1) / most);
    for (int64_t i = 0; i < parts; i++) {
      const int64_t begin = i * item.kv_heads / parts, end = (i + 1) * item.kv_heads / parts;
      AttentionItem part = item;
      part.kv_head += begin, part.kv_heads = end - begin, part.cost = cost(a, part);
      end - begin == item.kv_heads ? plan.items.push_back(part) : add(part);
    }
  }

  void split_spans(const AttentionItem& item, const Spans& spans) {
    const int64_t rows = item.count * item.kv_heads * heads_per_kv(a);
    AttentionItem joined = item;
    joined.span = spans.end - spans.first, joined.partial = partial_rows;
    plan.joined.push_back(joined);
    for (int64_t span = spans.first; span < spans.end; span++, partial_rows += rows) {
      AttentionItem part = item;
      part.span = span, part.partial = partial_rows, part.cost = cost(a, part);
      plan.items.push_back(part);
    }
  }
};

}  // namespace

int64_t most_attention_rows(const Attention& a) { return std::max(ROWS, a.heads); }

AttentionPlan attention_plan(const Attention& a, int threads) {
  AttentionPlan plan;
  const std::vector<AttentionItem> whole = whole_items(a);
  int64_t total = 0;
  for (const AttentionItem& item : whole) total += item.cost;
  Splitter splitter{a, threads > 1 ? total / (ITEMS * threads) + 1 : total, plan};
  for (const AttentionItem& item : whole) splitter.add(item);
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& x, const AttentionItem& y) { return x.cost > y.cost; });
  const int64_t share = total / (SHARES * threads);
  int64_t filled = share;
  for (size_t i = 0; i < plan.items.size(); i++) {
    if (filled >= share) plan.shares.push_back(i), filled = 0;
    filled += plan.items[i].cost;
  }
  plan.shares.push_back(plan.items.size());
  if (splitter.partial_rows)
    plan.partial.reset(new AttentionLine[splitter.partial_rows * attention_row_lines(a)]);
  return plan;
}

extern "C" void headrace_paged_attention(const Attention* a, int threads) {
  const AttentionPlan plan = attention_plan(*a, threads);
  with_team(threads, [&](Member& member) { paged_attention(member, *a, plan, *attention_scratch(*a)); });
}
