// SPDX-License-Identifier: Apache-2.0
//
// Waiting for other ranks and threads, never for ever.
#ifndef VLLM_HOST_CHANNELS_WAITING_H
#define VLLM_HOST_CHANNELS_WAITING_H

#include <sched.h>
#include <time.h>

#include "host_channels.h"

namespace host_channels {

class Deadline {
 public:
  explicit Deadline(double seconds) : end_(now() + seconds) {}

  bool passed() const { return now() >= end_; }

 private:
  static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) +
           1e-9 * static_cast<double>(time.tv_nsec);
  }

  double end_;
};

// A peer on a core of its own is there within a few spins. One that shares our
// core needs it given up, and one that is long in coming should not cost power.
class Backoff {
 public:
  // Waits a little longer than the last time; false once the deadline passed.
  bool wait(const Deadline& deadline) {
    ++turns_;
    if (turns_ <= kSpins) {
      relax();
      return true;
    }
    if (turns_ <= kSpins + kYields) {
      sched_yield();
    } else {
      const timespec nap = {0, 50'000};
      nanosleep(&nap, nullptr);
    }
    return !deadline.passed();
  }

 private:
  static constexpr unsigned kSpins = 64;
  static constexpr unsigned kYields = 256;

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  unsigned turns_ = 0;
};

// The right to operate on a channel: one thread of this process at a time. It
// is never given up to wait for a peer, so threads whose operations share a
// channel queue, in whatever order they come.
class Turn {
 public:
  Turn(hc_channel& channel, const Deadline& deadline) : channel_(channel) {
    Backoff backoff;
    do {
      taken_ = !__atomic_exchange_n(&channel_.busy, 1, __ATOMIC_ACQUIRE);
    } while (!taken_ && backoff.wait(deadline));
  }

  ~Turn() {
    if (taken_) __atomic_store_n(&channel_.busy, 0, __ATOMIC_RELEASE);
  }

  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool taken() const { return taken_; }

 private:
  hc_channel& channel_;
  bool taken_;
};

}  // namespace host_channels

#endif  // VLLM_HOST_CHANNELS_WAITING_H
