// The runtime of the emulation: fibers, their scheduler, rendezvous, and the model that check mode looks with.
// What it finds and what it does not model stands at the top of cuda_host.h.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cuda_host.h"
#include "hopper.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// ---------------------------------------------------------------------------------------------------------------------
// Switching stacks: save what a call must preserve, exchange stack pointers, restore. About 20 ns; ucontext takes 1 us.

extern "C" void emu_switch(void** save, void* load);
extern "C" void emu_fiber_start();

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size emu_switch,.-emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch,.-emu_switch
)");
#else
#error "the emulation switches stacks on x86-64 and aarch64 only"
#endif

namespace emu {
namespace {

// A stack that emu_switch enters at emu_fiber_start.
void* fresh_stack(char* top) {
  auto* sp = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
#if defined(__x86_64__)
  *--sp = 0;  // where a return address would be: at entry the stack is 8 off a multiple of 16
  *--sp = reinterpret_cast<uintptr_t>(&emu_fiber_start);
  for (int i = 0; i < 6; ++i) *--sp = 0;
#else
  sp -= 20;
  for (int i = 0; i < 20; ++i) sp[i] = 0;
  sp[11] = reinterpret_cast<uintptr_t>(&emu_fiber_start);  // x30
#endif
  return sp;
}

constexpr size_t MAX_THREADS = 1024, WARP_LANES = 32, MAX_WARPS = MAX_THREADS / WARP_LANES;
constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t WINDOW_BYTES = 256 * 1024;  // a power of two
constexpr size_t MAX_CLUSTER = 8, CLUSTER_BYTES = MAX_CLUSTER * WINDOW_BYTES;
constexpr size_t SIGNAL_STACK_BYTES = 64 * 1024;
// Where dynamic shared memory begins in the 32-bit addresses: the hardware keeps the first KB for itself.
constexpr uint32_t SHARED_BASE = 1024;

struct Random {  // xorshift64*: an order, not statistics
  uint64_t state;
  void seed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    state = (x ^ x >> 31) | 1u;
  }
  uint32_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1du) >> 32);
  }
};

enum class Kind : uint8_t {
  none, sync_block, sync_warp, shuffle, vote, mma, ldmatrix, stmatrix, mbarrier, named_barrier, cluster_barrier, wgmma,
  wgmma_fence, wgmma_commit, wgmma_wait, setmaxnreg, elect
};

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::sync_block: return "__syncthreads";
    case Kind::sync_warp: return "__syncwarp";
    case Kind::shuffle: return "a shuffle";
    case Kind::vote: return "a vote or reduction";
    case Kind::mma: return "mma";
    case Kind::ldmatrix: return "ldmatrix";
    case Kind::stmatrix: return "stmatrix";
    case Kind::mbarrier: return "mbarrier_wait";
    case Kind::named_barrier: return "bar.sync";
    case Kind::cluster_barrier: return "barrier.cluster.wait";
    case Kind::wgmma: return "wgmma";
    case Kind::wgmma_fence: return "wgmma.fence";
    case Kind::wgmma_commit: return "wgmma.commit_group";
    case Kind::wgmma_wait: return "wgmma.wait_group";
    case Kind::setmaxnreg: return "setmaxnreg";
    case Kind::elect: return "elect.sync";
    case Kind::none: break;
  }
  return "nothing";
}

struct Place {
  Site site;
  uintptr_t pc;  // of the call into the runtime; inlining included, it tells the callers of the site
};

bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

struct Copy {  // a cp.async that has been issued
  const void* source;
  uint32_t offset;  // in the block's shared memory
  uint16_t bytes, source_bytes;
  bool made = false;  // ahead of its wait, for an mbarrier
};

struct Warp;
struct Worker;
struct Shadow;
struct Readers;
struct Snapshot;

#include "hopper_state.h"

struct Snapshot {  // what the threads that left one barrier know of everybody: shared, never changed
  uint32_t references, mark;
  uint32_t clocks[4 * MAX_THREADS];
  uint32_t fenced[MAX_THREADS];  // the time up to which a thread's writes were given to the async proxy
};

struct Thread {
  void* sp;
  char* stack_low;
  char* stack_high;
  char* window;        // of its cluster's first block
  uint32_t own_bytes;  // from there to its own block's
  uint32_t rank;       // of its block in the cluster
  Worker* worker;
  Snapshot* known;
  Readers* reads;                      // its warp's part of Shadow::readers
  uint32_t clock;                      // its own time, which passes at barriers
  uint32_t copies_issued, copies_over;  // the time of its cp.async agent: as issued, and as waited for
  uint32_t fenced;                     // the time up to which it gave its writes to the async proxy
  uint32_t stores_over, products_over;  // the time of its bulk stores and its warpgroup's products, as waited for
  uint32_t proven;                     // an epoch that it is known to come after
  uint32_t shared_bytes, cluster_bytes;
  bool checking;
  Warp* warp;
  uint32_t linear, lane;
  uint3 index;
  Kind waits;
  Place place;  // where it waits
  bool exited;
  std::vector<Copy> copies;       // in order of issue; the first `copies_done` have been waited for
  uint32_t copies_ever;           // issued, those too that have left the list
  size_t copies_done;
  std::vector<size_t> groups;     // ends of the committed groups, as indices into copies
  size_t groups_done;
  uint32_t barrier, parity;       // where it waits, if at an mbarrier or a named barrier
  std::vector<Store> stores;      // bulk copies to global memory that nobody waited for
  uint32_t store_groups;          // committed
  uint32_t cluster_turn;          // arrivals and waits at barrier.cluster
  std::vector<Guard> guards;
};

struct Pending {  // a rendezvous of some lanes of a warp
  uint32_t mask, arrived, shape;
  Kind kind;
  Place place;
  void* operands[WARP_LANES];
};

struct Warp {
  uint32_t existing, ready, exited;
  uint32_t index;
  int pending_count;
  Pending pending[WARP_LANES];
};

struct Segment {  // of the step's library, in memory
  uintptr_t low, high;
  bool writable;
};

struct Launch {
  EmuConfig config;
  dim3 grid, cluster, block;
  size_t shared_bytes;
  void (*invoke)(const void*);
  const void* body;
  size_t body_bytes;
  uint64_t clusters, stride, first;  // a block alone is a cluster
  uint32_t cluster_blocks;
  uint32_t block_threads, block_warps, all_threads, all_warps;  // all: of a cluster
  uintptr_t library_base;  // of the step
  std::vector<Segment> segments;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string report;
};

// Epochs: when an agent did something. Agents 0 to n - 1 are the block's n threads; agent n + i makes the cp.async
// copies of thread i, so that a copy is ordered after its issue, before what follows its wait, with nothing between.
// In the same way agent 2n + i makes the bulk stores of thread i, 3n + g the products of warpgroup g, and each of those
// from 3n + 8 on the copies that complete on one mbarrier.
constexpr uint32_t CLOCK_BITS = 20, MAX_CLOCK = (1u << CLOCK_BITS) - 1;
constexpr uint32_t ATOMIC = 0x80000000u;  // in a write's place: made by an atomic

// The lanes of a warp that read some bytes of a 4-byte word at one time of theirs.
struct Readers {
  uint32_t key;  // which bytes, and the clock
  uint32_t lanes, place;
  uint32_t next;  // index in Shadow::more of what the warp read of the word otherwise
};

constexpr uint32_t WORDS = CLUSTER_BYTES / 4;

// What is known of every byte of shared memory. Clocks are drawn from one counter, so that a barrier of everybody
// is a time before which everybody knows of everything: no read before it needs to be looked at again.
struct Shadow {
  uint32_t* written;            // of each byte: epoch of the last write in this block; 0: none
  uint32_t* written_place;      // of each byte: offset of its code in the step's library
  uint32_t* read;               // of each word: a clock not before any read
  Readers* readers[MAX_WARPS];  // of each warp, WORDS of them
  std::vector<Readers> more;
  uint32_t now = 0, barrier = 0;  // the counter; when it stood at the last barrier of everybody

  Shadow();
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
};

struct BlockBarrier {  // a block's __syncthreads
  uint32_t arrived, votes, first;
  int result;
  Place place;
};

struct Worker {
  Launch* launch = nullptr;
  void* main_sp = nullptr;
  char* window = nullptr;
  char* signal_stack = nullptr;
  std::vector<std::pair<char*, char*>> stack_regions;
  uint32_t stacks = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Random random;
  // The cluster that runs.
  uint3 block_index[MAX_CLUSTER];
  uint32_t ready_warps, current_warp;
  uint64_t sleeps;  // since somebody last went on
  uint32_t atomics = 0;
  uint32_t alive, block_alive[MAX_CLUSTER];
  BlockBarrier barriers[MAX_CLUSTER];
  // Check mode.
  std::unique_ptr<Shadow> shadow;
  std::vector<std::unique_ptr<Snapshot>> snapshots;
  std::vector<Snapshot*> free_snapshots;
  uint32_t snapshot_mark = 0;
  uint32_t agents = 0;
  // What sm_90 adds, from the block's first use of it.
  bool uses_hopper = false;
  std::unique_ptr<Hopper> hopper;

  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  void need_stacks(uint32_t count);
};

thread_local Thread* current __attribute__((tls_model("initial-exec"))) = nullptr;

// ---------------------------------------------------------------------------------------------------------------------
// Memory of a worker: a window for shared memory, and stacks with a guard page each. Both are kept between launches.

char* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

// A generic address cut to 32 bits must never look like a shared one: the window's low half lies beyond any of them.
char* map_window() {
  std::vector<char*> rejected;
  char* window = nullptr;
  while (!window) {
    char* p = map(CLUSTER_BYTES);
    const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p));
    if (low >= (1u << 24) && low <= UINT32_MAX - CLUSTER_BYTES)
      window = p;
    else
      rejected.push_back(p);
  }
  for (char* p : rejected) munmap(p, CLUSTER_BYTES);
  return window;
}

