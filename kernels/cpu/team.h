// Threads that go through a list of operations together.
//
// Starting or waking threads for each operation costs more than a small operation itself, so they are woken once for a whole
// call, and every one of them makes the same calls of `each` in the same order. An operation is over when all its shares are
// done, not when all threads have come: a thread that the system keeps from running holds nobody up unless it is in the middle
// of a share, and finds what it missed done. So what is outside of `each` must be a thread's own affair.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

// What a team's members share while it works.
class Team {
 public:
  // The next share of operation `number`, or -1 when all of them are done. Waits for those that others work on.
  template <typename Meanwhile> int64_t take(uint32_t number, uint32_t shares, Meanwhile meanwhile) {
    uint64_t next = next_.load(std::memory_order_acquire);
    for (int spins = 0;;) {
      if (uint32_t(next >> 32) != number) return -1;
      if (uint32_t(next) < shares) {
        if (next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire))
          return uint32_t(next);
        continue;
      }
      if (!meanwhile() && ++spins > SPINS) over_.wait(int32_t(number), std::memory_order_acquire);
      next = next_.load(std::memory_order_acquire);
    }
  }

  // A share is done; whoever does the last opens the next operation.
  void finish(uint32_t number, uint32_t shares) {
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < shares) return;
    done_.store(0, std::memory_order_relaxed);
    next_.store(uint64_t(number + 1) << 32, std::memory_order_release);
    over_.store(int32_t(number + 1), std::memory_order_release);
    over_.notify_all();
  }

  static void pause();

  static constexpr int SPINS = 2000;  // about 30 µs; longer waits sleep, for another process may need the core

 private:
  alignas(64) std::atomic<uint64_t> next_ = 0;  // number of the operation, and of the share to hand out next
  alignas(64) std::atomic<uint32_t> done_ = 0;  // shares of it that are
  alignas(64) std::atomic<int32_t> over_ = 0;   // number of operations that are over
};

class Member {
 public:
  Member(Team& team, int size, int number) : size(size), number(number), team_(team) {}

  const int size;    // of the team
  const int number;  // in the team, from 0 on

  // work(i) for each i in [0, count), handed out in order, `chunk` at a time, to whoever is free.
  template <typename Work> void each(int64_t count, int64_t chunk, Work work) {
    const uint32_t shares = uint32_t((count + chunk - 1) / chunk);
    if (shares == 0) return;
    for (int64_t share; (share = team_.take(operation_, shares, [&] { return fetch(); })) >= 0;) {
      for (int64_t i = share * chunk; i < std::min((share + 1) * chunk, count); i++) work(i);
      team_.finish(operation_, shares);
    }
    operation_++;
  }

  // Something to ask the memory for while waiting: what this thread probably reads in an operation to come.
  void will_read(const void* from, int64_t num_bytes) {
    ahead_ = (const char*)from;
    ahead_end_ = ahead_ + num_bytes;
  }

 private:
  bool fetch() {
    if (ahead_ >= ahead_end_) {
      Team::pause();
      return false;
    }
    for (int line = 0; line < 4 && ahead_ < ahead_end_; line++, ahead_ += 64) __builtin_prefetch(ahead_, 0, 2);
    return true;
  }

  Team& team_;
  uint32_t operation_ = 0;
  const char *ahead_ = nullptr, *ahead_end_ = nullptr;
};

// run(member) in up to `threads` threads at once. All but one begin at once; whoever calls `finish` is the last of them, and
// returns when everything is done. If a team is at work already, all of this one's work is left to `finish`.
class TeamWork {
 public:
  TeamWork(int threads, std::function<void(Member&)> run);
  ~TeamWork() { finish(); }
  TeamWork(const TeamWork&) = delete;
  void finish();

 private:
  const int size_;
  const std::function<void(Member&)> run_;
  Team team_;
  const void* others_ = nullptr;  // whose threads are at it
  bool finished_ = false;
};

// The same at once, this thread among them.
void with_team(int threads, const std::function<void(Member&)>& run);
