// SPDX-License-Identifier: Apache-2.0
//
// Ranks as threads on one mapping, for the thread sanitizer.
#include <thread>

#include "drive.h"

namespace {

void ranks_as_threads(uint32_t world, int turns) {
  void* segment = drive::new_segment(world);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks.emplace_back([=] {
      hc_channel channel = drive::attach(segment, world, rank);
      drive::work(channel, turns);
      drive::failures(channel);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  munmap(segment, hc_segment_bytes(world, drive::kSlot));
}

// The fault of a shared channel, minus the wrong sums: two threads a rank make
// equal reductions, so whichever are paired, the sum is the same.
void two_threads_share_a_channel(int turns) {
  constexpr uint32_t kWorld = 2;
  void* segment = drive::new_segment(kWorld);
  hc_channel channels[kWorld];
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    channels[rank] = drive::attach(segment, kWorld, rank);
    for (int twin = 0; twin < 2; ++twin) {
      threads.emplace_back([&channel = channels[rank], turns] {
        hc_fault fault = {};
        for (int turn = 0; turn < turns; ++turn) {
          float number = 1;
          CHECK(hc_all_reduce(&channel, &number, &number, 1, HC_FLOAT32,
                              drive::kPatience, &fault) == HC_OK);
          CHECK(number == kWorld);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  munmap(segment, hc_segment_bytes(kWorld, drive::kSlot));
}

// A close waits for the operation of another thread.
void close_while_waiting() {
  void* segment = drive::new_segment(2);
  hc_channel channel = drive::attach(segment, 2, 0);
  std::thread waiting([&] {
    hc_fault fault = {};
    CHECK(drive::meet(&channel, 5 * drive::kShort, &fault) == HC_LATE);
    CHECK(fault.peers == 2 && fault.generation == 1);
  });
  while (!__atomic_load_n(&channel.busy, __ATOMIC_RELAXED)) {
    std::this_thread::yield();
  }
  CHECK(hc_close(&channel, drive::kShort) == HC_BUSY);
  waiting.join();
  CHECK(hc_close(&channel, drive::kShort) == HC_OK);
  munmap(segment, hc_segment_bytes(2, drive::kSlot));
}

}  // namespace

int main() {
  ranks_as_threads(2, 1000);
  ranks_as_threads(3, 300);
  ranks_as_threads(8, 50);
  two_threads_share_a_channel(1000);
  close_while_waiting();
  return 0;
}
