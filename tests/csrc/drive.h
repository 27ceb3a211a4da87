// SPDX-License-Identifier: Apache-2.0
//
// What one rank does in the sanitized drivers, whether it is a thread or a
// process: every operation, many times, with results that are checked.
#ifndef VLLM_TESTS_CSRC_DRIVE_H
#define VLLM_TESTS_CSRC_DRIVE_H

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "../../csrc/host_channels.h"

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);  \
      std::abort();                                                         \
    }                                                                       \
  } while (0)

namespace drive {

constexpr uint64_t kSlot = 20000;
constexpr double kPatience = 30;
constexpr double kShort = 0.1;

// A segment that forked processes and threads share alike.
inline void* new_segment(uint32_t world) {
  const int access = PROT_READ | PROT_WRITE, kind = MAP_SHARED | MAP_ANONYMOUS;
  const uint64_t bytes = hc_segment_bytes(world, kSlot);
  void* memory = mmap(nullptr, bytes, access, kind, -1, 0);
  CHECK(memory != MAP_FAILED);
  CHECK(hc_format(memory, world, kSlot) == HC_OK);
  return memory;
}

inline hc_channel attach(void* segment, uint32_t world, uint32_t rank) {
  hc_channel channel;
  CHECK(hc_attach(&channel, segment, world, rank, kSlot) == HC_OK);
  return channel;
}

inline void all_reduces(hc_channel& channel, int turns) {
  hc_fault fault = {};
  const float ranks = static_cast<float>(channel.world);
  for (int turn = 0; turn < turns; ++turn) {
    const float mine = static_cast<float>(channel.rank + turn % 97);
    std::vector<float> numbers(1 + turn * 31 % 5000, mine);
    float* data = numbers.data();
    CHECK(hc_all_reduce(&channel, data, data, numbers.size(), HC_FLOAT32,
                        kPatience, &fault) == HC_OK);
    const float expected =
        ranks * static_cast<float>(turn % 97) + ranks * (ranks - 1) / 2;
    for (float number : numbers) CHECK(number == expected);
  }
}

inline void halves(hc_channel& channel) {
  hc_fault fault = {};
  std::vector<uint16_t> numbers(0x10000), sums(0x1000);
  for (uint32_t bits = 0; bits < numbers.size(); ++bits) {
    numbers[bits] = static_cast<uint16_t>(bits);
  }
  for (uint16_t dtype : {HC_BFLOAT16, HC_FLOAT16}) {
    for (size_t start = 0; start < numbers.size(); start += sums.size()) {
      CHECK(hc_all_reduce(&channel, &numbers[start], sums.data(), sums.size(),
                          dtype, kPatience, &fault) == HC_OK);
    }
  }
}

inline void heads(hc_channel& channel) {
  constexpr uint64_t kBatch = 3, kShare = 2, kWidth = 70;
  const uint64_t all = kShare * channel.world;
  hc_fault fault = {};
  const float mine = static_cast<float>(channel.rank);
  std::vector<float> part(kBatch * all * kWidth, mine), lse(kBatch * all, 1);
  if (channel.rank == 0) {
    lse.assign(lse.size(), std::numeric_limits<float>::quiet_NaN());
    part.assign(part.size(), std::numeric_limits<float>::infinity());
  }
  std::vector<float> out(kBatch * kShare * kWidth), lse_out(kBatch * kShare);
  for (uint32_t base_two : {0, 1}) {
    float* lses = base_two ? nullptr : lse_out.data();
    CHECK(hc_lse_reduce_scatter(&channel, part.data(), lse.data(), out.data(),
                                lses, kBatch, all, kWidth, HC_FLOAT32, base_two,
                                kPatience, &fault) == HC_OK);
    // ranks 1 and up weigh the same
    const float expected = static_cast<float>(channel.world) / 2;
    for (float number : out) CHECK(std::abs(number - expected) < 1e-5f);
  }
  std::vector<float> gathered(out.size() * channel.world);
  out.assign(out.size(), mine);
  CHECK(hc_gather_heads(&channel, out.data(), gathered.data(), kBatch, kShare,
                        kWidth, HC_FLOAT32, kPatience, &fault) == HC_OK);
  for (size_t i = 0; i < gathered.size(); ++i) {
    const uint64_t origin = i / (kShare * kWidth) % channel.world;
    CHECK(gathered[i] == static_cast<float>(origin));
  }
}

// Returns once every rank has called it.
inline int meet(hc_channel* channel, double seconds, hc_fault* fault) {
  float none = 0;
  return hc_all_reduce(channel, &none, &none, 0, HC_FLOAT32, seconds, fault);
}

// None of these reaches a peer, so a rank may do them alone.
inline void refusals(hc_channel& channel) {
  hc_fault fault = {};
  std::vector<char> large(kSlot + 4);
  CHECK(hc_all_reduce(&channel, large.data(), large.data(), kSlot / 4 + 1,
                      HC_FLOAT32, kPatience, &fault) == HC_TOO_LARGE);
  CHECK(hc_all_reduce(&channel, large.data(), large.data(), UINT64_MAX / 2,
                      HC_FLOAT32, kPatience, &fault) == HC_TOO_LARGE);
  CHECK(hc_all_reduce(&channel, large.data(), large.data(), 1, 9, kPatience,
                      &fault) == HC_INVALID);
  CHECK(hc_lse_reduce_bytes(UINT64_MAX / 8, 2, 1, HC_FLOAT16) == UINT64_MAX);
  CHECK(hc_segment_bytes(HC_MAX_WORLD + 1, kSlot) == 0);
  CHECK(hc_segment_bytes(2, UINT64_MAX) == 0);
}

// Everything but the failures, in the order that all ranks share.
inline void work(hc_channel& channel, int turns) {
  hc_fault fault = {};
  CHECK(meet(&channel, kPatience, &fault) == HC_OK);
  all_reduces(channel, turns);
  halves(channel);
  heads(channel);
  refusals(channel);
  CHECK(meet(&channel, kPatience, &fault) == HC_OK);
}

// The last thing on a channel: rank 0 is elsewhere, then nobody comes.
inline void failures(hc_channel& channel) {
  hc_fault fault = {};
  float number = 0;
  const uint64_t count = channel.rank ? 1 : 0;
  CHECK(hc_all_reduce(&channel, &number, &number, count, HC_FLOAT32, kPatience,
                      &fault) == HC_MISMATCH);
  CHECK(fault.peers == (channel.rank ? 1u : 2u));
  CHECK(fault.theirs.extents[0] == 1 - count);
  CHECK(meet(&channel, kPatience, &fault) == HC_POISONED);
  CHECK(hc_close(&channel, kPatience) == HC_OK);
  CHECK(meet(&channel, kPatience, &fault) == HC_CLOSED);
}

}  // namespace drive

#endif  // VLLM_TESTS_CSRC_DRIVE_H
