// Ranges shared out among threads that live for one call.
//
// A pool that outlives a call would not survive fork(), which Python's processes do; starting a
// thread takes some 40 us, so callers ask for several only where there is work for them.
#pragma once

#include <pthread.h>
#include <stdint.h>

namespace fdk {

enum { MOST_THREADS = 64 };

template <class Work>
struct Share {
  const Work *work;
  int64_t from, to;

  static void *run(void *share) {
    const Share *self = static_cast<const Share *>(share);
    (*self->work)(self->from, self->to);
    return nullptr;
  }
};

// Call work(from, to) on ranges that together are [0, end), all bounds but `end` multiples of `grain`.
template <class Work>
void share_out(int32_t threads, int64_t end, int64_t grain, const Work &work) {
  if (end <= 0) return;
  int64_t grains = (end + grain - 1) / grain;
  int64_t parts = threads < MOST_THREADS ? threads : MOST_THREADS;
  if (parts > grains) parts = grains;
  if (parts <= 1) {
    work(0, end);
    return;
  }
  Share<Work> shares[MOST_THREADS];
  pthread_t started[MOST_THREADS];
  bool running[MOST_THREADS] = {};
  for (int64_t part = 0; part < parts; part++) {
    int64_t from = grains * part / parts * grain, to = grains * (part + 1) / parts * grain;
    shares[part] = {&work, from, to < end ? to : end};
    if (part > 0)
      running[part] =
          pthread_create(&started[part], nullptr, Share<Work>::run, &shares[part]) == 0;
  }
  for (int64_t part = 0; part < parts; part++)
    if (!running[part]) Share<Work>::run(&shares[part]);
  for (int64_t part = 1; part < parts; part++)
    if (running[part]) pthread_join(started[part], nullptr);
}

}  // namespace fdk
