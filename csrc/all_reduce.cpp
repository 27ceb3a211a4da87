// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "exchange.h"
#include "numbers.h"

namespace host_channels {

namespace {

// Elements added at once: the sums of a block stay in the first-level cache.
constexpr uint64_t kBlock = 1024;

template <class Format>
void add_up(const char* const* slots, uint32_t world,
            typename Format::Stored* out, uint64_t count) {
  alignas(kLine) float sums[kBlock];
  for (uint64_t start = 0; start < count; start += kBlock) {
    const uint64_t block = std::min(kBlock, count - start);
    for (uint32_t rank = 0; rank < world; ++rank) {
      auto* part =
          reinterpret_cast<const typename Format::Stored*>(slots[rank]) + start;
      for (uint64_t i = 0; i < block; ++i) {
        const float number = Format::load(part[i]);
        // starting from 0 would turn a sum of negative zeros into a positive
        sums[i] = rank ? sums[i] + number : number;
      }
    }
    for (uint64_t i = 0; i < block; ++i) {
      out[start + i] = Format::store(sums[i]);
    }
  }
}

}  // namespace

}  // namespace host_channels

using namespace host_channels;

int hc_all_reduce(hc_channel* channel, const void* in, void* out,
                  uint64_t count, uint16_t dtype, double seconds,
                  hc_fault* fault) {
  if (!element_bytes(dtype)) return HC_INVALID;
  const hc_operation operation = {HC_ALL_REDUCE, dtype, 0, {count, 1, 1}};
  const uint64_t bytes = message_bytes(operation);
  return run(
      *channel, operation, bytes, seconds, *fault,
      [&](char* slot) { memcpy(slot, in, bytes); },
      [&](const char* const* slots) {
        with_format(dtype, [&](auto format) {
          using Format = decltype(format);
          add_up<Format>(slots, channel->world,
                         static_cast<typename Format::Stored*>(out), count);
        });
      });
}
