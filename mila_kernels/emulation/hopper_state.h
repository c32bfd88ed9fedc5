// What a block of the emulation holds for sm_90's instructions. A part of cuda_host.cpp; the model is in hopper.cpp.
#pragma once

constexpr uint32_t WARPGROUP_LANES = 128, MAX_WARPGROUPS = MAX_THREADS / WARPGROUP_LANES;
// Agents: see the epochs of check mode. The last one holds what no plain access may touch: the mbarriers.
constexpr uint32_t MAX_AGENTS = 4096, BARRIER_WORD = MAX_AGENTS - 1;

struct Box {  // what a bulk or tensor copy moves
  bool tensor, store;
  CUtensorMap map;
  int at[5];
  char* global;  // of a plain bulk copy
  uint32_t offset, bytes;  // in shared memory
  Place place;
  uint32_t thread;
};

struct Load {  // a copy on its way to shared memory
  Box box;
  uint32_t barrier;
  uint64_t phase;
};

struct CopyArrival {  // at an mbarrier, once a thread's cp.async copies so far have landed
  uint32_t thread, copies, clock, barrier;
  Place place;
};

struct Store {  // a copy from shared to global memory
  Box box;
  uint32_t group;
};

struct Mbarrier {
  uint32_t offset, expected, pending, agent;
  int64_t bytes;  // announced and not landed
  uint64_t phase;
  uint32_t clock;  // of the agent that writes what lands in this phase
  bool live, fenced;
  uint32_t maker, made;  // the thread that made it, and when
  Place place;
  std::vector<uint32_t> waiters;
  Snapshot *gathering, *ended;  // what this phase's arrivals knew so far; what those of all ended phases knew
};

struct NamedBarrier {
  uint32_t wanted, arrived, first;
  Place place;
  std::vector<uint32_t> waiters;
  Snapshot* gathering;
};

struct ClusterBarrier {
  uint32_t arrived, turns;
  std::vector<uint32_t> waiters;
  Snapshot *gathering, *ended;
};

struct Accumulators {  // of a warpgroup: registers that products in flight add into
  float* registers[WARPGROUP_LANES];
  uint32_t n, last_group, taken;  // taken: the warps that have waited for them
  std::vector<float> sums;        // [64][n]
};

struct Product {
  Wgmma type;
  uint32_t n;
  bool from_registers, a_mn, b_mn, keeps;
  uint64_t a, b;
  uint32_t group, own_bytes;
  Accumulators* into;
  Place place;
  std::vector<uint32_t> a_registers;  // [128][4]
};

struct WgmmaOperand {  // what a lane brings
  float* d;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  int scale_d;
};

struct Warpgroup {
  uint32_t arrived, first, shape;
  Place place;
  WgmmaOperand operands[WARPGROUP_LANES];
  std::vector<std::unique_ptr<Accumulators>> accumulators;
  std::vector<Product> products;
  size_t products_done;
  uint32_t committed[4], waited[4];
  bool fenced[4];
  std::vector<Place> calls[4];  // of its warps to the instructions that all of it executes, since the last product
  int registers;               // as setmaxnreg said; 0: not yet
};

struct Guard {  // registers that a product in flight has
  uintptr_t low, high;
  bool reads;  // a register operand may be read
  uint32_t group;
  Place place;
};

struct AsyncReader {
  uint32_t epoch, place, next;
};

struct Hopper {
  std::vector<Mbarrier> barriers;
  std::vector<uint16_t> barrier_at;  // of each 8 bytes of shared memory: 1 + the index
  std::vector<Load> loads;
  std::vector<CopyArrival> arrivals;
  NamedBarrier named[MAX_CLUSTER][16];
  ClusterBarrier cluster;
  Warpgroup groups[MAX_WARPGROUPS];
  Snapshot* heard[3];  // what a thread knew, what it heard, what it knew then
  // Check mode: of each word, who outside the threads reads it.
  std::vector<uint32_t> reader_at;
  std::vector<AsyncReader> readers;
  uint32_t free_reader;
};