Shadow::Shadow() {
  written = reinterpret_cast<uint32_t*>(map(CLUSTER_BYTES * sizeof(uint32_t)));
  written_place = reinterpret_cast<uint32_t*>(map(CLUSTER_BYTES * sizeof(uint32_t)));
  read = reinterpret_cast<uint32_t*>(map(WORDS * sizeof(uint32_t)));
  for (Readers*& warp : readers) warp = reinterpret_cast<Readers*>(map(WORDS * sizeof(Readers)));
}

Shadow::~Shadow() {
  munmap(written, CLUSTER_BYTES * sizeof(uint32_t));
  munmap(written_place, CLUSTER_BYTES * sizeof(uint32_t));
  munmap(read, WORDS * sizeof(uint32_t));
  for (Readers* warp : readers) munmap(warp, WORDS * sizeof(Readers));
}

Worker::Worker() : threads(MAX_THREADS), warps(MAX_WARPS) {
  window = map_window();
  signal_stack = map(SIGNAL_STACK_BYTES);
  for (Thread& t : threads) t.window = window;
}

Worker::~Worker() {
  munmap(window, CLUSTER_BYTES);
  munmap(signal_stack, SIGNAL_STACK_BYTES);
  for (auto [low, high] : stack_regions) munmap(low, static_cast<size_t>(high - low));
}

void Worker::need_stacks(uint32_t count) {
  if (count <= stacks) return;
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pitch = STACK_BYTES + guard;
  const uint32_t more = count - stacks;
  char* region = map(more * pitch);
  stack_regions.emplace_back(region, region + more * pitch);
  for (uint32_t i = 0; i < more; ++i) {
    char* low = region + i * pitch;
    mprotect(low, guard, PROT_NONE);
    Thread& t = threads[stacks + i];
    t.stack_low = low + guard;
    // Staggered tops: else the same frame of every fiber falls into the same cache set.
    t.stack_high = low + pitch - ((stacks + i) * 5 % 64) * 64;
  }
  stacks = count;
}

std::mutex pool_mutex;
std::vector<std::unique_ptr<Worker>> pool;

std::unique_ptr<Worker> borrow_worker() {
  {
    std::lock_guard lock(pool_mutex);
    if (!pool.empty()) {
      auto worker = std::move(pool.back());
      pool.pop_back();
      return worker;
    }
  }
  return std::make_unique<Worker>();
}

void return_worker(std::unique_ptr<Worker> worker) {
  std::lock_guard lock(pool_mutex);
  if (pool.size() < 64) pool.push_back(std::move(worker));
}

// ---------------------------------------------------------------------------------------------------------------------
// Reports. The first of a launch wins; its fiber never resumes, and the worker drops the whole block.

void append(std::string& text, const char* format, ...) __attribute__((format(printf, 2, 3)));
void append(std::string& text, const char* format, ...) {
  char buffer[4608];  // holds a path
  va_list args;
  va_start(args, format);
  vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  text += buffer;
}

std::string code(uintptr_t pc) {
  Dl_info info;
  std::string text;
  if (!pc || !dladdr(reinterpret_cast<void*>(pc), &info) || !info.dli_fname) return text;
  // One less: a return address may already belong to the next line.
  const auto base = reinterpret_cast<uintptr_t>(info.dli_fbase);
  append(text, "@[%s+0x%zx]", info.dli_fname, static_cast<size_t>(pc - 1 - base));
  return text;
}

// "a/b/../c" is "a/c".
std::string short_path(const char* path) {
  std::string text(path);
  for (size_t up; (up = text.find("/../")) != std::string::npos && up > 0;) {
    const size_t parent = text.rfind('/', up - 1);
    text.erase(parent == std::string::npos ? 0 : parent + 1, up + 4 - (parent == std::string::npos ? 0 : parent + 1));
  }
  return text;
}

std::string where(const Place& place) {
  std::string text;
  if (place.site.file) append(text, "%s:%d, called at ", short_path(place.site.file).c_str(), place.site.line);
  return text + code(place.pc);
}

std::string who(const Thread& t) {
  std::string text;
  const Launch& launch = *t.worker->launch;
  const uint32_t linear = t.linear - t.rank * launch.block_threads;
  append(text, "thread (%u, %u, %u) [warp %u lane %u", t.index.x, t.index.y, t.index.z, linear / 32, linear % 32);
  if (launch.cluster_blocks > 1) append(text, ", block %u of the cluster", t.rank);
  return text + "]";
}

void finish_report(Worker& w, const std::string& text) {
  Launch& launch = *w.launch;
  std::lock_guard lock(launch.mutex);
  if (launch.failed.exchange(true)) return;
  launch.report = text;
  const uint3 block = w.block_index[current ? current->rank : 0];
  append(launch.report, " (block (%u, %u, %u), seed %llu)", block.x, block.y, block.z,
         static_cast<unsigned long long>(launch.config.seed));
}

[[noreturn]] void report(const std::string& text) {
  Thread& t = *current;
  finish_report(*t.worker, text);
  emu_switch(&t.sp, t.worker->main_sp);
  __builtin_unreachable();
}

bool in_window(const Worker& w, const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(w.window) < CLUSTER_BYTES;
}

