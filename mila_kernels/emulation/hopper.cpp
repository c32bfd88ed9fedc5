// The instructions that sm_90 adds: mbarriers, bulk and tensor copies, wgmma, parts of a block, clusters. A part of
// cuda_host.cpp, which includes it within its namespace. What is found and not modelled stands at the top of hopper.h.

namespace {

constexpr uint32_t NAMED = 0x10000u;  // in Thread::barrier: not an mbarrier, a named barrier

enum class Needs { sm_80, sm_90, sm_90a };

// The block's state, made at the first use.
Hopper& use_hopper(const char* what, const Place& place, Needs needs = Needs::sm_90) {
  Worker& w = *current->worker;
  const int architecture = w.launch->config.architecture ? w.launch->config.architecture : 90;
  if ((needs != Needs::sm_80 && architecture < 90) || (needs == Needs::sm_90a && architecture != 90))
    report(std::string(what) + " by " + who(*current) + " on sm_" + std::to_string(architecture) +
           ", which has none, " + where(place));
  if (w.uses_hopper) return *w.hopper;
  if (!w.hopper) w.hopper = std::make_unique<Hopper>();
  Hopper& h = *w.hopper;
  const Launch& launch = *w.launch;
  const uint32_t count = launch.all_threads;
  h.barriers.clear();
  const size_t bytes = (launch.cluster_blocks - 1) * WINDOW_BYTES + launch.shared_bytes;  // of the cluster's windows
  h.barrier_at.assign(bytes / 8 + 1, 0);
  h.loads.clear();
  h.arrivals.clear();
  for (auto& block : h.named)
    for (NamedBarrier& b : block) b = {};
  h.cluster = {};
  for (Warpgroup& g : h.groups) g = {};
  h.heard[0] = h.heard[1] = h.heard[2] = nullptr;
  w.uses_hopper = true;
  if (current->checking) {
    h.reader_at.assign(bytes / 4 + 1, 0);
    h.readers.assign(1, {});
    h.free_reader = 0;
    for (auto& s : w.snapshots) {
      memset(s->clocks + 2 * count, 0, (count + MAX_WARPGROUPS) * sizeof(uint32_t));
      memset(s->fenced, 0, count * sizeof(uint32_t));
    }
    w.agents = 3 * count + MAX_WARPGROUPS;
  }
  return h;
}

// ---- clocks ---------------------------------------------------------------------------------------------------------

void drop(Worker& w, Snapshot*& s) {
  if (s && --s->references == 0) w.free_snapshots.push_back(s);
  s = nullptr;
}

// t arrives: who waits for this will know what t knows. Its time goes on, so that they know of nothing later.
void tell(Worker& w, Snapshot*& gathering, const Snapshot* base, Thread& t) {
  if (!gathering) {
    gathering = new_snapshot(w);
    gathering->references = 1;
    copy_clocks(w, gathering, base ? base : t.known);
  }
  add_clocks(w, gathering, t.known);
  add_own(w, gathering, t);
  t.clock = tick(w);
}

// t has waited, and knows what was gathered. Threads that knew the same share what they know now.
void hear(Worker& w, Thread& t, Snapshot* gathered) {
  Snapshot*(&last)[3] = w.hopper->heard;  // known before, gathered, known after
  if (last[0] != t.known || last[1] != gathered) {
    Snapshot* after = new_snapshot(w);
    copy_clocks(w, after, t.known);
    add_clocks(w, after, gathered);
    Snapshot* now[3] = {t.known, gathered, after};
    for (Snapshot* s : now) ++s->references;
    for (int i = 0; i < 3; ++i) drop(w, last[i]), last[i] = now[i];
  }
  know(w, t, last[2]);
}

bool given_to_async_proxy(const Thread& t, uint32_t epoch) {
  const uint32_t agent = epoch >> CLOCK_BITS, clock = epoch & MAX_CLOCK;
  if (agent >= t.worker->launch->all_threads) return true;  // not a thread's plain write
  return (agent == t.linear ? t.fenced : t.known->fenced[agent]) >= clock;
}

std::string made_at(const Mbarrier& b) {
  std::string text;
  append(text, "made at %s:%d", short_path(b.place.site.file).c_str(), b.place.site.line);
  return text;
}

std::string barrier_name(const Mbarrier& b) {
  std::string text;
  append(text, "the mbarrier at offset %u of shared memory", static_cast<uint32_t>(b.offset % WINDOW_BYTES));
  const auto rank = static_cast<uint32_t>(b.offset / WINDOW_BYTES);
  if (rank) append(text, " of block %u of the cluster", rank);
  return text;
}

[[noreturn]] __attribute__((noinline, cold)) void report_no_proxy_fence(Thread& t, const char* verb, uint32_t offset,
                                                                        unsigned bytes, uint32_t byte, uintptr_t pc) {
  Worker& w = *t.worker;
  const uint32_t agent = w.shadow->written[byte] >> CLOCK_BITS;
  report("async proxy: " + who(t) + " " + verb + " " + at_offset(bytes, offset) + " at " + code(pc) + "; " +
         who(w.threads[agent]) + " wrote there at " + library_code(w, w.shadow->written_place[byte]) +
         " and no fence.proxy.async by it is between");
}

[[noreturn]] __attribute__((noinline, cold)) void report_after_copy(Worker& w, uint32_t agent, uint32_t clock,
                                                                    const std::string& now, const std::string& then) {
  const uint32_t first = 3 * w.launch->all_threads + MAX_WARPGROUPS;
  if (agent == BARRIER_WORD || agent < first)
    report("mbarrier: " + now + ", where the mbarrier is that was made at " + then);
  const Mbarrier& b = w.hopper->barriers[agent - first];
  const std::string copy = "the bulk copy to there, issued at " + then + " and to complete on " + barrier_name(b);
  if (b.clock <= clock) report("in flight: " + now + " while " + copy + ", is in flight");
  report("race: " + now + "; " + copy + ", has landed, but the reader did not wait for that phase");
}

void add_async_reader(Hopper& h, uint32_t word, uint32_t epoch, uint32_t place) {
  for (uint32_t i = h.reader_at[word]; i; i = h.readers[i].next)
    if (h.readers[i].epoch >> CLOCK_BITS == epoch >> CLOCK_BITS) {
      h.readers[i].epoch = epoch;  // its times pass in order
      h.readers[i].place = place;
      return;
    }
  uint32_t i = h.free_reader;
  if (i) {
    h.free_reader = h.readers[i].next;
  } else {
    i = static_cast<uint32_t>(h.readers.size());
    h.readers.emplace_back();
  }
  h.readers[i] = {epoch, place, h.reader_at[word]};
  h.reader_at[word] = i;
}

// Before t's write to a word: whoever reads it outside the threads must be done.
void check_async_readers(Thread& t, const char* verb, uint32_t offset, unsigned bytes, uint32_t word, bool whole,
                         uintptr_t pc) {
  Worker& w = *t.worker;
  Hopper& h = *w.hopper;
  uint32_t last = 0;
  for (uint32_t i = h.reader_at[word]; i; last = i, i = h.readers[i].next) {
    const AsyncReader& r = h.readers[i];
    if (comes_after(t, r.epoch)) continue;
    const uint32_t agent = r.epoch >> CLOCK_BITS, count = w.launch->all_threads;
    std::string reader;
    if (agent < 3 * count)
      reader = "a bulk store by " + who(w.threads[agent - 2 * count]);
    else
      append(reader, "a wgmma by warpgroup %u", agent - 3 * count);
    report("in flight: " + who(t) + " " + verb + " " + at_offset(bytes, offset) + " at " + code(pc) + "; " + reader +
           ", issued at " + library_code(w, r.place) + ", reads there, and its end is not known to the writer");
  }
  if (whole && last) {
    h.readers[last].next = h.free_reader;
    h.free_reader = h.reader_at[word];
    h.reader_at[word] = 0;
  }
}

// Bytes of shared memory that something outside the threads reads for t: written, known, given to the async proxy.
// `seen`: the epoch that the last call proved, to be kept between calls for the same t.
void async_read(Thread& t, const char* verb, uint32_t offset, unsigned bytes, uint32_t& seen, const Place& place) {
  const Shadow& shadow = *t.worker->shadow;
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    const uint32_t epoch = shadow.written[i];
    if (epoch == seen) continue;
    if (!epoch) report_unwritten(t, offset, bytes, place.pc);
    if (!comes_after(t, epoch)) report_after_write(t, verb, offset, bytes, i, place.pc);
    if (!given_to_async_proxy(t, epoch)) report_no_proxy_fence(t, verb, offset, bytes, i, place.pc);
    seen = epoch;
  }
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// The index of the barrier at an address that an instruction was given.
uint32_t find_barrier(Thread& t, uint32_t address, const char* what, const Place& place, bool of_any_block = false) {
  Hopper& h = use_hopper(what, place);
  const uint32_t offset = shared_offset(t, address, 8, 8, what, place, of_any_block);
  const uint32_t index = h.barrier_at[offset / 8];
  if (!index || !h.barriers[index - 1].live) {
    std::string text(what);
    append(text, " by %s: at offset %u of shared memory no mbarrier was made, ", who(t).c_str(),
           static_cast<uint32_t>(offset % WINDOW_BYTES));
    report(text + where(place));
  }
  const Mbarrier& b = h.barriers[index - 1];
  if (t.checking && !comes_after(t, b.made))
    report(std::string("race: ") + what + " by " + who(t) + " on " + barrier_name(b) + ", " + where(place) + "; " +
           who(t.worker->threads[b.maker]) + " made it at " + where(b.place) + " and no barrier is between");
  return index - 1;
}

std::string phase_of(const Mbarrier& b) {
  std::string text = barrier_name(b);
  append(text, ", in phase %llu (parity %llu): %u of %u arrivals and %lld bytes are pending",
         static_cast<unsigned long long>(b.phase), static_cast<unsigned long long>(b.phase & 1), b.pending, b.expected,
         static_cast<long long>(b.bytes));
  return text;
}

[[noreturn]] void report_short(const Mbarrier& b, const Load& load, int64_t missing) {
  std::string text = "expect_tx: ";
  append(text, "%lld bytes more than were expected come to ", static_cast<long long>(missing));
  report(text + phase_of(b) + "; a copy of " + std::to_string(load.box.bytes) + " bytes was issued at " +
         where(load.box.place) + " by " + who(current->worker->threads[load.box.thread]) + "; " + made_at(b));
}

void end_phase(Worker& w, uint32_t index, const Load* last) {
  Hopper& h = *w.hopper;
  Mbarrier& b = h.barriers[index];
  if (b.pending) return;
  for (const Load& load : h.loads)
    if (load.barrier == index && load.phase == b.phase && b.bytes <= 0)
      report_short(b, load, static_cast<int64_t>(load.box.bytes) - b.bytes);
  if (b.bytes < 0) {
    if (last) report_short(b, *last, -b.bytes);
    report("expect_tx: more bytes than were expected have come to " + phase_of(b) + "; " + made_at(b));
  }
  if (b.bytes > 0) return;
  if (b.gathering) {
    drop(w, b.ended);
    b.ended = b.gathering;
    b.gathering = nullptr;
    b.ended->clocks[b.agent] = b.clock;
  }
  ++b.phase;
  ++b.clock;
  b.pending = b.expected;
  w.sleeps = 0;
  for (uint32_t waiter : b.waiters) set_ready(w, *w.threads[waiter].warp, 1u << w.threads[waiter].lane);
  b.waiters.clear();
}

void arrive(Thread& t, uint32_t index, uint32_t count, const Place& place) {
  Worker& w = *t.worker;
  Mbarrier& b = w.hopper->barriers[index];
  if (count > b.pending)
    report("mbarrier: " + who(t) + " arrives where none is expected, at " + phase_of(b) + ", " + where(place));
  if (t.checking) tell(w, b.gathering, b.ended, t);
  b.pending -= count;
  end_phase(w, index, nullptr);
}

std::string barrier_state(const Thread& t) {
  if (t.waits != Kind::mbarrier && t.waits != Kind::named_barrier && t.waits != Kind::cluster_barrier) return {};
  const Hopper& h = *t.worker->hopper;
  std::string text;
  if (t.waits == Kind::cluster_barrier) {
    append(text, ": %u of %u threads of the cluster have arrived", h.cluster.arrived, t.worker->launch->all_threads);
    return text;
  }
  if (t.waits == Kind::named_barrier) {
    const NamedBarrier& b = h.named[t.rank][t.barrier & 15];
    append(text, ", barrier %u: %u of %u threads have come", t.barrier & 15, b.arrived, b.wanted);
    return text;
  }
  const Mbarrier& b = h.barriers[t.barrier - 1];
  append(text, ", for parity %u of ", t.parity);
  return text + phase_of(b) + ", " + made_at(b);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

uint32_t swizzled(uint32_t offset, uint32_t swizzle) { return offset ^ (offset >> 7 & ((1u << swizzle) - 1)) << 4; }

// f(piece's offset in shared memory, its place in global memory, the bytes of it that exist: from, to), 16 bytes each.
template <typename F>
void each_piece(const Box& box, F f) {
  if (!box.tensor) {
    for (uint32_t i = 0; i < box.bytes; i += 16) f(box.offset + i, box.global + i, 0, 16);
    return;
  }
  const CUtensorMap& map = box.map;
  const uint32_t row_bytes = map.box[0] * map.element_bytes, rows = box.bytes / row_bytes;
  for (uint32_t row = 0; row < rows; ++row) {
    const char* global = map.base;
    bool inside = true;
    for (uint32_t dimension = 1, rest = row; dimension < map.rank; ++dimension) {
      const int64_t at = int64_t{box.at[dimension]} + rest % map.box[dimension];
      rest /= map.box[dimension];
      inside &= at >= 0 && at < static_cast<int64_t>(map.sizes[dimension]);
      global += at * static_cast<int64_t>(map.strides[dimension - 1]);
    }
    const int64_t first = int64_t{box.at[0]} * map.element_bytes;  // of the row, within the tensor's
    int64_t end = static_cast<int64_t>(map.sizes[0]) * map.element_bytes;
    if (box.store) end = (end + 15) / 16 * 16;  // as a GPU does: it has no smaller piece
    for (uint32_t i = 0; i < row_bytes; i += 16) {
      const int64_t from = std::clamp<int64_t>(-(first + i), 0, 16), to = std::clamp<int64_t>(end - (first + i), 0, 16);
      const bool any = inside && from < to;
      f(swizzled(box.offset + row * row_bytes + i, map.swizzle), const_cast<char*>(global) + first + i,
        any ? static_cast<int>(from) : 0, any ? static_cast<int>(to) : 0);
    }
  }
}

void check_global(Thread& t, const Box& box, bool write) {
  if (in_window(*t.worker, box.global)) return;  // from another block's shared memory
  t.place = box.place;  // for the report, should there be no memory
  each_piece(box, [&](uint32_t, char* global, int from, int to) {
    if (from == to) return;
    if (t.checking)
      other_access(t, reinterpret_cast<uintptr_t>(global) + static_cast<unsigned>(from),
                   static_cast<unsigned>(to - from), write, box.place.pc);
    static_cast<void>(*static_cast<const volatile char*>(global + from));
  });
}

Box plain_box(Thread& t, uint32_t shared, const void* global, uint32_t bytes, const char* what, const Place& place,
              bool of_any_block = false) {
  Box box = {};
  if (bytes % 16 || !bytes)
    report(std::string(what) + " by " + who(t) + " of " + std::to_string(bytes) +
           " bytes, not a positive multiple of 16, " + where(place));
  require_global(t, global, 16, what, place);
  box.global = static_cast<char*>(const_cast<void*>(global));
  box.bytes = bytes;
  box.offset = shared_offset(t, shared, bytes, 16, what, place, of_any_block);
  box.place = place;
  box.thread = t.linear;
  return box;
}

Box tensor_box(Thread& t, int rank, uint32_t shared, const CUtensorMap* map, const int* at, const char* what,
               const Place& place, bool of_any_block = false) {
  Box box = {};
  if (reinterpret_cast<uintptr_t>(map) % 64 || in_window(*t.worker, map) || map->magic != TENSOR_MAP)
    report(std::string(what) + " by " + who(t) + ": its map is not a CUtensorMap of make_tensor_map, " + where(place));
  if (map->rank != rank)
    report(std::string(what) + " by " + who(t) + " with " + std::to_string(rank) + " coordinates for a tensor of " +
           std::to_string(map->rank) + " dimensions, " + where(place));
  box.tensor = true;
  box.map = *map;
  box.bytes = map->element_bytes;
  for (int i = 0; i < rank; ++i) box.at[i] = at[i], box.bytes *= map->box[i];
  if (at[0] * static_cast<int64_t>(map->element_bytes) % 16)
    report(std::string(what) + " by " + who(t) + " from coordinate " + std::to_string(at[0]) + " of elements of " +
           std::to_string(map->element_bytes) + " bytes, which is no multiple of 16 bytes: a GPU calls that an illegal " +
           "instruction, " + where(place));
  const uint32_t span = 16u << map->swizzle;
  if (map->swizzle && map->box[0] * map->element_bytes != span)
    report(std::string(what) + " by " + who(t) + ": the emulation knows a swizzle of " + std::to_string(span) +
           " bytes only with boxes as wide, not " + std::to_string(map->box[0] * map->element_bytes) + ", " +
           where(place));
  box.offset = shared_offset(t, shared, box.bytes, map->swizzle ? 8 * span : 128, what, place, of_any_block);
  box.place = place;
  box.thread = t.linear;
  return box;
}

void land(Worker& w, const Load& load) {
  each_piece(load.box, [&](uint32_t offset, const char* global, int from, int to) {
    char piece[16] = {};
    memcpy(piece + from, global + from, static_cast<size_t>(to - from));
    memcpy(w.window + offset, piece, 16);
  });
  w.sleeps = 0;
  w.hopper->barriers[load.barrier].bytes -= load.box.bytes;
  end_phase(w, load.barrier, &load);
}

// The thread's cp.async copies up to the arrival land, then it arrives.
void land_arrival(Worker& w, const CopyArrival& a) {
  Thread& t = w.threads[a.thread];
  const uint32_t gone = t.copies_ever - static_cast<uint32_t>(t.copies.size());
  for (uint32_t i = gone; i < a.copies; ++i) make_copy(t, t.copies[i - gone]);
  Mbarrier& b = w.hopper->barriers[a.barrier];
  if (!b.pending)
    report("mbarrier: an arrival after cp.async, issued by " + who(t) + " at " + where(a.place) +
           ", comes where none is expected, at " + phase_of(b));
  if (t.checking) {
    if (!b.gathering) {
      b.gathering = new_snapshot(w);
      b.gathering->references = 1;
      if (b.ended) {
        copy_clocks(w, b.gathering, b.ended);
      } else {
        memset(b.gathering->clocks, 0, w.agents * sizeof(uint32_t));
        memset(b.gathering->fenced, 0, w.launch->all_threads * sizeof(uint32_t));
      }
    }
    uint32_t& copies = b.gathering->clocks[w.launch->all_threads + a.thread];
    copies = std::max(copies, a.clock);
  }
  w.sleeps = 0;
  --b.pending;
  end_phase(w, a.barrier, nullptr);
}

// One of the copies on their way, any; false: there is none.
bool land_a_copy(Worker& w) {
  std::vector<Load>& loads = w.hopper->loads;
  std::vector<CopyArrival>& arrivals = w.hopper->arrivals;
  if (!arrivals.empty() && (loads.empty() || w.random.next() >> 31)) {
    std::swap(arrivals[w.random.next() % arrivals.size()], arrivals.back());
    const CopyArrival arrival = arrivals.back();
    arrivals.pop_back();
    land_arrival(w, arrival);
    return true;
  }
  if (loads.empty()) return false;
  std::swap(loads[w.random.next() % loads.size()], loads.back());
  const Load load = std::move(loads.back());
  loads.pop_back();
  land(w, load);
  return true;
}

void start_load(Thread& t, const Box& box, uint32_t barrier, const char* what) {
  Worker& w = *t.worker;
  const uint32_t index = find_barrier(t, barrier, what, box.place, true);
  const Mbarrier& b = w.hopper->barriers[index];
  if (b.offset / WINDOW_BYTES != box.offset / WINDOW_BYTES)
    report(std::string(what) + " by " + who(t) + ": its destination and its mbarrier are in different blocks, " +
           where(box.place));
  if (!b.fenced)
    report(std::string(what) + " by " + who(t) + " on " + barrier_name(b) + ", which was made at " + where(b.place) +
           " without fence.mbarrier_init or fence.proxy.async after, " + where(box.place));
  check_global(t, box, false);
  if (t.checking)
    shared_write(t, box.offset, box.bytes, epoch_of(b.agent, b.clock), "overwrites by a bulk copy", 0, box.place.pc,
                 true);
  memset(w.window + box.offset, 0xff, box.bytes);
  w.hopper->loads.push_back({box, index, b.phase});
  if (w.random.next() >> 30) return;
  const Load load = w.hopper->loads.back();
  w.hopper->loads.pop_back();
  land(w, load);
}

void start_store(Thread& t, const Box& box) {
  Worker& w = *t.worker;
  check_global(t, box, true);
  const uint32_t group = t.store_groups + 1;
  if (t.checking) {
    const uint32_t epoch = epoch_of(2 * w.launch->all_threads + t.linear, group), place = place_of(t, box.place.pc);
    uint32_t seen = UINT32_MAX;
    async_read(t, "reads by a bulk store", box.offset, box.bytes, seen, box.place);
    for (uint32_t word = box.offset / 4; word < (box.offset + box.bytes) / 4; ++word)
      add_async_reader(*w.hopper, word, epoch, place);
  }
  t.stores.push_back({box, group});
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

struct Descriptor {
  uint32_t start, leading, stride, swizzle;  // swizzle: as in tensor maps
};

const char* descriptor_problem(uint64_t bits, bool mn_major, Descriptor& d) {
  d.start = static_cast<uint32_t>(bits & 0x3fff) << 4;
  d.leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
  d.stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
  const auto layout = static_cast<uint32_t>(bits >> 62);
  d.swizzle = layout ? 4 - layout : 0;
  if (bits & ~0xc0003fff3fff3fffu) return "bits that the emulation does not know (base offset?)";
  if (mn_major && d.swizzle != 3) return "an MN-major layout without 128-byte swizzle, unknown to the emulation";
  if (!d.swizzle) return nullptr;
  const uint32_t span = 16u << d.swizzle;
  if (d.stride % (8 * span)) return "a stride that is not a multiple of the swizzle's repeat (256, 512, 1024 bytes)";
  if (mn_major && d.leading % (8 * span)) return "a leading offset that is not a multiple of 1024";
  if (d.start % (8 * span) > (mn_major ? 0 : span - 32))
    return "a start that is not at the swizzle's repeat (256, 512, 1024 bytes), nor 32, 64, 96 bytes further in K";
  return nullptr;
}

// f(line, piece, offset) for the operand's pieces of 16 bytes: lines are rows of M or N and pieces 16 bytes of K, or,
// if MN-major, lines are k and pieces 8 elements of M or N.
template <typename F>
void each_operand_piece(const Descriptor& d, bool mn_major, uint32_t extent, uint32_t own_bytes, F f) {
  const uint32_t lines = mn_major ? 16 : extent, pieces = mn_major ? extent / 8 : 2;
  for (uint32_t line = 0; line < lines; ++line)
    for (uint32_t piece = 0; piece < pieces; ++piece) {
      uint32_t address = d.start + line / 8 * d.stride;
      if (!d.swizzle)
        address += piece * d.leading + line % 8 * 16;
      else if (mn_major)
        address += piece / 8 * d.leading + line % 8 * 128 + piece % 8 * 16;
      else
        address += line % 8 * (16u << d.swizzle) + piece * 16;
      f(line, piece, own_bytes + swizzled(address & 0x3ffffu, d.swizzle) - SHARED_BASE);
    }
}

void check_operand(Worker& w, uint32_t group, const char* name, uint64_t bits, bool mn_major, uint32_t extent,
                   uint32_t epoch, const Place& place) {
  Descriptor d;
  const char* problem = descriptor_problem(bits, mn_major, d);
  const std::string what = std::string("wgmma by warpgroup ") + std::to_string(group) + ", operand " + name;
  if (problem) {
    std::string text = what;
    append(text, ": descriptor 0x%016llx has %s, ", static_cast<unsigned long long>(bits), problem);
    report(text + where(place));
  }
  const size_t size = w.launch->shared_bytes;
  Thread* threads = &w.threads[group * WARPGROUP_LANES];
  std::vector<std::pair<uint32_t, uint32_t>> epochs;  // distinct, and a piece that has it
  const uint32_t site = place_of(*current, place.pc);
  each_operand_piece(d, mn_major, extent, threads->own_bytes, [&](uint32_t, uint32_t, uint32_t offset) {
    const uint32_t own = offset - threads->own_bytes;
    if (own >= size || size - own < 16) {
      std::string text = "out of bounds: " + what;
      append(text, " reads 16 bytes at offset %d of shared memory, which has %zu, ", static_cast<int>(own), size);
      report(text + where(place));
    }
    if (!current->checking) return;
    for (uint32_t i = offset; i < offset + 16; ++i) {
      const uint32_t written = w.shadow->written[i];
      if (epochs.empty() || epochs.back().first != written) {
        bool found = false;
        for (const auto& known : epochs) found |= known.first == written;
        if (!found) epochs.emplace_back(written, i);
      }
    }
    for (uint32_t word = offset / 4; word < offset / 4 + 4; ++word) add_async_reader(*w.hopper, word, epoch, site);
  });
  const std::string verb = std::string("reads by wgmma, operand ") + name + ",";
  for (const auto& [written, byte] : epochs)
    for (uint32_t i = 0; i < WARPGROUP_LANES; ++i) {
      uint32_t seen = UINT32_MAX;
      async_read(threads[i], verb.c_str(), byte & ~15u, 16, seen, place);
    }
}

bool of_bytes(Wgmma type) { return type == Wgmma::e4m3_k32 || type == Wgmma::e4m3_e5m2_k32; }

void unpack_piece(Wgmma type, const char* from, float* to, uint32_t stride) {
  for (uint32_t i = 0; i < 16; ++i) {
    if (type == Wgmma::e4m3_e5m2_k32) {  // E5M2 is the upper half of FP16
      to[i * stride] = half_value(static_cast<uint16_t>(static_cast<uint8_t>(from[i]) << 8));
      continue;
    }
    if (type == Wgmma::e4m3_k32) {
      to[i * stride] = e4m3_value(static_cast<uint8_t>(from[i]));
      continue;
    }
    if (i == 8) break;
    uint16_t bits;
    memcpy(&bits, from + 2 * i, 2);
    to[i * stride] = type == Wgmma::bf16_k16 ? bfloat_value(bits) : half_value(bits);
  }
}

using Float8u = float __attribute__((vector_size(32), aligned(4)));

// d[64][n] += a[64][depth] b[depth][n].
EMU_CLONES void multiply_group(float* d, const float* a, const float* b, uint32_t n, uint32_t depth) {
  for (uint32_t column = 0; column < n; column += 8)
    for (uint32_t row = 0; row < 64; row += 8) {
      Float8u sums[8];
      for (uint32_t i = 0; i < 8; ++i) sums[i] = *reinterpret_cast<const Float8u*>(d + (row + i) * n + column);
      for (uint32_t k = 0; k < depth; ++k) {
        const Float8u b_row = *reinterpret_cast<const Float8u*>(b + k * n + column);
        for (uint32_t i = 0; i < 8; ++i) sums[i] += a[(row + i) * depth + k] * b_row;
      }
      for (uint32_t i = 0; i < 8; ++i) *reinterpret_cast<Float8u*>(d + (row + i) * n + column) = sums[i];
    }
}

void multiply_product(Worker& w, const Product& p) {
  const uint32_t depth = of_bytes(p.type) ? 32 : 16, per_piece = depth / 2, n = p.n;
  static thread_local std::vector<float> a_storage, b_storage;
  std::vector<float>&a = a_storage, &b = b_storage;
  a.resize(64 * depth);
  b.resize(depth * n);
  Descriptor d;
  descriptor_problem(p.b, p.b_mn, d);
  each_operand_piece(d, p.b_mn, n, p.own_bytes, [&](uint32_t line, uint32_t piece, uint32_t offset) {
    if (p.b_mn)
      unpack_piece(p.type, w.window + offset, &b[line * n + piece * 8], 1);
    else
      unpack_piece(p.type, w.window + offset, &b[piece * per_piece * n + line], n);
  });
  if (p.from_registers) {
    const uint32_t packed = per_piece / 4;  // elements a register
    for (uint32_t i = 0; i < WARPGROUP_LANES; ++i)
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t row = i / 32 * 16 + i % 32 / 4 + 8 * (j & 1), column = packed * (i % 4 + 4 * (j >> 1));
        const uint32_t word = p.a_registers[i * 4 + j];
        unpack(of_bytes(p.type)            ? Mma::e4m3_16832
               : p.type == Wgmma::bf16_k16 ? Mma::bf16_16816
                                           : Mma::f16_16816,
               word, &a[row * depth + column]);
      }
  } else {
    descriptor_problem(p.a, p.a_mn, d);
    each_operand_piece(d, p.a_mn, 64, p.own_bytes, [&](uint32_t line, uint32_t piece, uint32_t offset) {
      if (p.a_mn)
        unpack_piece(p.type, w.window + offset, &a[piece * 8 * depth + line], depth);
      else
        unpack_piece(p.type, w.window + offset, &a[line * depth + piece * per_piece], 1);
    });
  }
  std::vector<float>& sums = p.into->sums;
  if (!p.keeps) std::fill(sums.begin(), sums.end(), 0.0f);
  multiply_group(sums.data(), a.data(), b.data(), n, depth);
}

// f(register, element of sums) for lane i of a warpgroup.
template <typename F>
void each_accumulator(uint32_t i, uint32_t n, F f) {
  for (uint32_t j = 0; j < n / 2; ++j)
    f(j, (i / 32 * 16 + i % 32 / 4 + 8 * (j % 4 / 2)) * n + j / 4 * 8 + i % 4 * 2 + j % 2);
}

Accumulators* accumulators_of(Warpgroup& g, uint32_t group, uint32_t n, bool keeps, const Place& place) {
  const std::string what = "wgmma by warpgroup " + std::to_string(group);
  for (auto& known : g.accumulators) {
    if (known->registers[0] != g.operands[0].d) continue;
    if (known->taken)
      report("divergence within a warpgroup: only some warps have waited for the products in the registers of " + what +
             ", " + where(place));
    if (known->n != n)
      report(what + ": of another shape than the product in flight in the same registers, " + where(place));
    return known.get();
  }
  g.accumulators.push_back(std::make_unique<Accumulators>());
  Accumulators& mine = *g.accumulators.back();
  mine.n = n;
  mine.taken = 0;
  mine.sums.resize(64 * n);
  for (uint32_t i = 0; i < WARPGROUP_LANES; ++i) {
    mine.registers[i] = g.operands[i].d;
    each_accumulator(i, n, [&](uint32_t j, uint32_t element) {
      if (keeps) mine.sums[element] = mine.registers[i][j];
      mine.registers[i][j] = bit_cast<float>(0xffffffffu);
    });
  }
  return &mine;
}

// The warps of a warpgroup have executed the same of these instructions since its last product, as compute-sanitizer's
// synccheck asks, too.
void check_calls(Warpgroup& g, uint32_t group) {
  for (uint32_t i = 1; i < 4; ++i) {
    const std::vector<Place>&a = g.calls[0], &b = g.calls[i];
    const size_t both = std::min(a.size(), b.size());
    size_t same = 0;
    while (same < both && same_site(a[same].site, b[same].site)) ++same;
    if (same == a.size() && same == b.size()) continue;
    const auto next = [&](const std::vector<Place>& calls) {
      return same < calls.size() ? "at " + where(calls[same]) : std::string("with nothing");
    };
    report("divergence within a warpgroup: before its next wgmma, or its end, warp 0 of warpgroup " +
           std::to_string(group) + " goes on " + next(a) + ", and warp " + std::to_string(i) + " " + next(b) +
           "; fence, commit_group, wait_group and setmaxnreg are the whole warpgroup's");
  }
  for (auto& calls : g.calls) calls.clear();
}

// All lanes have come.
void start_product(Worker& w, uint32_t group, Wgmma type, uint32_t n, bool a_mn, bool b_mn, const Place& place) {
  Warpgroup& g = w.hopper->groups[group];
  const WgmmaOperand& first = g.operands[0];
  const std::string what = "wgmma by warpgroup " + std::to_string(group);
  check_calls(g, group);
  for (const WgmmaOperand& o : g.operands)
    if (o.a_descriptor != first.a_descriptor || o.b_descriptor != first.b_descriptor ||
        (o.scale_d != 0) != (first.scale_d != 0) || !o.a != !first.a)
      report("divergence within a warpgroup: " + what + ": its threads bring different descriptors or scale-d, " +
             where(place));
  for (int i = 0; i < 4; ++i) {
    if (!g.fenced[i])
      report(what + ": no wgmma.fence by its warp " + std::to_string(i) + " since its registers were last its own, " +
             where(place));
    if (g.committed[i] != g.committed[0])
      report("divergence within a warpgroup: " + what + ": its warps have committed different groups, " + where(place));
  }
  Product p{};
  p.type = type;
  p.n = n;
  p.from_registers = first.a != nullptr;
  p.a_mn = a_mn;
  p.b_mn = b_mn;
  p.keeps = first.scale_d != 0;
  p.a = first.a_descriptor;
  p.b = first.b_descriptor;
  p.group = g.committed[0] + 1;
  p.place = place;
  p.own_bytes = w.threads[group * WARPGROUP_LANES].own_bytes;
  const uint32_t epoch = epoch_of(3 * w.launch->all_threads + group, p.group);
  if (!p.from_registers) check_operand(w, group, "A", p.a, a_mn, 64, epoch, place);
  check_operand(w, group, "B", p.b, b_mn, n, epoch, place);
  p.into = accumulators_of(g, group, n, p.keeps, place);
  p.into->last_group = p.group;
  if (p.from_registers) {
    p.a_registers.resize(4 * WARPGROUP_LANES);
    for (uint32_t i = 0; i < WARPGROUP_LANES; ++i) memcpy(&p.a_registers[4 * i], g.operands[i].a, 16);
  }
  if (current->checking)
    for (uint32_t i = 0; i < WARPGROUP_LANES; ++i) {
      std::vector<Guard>& guards = w.threads[group * WARPGROUP_LANES + i].guards;
      auto guard = [&](const void* from, size_t bytes, bool reads) {
        const auto low = reinterpret_cast<uintptr_t>(from);
        for (Guard& known : guards)
          if (known.low == low && known.reads == reads) {
            known.group = p.group;
            return;
          }
        guards.push_back({low, low + bytes, reads, p.group, place});
      };
      guard(g.operands[i].d, n / 2 * sizeof(float), false);
      if (p.from_registers) guard(g.operands[i].a, 16, true);
    }
  g.products.push_back(std::move(p));
}

// A warp has waited until all groups up to `over` are done.
void end_products(Worker& w, uint32_t group, uint32_t warp, uint32_t over) {
  Warpgroup& g = w.hopper->groups[group];
  for (; g.products_done < g.products.size() && g.products[g.products_done].group <= over; ++g.products_done)
    multiply_product(w, g.products[g.products_done]);
  if (g.products_done == g.products.size()) g.products.clear(), g.products_done = 0;
  for (auto& a : g.accumulators) {
    if (a->taken >> warp & 1u || a->last_group > over) continue;
    for (uint32_t i = warp * 32; i < warp * 32 + 32; ++i)
      each_accumulator(i, a->n, [&](uint32_t j, uint32_t element) { a->registers[i][j] = a->sums[element]; });
    a->taken |= 1u << warp;
    g.fenced[warp] = false;
  }
  std::erase_if(g.accumulators, [](const auto& a) { return a->taken == 15; });
  for (uint32_t i = 0; i < 32; ++i) {
    Thread& t = w.threads[group * WARPGROUP_LANES + warp * 32 + i];
    t.products_over = over;
    std::erase_if(t.guards, [over](const Guard& guard) { return guard.group <= over; });
  }
}

void registers_accessed(Thread& t, uintptr_t address, unsigned bytes, bool write, uintptr_t pc) {
  for (const Guard& guard : t.guards)
    if (address < guard.high && address + bytes > guard.low && (write || !guard.reads))
      report("in flight: " + who(t) + (write ? " writes" : " reads") + " registers at " + code(pc) +
             " that a wgmma has, issued at " + where(guard.place) + "; wgmma.wait_group must come first");
}

bool in_warpgroup(const Thread& t) {
  const uint32_t threads = t.worker->launch->block_threads, first = t.rank * threads;
  return (t.linear - first) / WARPGROUP_LANES < threads / WARPGROUP_LANES && first % WARPGROUP_LANES == 0;
}

// Runs act(warpgroup, index of the warp in it) once all lanes of the warp have come.
template <typename Act>
void together(Kind kind, uint32_t shape, const Place& place, Act act) {
  use_hopper(kind_name(kind), place, Needs::sm_90a);
  Thread& t = *current;
  const uint32_t group = t.linear / WARPGROUP_LANES;
  if (!in_warpgroup(t))
    report(std::string(kind_name(kind)) + " by " + who(t) + ", which is in no whole warpgroup, " + where(place));
  meet(kind, 0xffffffffu, shape, place, nullptr,
       [&](Pending&) {
         Warpgroup& g = t.worker->hopper->groups[group];
         g.calls[t.linear / 32 % 4].push_back(place);
         act(g, t.linear / 32 % 4);
       });
}

void check_exit(Thread& t) {
  Worker& w = *t.worker;
  Hopper& h = *w.hopper;
  if (!t.stores.empty())
    report("in flight: " + who(t) + " exits, and did not wait until its bulk store was read, issued at " +
           where(t.stores.front().box.place));
  const uint32_t group = t.linear / WARPGROUP_LANES;
  for (const auto& a : h.groups[group].accumulators)
    if (!(a->taken >> t.linear / 32 % 4 & 1u))
      report("in flight: " + who(t) + " exits, and did not wait for its warpgroup's wgmma, issued at " +
             where(h.groups[group].products.empty() ? t.place : h.groups[group].products.front().place));
  if (w.block_alive[t.rank] > 1) return;
  const uint32_t groups = w.launch->block_threads / WARPGROUP_LANES;
  for (uint32_t i = t.rank * groups; i < (t.rank + 1) * groups; ++i) check_calls(h.groups[i], i);
  for (const Load& load : h.loads)
    if (load.box.offset / WINDOW_BYTES == t.rank)
      report("in flight: the block's last thread, " + who(t) +
             ", exits before a copy to its shared memory has landed, issued at " + where(load.box.place));
}

}  // namespace

void mbarrier_init(uint32_t barrier, uint32_t count, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  Hopper& h = use_hopper("mbarrier.init", place);
  const uint32_t offset = shared_offset(t, barrier, 8, 8, "mbarrier.init", place);
  if (!count || count > (1u << 20) - 1)
    report("mbarrier.init by " + who(t) + " for " + std::to_string(count) + " arrivals, not 1 to 2^20 - 1, " +
           where(place));
  uint16_t& at = h.barrier_at[offset / 8];
  if (at && h.barriers[at - 1].live)
    report("mbarrier.init by " + who(t) + ": " + barrier_name(h.barriers[at - 1]) + " was made before, at " +
           where(h.barriers[at - 1].place) + ", " + where(place));
  if (t.checking) {
    shared_write(t, offset, 8, epoch_of(t.linear, t.clock), "makes an mbarrier of", 0, place.pc);
    for (uint32_t i = offset; i < offset + 8; ++i) w.shadow->written[i] = epoch_of(BARRIER_WORD, 1);
  }
  if (!at) {
    const uint32_t agent = 3 * w.launch->all_threads + MAX_WARPGROUPS + static_cast<uint32_t>(h.barriers.size());
    if (agent >= BARRIER_WORD)
      report("mbarrier.init by " + who(t) + ": more mbarriers than the emulation has, " + where(place));
    h.barriers.emplace_back();
    at = static_cast<uint16_t>(h.barriers.size());
    h.barriers.back().agent = agent;
    h.barriers.back().clock = 1;
    if (t.checking) {
      for (auto& s : w.snapshots) s->clocks[agent] = 0;
      w.agents = agent + 1;
    }
  }
  Mbarrier& b = h.barriers[at - 1];
  b.offset = offset;
  b.expected = b.pending = count;
  b.bytes = 0;
  b.phase = 0;
  b.live = true;
  b.fenced = false;
  b.maker = t.linear;
  b.made = epoch_of(t.linear, t.clock);
  b.place = place;
}

void mbarrier_inval(uint32_t barrier, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  const uint32_t index = find_barrier(t, barrier, "mbarrier.inval", place);
  Hopper& h = *t.worker->hopper;
  Mbarrier& b = h.barriers[index];
  for (const Load& load : h.loads)
    if (load.barrier == index)
      report("in flight: mbarrier.inval by " + who(t) + " while a copy is to complete on " + barrier_name(b) +
             ", issued at " + where(load.box.place) + ", " + where(place));
  for (const CopyArrival& arrival : h.arrivals)
    if (arrival.barrier == index)
      report("in flight: mbarrier.inval by " + who(t) + " before an arrival after cp.async at " + barrier_name(b) +
             ", issued at " + where(arrival.place) + ", " + where(place));
  if (!b.waiters.empty())
    report("mbarrier.inval by " + who(t) + " while others wait at " + barrier_name(b) + ", " + where(place));
  b.live = false;
  if (t.checking)
    for (uint32_t i = b.offset; i < b.offset + 8; ++i) {
      t.worker->shadow->written[i] = epoch_of(t.linear, t.clock);
      t.worker->shadow->written_place[i] = place_of(t, place.pc);
    }
}

void mbarrier_arrive(uint32_t barrier, uint32_t count, Site site) {
  const Place place = PLACE;
  arrive(*current, find_barrier(*current, barrier, "mbarrier.arrive", place), count, place);
}

void mbarrier_arrive_cluster(uint32_t barrier, Site site) {
  const Place place = PLACE;
  arrive(*current, find_barrier(*current, barrier, "mbarrier.arrive", place, true), 1, place);
}

void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes, bool arrives, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  const uint32_t index = find_barrier(t, barrier, "mbarrier.expect_tx", place);
  Mbarrier& b = t.worker->hopper->barriers[index];
  b.bytes += bytes;
  if (b.bytes > (1 << 20) - 1)
    report("mbarrier.expect_tx by " + who(t) + ": more than 2^20 - 1 bytes are pending at " + phase_of(b) + ", " +
           where(place));
  if (arrives) arrive(t, index, 1, place);
}

