// SPDX-License-Identifier: Apache-2.0
//
// The protocol that every operation of a channel follows.
//
// In generation g a rank writes its slot g % 2, publishes g, waits until every
// peer has published g or more, and reads the peers' slots g % 2.
//
// Why two slots suffice. Rank p writes its slot of g again in generation g + 2,
// so it finished g + 1, and saw every rank publish g + 1. Rank r does that only
// after it finished g, that is, after its last read of p's slot of g. So each
// such read comes before p's next write to that slot; and it does so for the
// memory model too, as r's release store of g + 1 orders the reads before it,
// and p's acquire load of that value orders the write after it. One slot would
// not do: p may be in g + 1 while r still reads what p wrote in g.
// The operations beside the generation have two places for the same reason.
//
// The generations are counted in the segment, by what is executed. So two ranks
// that run equal operations in different orders on one channel are paired as
// they come, and add up what does not belong together: a channel has one owner.
#ifndef VLLM_HOST_CHANNELS_EXCHANGE_H
#define VLLM_HOST_CHANNELS_EXCHANGE_H

#include "segment.h"
#include "waiting.h"

namespace host_channels {

enum State : uint32_t { kOpen = 0, kPoisoned = 1, kClosed = 2 };

// HC_OK, or why this channel takes no operation of this many bytes. The turn on
// it is held.
int admit(const hc_channel& channel, uint64_t bytes);

// Makes what this rank wrote visible, and waits for the same of every peer. If
// it fails, fault says why and the channel is poisoned.
int meet_peers(hc_channel& channel, uint64_t generation,
               const hc_operation& operation, const Deadline& deadline,
               hc_fault& fault);

// Runs one operation. write(slot) puts this rank's message of some bytes into
// its slot; read(slots) finds that of each rank in slots[rank].
template <class Write, class Read>
int run(hc_channel& channel, const hc_operation& operation, uint64_t bytes,
        double seconds, hc_fault& fault, Write write, Read read) {
  const Deadline deadline(seconds);
  const Turn turn(channel, deadline);
  if (!turn.taken()) return HC_BUSY;
  if (int refusal = admit(channel, bytes)) return refusal;

  // only this rank writes its own generation, and only with the turn held
  const uint64_t generation = signal_of(channel, channel.rank).generation + 1;
  write(slot_of(channel, channel.rank, generation));
  int failure = meet_peers(channel, generation, operation, deadline, fault);
  if (failure) return failure;
  const char* slots[HC_MAX_WORLD];
  for (uint32_t rank = 0; rank < channel.world; ++rank) {
    slots[rank] = slot_of(channel, rank, generation);
  }
  read(slots);
  return HC_OK;
}

}  // namespace host_channels

#endif  // VLLM_HOST_CHANNELS_EXCHANGE_H