bool in_stacks(const Worker& w, const void* pointer) {
  for (auto [low, high] : w.stack_regions)
    if (pointer >= low && pointer < high) return true;
  return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Check mode: who knows of what. A thread knows of what others did before the last barrier they shared; it carries a
// clock for every agent, in a snapshot that all threads leaving a barrier share, so that a barrier of the whole block
// costs one pass. Barriers and __syncwarp join clocks; shuffles, votes and mma order nothing.

Snapshot* new_snapshot(Worker& w) {
  if (w.free_snapshots.empty()) {
    w.snapshots.push_back(std::make_unique<Snapshot>());
    w.free_snapshots.push_back(w.snapshots.back().get());
  }
  Snapshot* s = w.free_snapshots.back();
  w.free_snapshots.pop_back();
  s->references = 0;
  s->mark = 0;
  return s;
}

void know(Worker& w, Thread& t, Snapshot* s) {
  if (t.known && --t.known->references == 0) w.free_snapshots.push_back(t.known);
  t.known = s;
  if (s) ++s->references;
}

uint32_t tick(Worker& w) {
  if (++w.shadow->now > MAX_CLOCK) report("check mode follows a block through 2^20 barriers, not more");
  return w.shadow->now;
}

void copy_clocks(const Worker& w, Snapshot* to, const Snapshot* from) {
  memcpy(to->clocks, from->clocks, w.agents * sizeof(uint32_t));
  if (w.uses_hopper) memcpy(to->fenced, from->fenced, w.launch->all_threads * sizeof(uint32_t));
}

void add_clocks(const Worker& w, Snapshot* to, const Snapshot* from) {
  for (uint32_t i = 0; i < w.agents; ++i) to->clocks[i] = std::max(to->clocks[i], from->clocks[i]);
  const uint32_t count = w.uses_hopper ? w.launch->all_threads : 0;
  for (uint32_t i = 0; i < count; ++i) to->fenced[i] = std::max(to->fenced[i], from->fenced[i]);
}

// What a thread knows beside its snapshot: of itself and of what it waited for.
void add_own(const Worker& w, Snapshot* to, const Thread& t) {
  const uint32_t count = w.launch->all_threads;
  to->clocks[t.linear] = t.clock;
  to->clocks[count + t.linear] = std::max(to->clocks[count + t.linear], t.copies_over);
  if (!w.uses_hopper) return;
  to->clocks[2 * count + t.linear] = t.stores_over;
  uint32_t& products = to->clocks[3 * count + t.linear / WARPGROUP_LANES];
  products = std::max(products, t.products_over);
  to->fenced[t.linear] = t.fenced;
}

// The threads that members(f) calls f for meet: each comes to know what any of them knew or did.
template <typename Members>
void join(Worker& w, Members members) {
  Snapshot* joined = new_snapshot(w);
  const uint32_t mark = ++w.snapshot_mark;
  bool first = true;
  members([&](Thread& t) {
    if (t.known->mark == mark) return;
    t.known->mark = mark;
    if (first)
      copy_clocks(w, joined, t.known);
    else
      add_clocks(w, joined, t.known);
    first = false;
  });
  const uint32_t now = tick(w);
  members([&](Thread& t) {
    add_own(w, joined, t);
    t.clock = now;
  });
  members([&](Thread& t) { know(w, t, joined); });
}

uint32_t epoch_of(uint32_t agent, uint32_t clock) { return agent << CLOCK_BITS | clock; }

bool comes_after(const Thread& t, uint32_t epoch) {
  const uint32_t agent = epoch >> CLOCK_BITS, clock = epoch & MAX_CLOCK, count = t.worker->launch->all_threads;
  if (agent == t.linear) return true;
  if (agent == count + t.linear && clock <= t.copies_over) return true;
  if (agent >= 2 * count) {
    if (agent == BARRIER_WORD) return false;
    if (agent == 2 * count + t.linear && clock <= t.stores_over) return true;
    if (agent == 3 * count + t.linear / WARPGROUP_LANES && clock <= t.products_over) return true;
  }
  return t.known->clocks[agent] >= clock;
}

std::string library_code(const Worker& w, uint32_t place) {
  return code(w.launch->library_base + (place & ~ATOMIC));
}

std::string at_offset(unsigned bytes, uint32_t offset) {
  std::string text;
  const auto own = static_cast<uint32_t>(offset % WINDOW_BYTES), rank = static_cast<uint32_t>(offset / WINDOW_BYTES);
  append(text, "%u byte%s at offset %u of shared memory", bytes, bytes == 1 ? "" : "s", own);
  if (rank) append(text, " of block %u of the cluster", rank);
  return text;
}

// Of hopper.cpp.
[[noreturn]] void report_after_copy(Worker& w, uint32_t agent, uint32_t clock, const std::string& now,
                                    const std::string& then);
[[noreturn]] void report_no_proxy_fence(Thread& t, const char* verb, uint32_t offset, unsigned bytes, uint32_t byte,
                                        uintptr_t pc);
bool given_to_async_proxy(const Thread& t, uint32_t epoch);
void check_async_readers(Thread& t, const char* verb, uint32_t offset, unsigned bytes, uint32_t word, bool whole,
                         uintptr_t pc);
void registers_accessed(Thread& t, uintptr_t address, unsigned bytes, bool write, uintptr_t pc);
bool land_a_copy(Worker& w);
void check_exit(Thread& t);
std::string barrier_state(const Thread& t);

// `verb`: what t does now, to bytes of which `epoch` is the last write, unknown to t.
[[noreturn]] __attribute__((noinline, cold)) void report_after_write(Thread& t, const char* verb, uint32_t offset,
                                                                      unsigned bytes, uint32_t byte, uintptr_t pc) {
  Worker& w = *t.worker;
  const uint32_t epoch = w.shadow->written[byte], agent = epoch >> CLOCK_BITS, count = w.launch->all_threads;
  const std::string now = who(t) + " " + verb + " " + at_offset(bytes, offset) + " at " + code(pc);
  const std::string then = library_code(w, w.shadow->written_place[byte]);
  if (agent < count)
    report("race: " + now + "; " + who(w.threads[agent]) + " wrote there at " + then + " and no barrier is between");
  if (agent >= 2 * count) report_after_copy(w, agent, epoch & MAX_CLOCK, now, then);
  const Thread& owner = w.threads[agent - count];
  if ((epoch & MAX_CLOCK) > owner.copies_over)
    report("in flight: " + now + " while a cp.async by " + who(owner) + " to there is in flight, issued at " + then);
  report("race: " + now + "; the cp.async by " + who(owner) + " to there, issued at " + then +
         ", was waited for, but no barrier is between");
}

[[noreturn]] __attribute__((noinline, cold)) void report_after_read(Thread& t, const char* verb, uint32_t offset,
                                                                     unsigned bytes, uint32_t reader, uint32_t place,
                                                                     uintptr_t pc) {
  Worker& w = *t.worker;
  report("race: " + who(t) + " " + verb + " " + at_offset(bytes, offset) + " at " + code(pc) + "; " +
         who(w.threads[reader]) + " read there at " + library_code(w, place) + " and no barrier is between");
}

[[noreturn]] __attribute__((noinline, cold)) void report_unwritten(Thread& t, uint32_t offset, unsigned bytes,
                                                                    uintptr_t pc) {
  report("uninitialised: " + who(t) + " reads " + at_offset(bytes, offset) + ", which nobody wrote, at " + code(pc));
}

inline void add_reader(Thread& t, uint32_t word, uint32_t bytes, uint32_t place) {
  Shadow& shadow = *t.worker->shadow;
  Readers& r = t.reads[word];
  const uint32_t key = bytes << CLOCK_BITS | t.clock, lane = 1u << t.lane;
  shadow.read[word] = shadow.now;
  if (r.key == key) {
    r.lanes |= lane;
    r.place = place;
    return;
  }
  if ((r.key & MAX_CLOCK) < shadow.barrier) {
    r = {key, lane, place, 0};
    return;
  }
  for (uint32_t i = r.next; i; i = shadow.more[i].next) {
    Readers& other = shadow.more[i];
    if (other.key != key) continue;
    other.lanes |= lane;
    other.place = place;
    return;
  }
  shadow.more.push_back(r);
  r = {key, lane, place, static_cast<uint32_t>(shadow.more.size() - 1)};
}

template <typename F>
void each_word(uint32_t offset, unsigned bytes, F f) {
  const uint32_t end = offset + bytes;
  for (uint32_t word = offset / 4; word * 4 < end; ++word) {
    const uint32_t low = std::max(offset, word * 4), high = std::min(end, word * 4 + 4);
    f(word, ((1u << (high - low)) - 1) << (low - word * 4));
  }
}

uint32_t place_of(const Thread& t, uintptr_t pc) {
  return static_cast<uint32_t>(pc - t.worker->launch->library_base) & ~ATOMIC;
}

inline void shared_read(Thread& t, uint32_t offset, unsigned bytes, uintptr_t pc) {
  Shadow& shadow = *t.worker->shadow;
  const uint32_t* written = &shadow.written[offset];
  const uint32_t epoch = written[0];
  uint32_t differ = epoch ^ t.proven;
  for (unsigned i = 1; i < bytes; ++i) differ |= written[i] ^ epoch;
  if (differ) {
    for (unsigned i = 0; i < bytes; ++i) {
      if (!written[i]) report_unwritten(t, offset, bytes, pc);
      if (!comes_after(t, written[i])) report_after_write(t, "reads", offset, bytes, offset + i, pc);
    }
    t.proven = epoch;
  }
  const uint32_t place = place_of(t, pc);
  if (bytes <= 4 && offset % bytes == 0)
    add_reader(t, offset / 4, ((1u << bytes) - 1) << offset % 4, place);
  else
    each_word(offset, bytes, [&](uint32_t word, uint32_t mask) { add_reader(t, word, mask, place); });
}

// A write by the agent and at the time of `epoch`, on behalf of t. `place` may carry ATOMIC.
void shared_write(Thread& t, uint32_t offset, unsigned bytes, uint32_t epoch, const char* verb, uint32_t atomic,
                  uintptr_t pc, bool async_proxy = false) {
  Worker& w = *t.worker;
  Shadow& shadow = *w.shadow;
  const uint32_t place = place_of(t, pc) | atomic;
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    const uint32_t before = shadow.written[i];
    if (before && before != t.proven && !(shadow.written_place[i] & atomic)) {
      if (!comes_after(t, before)) report_after_write(t, verb, offset, bytes, i, pc);
      t.proven = before;
    }
    if (async_proxy && before && !given_to_async_proxy(t, before)) report_no_proxy_fence(t, verb, offset, bytes, i, pc);
    shadow.written[i] = epoch;
    shadow.written_place[i] = place;
  }
  each_word(offset, bytes, [&](uint32_t word, uint32_t mask) {
    if (w.uses_hopper) check_async_readers(t, verb, offset, bytes, word, mask == 15, pc);
    if (shadow.read[word] < shadow.barrier) return;
    for (uint32_t warp = 0; warp < w.launch->all_warps; ++warp)
      for (const Readers* r = &shadow.readers[warp][word]; (r->key & MAX_CLOCK) >= shadow.barrier;
           r = &shadow.more[r->next]) {
        for (uint32_t lanes = r->key >> CLOCK_BITS & mask ? r->lanes : 0; lanes; lanes &= lanes - 1) {
          const uint32_t reader = warp * 32 + static_cast<uint32_t>(__builtin_ctz(lanes));
          if (!comes_after(t, epoch_of(reader, r->key & MAX_CLOCK)))
            report_after_read(t, verb, offset, bytes, reader, r->place, pc);
        }
        if (!r->next) break;
      }
    if (mask != 15) return;
    shadow.read[word] = 0;  // all of them are before this write
    for (uint32_t warp = 0; warp < w.launch->all_warps; ++warp) shadow.readers[warp][word].key = 0;
  });
}

// Memory that is neither shared nor the thread's own stack.
__attribute__((noinline)) void other_access(Thread& t, uintptr_t address, unsigned bytes, bool write, uintptr_t pc) {
  Worker& w = *t.worker;
  const Launch& launch = *w.launch;
  const EmuConfig& config = launch.config;
  const EmuBuffer* nearest = nullptr;
  uint64_t distance = UINT64_MAX;
  for (uint64_t i = 0; i < config.buffer_count; ++i) {
    const EmuBuffer& b = config.buffers[i];
    const auto low = reinterpret_cast<uintptr_t>(b.data);
    if (address - low < b.bytes && b.bytes - (address - low) >= bytes && (!write || b.writable)) return;
    const bool inside = address + bytes > low && address < low + b.bytes;
    const uint64_t away = inside ? 0 : address < low ? low - address : address - (low + b.bytes) + 1;
    if (away < distance) distance = away, nearest = &b;
  }
  const auto pack = reinterpret_cast<uintptr_t>(launch.body);
  if (!write && address - pack < launch.body_bytes) return;
  for (const Segment& s : launch.segments)
    if (address >= s.low && address + bytes <= s.high && (!write || s.writable)) return;
  const char* verb = write ? "writes" : "reads";
  const auto* pointer = reinterpret_cast<const void*>(address);
  std::string text;
  if (in_stacks(w, pointer)) {
    append(text, "local memory: %s %s %u bytes of another thread's local memory", who(t).c_str(), verb, bytes);
    report(text + " at " + code(pc));
  }
  if (!config.buffers) return;
  const bool read_only = nearest && distance == 0 && write && !nearest->writable;
  append(text, "%s: %s %s %u bytes at %p", read_only ? "read-only" : "out of bounds", who(t).c_str(), verb, bytes,
         pointer);
  if (nearest && distance < nearest->bytes + (1u << 30)) {
    const auto low = reinterpret_cast<uintptr_t>(nearest->data);
    const size_t size = nearest->bytes;
    if (address < low)
      append(text, ", %zu bytes before the start of %s", static_cast<size_t>(low - address), nearest->name);
    else
      append(text, ", %zu bytes from the start of %s, which has %zu", static_cast<size_t>(address - low), nearest->name,
             size);
    if (read_only) text += " and is only read";
  }
  report(text + ", at " + code(pc));
}

[[noreturn]] __attribute__((noinline, cold)) void report_shared_bounds(Thread& t, uintptr_t offset, unsigned bytes,
                                                                        bool write, uintptr_t pc) {
  std::string text;
  append(text, "out of bounds: %s %s %u bytes at offset %zu of shared memory, which has %zu, at ", who(t).c_str(),
         write ? "writes" : "reads", bytes, static_cast<size_t>(offset % WINDOW_BYTES),
         t.worker->launch->shared_bytes);
  report(text + code(pc));
}