void mbarrier_arrive_after_copies(uint32_t barrier, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  const uint32_t index = find_barrier(t, barrier, "cp.async.mbarrier.arrive", place);
  t.worker->hopper->arrivals.push_back({t.linear, t.copies_ever, t.copies_issued, index, place});
}

void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  const uint32_t index = find_barrier(t, barrier, "mbarrier.try_wait", place);
  Hopper& h = *w.hopper;
  if (parity > 1)
    report("mbarrier.try_wait by " + who(t) + " for parity " + std::to_string(parity) + ", not 0 or 1, " +
           where(place));
  t.barrier = index + 1;
  t.parity = parity;
  while ((h.barriers[index].phase & 1) == parity) {
    h.barriers[index].waiters.push_back(t.linear);
    wait(t, Kind::mbarrier, place);
  }
  t.barrier = 0;
  if (t.checking && h.barriers[index].ended) hear(w, t, h.barriers[index].ended);
}

bool mbarrier_test_wait(uint32_t barrier, uint32_t parity, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  const uint32_t index = find_barrier(t, barrier, "mbarrier.test_wait", place);
  if ((w.hopper->barriers[index].phase & 1) == parity) {
    if (w.random.next() >> 31) land_a_copy(w);
    yield();
    return false;
  }
  if (t.checking && w.hopper->barriers[index].ended) hear(w, t, w.hopper->barriers[index].ended);
  return true;
}

