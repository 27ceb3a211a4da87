// SPDX-License-Identifier: Apache-2.0
//
// What lies where in a segment:
//
//   header | a signal per rank | slot 0 and slot 1 of rank 0 | of rank 1 | ...
//
// A rank writes its own signal and slots only, and reads everyone's.
#ifndef VLLM_HOST_CHANNELS_SEGMENT_H
#define VLLM_HOST_CHANNELS_SEGMENT_H

#include <stddef.h>

#include "host_channels.h"

namespace host_channels {

constexpr uint64_t kMagic = 0x4c4e484354534f48;  // "HOSTCHNL"
constexpr uint32_t kVersion = 1;
constexpr uint64_t kLine = 64;
constexpr uint64_t kSlotsAt = 4096;
constexpr uint64_t kMaxSlotBytes = uint64_t{1} << 30;

// Written by hc_format, before the segment is shared, and never again.
struct alignas(kLine) Header {
  uint64_t magic;
  uint32_t version;
  uint32_t world;
  uint64_t slot_bytes;
};

// How far a rank has come. The generation alone is atomic: it publishes the
// operation and the slot that have its parity.
struct Signal {
  alignas(kLine) uint64_t generation;
  alignas(kLine) hc_operation operations[2];
};

static_assert(__atomic_always_lock_free(sizeof(uint64_t), nullptr),
              "a lock would not be shared between processes");
static_assert(sizeof(hc_operation) == 32, "operations are compared as bytes");
static_assert(sizeof(Header) + HC_MAX_WORLD * sizeof(Signal) <= kSlotsAt,
              "the signals reach into the slots");

constexpr uint64_t round_up(uint64_t bytes, uint64_t step) {
  return (bytes + step - 1) / step * step;
}

inline Header& header_of(void* segment) {
  return *static_cast<Header*>(segment);
}

inline Signal& signal_of(const hc_channel& channel, uint32_t rank) {
  char* signals = static_cast<char*>(channel.segment) + sizeof(Header);
  return reinterpret_cast<Signal*>(signals)[rank];
}

inline char* slot_of(const hc_channel& channel, uint32_t rank,
                     uint64_t generation) {
  uint64_t slot = 2 * rank + generation % 2;
  return static_cast<char*>(channel.segment) + kSlotsAt +
         slot * round_up(channel.slot_bytes, kLine);
}

}  // namespace host_channels

#endif  // VLLM_HOST_CHANNELS_SEGMENT_H