// Within the shared memory of a block of the cluster.
inline bool in_shared(const Thread& t, uintptr_t offset, unsigned bytes) {
  return offset % WINDOW_BYTES + bytes <= t.shared_bytes && offset < t.cluster_bytes;
}

// A plain load or store of the step, as the compiler's instrumentation tells it.
template <bool WRITE>
inline __attribute__((always_inline)) void plain_access(const void* pointer, unsigned bytes, uintptr_t pc) {
  if (!current) return;  // the launcher, on the host
  Thread& t = *current;
  if (!t.checking) return;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(t.stack_low) < STACK_BYTES) {
    if (!t.guards.empty()) registers_accessed(t, address, bytes, WRITE, pc);
    return;
  }
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(t.window);
  if (offset < CLUSTER_BYTES) {
    if (!in_shared(t, offset, bytes)) report_shared_bounds(t, offset, bytes, WRITE, pc);
    if (WRITE)
      shared_write(t, static_cast<uint32_t>(offset), bytes, epoch_of(t.linear, t.clock), "writes", 0, pc);
    else
      shared_read(t, static_cast<uint32_t>(offset), bytes, pc);
    return;
  }
  other_access(t, address, bytes, WRITE, pc);
}

// The counter runs on from block to block: what is noted of the last block's reads lies before this one's start.
void start_clocks(Shadow& shadow) {
  if (shadow.now > MAX_CLOCK / 2) {
    for (Readers* warp : shadow.readers) madvise(warp, WORDS * sizeof(Readers), MADV_DONTNEED);  // zeros
    madvise(shadow.read, WORDS * sizeof(uint32_t), MADV_DONTNEED);
    shadow.now = 0;
  }
  shadow.barrier = ++shadow.now;
  shadow.more.assign(1, {});
}