void fence_mbarrier_init(Site site) {
  Hopper& h = use_hopper("fence.mbarrier_init", PLACE);
  for (Mbarrier& b : h.barriers)
    if (b.maker == current->linear) b.fenced = true;
}

void fence_proxy_async(Site site) {
  Hopper& h = use_hopper("fence.proxy.async", PLACE);
  Thread& t = *current;
  for (Mbarrier& b : h.barriers)
    if (b.maker == t.linear) b.fenced = true;
  if (!t.checking) return;
  t.fenced = t.clock;
  t.clock = tick(*t.worker);
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, Site site) {
  const Place place = PLACE;
  use_hopper("cp.async.bulk", place);
  start_load(*current, plain_box(*current, destination, source, bytes, "cp.async.bulk", place, true), barrier,
             "cp.async.bulk");
}

// Shared memory of one block to that of another: lands like a load, and reads its source until then.
void bulk_shared(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier, Site site) {
  const Place place = PLACE;
  const char* what = "cp.async.bulk";
  Thread& t = *current;
  Worker& w = *t.worker;
  use_hopper(what, place);
  if (bytes % 16 || !bytes)
    report(std::string(what) + " by " + who(t) + " of " + std::to_string(bytes) +
           " bytes, not a positive multiple of 16, " + where(place));
  Box box = {};
  box.place = place;
  box.thread = t.linear;
  box.bytes = bytes;
  box.offset = shared_offset(t, destination, bytes, 16, what, place, true);
  const uint32_t from = shared_offset(t, source, bytes, 16, what, place);
  box.global = w.window + from;
  if (t.checking) {
    const uint32_t index = find_barrier(t, barrier, what, place, true);
    const Mbarrier& b = w.hopper->barriers[index];
    uint32_t seen = UINT32_MAX;
    async_read(t, "reads by a bulk copy", from, bytes, seen, place);
    for (uint32_t word = from / 4; word < (from + bytes) / 4; ++word)
      add_async_reader(*w.hopper, word, epoch_of(b.agent, b.clock), place_of(t, place.pc));
  }
  start_load(t, box, barrier, what);
}

