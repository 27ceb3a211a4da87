// SPDX-License-Identifier: Apache-2.0
//
// Ranks as processes, and headers of random bytes, for the sanitizers of
// addresses and of undefined behaviour.
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "drive.h"

namespace {

template <class Body>
pid_t start(Body body) {
  const pid_t process = fork();
  CHECK(process >= 0);
  if (process == 0) {
    body();
    exit(0);  // not _exit: leaks are looked for on the way out
  }
  return process;
}

void expect_success(pid_t process) {
  int status;
  CHECK(waitpid(process, &status, 0) == process);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void ranks_as_processes(uint32_t world, int turns) {
  void* segment = drive::new_segment(world);
  std::vector<pid_t> ranks;
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks.push_back(start([=] {
      hc_channel channel = drive::attach(segment, world, rank);
      drive::work(channel, turns);
      drive::failures(channel);
    }));
  }
  for (pid_t rank : ranks) expect_success(rank);
  munmap(segment, hc_segment_bytes(world, drive::kSlot));
}

void a_killed_rank_is_missed() {
  void* segment = drive::new_segment(2);
  const pid_t killed = start([=] {
    hc_channel channel = drive::attach(segment, 2, 1);
    hc_fault fault = {};
    CHECK(drive::meet(&channel, drive::kPatience, &fault) == HC_OK);
    raise(SIGKILL);
  });
  hc_channel channel = drive::attach(segment, 2, 0);
  hc_fault fault = {};
  CHECK(drive::meet(&channel, drive::kPatience, &fault) == HC_OK);
  CHECK(drive::meet(&channel, drive::kShort, &fault) == HC_LATE);
  CHECK(fault.peers == 2 && fault.generation == 2);
  waitpid(killed, nullptr, 0);
  munmap(segment, hc_segment_bytes(2, drive::kSlot));
}

void headers_of_random_bytes(int turns) {
  std::mt19937 random(1);
  void* segment = drive::new_segment(2);
  char good[64], header[64];
  memcpy(good, segment, sizeof good);
  for (int turn = 0; turn < turns; ++turn) {
    memcpy(header, good, sizeof header);
    for (unsigned changes = random() % 4; changes; --changes) {
      header[random() % 24] = static_cast<char>(random());
    }
    memcpy(segment, header, sizeof header);
    hc_channel channel;
    const int status = hc_attach(&channel, segment, 2, 0, drive::kSlot);
    // the first 24 bytes are in use
    CHECK((status == HC_OK) == (memcmp(header, good, 24) == 0));
  }
  munmap(segment, hc_segment_bytes(2, drive::kSlot));
}

}  // namespace

int main() {
  ranks_as_processes(2, 1000);
  ranks_as_processes(4, 300);
  ranks_as_processes(8, 50);
  a_killed_rank_is_missed();
  headers_of_random_bytes(100'000);
  return 0;
}
