// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <string.h>

namespace host_channels {

namespace {

bool is_shape(uint32_t world, uint64_t slot_bytes) {
  return world >= HC_MIN_WORLD && world <= HC_MAX_WORLD && slot_bytes >= 1 &&
         slot_bytes <= kMaxSlotBytes;
}

// Which of these peers have not published the generation yet, as bits.
uint32_t still_missing(const hc_channel& channel, uint32_t peers,
                       uint64_t generation) {
  for (uint32_t rank = 0; rank < channel.world; ++rank) {
    const uint64_t* published = &signal_of(channel, rank).generation;
    if (__atomic_load_n(published, __ATOMIC_ACQUIRE) >= generation) {
      peers &= ~(1u << rank);
    }
  }
  return peers;
}

// The lowest rank that published another operation; world if none did.
uint32_t first_in_another(const hc_channel& channel, uint64_t generation,
                          const hc_operation& operation) {
  uint32_t rank = 0;
  while (rank < channel.world &&
         !memcmp(&signal_of(channel, rank).operations[generation % 2],
                 &operation, sizeof operation)) {
    ++rank;
  }
  return rank;
}

int fail(hc_channel& channel, int status) {
  channel.state = kPoisoned;
  return status;
}

}  // namespace

int admit(const hc_channel& channel, uint64_t bytes) {
  if (channel.state == kClosed) return HC_CLOSED;
  if (channel.state == kPoisoned) return HC_POISONED;
  return bytes <= channel.slot_bytes ? HC_OK : HC_TOO_LARGE;
}

int meet_peers(hc_channel& channel, uint64_t generation,
               const hc_operation& operation, const Deadline& deadline,
               hc_fault& fault) {
  Signal& mine = signal_of(channel, channel.rank);
  mine.operations[generation % 2] = operation;
  __atomic_store_n(&mine.generation, generation, __ATOMIC_RELEASE);

  fault.generation = generation;
  fault.peers = (1u << channel.world) - 1;
  Backoff backoff;
  while ((fault.peers = still_missing(channel, fault.peers, generation))) {
    if (!backoff.wait(deadline)) return fail(channel, HC_LATE);
  }
  const uint32_t other = first_in_another(channel, generation, operation);
  if (other == channel.world) return HC_OK;
  fault.peers = 1u << other;
  fault.theirs = signal_of(channel, other).operations[generation % 2];
  return fail(channel, HC_MISMATCH);
}

}  // namespace host_channels

using namespace host_channels;

uint64_t hc_segment_bytes(uint32_t world, uint64_t slot_bytes) {
  if (!is_shape(world, slot_bytes)) return 0;
  return kSlotsAt + 2 * world * round_up(slot_bytes, kLine);
}

int hc_format(void* segment, uint32_t world, uint64_t slot_bytes) {
  if (!is_shape(world, slot_bytes)) return HC_INVALID;
  header_of(segment) = {kMagic, kVersion, world, slot_bytes};
  return HC_OK;
}

int hc_attach(hc_channel* channel, void* segment, uint32_t world, uint32_t rank,
              uint64_t slot_bytes) {
  if (!is_shape(world, slot_bytes) || rank >= world) return HC_INVALID;
  const Header& header = header_of(segment);
  if (header.magic != kMagic) return HC_BAD_MAGIC;
  if (header.version != kVersion) return HC_BAD_VERSION;
  if (header.world != world || header.slot_bytes != slot_bytes) {
    return HC_BAD_SHAPE;
  }
  // from here on the header is not believed: a peer could rewrite it
  *channel = {segment, slot_bytes, world, rank, 0, kOpen};
  return HC_OK;
}

int hc_close(hc_channel* channel, double seconds) {
  const Turn turn(*channel, Deadline(seconds));
  if (!turn.taken()) return HC_BUSY;
  channel->state = kClosed;
  return HC_OK;
}