// The same box to the same place of several blocks; each one's mbarrier at the given one's place counts its bytes.
void tensor_load_multicast(int rank, uint32_t destination, const CUtensorMap* map, const int* at, uint32_t barrier,
                           uint32_t blocks, Site site) {
  const Place place = PLACE;
  const char* what = "cp.async.bulk.tensor.multicast";
  Thread& t = *current;
  use_hopper(what, place);
  if (!blocks || blocks >> t.worker->launch->cluster_blocks) {
    std::string text = std::string(what) + " by " + who(t);
    append(text, " to the blocks 0x%x of a cluster of %u, ", blocks, t.worker->launch->cluster_blocks);
    report(text + where(place));
  }
  each_lane(blocks, [&](uint32_t block) {
    const uint32_t there = static_cast<uint32_t>(block * WINDOW_BYTES) - t.own_bytes;
    start_load(t, tensor_box(t, rank, destination + there, map, at, what, place, true), barrier + there, what);
  });
}

uint32_t mapa(uint32_t address, uint32_t block, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  use_hopper("mapa", place);
  const uint32_t own = shared_offset(t, address, 1, 1, "mapa", place) - t.own_bytes;
  if (block >= t.worker->launch->cluster_blocks)
    report("mapa by " + who(t) + " to block " + std::to_string(block) + " of a cluster of " +
           std::to_string(t.worker->launch->cluster_blocks) + ", " + where(place));
  return SHARED_BASE + static_cast<uint32_t>(block * WINDOW_BYTES) + own;
}

