// What g++ needs to run kernels.cu: CUDA's words, and threads of a block as fibers, one at a time.
//
// A thread runs until it returns or reaches a collective of its warp; a warp's collective is carried
// out when all of its 32 threads are there, and one that not all of them reach ends the program.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

namespace emulator {

struct Dim {
  unsigned x;
};

// A kernel: the sizes of its parameters, and how it is called with pointers to them.
struct Kernel {
  const char *name;
  int parameters;
  const size_t *sizes;
  void (*call)(void *const *values);
};

extern const Kernel kernels[];
extern const int kernel_count;

inline Dim thread_index, block_index, block_size, grid_size;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done, waits;
  uint32_t value;
};

constexpr size_t kStack = 64 << 10;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline const Kernel *kernel;
inline void *const *arguments;

[[noreturn]] inline void fail(const char *what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

inline void enter() {
  kernel->call(arguments);
  fibers[thread_index.x].done = true;
  swapcontext(&fibers[thread_index.x].context, &scheduler);
}

// Waits for the warp, and gives the largest of its values.
inline uint32_t reduce_max(uint32_t mask, uint32_t value) {
  if (mask != 0xffffffffu) fail("a collective of a part of a warp is not emulated");
  Fiber &fiber = fibers[thread_index.x];
  fiber.value = value;
  fiber.waits = true;
  swapcontext(&fiber.context, &scheduler);
  return fiber.value;
}

inline void run_block() {
  for (Fiber &fiber : fibers) {
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    fiber.done = fiber.waits = false;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (unsigned t = 0; t < fibers.size(); ++t) {
      if (fibers[t].done || fibers[t].waits) continue;
      thread_index.x = t;
      swapcontext(&scheduler, &fibers[t].context);
    }
    for (size_t warp = 0; warp < fibers.size(); warp += 32) {
      size_t waiting = 0;
      uint32_t most = 0;
      for (size_t t = warp; t < warp + 32; ++t) {
        waiting += fibers[t].waits;
        if (fibers[t].waits && fibers[t].value > most) most = fibers[t].value;
      }
      if (waiting == 0) continue;
      if (waiting != 32) fail("not all threads of a warp have come to a collective");
      for (size_t t = warp; t < warp + 32; ++t) {
        fibers[t].value = most;
        fibers[t].waits = false;
      }
      alive = true;
    }
  }
}

inline void launch(const Kernel &what, void *const *values, unsigned grid, unsigned block) {
  if (block % 32 || block > 1024) fail("a block must consist of up to 32 whole warps");
  kernel = &what;
  arguments = values;
  fibers.resize(block);
  block_size.x = block;
  grid_size.x = grid;
  for (block_index.x = 0; block_index.x < grid; ++block_index.x) run_block();
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define __reduce_max_sync emulator::reduce_max
