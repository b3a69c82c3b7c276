// Threads that go through a list of operations side by side.
//
// Starting threads for each operation costs more than a small operation itself, so they are started once, and every one of
// them makes the same calls of `each` in the same order. A call returns when all shares of it are done, in every thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct Team {
  alignas(64) std::atomic<int64_t> next[2] = {};  // shares handed out, of this call and of the one after
  alignas(64) std::atomic<int32_t> arrived = 0;
  alignas(64) std::atomic<int32_t> turn = 0;  // calls that are done
};

class Member {
 public:
  Member(Team& team, int size, int number) : size(size), number(number), team_(team) {}

  const int size;    // of the team
  const int number;  // in the team, from 0 on

  // work(i) for each i in [0, count), handed out in order, `chunk` at a time, to whoever is free.
  template <typename Work> void each(int64_t count, int64_t chunk, Work work) {
    std::atomic<int64_t>& next = team_.next[calls_ & 1];
    for (int64_t first; (first = next.fetch_add(chunk, std::memory_order_relaxed)) < count;)
      for (int64_t i = first; i < std::min(first + chunk, count); i++) work(i);
    wait();
  }

 private:
  static constexpr int SPINS = 2000;  // about 30 µs; longer waits sleep, for another process may need the core

  void wait() {
    const int32_t before = team_.turn.load(std::memory_order_acquire);
    if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      team_.next[calls_ & 1].store(0, std::memory_order_relaxed);
      team_.arrived.store(0, std::memory_order_relaxed);
      team_.turn.fetch_add(1, std::memory_order_acq_rel);
      team_.turn.notify_all();
    } else {
      for (int spin = 0; team_.turn.load(std::memory_order_acquire) == before; spin++) {
        if (spin < SPINS) pause();
        else team_.turn.wait(before, std::memory_order_acquire);
      }
    }
    calls_++;
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  Team& team_;
  int64_t calls_ = 0;
};

// run(member) in `threads` threads at once.
template <typename Run> void with_team(int threads, Run run) {
  Team team;
#pragma omp parallel num_threads(threads)
  {
    Member member(team, omp_get_num_threads(), omp_get_thread_num());
    run(member);
  }
}