uint32_t cluster_rank() { return current->rank; }
uint32_t cluster_blocks() { return current->worker->launch->cluster_blocks; }

// A plain access by a shared address of any block.
void* cluster_pointer(uint32_t address, unsigned bytes, bool write, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  const char* what = write ? "st.shared::cluster" : "ld.shared::cluster";
  use_hopper(what, place);
  const uint32_t offset = shared_offset(t, address, bytes, bytes, what, place, true);
  if (t.checking && write) shared_write(t, offset, bytes, epoch_of(t.linear, t.clock), "writes", 0, place.pc);
  if (t.checking && !write) shared_read(t, offset, bytes, place.pc);
  return t.window + offset;
}

// Each thread arrives once and waits once a turn. What came before the arrivals is known after the wait.
void cluster_arrive(bool release, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  ClusterBarrier& b = use_hopper("barrier.cluster.arrive", place).cluster;
  if (t.cluster_turn % 2)
    report("divergence: " + who(t) + " arrives at barrier.cluster twice without a wait between, " + where(place));
  ++t.cluster_turn;
  if (t.checking && release) tell(w, b.gathering, nullptr, t);
  if (++b.arrived < w.launch->all_threads) return;
  b.arrived = 0;
  ++b.turns;
  drop(w, b.ended);
  std::swap(b.ended, b.gathering);
  w.sleeps = 0;
  for (uint32_t waiter : b.waiters) set_ready(w, *w.threads[waiter].warp, 1u << w.threads[waiter].lane);
  b.waiters.clear();
}