void start_checking(Worker& w) {
  Launch& launch = *w.launch;
  const bool checking = launch.config.check != 0;
  w.agents = 2 * launch.all_threads;
  if (checking && !w.shadow) w.shadow = std::make_unique<Shadow>();
  Snapshot* none = nullptr;
  if (checking) {
    for (uint32_t rank = 0; rank < launch.cluster_blocks; ++rank)
      memset(w.shadow->written + rank * WINDOW_BYTES, 0, launch.shared_bytes * sizeof(uint32_t));
    start_clocks(*w.shadow);
    w.free_snapshots.clear();
    for (auto& s : w.snapshots) w.free_snapshots.push_back(s.get());
    none = new_snapshot(w);
    memset(none->clocks, 0, w.agents * sizeof(uint32_t));
  }
  for (uint32_t i = 0; i < launch.all_threads; ++i) {
    Thread& t = w.threads[i];
    t.checking = checking;
    t.known = nullptr;
    t.shared_bytes = static_cast<uint32_t>(launch.shared_bytes);
    t.cluster_bytes = static_cast<uint32_t>(launch.cluster_blocks * WINDOW_BYTES);
    t.reads = checking ? w.shadow->readers[i / 32] : nullptr;
    t.clock = checking ? w.shadow->now : 0;
    t.copies_issued = t.copies_over = t.stores_over = t.products_over = t.fenced = 0;
    t.proven = UINT32_MAX;  // no epoch
    if (checking) know(w, t, none);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The scheduler: a fiber runs until it waits, then goes straight to another that is ready: mostly of its own warp,
// sometimes of another, always drawn at random.

Thread* pick(Worker& w) {
  while (!w.ready_warps)
    if (!w.uses_hopper || !land_a_copy(w)) return nullptr;
  const uint32_t draw = w.random.next();
  uint32_t warp = w.current_warp;
  if (!(w.ready_warps >> warp & 1u) || draw >> 26 == 0) {
    const uint32_t turn = draw & 31u;
    const uint32_t turned = w.ready_warps >> turn | w.ready_warps << ((32 - turn) & 31);
    warp = (static_cast<uint32_t>(__builtin_ctz(turned)) + turn) & 31u;
    w.current_warp = warp;
  }
  const uint32_t ready = w.warps[warp].ready, turn = draw >> 8 & 31u;
  const uint32_t turned = ready >> turn | ready << ((32 - turn) & 31);
  return &w.threads[warp * 32 + ((static_cast<uint32_t>(__builtin_ctz(turned)) + turn) & 31u)];
}

void set_ready(Worker& w, Warp& warp, uint32_t lanes) {
  warp.ready |= lanes;
  if (warp.ready) w.ready_warps |= 1u << warp.index;
}

void set_waiting(Worker& w, Warp& warp, uint32_t lane) {
  warp.ready &= ~(1u << lane);
  if (!warp.ready) w.ready_warps &= ~(1u << warp.index);
}

// Runs others until somebody made the caller ready and its turn came. To main when nobody can run.
void wait_turn(Thread& t) {
  Worker& w = *t.worker;
  Thread* next = w.launch->failed.load(std::memory_order_relaxed) ? nullptr : pick(w);
  if (next == &t) return;
  if (next) {
    current = next;
    emu_switch(&t.sp, next->sp);
  } else {
    emu_switch(&t.sp, w.main_sp);
  }
}

void wait(Thread& t, Kind kind, const Place& place) {
  t.waits = kind;
  t.place = place;
  set_waiting(*t.worker, *t.warp, t.lane);
  wait_turn(t);
  t.waits = Kind::none;
}

std::string waiting(const Thread& t) {
  return who(t) + " waits at " + kind_name(t.waits) + " " + where(t.place) + barrier_state(t);
}

// All wait, or have exited while others wait: says who waits where, a line for every place.
std::string stuck(Worker& w) {
  std::string places;
  bool diverged = false, at_barrier = false;
  int lines = 0;
  const Thread* first = nullptr;
  const uint32_t count = w.launch->all_threads;
  std::vector<bool> told(count, false);
  for (uint32_t i = 0; i < count; ++i) {
    const Thread& t = w.threads[i];
    if (t.exited || told[i] || t.waits == Kind::none) continue;
    if (first && first->warp == t.warp) diverged = true;
    at_barrier |= t.waits == Kind::mbarrier || t.waits == Kind::named_barrier ||
                  t.waits == Kind::cluster_barrier;
    first = &t;
    uint32_t same = 0;
    for (uint32_t j = i; j < count; ++j) {
      const Thread& u = w.threads[j];
      if (u.exited || u.waits != t.waits || u.place.pc != t.place.pc || u.place.site.line != t.place.site.line ||
          u.barrier != t.barrier)
        continue;
      if (u.warp == t.warp || t.barrier || lines >= 6) told[j] = true, ++same;
    }
    if (lines++ < 8) append(places, "; %s", waiting(t).c_str());
    if (same > 1 && lines <= 8) append(places, " with %u more", same - 1);
  }
  const char* kind = at_barrier          ? "deadlock"
                     : diverged          ? "divergence within a warp"
                     : w.alive < count ? "divergence: some threads have exited"
                                       : "deadlock";
  return std::string(kind) + ": nobody can go on" + places;
}

// The rendezvous of the lanes in `mask`. Each brings `operand`; the last one runs compute(pending) for all.
template <typename Compute>
void meet(Kind kind, uint32_t mask, uint32_t shape, const Place& place, void* operand, Compute compute) {
  Thread& t = *current;
  Worker& w = *t.worker;
  Warp& warp = *t.warp;
  const uint32_t bit = 1u << t.lane;
  if (!(mask & bit))
    report(std::string("divergence: ") + who(t) + " calls " + kind_name(kind) + " with a mask that leaves it out, " +
           where(place));
  const bool whole = kind == Kind::mma || kind == Kind::ldmatrix || kind == Kind::stmatrix || kind >= Kind::wgmma_fence;
  if (whole && warp.existing != 0xffffffffu)
    report(std::string(kind_name(kind)) + " needs a whole warp, " + who(t) + " is in a partial one, " + where(place));
  const uint32_t members = mask & warp.existing;
  if (members & warp.exited) {
    const uint32_t gone = static_cast<uint32_t>(__builtin_ctz(members & warp.exited));
    report(std::string("divergence: ") + who(w.threads[warp.index * 32 + gone]) + " has exited, but " + who(t) +
           " needs it at " + kind_name(kind) + " " + where(place));
  }
  Pending* p = nullptr;
  for (int i = 0; i < warp.pending_count; ++i)
    if (warp.pending[i].mask == members) p = &warp.pending[i];
  if (!p) {
    if (members == bit) {  // alone
      Pending alone;
      alone.mask = alone.arrived = members;
      alone.operands[t.lane] = operand;
      compute(alone);
      return;
    }
    p = &warp.pending[warp.pending_count++];
    p->mask = members;
    p->arrived = 0;
    p->shape = shape;
    p->kind = kind;
    p->place = place;
  } else if (p->kind != kind || p->shape != shape || !same_site(p->place.site, place.site)) {
    const Thread& other = w.threads[warp.index * 32 + static_cast<uint32_t>(__builtin_ctz(p->arrived))];
    report(std::string("divergence within a warp: ") + who(t) + " is at " + kind_name(kind) + " " + where(place) +
           " while " + waiting(other));
  }
  p->operands[t.lane] = operand;
  p->arrived |= bit;
  if (p->arrived != members) {
    wait(t, kind, place);
    return;
  }
  compute(*p);
  w.sleeps = 0;
  if (p != &warp.pending[--warp.pending_count]) *p = warp.pending[warp.pending_count];
  set_ready(w, warp, members & ~bit);
  if (w.random.next() >> 28 == 0) wait_turn(t);  // the last to come need not be the first to go on
}

template <typename F>
void each_lane(uint32_t mask, F f) {
  for (; mask; mask &= mask - 1) f(static_cast<uint32_t>(__builtin_ctz(mask)));
}

#define PLACE \
  Place { site, reinterpret_cast<uintptr_t>(__builtin_return_address(0)) }

void release_block(Worker& w, uint32_t rank) {
  const Launch& launch = *w.launch;
  if (current->checking) {
    join(w, [&](auto f) {
      for (uint32_t i = 0; i < launch.block_threads; ++i) f(w.threads[rank * launch.block_threads + i]);
    });
    if (launch.cluster_blocks == 1) {
      w.shadow->barrier = w.shadow->now;
      w.shadow->more.resize(1);
    }
  }
  w.sleeps = 0;
  w.barriers[rank].arrived = 0;
  for (uint32_t i = rank * launch.block_warps; i < (rank + 1) * launch.block_warps; ++i) {
    Warp& warp = w.warps[i];
    set_ready(w, warp, warp.existing & ~warp.exited);
  }
}

void make_copy(Thread& t, Copy& c) {
  if (c.made) return;
  c.made = true;
  char* destination = t.worker->window + c.offset;
  memcpy(destination, c.source, c.source_bytes);
  memset(destination + c.source_bytes, 0, static_cast<size_t>(c.bytes - c.source_bytes));
}

void finish_copies(Thread& t, size_t count) {
  for (; t.copies_done < count; ++t.copies_done, ++t.copies_over) make_copy(t, t.copies[t.copies_done]);
}

void exit_thread(Thread& t) {
  Worker& w = *t.worker;
  Warp& warp = *t.warp;
  finish_copies(t, t.copies.size());
  if (w.uses_hopper) check_exit(t);
  for (int i = 0; i < warp.pending_count; ++i)
    if (warp.pending[i].mask >> t.lane & 1u) {
      const Thread& other = w.threads[warp.index * 32 + static_cast<uint32_t>(__builtin_ctz(warp.pending[i].arrived))];
      report("divergence within a warp: " + who(t) + " has exited while " + waiting(other));
    }
  w.sleeps = 0;
  t.exited = true;
  warp.exited |= 1u << t.lane;
  --w.alive;
  --w.block_alive[t.rank];
  set_waiting(w, warp, t.lane);
  wait_turn(t);
  __builtin_unreachable();
}

void start_block(Worker& w, uint64_t linear) {
  Launch& launch = *w.launch;
  const dim3 c = launch.cluster;
  const uint64_t across = launch.grid.x / c.x, down = launch.grid.y / c.y;
  for (uint32_t rank = 0; rank < launch.cluster_blocks; ++rank) {
    w.block_index[rank] = {static_cast<uint32_t>(linear % across) * c.x + rank % c.x,
                           static_cast<uint32_t>(linear / across % down) * c.y + rank / c.x % c.y,
                           static_cast<uint32_t>(linear / across / down) * c.z + rank / c.x / c.y};
    memset(w.window + rank * WINDOW_BYTES, 0xff, launch.shared_bytes);  // NaN in every format
    w.barriers[rank] = {};
    w.block_alive[rank] = launch.block_threads;
  }
  w.random.seed(launch.config.seed * 0x100000001b3u ^ linear);
  w.uses_hopper = false;
  start_checking(w);
  w.alive = launch.all_threads;
  w.sleeps = 0;
  w.ready_warps = 0;
  w.current_warp = w.random.next() % launch.all_warps;
  for (uint32_t i = 0; i < launch.all_warps; ++i) {
    Warp& warp = w.warps[i];
    const uint32_t lanes = std::min<uint32_t>(32, launch.all_threads - i * 32);
    warp.index = i;
    warp.existing = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warp.exited = warp.ready = 0;
    warp.pending_count = 0;
    set_ready(w, warp, warp.existing);
  }
  for (uint32_t i = 0; i < launch.all_threads; ++i) {
    Thread& t = w.threads[i];
    t.worker = &w;
    t.warp = &w.warps[i / 32];
    t.linear = i;
    t.lane = i % 32;
    t.rank = i / launch.block_threads;
    t.own_bytes = static_cast<uint32_t>(t.rank * WINDOW_BYTES);
    const uint32_t in_block = i % launch.block_threads, x = launch.block.x, y = launch.block.y;
    t.index = {in_block % x, in_block / x % y, in_block / x / y};
    t.waits = Kind::none;
    t.exited = false;
    t.copies.clear();
    t.groups.clear();
    t.copies_done = t.groups_done = 0;
    t.barrier = t.store_groups = t.cluster_turn = t.copies_ever = 0;
    t.stores.clear();
    t.guards.clear();
    t.sp = fresh_stack(t.stack_high);
  }
}

void run_block(Worker& w, uint64_t linear) {
  start_block(w, linear);
  current = pick(w);
  emu_switch(&w.main_sp, current->sp);
  current = nullptr;
  if (w.alive && !w.launch->failed.load()) finish_report(w, stuck(w));
}

// ---------------------------------------------------------------------------------------------------------------------
// An address that is not mapped ends the launch with a report, not the process. While a grid runs, its workers handle
// the signal on a stack of their own; a fault of anybody else goes where it went before.

struct Faults {
  std::mutex mutex;
  int users = 0;
  struct sigaction segv_before, bus_before;
} faults;

uintptr_t faulting_pc(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uintptr_t>(machine.gregs[REG_RIP]);
#else
  return static_cast<uintptr_t>(machine.pc);
#endif
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!current) {
    const struct sigaction& before = signal == SIGSEGV ? faults.segv_before : faults.bus_before;
    if (before.sa_flags & SA_SIGINFO)
      before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
      before.sa_handler(signal);
    else
      ::signal(signal, SIG_DFL);  // the instruction runs again, and ends the process
    return;
  }
  Thread& t = *current;
  const uintptr_t pc = faulting_pc(context), address = reinterpret_cast<uintptr_t>(info->si_addr);
  Dl_info from;
  const bool in_step = dladdr(reinterpret_cast<void*>(pc), &from) &&
                       reinterpret_cast<uintptr_t>(from.dli_fbase) == t.worker->launch->library_base;
  std::string text;
  if (address - (reinterpret_cast<uintptr_t>(t.stack_low) - 65536) < 65536)
    append(text, "local memory: %s needs more than %zu bytes of stack", who(t).c_str(), STACK_BYTES);
  else if (!address && pc)
    append(text, "out of bounds or misaligned: %s uses an address that this machine cannot", who(t).c_str());
  else
    append(text, "out of bounds: %s uses %p, where no memory is", who(t).c_str(), info->si_addr);
  report(text + ", at " + (in_step ? code(pc + 1) : where(t.place)));
}

// For the length of a launch.
struct FaultHandler {
  FaultHandler() {
    std::lock_guard lock(faults.mutex);
    if (faults.users++) return;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // no return from it restores a mask
    sigaction(SIGSEGV, &action, &faults.segv_before);
    sigaction(SIGBUS, &action, &faults.bus_before);
  }
  ~FaultHandler() {
    std::lock_guard lock(faults.mutex);
    if (--faults.users) return;
    sigaction(SIGSEGV, &faults.segv_before, nullptr);
    sigaction(SIGBUS, &faults.bus_before, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;
};

struct SignalStack {  // of the calling system thread
  stack_t before;
  explicit SignalStack(char* low) {
    stack_t mine = {};
    mine.ss_sp = low;
    mine.ss_size = SIGNAL_STACK_BYTES;
    sigaltstack(&mine, &before);
  }
  ~SignalStack() { sigaltstack(&before, nullptr); }
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;
};

void run_blocks(Launch& launch) {
  try {
    auto worker = borrow_worker();
    worker->launch = &launch;
    worker->need_stacks(launch.all_threads);
    const SignalStack signal_stack(worker->signal_stack);
    for (;;) {
      const uint64_t i = launch.next.fetch_add(1);
      if (i >= launch.clusters || launch.failed.load(std::memory_order_relaxed)) break;
      // An order that no kernel may count on.
      run_block(*worker, static_cast<uint64_t>((static_cast<unsigned __int128>(i) * launch.stride + launch.first) %
                                               launch.clusters));
    }
    return_worker(std::move(worker));
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(launch.mutex);
    if (!launch.failed.exchange(true)) launch.report = "out of memory for the emulation's stacks";
  }
}

thread_local EmuConfig thread_config{};
thread_local std::string thread_text;

struct Limits {
  int architecture;
  size_t shared_bytes;
};
constexpr Limits LIMITS[] = {{80, 163 * 1024},  {86, 99 * 1024},   {89, 99 * 1024},
                             {90, 227 * 1024}, {100, 227 * 1024}, {120, 99 * 1024}};

const Limits* limits_of(int architecture) {
  for (const Limits& limits : LIMITS)
    if (limits.architecture == (architecture ? architecture : 90)) return &limits;
  return nullptr;
}

// What the driver would refuse, in its words and with the reason.
std::string refusal(dim3 grid, dim3 cluster, dim3 block, size_t shared_bytes, const Limits& limits) {
  std::string text;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    append(text, "invalid configuration argument: a grid of (%u, %u, %u) blocks; each at least 1, at most (2147483647, "
           "65535, 65535)", grid.x, grid.y, grid.z);
  else if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > MAX_THREADS)
    append(text, "invalid configuration argument: a block of (%u, %u, %u) threads; each at least 1, at most (1024, "
           "1024, 64) and 1024 together", block.x, block.y, block.z);
  else if (shared_bytes > limits.shared_bytes)
    append(text, "invalid argument: %zu bytes of shared memory a block; sm_%d allows at most %zu", shared_bytes,
           limits.architecture, limits.shared_bytes);
  const uint64_t blocks = uint64_t{cluster.x} * cluster.y * cluster.z;
  if (!text.empty() || blocks == 1) return text;
  if (!blocks || blocks > MAX_CLUSTER || limits.architecture < 90)
    append(text, "invalid cluster size: (%u, %u, %u) blocks; 1 to %zu together, on sm_90 and later", cluster.x,
           cluster.y, cluster.z, MAX_CLUSTER);
  else if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z)
    append(text, "invalid configuration argument: a grid of (%u, %u, %u) blocks, not made of clusters of (%u, %u, %u)",
           grid.x, grid.y, grid.z, cluster.x, cluster.y, cluster.z);
  else if (threads % WARP_LANES || blocks * threads > MAX_THREADS)
    append(text, "a cluster of %zu blocks of %zu threads: the emulation runs up to 1024 together, in whole warps",
           static_cast<size_t>(blocks), static_cast<size_t>(threads));
  return text;
}

// The constants and variables of the step itself: a kernel may use them.
void find_segments(Launch& launch) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Launch& launch = *static_cast<Launch*>(data);
        bool found = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& h = info->dlpi_phdr[i];
          const uintptr_t low = info->dlpi_addr + h.p_vaddr;
          found |= h.p_type == PT_LOAD && launch.library_base >= low && launch.library_base < low + h.p_memsz;
        }
        for (int i = 0; found && i < info->dlpi_phnum; ++i) {
          const auto& h = info->dlpi_phdr[i];
          const uintptr_t low = info->dlpi_addr + h.p_vaddr;
          if (h.p_type == PT_LOAD) launch.segments.push_back({low, low + h.p_memsz, (h.p_flags & PF_W) != 0});
        }
        return found ? 1 : 0;
      },
      &launch);
}

}  // namespace

