// SPDX-License-Identifier: Apache-2.0
//
// Channels of the host transport: collectives over one memory segment that all
// ranks of a group have mapped. This is the whole interface, in plain C; what
// the ranks of a group call must be called by each of them, in the same order.
//
// Every collective publishes what it is and waits for its peers, at most until
// its deadline. A channel whose collective failed after it began stays poisoned
// on this rank: the ranks no longer agree on how many operations it has seen.
#ifndef VLLM_HOST_CHANNELS_H
#define VLLM_HOST_CHANNELS_H

#include <stdint.h>

#define HC_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { HC_MIN_WORLD = 2, HC_MAX_WORLD = 8 };

enum hc_dtype { HC_FLOAT32 = 0, HC_BFLOAT16 = 1, HC_FLOAT16 = 2 };

enum hc_kind {
  HC_ALL_REDUCE = 1,
  HC_LSE_REDUCE_SCATTER = 2,
  HC_GATHER_HEADS = 3,
};

enum hc_status {
  HC_OK = 0,
  HC_INVALID = 1,      // an argument is out of range; nothing was written
  HC_TOO_LARGE = 2,    // the message exceeds a slot; nothing was written
  HC_LATE = 3,         // peers had not arrived by the deadline; now poisoned
  HC_MISMATCH = 4,     // a peer is in another operation; now poisoned
  HC_BUSY = 5,         // another thread's operation outlasted the deadline
  HC_POISONED = 6,     // an earlier operation failed
  HC_CLOSED = 7,       // hc_close was called
  HC_BAD_MAGIC = 8,    // hc_attach: not a segment of this library
  HC_BAD_VERSION = 9,  // hc_attach: laid out by another version
  HC_BAD_SHAPE = 10,   // hc_attach: another number of ranks or size of slots
};

// What a rank says it is doing. Equal on all ranks, or the operation fails.
typedef struct hc_operation {
  uint16_t kind;
  uint16_t dtype;
  uint32_t flags;       // HC_LSE_REDUCE_SCATTER: 1 if the LSEs are to base 2
  uint64_t extents[3];  // elements, or batch, heads and width; 1 if unused
} hc_operation;

// One rank's end of a channel. The caller owns the memory; only this library
// reads or writes it, between hc_attach and hc_close.
typedef struct hc_channel {
  void* segment;
  uint64_t slot_bytes;
  uint32_t world;
  uint32_t rank;
  uint32_t busy;
  uint32_t state;
} hc_channel;

// What is known of a failure: HC_LATE fills peers, HC_MISMATCH theirs as well.
typedef struct hc_fault {
  uint64_t generation;  // of the operation that failed, from 1
  uint32_t peers;       // bit p is set for each rank p that is to blame
  uint32_t reserved;
  hc_operation theirs;  // what the lowest of these ranks is doing
} hc_fault;

// The bytes that a segment needs; 0 if an argument is out of range.
HC_EXPORT uint64_t hc_segment_bytes(uint32_t world, uint64_t slot_bytes);

// Makes a new, zeroed segment a channel. One rank calls it before any attaches.
HC_EXPORT int hc_format(void* segment, uint32_t world, uint64_t slot_bytes);

// Checks a segment's header against what this rank expects, then fills channel.
// The segment has hc_segment_bytes(world, slot_bytes) bytes, and does not move.
HC_EXPORT int hc_attach(hc_channel* channel, void* segment, uint32_t world,
                        uint32_t rank, uint64_t slot_bytes);

// Lets a running operation end, within seconds, and refuses later ones. When it
// returns HC_OK, nothing reads the segment on behalf of this channel any more.
HC_EXPORT int hc_close(hc_channel* channel, double seconds);

// out[i] = the sum over ranks of in[i], added in fp32 and in the ranks' order:
// the same bits on each of them. in and out may be the same. With a count of 0
// it returns once every rank has called it.
HC_EXPORT int hc_all_reduce(hc_channel* channel, const void* in, void* out,
                            uint64_t count, uint16_t dtype, double seconds,
                            hc_fault* fault);

// The bytes of a message of hc_lse_reduce_scatter, which a slot must hold.
HC_EXPORT uint64_t hc_lse_reduce_bytes(uint64_t batch, uint64_t heads,
                                       uint64_t width, uint16_t dtype);

// Combines attention over parts of the context. in is this rank's part, [batch,
// heads, width], and lse the fp32 log-sum-exp of its scores, [batch, heads].
// out is [batch, heads / world, width], this rank's share of the heads. A part
// whose LSE is not finite counts for nothing and is not read; if none is, out
// is 0. lse_out, unless null, gets the combined LSE, [batch, heads / world].
HC_EXPORT int hc_lse_reduce_scatter(hc_channel* channel, const void* in,
                                    const float* lse, void* out, float* lse_out,
                                    uint64_t batch, uint64_t heads,
                                    uint64_t width, uint16_t dtype,
                                    uint32_t base_two, double seconds,
                                    hc_fault* fault);

// Puts every rank's [batch, heads, width] side by side, in the order of ranks:
// out is [batch, world * heads, width].
HC_EXPORT int hc_gather_heads(hc_channel* channel, const void* in, void* out,
                              uint64_t batch, uint64_t heads, uint64_t width,
                              uint16_t dtype, double seconds, hc_fault* fault);

#ifdef __cplusplus
}
#endif

#endif  // VLLM_HOST_CHANNELS_H