void cluster_wait(Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  ClusterBarrier& b = use_hopper("barrier.cluster.wait", place).cluster;
  if (t.cluster_turn % 2 == 0)
    report("divergence: " + who(t) + " waits at barrier.cluster without having arrived, " + where(place));
  const uint32_t turn = ++t.cluster_turn / 2;
  while (b.turns < turn) {
    b.waiters.push_back(t.linear);
    wait(t, Kind::cluster_barrier, place);
  }
  if (t.checking && b.ended) hear(w, t, b.ended);
}

void bulk_store(void* destination, uint32_t source, uint32_t bytes, Site site) {
  const Place place = PLACE;
  use_hopper("cp.async.bulk", place);
  start_store(*current, plain_box(*current, source, destination, bytes, "cp.async.bulk", place));
}

void tensor_load(int rank, uint32_t destination, const CUtensorMap* map, const int* at, uint32_t barrier, Site site) {
  const Place place = PLACE;
  const char* what = "cp.async.bulk.tensor";
  use_hopper(what, place);
  start_load(*current, tensor_box(*current, rank, destination, map, at, what, place, true), barrier, what);
}

void tensor_store(int rank, const CUtensorMap* map, uint32_t source, const int* at, Site site) {
  const Place place = PLACE;
  const char* what = "cp.async.bulk.tensor";
  use_hopper(what, place);
  for (int i = 0; i < rank; ++i)
    if (at[i] < 0)
      report(std::string(what) + " by " + who(*current) + " stores from coordinate " + std::to_string(at[i]) +
             " of dimension " + std::to_string(i) + ", which is negative: a GPU calls that an illegal instruction, " +
             where(place));
  Box box = tensor_box(*current, rank, source, map, at, what, place);
  box.store = true;
  start_store(*current, box);
}

