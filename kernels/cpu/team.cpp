// The threads behind team.h: started once, asleep between calls.
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

void Team::pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

namespace {

typedef std::function<void(Member&)> Run;

class Pool {
 public:
  // Has the others begin, unless they are at something else. `finish` must follow if they do.
  bool begin(int size, Team& team, const Run& work) {
    if (size <= 1 || busy_.exchange(true, std::memory_order_acquire)) return false;
    start(size - 1);
    team_ = &team, work_ = &work, size_ = size;
    left_.store(0, std::memory_order_relaxed);
    const uint32_t turn = uint32_t(turn_.load(std::memory_order_relaxed)) + 1;
    gate_.store(uint64_t(turn) << 32, std::memory_order_release);
    turn_.store(int32_t(turn), std::memory_order_release);
    turn_.notify_all();
    return true;
  }

  void finish() {
    Member member(*team_, size_, 0);
    (*work_)(member);
    close();
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr uint64_t CLOSED = 1u << 31, COUNT = CLOSED - 1;

  // Lets nobody in any more, and waits for those that are in.
  void close() {
    const int32_t entered = int32_t(gate_.fetch_or(CLOSED, std::memory_order_acq_rel) & COUNT);
    for (int spins = 0;; spins++) {
      const int32_t left = left_.load(std::memory_order_acquire);
      if (left == entered) return;
      if (spins < Team::SPINS) Team::pause();
      else left_.wait(left, std::memory_order_acquire);
    }
  }

  bool enter(uint32_t turn) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    do {
      if (uint32_t(gate >> 32) != turn || (gate & CLOSED)) return false;
    } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    return true;
  }

  void serve(int number) {
    for (int32_t seen = 0;;) {
      turn_.wait(seen, std::memory_order_acquire);
      const int32_t turn = turn_.load(std::memory_order_acquire);
      if (turn == seen) continue;
      seen = turn;
      if (!enter(uint32_t(turn))) continue;
      if (number < size_) {
        Member member(*team_, size_, number);
        (*work_)(member);
      }
      left_.fetch_add(1, std::memory_order_acq_rel);
      left_.notify_all();
    }
  }

  // Has at least `count` threads besides the caller's, or as many as the system gives. Signals are not for them.
  void start(int count) {
    if (started_ >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; started_ < count; started_++) std::thread(&Pool::serve, this, started_ + 1).detach();
    } catch (const std::system_error&) {  // those that there are do all of the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  std::atomic<bool> busy_ = false;  // from `begin` to the end of `finish`
  int started_ = 0;
  // of the call that goes on; read by those that have entered
  Team* team_ = nullptr;
  const Run* work_ = nullptr;
  int size_ = 0;
  alignas(64) std::atomic<int32_t> turn_ = 0;   // number of the latest call
  alignas(64) std::atomic<uint64_t> gate_ = 0;  // that number, whether it is closed, and how many threads have entered
  alignas(64) std::atomic<int32_t> left_ = 0;   // how many of these are out again
};

Pool* pool() {
  static Pool* here = [] {
    pthread_atfork(nullptr, nullptr, [] { here = new Pool; });  // a child of a fork has none of the threads
    return new Pool;
  }();
  return here;
}

}  // namespace

TeamWork::TeamWork(int threads, Run run) : size_(std::max(1, threads)), run_(std::move(run)) {
  if (pool()->begin(size_, team_, run_)) others_ = pool();
}

void TeamWork::finish() {
  if (finished_) return;
  finished_ = true;
  if (others_ == pool()) return pool()->finish();
  if (others_) return;  // a child of a fork, in which nobody works on it
  Member alone(team_, 1, 0);
  run_(alone);
}

void with_team(int threads, const Run& run) { TeamWork(threads, run).finish(); }