uint3 thread_index() { return current->index; }
uint3 block_index() { return current->worker->block_index[current->rank]; }
dim3 block_size() { return current->worker->launch->block; }
dim3 grid_size() { return current->worker->launch->grid; }
void* shared_memory() { return current->window + current->own_bytes; }

int sync_block(BlockVote vote, int predicate, Site site) {
  Thread& t = *current;
  Worker& w = *t.worker;
  const Place place = PLACE;
  BlockBarrier& b = w.barriers[t.rank];
  if (b.arrived == 0) {
    b.place = place;
    b.first = t.linear;
    b.votes = 0;
  } else if (!same_site(b.place.site, site)) {
    report("divergence within a block: " + who(t) + " is at __syncthreads " + where(place) + " while " +
           waiting(w.threads[b.first]));
  }
  b.votes += predicate != 0;
  const uint32_t count = w.launch->block_threads;
  if (++b.arrived < count) {
    wait(t, Kind::sync_block, place);
    return b.result;
  }
  b.result = static_cast<int>(vote == BlockVote::count ? b.votes
                              : vote == BlockVote::all ? b.votes == count
                                                       : b.votes != 0);
  release_block(w, t.rank);
  if (w.random.next() >> 30) wait_turn(t);
  return b.result;
}

void sync_warp(unsigned mask, Site site) {
  meet(Kind::sync_warp, mask, 0, PLACE, nullptr, [](Pending& p) {
    if (!current->checking) return;
    Worker& w = *current->worker;
    Thread* lanes = &w.threads[current->warp->index * 32];
    join(w, [&](auto f) { each_lane(p.mask, [&](uint32_t lane) { f(lanes[lane]); }); });
  });
}

uint64_t shuffle_bits(Shuffle kind, unsigned mask, uint64_t bits, int lane, int width, Site site) {
  struct Operand {
    uint64_t bits, result;
    int lane;
  } mine{bits, bits, lane};
  const Place place = PLACE;
  if (width <= 0 || width > 32 || (width & (width - 1)))
    report("a shuffle of width " + std::to_string(width) + ", not a power of two up to 32, " + where(place));
  const uint32_t shape = static_cast<uint32_t>(kind) << 8 | static_cast<uint32_t>(width);
  meet(Kind::shuffle, mask, shape, place, &mine, [&](Pending& p) {
    each_lane(p.mask, [&](uint32_t me) {
      Operand& to = *static_cast<Operand*>(p.operands[me]);
      const int first = static_cast<int>(me) & -width, last = first + width - 1;
      int from = 0;
      switch (kind) {
        case Shuffle::index: from = first | (to.lane & (width - 1)); break;
        case Shuffle::up: from = static_cast<int>(me) - to.lane; if (from < first) from = static_cast<int>(me); break;
        case Shuffle::down: from = static_cast<int>(me) + to.lane; if (from > last) from = static_cast<int>(me); break;
        case Shuffle::exclusive_or: from = static_cast<int>(me) ^ to.lane; if (from > last) from = static_cast<int>(me);
      }
      if (from < 0 || from > 31 || !(p.mask >> from & 1u)) {
        Worker& w = *current->worker;
        report("a shuffle reads lane " + std::to_string(from) + ", which its mask leaves out: " +
               who(w.threads[current->warp->index * 32 + me]) + ", " + where(place));
      }
      to.result = static_cast<Operand*>(p.operands[from])->bits;
    });
  });
  return mine.result;
}

unsigned vote(Vote kind, unsigned mask, unsigned value, Site site) {
  struct Operand {
    unsigned value, result;
  } mine{value, 0};
  meet(Kind::vote, mask, static_cast<uint32_t>(kind), PLACE, &mine, [&](Pending& p) {
    auto operand = [&](uint32_t lane) -> Operand& { return *static_cast<Operand*>(p.operands[lane]); };
    unsigned result = operand(static_cast<uint32_t>(__builtin_ctz(p.mask))).value, ballot = 0;
    bool first = true;
    each_lane(p.mask, [&](uint32_t lane) {
      const unsigned x = operand(lane).value;
      ballot |= (x ? 1u : 0u) << lane;
      if (first) {
        first = false;
        return;
      }
      switch (kind) {
        case Vote::add: result += x; break;
        case Vote::min_unsigned: result = std::min(result, x); break;
        case Vote::max_unsigned: result = std::max(result, x); break;
        case Vote::bit_and: result &= x; break;
        case Vote::bit_or: result |= x; break;
        case Vote::bit_xor: result ^= x; break;
        default: break;
      }
    });
    if (kind == Vote::ballot) result = ballot;
    if (kind == Vote::any) result = ballot != 0;
    if (kind == Vote::all) result = ballot == p.mask;
    each_lane(p.mask, [&](uint32_t lane) {
      if (kind == Vote::match_any) {
        result = 0;
        each_lane(p.mask, [&](uint32_t other) {
          result |= (operand(other).value == operand(lane).value ? 1u : 0u) << other;
        });
      }
      operand(lane).result = result;
    });
  });
  return mine.result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Narrow floats.

float e4m3_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  float value;
  if (magnitude == 0x7f)
    value = bit_cast<float>(0x7fffffffu);
  else if (magnitude < 8)
    value = static_cast<float>(magnitude) * 0x1p-9f;
  else
    value = bit_cast<float>((magnitude << 20) + (120u << 23));
  return code & 0x80u ? -value : value;
}

uint8_t round_e4m3(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80u;
  const float magnitude = fabsf(x);
  if (magnitude != magnitude) return 0x7f;
  if (magnitude >= 448.0f) return static_cast<uint8_t>(sign | 0x7eu);
  if (magnitude < 0x1p-6f)  // subnormal: multiples of 2^-9
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(magnitude * 512.0f)));
  const uint32_t m = bits & 0x7fffffffu, rounded = (m + 0x7ffffu + (m >> 20 & 1u)) >> 20;
  return static_cast<uint8_t>(sign | std::min(rounded - (120u << 3), 0x7eu));
}

float e2m1_value(uint8_t code) {
  constexpr float VALUES[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8u ? -VALUES[code & 7u] : VALUES[code & 7u];
}

uint8_t round_e2m1(float x) {
  if (x != x) return 7;
  const uint8_t sign = bit_cast<uint32_t>(x) >> 31 ? 8 : 0;
  const float m = fabsf(x);
  // Nearest, ties to the even code.
  int code = 7;
  if (m <= 5.0f) code = 6;
  if (m < 3.5f) code = 5;
  if (m <= 2.5f) code = 4;
  if (m < 1.75f) code = 3;
  if (m <= 1.25f) code = 2;
  if (m < 0.75f) code = 1;
  if (m <= 0.25f) code = 0;
  return static_cast<uint8_t>(sign | code);
}

// ---------------------------------------------------------------------------------------------------------------------
// Addresses.

namespace {

// The offset in the cluster's windows of what an instruction was given as a 32-bit shared address; of another block
// only where it may be.
uint32_t shared_offset(Thread& t, uint32_t address, unsigned bytes, unsigned alignment, const char* what,
                       const Place& place, bool of_any_block = false) {
  Worker& w = *t.worker;
  const size_t size = w.launch->shared_bytes;
  const uint32_t all = address - SHARED_BASE, rank = static_cast<uint32_t>(all / WINDOW_BYTES);
  const auto offset = static_cast<uint32_t>(all % WINDOW_BYTES);
  const bool there = rank == t.rank || (of_any_block && rank < w.launch->cluster_blocks);
  if (there && offset < size && size - offset >= bytes && offset % alignment == 0) {
    if (rank != t.rank && !w.block_alive[rank])
      report(std::string(what) + " by " + who(t) + " on shared memory of block " + std::to_string(rank) +
             " of the cluster, which has exited, " + where(place));
    return all;
  }
  std::string text(what);
  append(text, " by %s with shared address 0x%x: ", who(t).c_str(), address);
  const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(w.window));
  if (!there && rank < w.launch->cluster_blocks)
    append(text, "in block %u of the cluster, where only the thread's own may be", rank);
  else if (there && offset < size && size - offset >= bytes)
    append(text, "misaligned, must be a multiple of %u", alignment);
  else if (address - low < CLUSTER_BYTES)
    text += "a generic address, cut to 32 bits, where a shared one must be (smem_u32 makes one)";
  else
    append(text, "out of bounds: %u bytes from offset %lld of the block's %zu", bytes,
           static_cast<long long>(address) - SHARED_BASE - t.own_bytes, size);
  report(text + ", " + where(place));
}

// What instructions on global memory ask for in either mode.
void require_global(Thread& t, const void* pointer, unsigned alignment, const char* what, const Place& place) {
  Worker& w = *t.worker;
  const char* wrong = in_window(w, pointer) ? "shared memory" : in_stacks(w, pointer) ? "local memory" : nullptr;
  if (wrong) report(std::string(what) + " by " + who(t) + " on " + wrong + ", which is not global, " + where(place));
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) {
    std::string text(what);
    append(text, " by %s: misaligned address %p, must be a multiple of %u, ", who(t).c_str(), pointer, alignment);
    report(text + where(place));
  }
}

}  // namespace