void bulk_commit(Site site) {
  use_hopper("cp.async.bulk.commit_group", PLACE);
  ++current->store_groups;
}

void bulk_wait(unsigned in_flight, Site site) {
  use_hopper("cp.async.bulk.wait_group", PLACE);
  Thread& t = *current;
  if (t.store_groups <= in_flight) return;
  t.stores_over = t.store_groups - in_flight;
  for (const Store& store : t.stores)
    if (store.group <= t.stores_over)
      each_piece(store.box, [&](uint32_t offset, char* global, int from, int to) {
        memcpy(global + from, t.window + offset + from, static_cast<size_t>(to - from));
      });
  std::erase_if(t.stores, [&](const Store& store) { return store.group <= t.stores_over; });
}

void wgmma_fence(Site site) {
  together(Kind::wgmma_fence, 0, PLACE, [](Warpgroup& g, uint32_t warp) { g.fenced[warp] = true; });
}

void wgmma_commit(Site site) {
  together(Kind::wgmma_commit, 0, PLACE, [](Warpgroup& g, uint32_t warp) { ++g.committed[warp]; });
}

void wgmma_wait(unsigned in_flight, Site site) {
  together(Kind::wgmma_wait, in_flight, PLACE, [in_flight](Warpgroup& g, uint32_t warp) {
    if (g.committed[warp] > in_flight)
      end_products(*current->worker, current->linear / WARPGROUP_LANES, warp, g.committed[warp] - in_flight);
  });
}

