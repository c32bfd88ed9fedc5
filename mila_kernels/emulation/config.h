// How Python tells the emulation to run the next launch of the calling thread. Mirrored in mila_kernels/build.py.
#pragma once

#include <cstdint>

extern "C" {

// Global memory that a launch may touch.
struct EmuBuffer {
  const char* name;
  const void* ptr;
  uint64_t nbytes;
  int32_t writable;
};

struct EmuConfig {
  uint64_t seed;             // of the order of warps and lanes
  int32_t check;             // 1: the step was compiled with the hooks of check mode
  int32_t threads;           // OS threads over the blocks of a grid; 0: one a core
  int32_t sm;                // the GPU whose launch limits hold: 80, 89, 90, 100, 120
  int32_t n_buffers;         // 0 with check: global memory is not bounds-checked
  const EmuBuffer* buffers;
};

// Valid for the launches of this thread until the next call. Copies what it keeps.
//
// Reports name code by "[library.so+0x1a2b]", the offset of the instruction itself (a return address less one) from
// the library's load address, as in dladdr's dli_fbase; build.py turns each into file:line.
__attribute__((visibility("default"))) void emu_configure(const EmuConfig* config);
}