uint32_t shared_address(const void* pointer, Site site) {
  Thread& t = *current;
  const auto offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(t.window + t.own_bytes);
  // One past the end is an address too, of nothing.
  if (offset > t.worker->launch->shared_bytes) {
    std::string text;
    append(text, "the shared address of %p was asked for by %s, which is not in the block's shared memory, ", pointer,
           who(t).c_str());
    report(text + where(PLACE));
  }
  return SHARED_BASE + t.own_bytes + static_cast<uint32_t>(offset);
}

void* shared_pointer(uint32_t address, unsigned bytes, Site site) {
  Thread& t = *current;
  return t.worker->window + shared_offset(t, address, bytes, bytes, "a shared access", PLACE);
}

void global_access(const void* pointer, unsigned bytes, bool write, Site site) {
  require_global(*current, pointer, bytes, write ? "a global store" : "a global load", PLACE);
}

// ---------------------------------------------------------------------------------------------------------------------
// Instructions.

namespace {

using Float8 = float __attribute__((vector_size(32)));

#if defined(__x86_64__)
#define EMU_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define EMU_CLONES
#endif

// d[16][8] += a[16][k] b[k][8]: k ascending, a rounded sum after each product (which is exact, tiny ones aside).
EMU_CLONES void multiply(Float8* d, const float (*a)[32], const Float8* b, int depth) {
  for (int row = 0; row < 16; row += 4) {
    Float8 d0 = d[row], d1 = d[row + 1], d2 = d[row + 2], d3 = d[row + 3];
    for (int k = 0; k < depth; ++k) {
      d0 += a[row][k] * b[k];
      d1 += a[row + 1][k] * b[k];
      d2 += a[row + 2][k] * b[k];
      d3 += a[row + 3][k] * b[k];
    }
    d[row] = d0, d[row + 1] = d1, d[row + 2] = d2, d[row + 3] = d3;
  }
}

struct MmaOperand {
  float* d;
  const uint32_t *a, *b;
};

void unpack(Mma shape, uint32_t word, float* out) {
  switch (shape) {
    case Mma::bf16_16816:
      out[0] = bfloat_value(static_cast<uint16_t>(word));
      out[1] = bfloat_value(static_cast<uint16_t>(word >> 16));
      break;
    case Mma::f16_16816:
      out[0] = half_value(static_cast<uint16_t>(word));
      out[1] = half_value(static_cast<uint16_t>(word >> 16));
      break;
    case Mma::e4m3_16832:
      for (int i = 0; i < 4; ++i) out[i] = e4m3_value(static_cast<uint8_t>(word >> 8 * i));
  }
}

void multiply_warp(Mma shape, void* const* operands) {
  const uint32_t packed = shape == Mma::e4m3_16832 ? 4 : 2, depth = 8 * packed;
  alignas(32) float a[16][32];
  alignas(32) float b[32][8];
  alignas(32) float d[16][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const MmaOperand& o = *static_cast<const MmaOperand*>(operands[lane]);
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) unpack(shape, o.a[i], &a[g + 8 * (i & 1)][packed * (t + 4 * (i >> 1))]);
    for (uint32_t i = 0; i < 2; ++i) {
      float column[4];
      unpack(shape, o.b[i], column);
      for (uint32_t j = 0; j < packed; ++j) b[packed * (t + 4 * i) + j][g] = column[j];
    }
    for (uint32_t i = 0; i < 4; ++i) d[g + 8 * (i >> 1)][2 * t + (i & 1)] = o.d[i];
  }
  multiply(reinterpret_cast<Float8*>(d), a, reinterpret_cast<const Float8*>(b), static_cast<int>(depth));
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const MmaOperand& o = *static_cast<const MmaOperand*>(operands[lane]);
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) o.d[i] = d[g + 8 * (i >> 1)][2 * t + (i & 1)];
  }
}

}  // namespace

void mma(Mma shape, float* d, const uint32_t* a, const uint32_t* b, Site site) {
  MmaOperand mine{d, a, b};
  meet(Kind::mma, 0xffffffffu, static_cast<uint32_t>(shape), PLACE, &mine,
       [shape](Pending& p) { multiply_warp(shape, p.operands); });
}

