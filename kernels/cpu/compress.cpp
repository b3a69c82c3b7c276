// Brings panels of bfloat16 into three quarters of their room, where they lie. See compressed.h for the form.
#include "compressed.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "simd.cpp"

namespace {

// The values of a panel as they were: [steps][PANEL][2].
uint16_t* whole_panel(const Matrix& m, int64_t number) { return (uint16_t*)m.values + number * PANEL * m.inputs; }

// Chooses what a panel's four bits can say, and counts the values of which they cannot.
PanelHead head_of(const uint16_t* panel, int64_t steps) {
  constexpr int APART = 4;  // so that equal neighbours do not wait for each other's count
  uint32_t counts[APART][256] = {};
  for (int64_t i = 0; i < steps * STEP_VALUES; i += APART)
    for (int a = 0; a < APART; a++) counts[a][panel[i + a] >> 8]++;
  for (int a = 1; a < APART; a++)
    for (int upper = 0; upper < 256; upper++) counts[0][upper] += counts[a][upper];
  int order[256];
  std::iota(order, order + 256, 0);
  std::stable_sort(order, order + 256, [&](int a, int b) { return counts[0][a] > counts[0][b]; });
  PanelHead head{};
  for (int i = 0; i < UPPERS; i++) head.upper[i] = uint8_t(order[i]);
  for (int i = UPPERS; i < 256; i++) head.count += counts[0][order[i]];
  return head;
}

#if defined(__AVX512BW__) && defined(__AVX512BF16__)

// The lower bytes and the upper ones of two vectors, in the order in which the two halves of `unpacklo`, `unpackhi` are.
inline __m512i lower_bytes(__m512i a, __m512i b) {
  const __m512i mask = _mm512_set1_epi16(255);
  return _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
}
inline __m512i upper_bytes(__m512i a, __m512i b) { return _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)); }

// Which of the upper bytes each is; `known` loses those that are none.
inline __m512i numbers(const PanelHead& head, __m512i upper, __mmask64& known) {
  __m512i number{};
  known = 0;
  for (int i = 0; i < UPPERS; i++) {
    const __mmask64 equal = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(char(head.upper[i])));
    number = _mm512_mask_set1_epi8(number, equal, char(i));
    known |= equal;
  }
  return number;
}

void put_step(const PanelHead& head, const uint16_t* from, uint32_t step, uint8_t* to, Exception*& exception) {
  __m512i v[4], number[2];
  __mmask64 known[2];
  for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(from + i * 32);
  for (int i = 0; i < 2; i++) {
    _mm512_storeu_si512(to + i * 64, lower_bytes(v[2 * i], v[2 * i + 1]));
    number[i] = numbers(head, upper_bytes(v[2 * i], v[2 * i + 1]), known[i]);
  }
  _mm512_storeu_si512(to + STEP_VALUES, _mm512_or_si512(number[0], _mm512_slli_epi16(number[1], 4)));
  if (~(known[0] & known[1]) == 0) return;
  for (uint16_t place = 0; place < STEP_VALUES; place++)
    if (!std::memchr(head.upper, from[place] >> 8, UPPERS)) *exception++ = {step, place, from[place]};
}

#else
void put_step(const PanelHead&, const uint16_t*, uint32_t, uint8_t*, Exception*&) {}
#endif

// Puts a panel together at the beginning of its own room.
void compress_panel(const Matrix& m, int64_t number, const PanelHead& head, std::vector<uint16_t>& copy, Exception* exception) {
  uint8_t* to = (uint8_t*)whole_panel(m, number);
  std::memcpy(copy.data(), to, copy.size() * sizeof(uint16_t));
  std::memcpy(to, &head, sizeof head);
  to += sizeof head;
  for (int64_t step = 0; step < m.inputs / 2; step++, to += STEP_BYTES)
    put_step(head, copy.data() + step * STEP_VALUES, uint32_t(step), to, exception);
}

// Gives back the pages between two addresses.
void give_back(const char* begin, const char* end) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t from = (uintptr_t(begin) + page - 1) / page * page, to = uintptr_t(end) / page * page;
  if (from < to) madvise((void*)from, to - from, MADV_DONTNEED);
}

std::vector<PanelHead> heads_of(const Matrix& m, int threads) {
  std::vector<PanelHead> heads((m.outputs + PANEL - 1) / PANEL);
  with_team(threads, [&](Member& member) {
    member.each(heads.size(), 1, [&](int64_t i) { heads[i] = head_of(whole_panel(m, i), m.inputs / 2); });
  });
  for (size_t i = 1; i < heads.size(); i++) heads[i].first = heads[i - 1].first + heads[i - 1].count;
  return heads;
}

}  // namespace

// Compresses a matrix in panels and gives its bytes; 0, with nothing changed, where that cannot be or is not worth it.
extern "C" int64_t headrace_compress(const Matrix* matrix, int threads) {
  const Matrix& m = *matrix;
  if (!HAS_COMPRESSED || !m.bf16 || m.inputs % 2 || m.inputs < 4 || m.outputs == 0) return 0;
  const std::vector<PanelHead> heads = heads_of(m, threads);
  const int64_t panels = heads.size(), num_bytes = compressed_panel_bytes(m.inputs), whole_bytes = m.inputs * PANEL * 2;
  const int64_t num_exceptions = int64_t(heads.back().first) + heads.back().count;
  const int64_t all_bytes = panels * num_bytes + num_exceptions * int64_t(sizeof(Exception));
  if (num_exceptions * VALUES_FOR_EXCEPTION > panels * PANEL * m.inputs || all_bytes >= m.outputs * m.inputs * 2) return 0;
  std::vector<Exception> exceptions(num_exceptions);
  with_team(threads, [&](Member& member) {
    std::vector<uint16_t> copy(PANEL * m.inputs);
    member.each(panels, 1, [&](int64_t i) { compress_panel(m, i, heads[i], copy, exceptions.data() + heads[i].first); });
  });
  char* const begin = (char*)m.values;
  for (int64_t i = 1; i < panels; i++) std::memmove(begin + i * num_bytes, begin + i * whole_bytes, num_bytes);
  std::memcpy(begin + panels * num_bytes, exceptions.data(), num_exceptions * sizeof(Exception));
  give_back(begin + all_bytes, begin + panels * whole_bytes);
  return all_bytes;
}