void wgmma(Wgmma type, int n, float* d, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor, bool a_mn,
           bool b_mn, int scale_d, Site site) {
  const Place place = PLACE;
  Thread& t = *current;
  Worker& w = *t.worker;
  Hopper& h = use_hopper("wgmma", place, Needs::sm_90a);
  const uint32_t group = t.linear / WARPGROUP_LANES, first = group * WARPGROUP_LANES;
  if (!in_warpgroup(t))
    report("wgmma by " + who(t) + ", which is in no whole warpgroup, " + where(place));
  Warpgroup& g = h.groups[group];
  const uint32_t shape = static_cast<uint32_t>(type) | static_cast<uint32_t>(n) << 2 | uint32_t{a != nullptr} << 12 |
                         uint32_t{a_mn} << 13 | uint32_t{b_mn} << 14;
  if (!g.arrived) {
    g.shape = shape;
    g.place = place;
    g.first = t.linear;
  } else if (g.shape != shape || !same_site(g.place.site, site)) {
    report("divergence within a warpgroup: " + who(t) + " is at wgmma " + where(place) + " while " +
           waiting(w.threads[g.first]));
  }
  g.operands[t.linear - first] = {d, a, a_descriptor, b_descriptor, scale_d};
  if (++g.arrived < WARPGROUP_LANES) {
    wait(t, Kind::wgmma, place);
    return;
  }
  g.arrived = 0;
  start_product(w, group, type, static_cast<uint32_t>(n), a_mn, b_mn, place);
  w.sleeps = 0;
  for (uint32_t i = first; i < first + WARPGROUP_LANES; i += 32)
    set_ready(w, *w.threads[i].warp, w.threads[i].warp == t.warp ? ~(1u << t.lane) : 0xffffffffu);
  if (w.random.next() >> 30) wait_turn(t);
}

void named_barrier(int id, int threads, bool waits, Site site) {
  const Place place = PLACE;
  const char* what = waits ? "bar.sync" : "bar.arrive";
  Thread& t = *current;
  Worker& w = *t.worker;
  Hopper& h = use_hopper(what, place, Needs::sm_80);
  const auto count = static_cast<uint32_t>(threads);
  if (id < 1 || id > 15 || threads < 32 || count % 32 || count > w.launch->block_threads)
    report(std::string(what) + " by " + who(t) + " with id " + std::to_string(id) + " for " + std::to_string(threads) +
           " threads; ids are 1 to 15, whole warps of the block, " + where(place));
  NamedBarrier& b = h.named[t.rank][id];
  if (!b.arrived) {
    b.wanted = count;
    b.place = place;
    b.first = t.linear;
  } else if (b.wanted != count) {
    report("divergence: " + who(t) + " is at " + what + " " + where(place) + ", barrier " + std::to_string(id) +
           " for " + std::to_string(count) + " threads, while " + who(w.threads[b.first]) + " came at " +
           where(b.place) + " for " + std::to_string(b.wanted));
  }
  if (t.checking) tell(w, b.gathering, nullptr, t);
  if (++b.arrived < b.wanted) {
    if (!waits) return;
    b.waiters.push_back(t.linear);
    t.barrier = NAMED | static_cast<uint32_t>(id);
    wait(t, Kind::named_barrier, place);
    t.barrier = 0;
    return;
  }
  b.arrived = 0;
  w.sleeps = 0;
  for (uint32_t waiter : b.waiters) {
    Thread& other = w.threads[waiter];
    if (t.checking) hear(w, other, b.gathering);
    set_ready(w, *other.warp, 1u << other.lane);
  }
  b.waiters.clear();
  if (t.checking && waits) hear(w, t, b.gathering);
  drop(w, b.gathering);
}

void setmaxnreg(int registers, bool more, Site site) {
  const Place place = PLACE;
  together(Kind::setmaxnreg, static_cast<uint32_t>(registers * 2 + more), place, [&](Warpgroup& g, uint32_t) {
    const Worker& w = *current->worker;
    const Hopper& h = *w.hopper;
    const int threads = static_cast<int>(w.launch->block_threads), lanes = static_cast<int>(WARPGROUP_LANES);
    const int groups = threads / lanes, first = static_cast<int>(current->rank) * groups;
    // What a kernel with setmaxnreg starts with; afterwards what it said last.
    const int before = g.registers ? g.registers : std::min(65536 / threads / 8 * 8, 255);
    if (more ? registers < before : registers > before)
      report(std::string("setmaxnreg.") + (more ? "inc" : "dec") + " by " + who(*current) + " from " +
             std::to_string(before) + " registers to " + std::to_string(registers) + ", " + where(place));
    g.registers = registers;
    int sum = 0;
    for (int i = 0; i < groups; ++i) {
      if (!h.groups[first + i].registers) return;
      sum += h.groups[first + i].registers;
    }
    const int most = 65536 / threads / 8 * 8 * groups;
    if (sum > most)
      report("setmaxnreg: the warpgroups want " + std::to_string(sum) + " registers a thread together; a block of " +
             std::to_string(threads) + " threads has at most " + std::to_string(most) + ", " + where(place));
  });
}

bool elect(unsigned mask, Site site) {
  bool mine = false;
  const Place place = PLACE;
  use_hopper("elect.sync", place);
  meet(Kind::elect, mask, 0, place, &mine, [](Pending& p) {
    // Any lane may be it, but always the same.
    Random random;
    random.seed(current->worker->launch->config.seed ^ p.mask);
    uint32_t turn = random.next() % static_cast<uint32_t>(__builtin_popcount(p.mask));
    each_lane(p.mask, [&](uint32_t lane) { *static_cast<bool*>(p.operands[lane]) = turn-- == 0; });
  });
  return mine;
}

void stmatrix(int count, bool transposed, const uint32_t* d, uint32_t row, Site site) {
  struct Operand {
    const uint32_t* d;
    uint32_t row;
  } mine{d, row};
  const Place place = PLACE;
  use_hopper("stmatrix", place);
  meet(Kind::stmatrix, 0xffffffffu, static_cast<uint32_t>(count * 2 + transposed), place, &mine, [&](Pending& p) {
    Worker& w = *current->worker;
    Thread* lanes = &w.threads[current->warp->index * 32];
    uint32_t rows[32];
    for (int i = 0; i < 8 * count; ++i)
      rows[i] = shared_offset(lanes[i], static_cast<Operand*>(p.operands[i])->row, 16, 16, "stmatrix", place);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < count; ++i)
        for (int half = 0; half < 2; ++half) {
          const int r = lane / 4, c = 2 * (lane % 4) + half;
          const uint32_t offset = transposed ? rows[8 * i + c] + 2 * static_cast<uint32_t>(r)
                                             : rows[8 * i + r] + 2 * static_cast<uint32_t>(c);
          const auto value = static_cast<uint16_t>(static_cast<Operand*>(p.operands[lane])->d[i] >> 16 * half);
          Thread& t = lanes[lane];
          if (t.checking) shared_write(t, offset, 2, epoch_of(t.linear, t.clock), "writes", 0, place.pc);
          memcpy(w.window + offset, &value, 2);
        }
  });
}