void ldmatrix(int count, bool transposed, uint32_t* d, uint32_t row, Site site) {
  struct Operand {
    uint32_t* d;
    uint32_t row;
  } mine{d, row};
  const Place place = PLACE;
  meet(Kind::ldmatrix, 0xffffffffu, static_cast<uint32_t>(count * 2 + transposed), place, &mine, [&](Pending& p) {
    Worker& w = *current->worker;
    Thread* lanes = &w.threads[current->warp->index * 32];
    const char* rows[32];
    for (int i = 0; i < 8 * count; ++i) {
      const uint32_t address = static_cast<Operand*>(p.operands[i])->row;
      rows[i] = w.window + shared_offset(lanes[i], address, 16, 16, "ldmatrix", place);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < count; ++i) {
        const int r = lane / 4, c = 2 * (lane % 4);
        uint16_t pair[2];
        const char* first = transposed ? rows[8 * i + c] + 2 * r : rows[8 * i + r] + 2 * c;
        const char* second = transposed ? rows[8 * i + c + 1] + 2 * r : first + 2;
        memcpy(&pair[0], first, 2);
        memcpy(&pair[1], second, 2);
        if (current->checking) {  // each lane reads what it gets
          shared_read(lanes[lane], static_cast<uint32_t>(first - w.window), transposed ? 2 : 4, place.pc);
          if (transposed) shared_read(lanes[lane], static_cast<uint32_t>(second - w.window), 2, place.pc);
        }
        static_cast<Operand*>(p.operands[lane])->d[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
      }
  });
}

void cp_async(uint32_t destination, const void* source, unsigned bytes, unsigned source_bytes, Site site) {
  Thread& t = *current;
  const Place place = PLACE;
  const uint32_t offset = shared_offset(t, destination, bytes, bytes, "cp.async", place);
  if (source_bytes > bytes) {
    std::string text;
    append(text, "cp.async by %s: %u source bytes, more than the %u it copies, ", who(t).c_str(), source_bytes, bytes);
    report(text + where(place));
  }
  if (source_bytes) {
    require_global(t, source, bytes, "cp.async", place);
    t.place = place;  // for the report, should there be no memory
    static_cast<void>(*static_cast<const volatile char*>(source));
  }
  if (t.checking) {
    if (source_bytes) other_access(t, reinterpret_cast<uintptr_t>(source), source_bytes, false, place.pc);
    if (++t.copies_issued > MAX_CLOCK) report("check mode follows a thread through 2^20 cp.async, not more");
    shared_write(t, offset, bytes, epoch_of(t.worker->launch->all_threads + t.linear, t.copies_issued),
                 "overwrites by cp.async", 0, place.pc);
  }
  t.copies.push_back({source, offset, static_cast<uint16_t>(bytes), static_cast<uint16_t>(source_bytes)});
  ++t.copies_ever;
}

void cp_async_commit() {
  Thread& t = *current;
  t.groups.push_back(t.copies.size());
}

void cp_async_wait(unsigned in_flight) {
  Thread& t = *current;
  if (t.groups.size() - t.groups_done <= in_flight) return;
  t.groups_done = t.groups.size() - in_flight;
  finish_copies(t, t.groups[t.groups_done - 1]);
  if (t.groups_done == t.groups.size() && t.copies_done == t.copies.size()) {
    t.groups.clear();
    t.copies.clear();
    t.groups_done = t.copies_done = 0;
  }
}

void cp_async_wait_all() {
  Thread& t = *current;
  finish_copies(t, t.copies.size());
  t.copies.clear();
  t.groups.clear();
  t.groups_done = t.copies_done = 0;
}

#include "hopper.cpp"

namespace {

template <typename T, typename F>
T update(void* address, F f) {
  T* p = static_cast<T*>(address);
  T before = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &before, f(before), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

float without_subnormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
float without_subnormals(uint32_t bits) { return without_subnormals(bit_cast<float>(bits)); }

uint32_t add_pair(uint32_t a, uint32_t b, uint16_t (*round)(float), float (*value)(uint16_t)) {
  auto add = [&](unsigned shift) {
    const double x = value(static_cast<uint16_t>(a >> shift)), y = value(static_cast<uint16_t>(b >> shift));
    return static_cast<uint32_t>(round(round_odd(x + y))) << shift;
  };
  return add(0) | add(16);
}

}  // namespace

uint64_t atomic(Atomic op, void* address, uint64_t value, uint64_t compare) {
  Thread& t = *current;
  const bool wide = op == Atomic::add_u64 || op == Atomic::max_u64 || op == Atomic::exchange_u64 ||
                    op == Atomic::compare_exchange_u64;
  const unsigned bytes = wide ? 8 : 4;
  const Place place{{nullptr, 0}, reinterpret_cast<uintptr_t>(__builtin_return_address(0))};
  if (reinterpret_cast<uintptr_t>(address) % bytes) {
    std::string text;
    append(text, "an atomic by %s: misaligned address %p, must be a multiple of %u, ", who(t).c_str(), address, bytes);
    report(text + where(place));
  }
  if (t.checking) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(t.window);
    if (offset >= CLUSTER_BYTES) {
      other_access(t, reinterpret_cast<uintptr_t>(address), bytes, true, place.pc);
    } else {
      const auto at = static_cast<uint32_t>(offset);
      if (!in_shared(t, offset, bytes)) report_shared_bounds(t, offset, bytes, true, place.pc);
      for (uint32_t i = at; i < at + bytes; ++i)
        if (!t.worker->shadow->written[i]) report_unwritten(t, at, bytes, place.pc);
      shared_write(t, at, bytes, epoch_of(t.linear, t.clock), "updates by an atomic", ATOMIC, place.pc);
    }
  }
  if (++t.worker->atomics % 64 == 0) yield();  // it may be waiting for another
  const auto x = static_cast<uint32_t>(value);
  const auto s = static_cast<int32_t>(x);
  auto word = [&](auto f) { return update<uint32_t>(address, f); };
  switch (op) {
    case Atomic::add_u32: return word([=](uint32_t b) { return b + x; });
    case Atomic::add_f32: {
      const bool flush = !in_window(*t.worker, address);  // as global memory does it, and shared does not
      return word([=](uint32_t b) {
        const float sum = flush ? without_subnormals(without_subnormals(b) + without_subnormals(x))
                                : bit_cast<float>(b) + bit_cast<float>(x);
        return bit_cast<uint32_t>(sum);
      });
    }
    case Atomic::add_f16x2: return word([=](uint32_t b) { return add_pair(b, x, round_half, half_value); });
    case Atomic::add_bf16x2: return word([=](uint32_t b) { return add_pair(b, x, round_bfloat, bfloat_value); });
    case Atomic::min_s32:
      return word([=](uint32_t b) { return static_cast<uint32_t>(std::min(static_cast<int32_t>(b), s)); });
    case Atomic::max_s32:
      return word([=](uint32_t b) { return static_cast<uint32_t>(std::max(static_cast<int32_t>(b), s)); });
    case Atomic::min_u32: return word([=](uint32_t b) { return std::min(b, x); });
    case Atomic::max_u32: return word([=](uint32_t b) { return std::max(b, x); });
    case Atomic::bit_and: return word([=](uint32_t b) { return b & x; });
    case Atomic::bit_or: return word([=](uint32_t b) { return b | x; });
    case Atomic::bit_xor: return word([=](uint32_t b) { return b ^ x; });
    case Atomic::inc_u32: return word([=](uint32_t b) { return b >= x ? 0 : b + 1; });
    case Atomic::dec_u32: return word([=](uint32_t b) { return b == 0 || b > x ? x : b - 1; });
    case Atomic::exchange: return word([=](uint32_t) { return x; });
    case Atomic::compare_exchange:
      return word([=](uint32_t b) { return b == static_cast<uint32_t>(compare) ? x : b; });
    case Atomic::add_u64: return update<uint64_t>(address, [=](uint64_t b) { return b + value; });
    case Atomic::max_u64: return update<uint64_t>(address, [=](uint64_t b) { return std::max(b, value); });
    case Atomic::exchange_u64: return update<uint64_t>(address, [=](uint64_t) { return value; });
    case Atomic::compare_exchange_u64:
      return update<uint64_t>(address, [=](uint64_t b) { return b == compare ? value : b; });
  }
  __builtin_unreachable();
}

// A thread that asks again and again for what another is to do. Another block may be long in coming; this one is not.
void yield() {
  Thread& t = *current;
  Worker& w = *t.worker;
  const uint64_t patience = w.launch->clusters == 1 ? 1u << 20 : 1u << 27;
  if (++w.sleeps > patience)
    report("deadlock: " + who(t) + " sleeps again and again, and nobody else goes on, " +
           where({{nullptr, 0}, reinterpret_cast<uintptr_t>(__builtin_return_address(0))}) + stuck(w));
  if (w.uses_hopper && w.random.next() >> 31) land_a_copy(w);  // who sleeps does not keep copies from landing
  w.current_warp = w.random.next() % w.launch->all_warps;
  wait_turn(t);
}

void trap(const char* what, Site site) { report(std::string(what) + " by " + who(*current) + " at " + where(PLACE)); }

int64_t clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

const char* launch_grid(dim3 grid, dim3 cluster, dim3 block, size_t shared_bytes, void (*invoke)(const void*),
                        const void* body, size_t body_bytes, const void* code) {
  if (current) return "a kernel cannot launch a grid in the emulation";
  try {
    thread_text = refusal(grid, cluster, block, shared_bytes, *limits_of(thread_config.architecture));
    if (!thread_text.empty()) return thread_text.c_str();
    Launch launch{};
    launch.config = thread_config;
    launch.grid = grid;
    launch.cluster = cluster;
    launch.block = block;
    launch.shared_bytes = shared_bytes;
    launch.invoke = invoke;
    launch.body = body;
    launch.body_bytes = body_bytes;
    launch.cluster_blocks = cluster.x * cluster.y * cluster.z;
    launch.clusters = uint64_t{grid.x} * grid.y * grid.z / launch.cluster_blocks;
    launch.block_threads = block.x * block.y * block.z;
    launch.block_warps = (launch.block_threads + 31) / 32;
    launch.all_threads = launch.cluster_blocks * launch.block_threads;
    launch.all_warps = launch.cluster_blocks * launch.block_warps;
    Random random;
    random.seed(~thread_config.seed);
    launch.first = random.next() % launch.clusters;
    do launch.stride = random.next() % launch.clusters + 1;
    while (std::__gcd(launch.stride, launch.clusters) != 1);
    Dl_info info;
    if (dladdr(code, &info)) launch.library_base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    if (launch.config.check) find_segments(launch);
    const uint64_t wanted = thread_config.threads > 0 ? static_cast<uint64_t>(thread_config.threads)
                                                      : std::max(1u, std::thread::hardware_concurrency());
    const uint64_t workers = std::min({wanted, launch.clusters, uint64_t{32768} / (2 * launch.all_threads)});
    const FaultHandler handler;
    std::vector<std::thread> threads;
    try {
      for (uint64_t i = 1; i < workers; ++i) threads.emplace_back([&launch] { run_blocks(launch); });
    } catch (const std::system_error&) {  // fewer will do
    }
    run_blocks(launch);
    for (std::thread& thread : threads) thread.join();
    if (!launch.failed) return nullptr;
    thread_text = launch.report;
    return thread_text.c_str();
  } catch (const std::exception& error) {
    thread_text = std::string("the emulation could not start: ") + error.what();
    return thread_text.c_str();
  }
}

}  // namespace emu

extern "C" void emu_fiber_start() {
  using namespace emu;
  Thread& t = *current;
  t.worker->launch->invoke(t.worker->launch->body);
  exit_thread(t);
}

extern "C" const char* emu_configure(const EmuConfig* config) {
  using namespace emu;
  if (!limits_of(config->architecture)) {
    thread_text = "architecture " + std::to_string(config->architecture) + ", not one of 80, 86, 89, 90, 100, 120";
    return thread_text.c_str();
  }
  if (config->threads < 0) return "threads: not negative";
  thread_config = *config;
  return nullptr;
}


// ---------------------------------------------------------------------------------------------------------------------
// What the compiler's instrumentation calls in place of its own runtimes.

#define EMU_PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define EMU_HOOKS(bytes)                                                                                 \
  extern "C" void __tsan_read##bytes(void* p) { emu::plain_access<false>(p, bytes, EMU_PC); }            \
  extern "C" void __tsan_write##bytes(void* p) { emu::plain_access<true>(p, bytes, EMU_PC); }            \
  extern "C" void __tsan_unaligned_read##bytes(void* p) { emu::plain_access<false>(p, bytes, EMU_PC); }  \
  extern "C" void __tsan_unaligned_write##bytes(void* p) { emu::plain_access<true>(p, bytes, EMU_PC); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)

extern "C" void __tsan_read_range(void* p, size_t bytes) {
  if (bytes) emu::plain_access<false>(p, static_cast<unsigned>(bytes), EMU_PC);
}
extern "C" void __tsan_write_range(void* p, size_t bytes) {
  if (bytes) emu::plain_access<true>(p, static_cast<unsigned>(bytes), EMU_PC);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// The guards of static locals in a launcher.
extern "C" uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

namespace {

// As -fsanitize=bounds and =alignment describe what they found.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct SourceType {
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  SourcePlace place;
  const SourceType *array, *index;
};
struct Misaligned {
  SourcePlace place;
  const SourceType* type;
  uint8_t log_alignment, kind;
};

[[noreturn]] void finding(const std::string& text, const SourcePlace& place, uintptr_t pc) {
  using namespace emu;
  std::string line = text;
  append(line, ", at %s:%u", short_path(place.file).c_str(), place.line);
  if (!current) {  // a launcher's own mistake, where no fiber can be left
    fprintf(stderr, "%s\n", line.c_str());
    abort();
  }
  report(line + ", by " + who(*current) + " at " + code(pc));
}

[[noreturn]] void out_of_bounds(const OutOfBounds& at, uintptr_t index, uintptr_t pc) {
  const unsigned bits = 1u << (at.index->info >> 1);
  auto value = static_cast<long long>(index);
  if (bits < 64 && (at.index->info & 1)) value = static_cast<long long>(index << (64 - bits)) >> (64 - bits);
  std::string text;
  emu::append(text, "out of bounds: index %lld of an array %s", value, at.array->name);
  finding(text, at.place, pc);
}

[[noreturn]] void misaligned(const Misaligned& at, uintptr_t pointer, uintptr_t pc) {
  std::string text;
  emu::append(text, "misaligned: %s at %p, not a multiple of %u", at.type->name, reinterpret_cast<void*>(pointer),
              1u << at.log_alignment);
  finding(text, at.place, pc);
}

}  // namespace

extern "C" void __ubsan_handle_out_of_bounds(void* data, uintptr_t index) {
  out_of_bounds(*static_cast<const OutOfBounds*>(data), index, EMU_PC);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(void* data, uintptr_t index) {
  out_of_bounds(*static_cast<const OutOfBounds*>(data), index, EMU_PC);
}
extern "C" void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t pointer) {
  misaligned(*static_cast<const Misaligned*>(data), pointer, EMU_PC);
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void* data, uintptr_t pointer) {
  misaligned(*static_cast<const Misaligned*>(data), pointer, EMU_PC);
}
