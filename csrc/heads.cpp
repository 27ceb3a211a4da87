// SPDX-License-Identifier: Apache-2.0
//
// What decode context parallelism needs: attention over parts of the context,
// combined; and the heads of every rank, side by side.
#include <algorithm>
#include <cmath>
#include <limits>

#include "exchange.h"
#include "numbers.h"

namespace host_channels {

namespace {

constexpr uint64_t kBlock = 256;

// A message is the LSEs, then the outputs.
uint64_t outputs_at(uint64_t batch, uint64_t heads) {
  return round_up(batch * heads * sizeof(float), kLine);
}

// How much each part counts for one head, adding up to 1 or all being 0.
struct Weights {
  float of[HC_MAX_WORLD];
  float combined_lse;

  Weights(const char* const* slots, uint32_t world, uint64_t head,
          bool base_two) {
    float largest = -std::numeric_limits<float>::infinity();
    for (uint32_t rank = 0; rank < world; ++rank) {
      of[rank] = reinterpret_cast<const float*>(slots[rank])[head];
      if (std::isfinite(of[rank])) largest = std::max(largest, of[rank]);
    }
    float sum = 0;
    for (uint32_t rank = 0; rank < world; ++rank) {
      const float above = of[rank] - largest;
      const float power = base_two ? std::exp2(above) : std::exp(above);
      of[rank] = std::isfinite(of[rank]) ? power : 0;
      sum += of[rank];
    }
    // the largest part has the power 1, so the sum is 0 only if none is finite
    for (uint32_t rank = 0; sum > 0 && rank < world; ++rank) of[rank] /= sum;
    const float log_sum = base_two ? std::log2(sum) : std::log(sum);
    combined_lse = sum > 0 ? largest + log_sum : largest;
  }
};

// One head's combined output; the parts of it start at an offset in each slot.
template <class Format>
void combine(const char* const* slots, uint32_t world, uint64_t offset,
             const Weights& weights, typename Format::Stored* out,
             uint64_t width) {
  for (uint64_t start = 0; start < width; start += kBlock) {
    const uint64_t block = std::min(kBlock, width - start);
    float sums[kBlock] = {};
    for (uint32_t rank = 0; rank < world; ++rank) {
      const float weight = weights.of[rank];
      if (weight == 0) continue;  // times NaN it would be NaN
      auto* part = reinterpret_cast<const typename Format::Stored*>(
                       slots[rank] + offset) +
                   start;
      for (uint64_t i = 0; i < block; ++i) {
        sums[i] += weight * Format::load(part[i]);
      }
    }
    for (uint64_t i = 0; i < block; ++i) {
      out[start + i] = Format::store(sums[i]);
    }
  }
}

// All batches of the heads that are this rank's.
template <class Format>
void combine_share(const hc_channel& channel, const char* const* slots,
                   const hc_operation& operation, void* out, float* lse_out) {
  const auto [batch, heads, width] = operation.extents;
  const uint64_t share = heads / channel.world;
  auto* rows = static_cast<typename Format::Stored*>(out);
  for (uint64_t row = 0; row < batch * share; ++row) {
    const uint64_t head =
        row / share * heads + channel.rank * share + row % share;
    const Weights weights(slots, channel.world, head, operation.flags);
    const uint64_t offset = outputs_at(batch, heads) +
                            head * width * sizeof(typename Format::Stored);
    combine<Format>(slots, channel.world, offset, weights, rows + row * width,
                    width);
    if (lse_out) lse_out[row] = weights.combined_lse;
  }
}

}  // namespace

}  // namespace host_channels

using namespace host_channels;

uint64_t hc_lse_reduce_bytes(uint64_t batch, uint64_t heads, uint64_t width,
                             uint16_t dtype) {
  const uint64_t lses = message_bytes({0, HC_FLOAT32, 0, {batch, heads, 1}});
  const uint64_t outputs = message_bytes({0, dtype, 0, {batch, heads, width}});
  // neither alone nor in their sum may they exceed what can be counted
  const bool too_large = std::max(lses, outputs) > UINT64_MAX / 4;
  return too_large ? UINT64_MAX : outputs_at(batch, heads) + outputs;
}

int hc_lse_reduce_scatter(hc_channel* channel, const void* in, const float* lse,
                          void* out, float* lse_out, uint64_t batch,
                          uint64_t heads, uint64_t width, uint16_t dtype,
                          uint32_t base_two, double seconds, hc_fault* fault) {
  if (!element_bytes(dtype) || heads % channel->world) return HC_INVALID;
  const hc_operation operation = {
      HC_LSE_REDUCE_SCATTER, dtype, base_two != 0, {batch, heads, width}};
  const uint64_t bytes = hc_lse_reduce_bytes(batch, heads, width, dtype);
  return run(
      *channel, operation, bytes, seconds, *fault,
      [&](char* slot) {
        memcpy(slot, lse, batch * heads * sizeof(float));
        memcpy(slot + outputs_at(batch, heads), in, message_bytes(operation));
      },
      [&](const char* const* slots) {
        with_format(dtype, [&](auto format) {
          combine_share<decltype(format)>(*channel, slots, operation, out,
                                          lse_out);
        });
      });
}

int hc_gather_heads(hc_channel* channel, const void* in, void* out,
                    uint64_t batch, uint64_t heads, uint64_t width,
                    uint16_t dtype, double seconds, hc_fault* fault) {
  if (!element_bytes(dtype)) return HC_INVALID;
  const hc_operation operation = {
      HC_GATHER_HEADS, dtype, 0, {batch, heads, width}};
  const uint64_t bytes = message_bytes(operation);
  const uint64_t row = batch ? bytes / batch : 0;
  return run(
      *channel, operation, bytes, seconds, *fault,
      [&](char* slot) { memcpy(slot, in, bytes); },
      [&](const char* const* slots) {
        char* next = static_cast<char*>(out);
        for (uint64_t item = 0; item < batch; ++item) {
          for (uint32_t rank = 0; rank < channel->world; ++rank, next += row) {
            memcpy(next, slots[rank] + item * row, row);
          }
        }
      });
}
