// A race detector for one emulated block: a clock for every thread, and for what it has on its way (as in FastTrack, one clock a word). An access must
// come after the accesses that it could disturb by barriers, mbarriers and waits, not by the emulator's order: one run stands for all of them.
#include "races.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
using Clock = std::vector<uint32_t>;
// Parts of a clock, `threads` wide each: what of a thread, of its matrix reads, its copies, its bulk copies is known to be over, and up to when its
// writes are published.
enum Part { OWN, MATRIX, COPY, BULK, PUBLIC, PARTS };
struct Mark { uint32_t actor, time; };
struct Cell { Mark write = {0, 0}; std::vector<Mark> reads; };
struct Object { Clock left, met; };

int threads;
const int* current;
const unsigned char* shared;
size_t size;
std::vector<Clock> clocks;
std::vector<uint32_t> matrix_group, copy_group, bulk_count;
std::vector<Cell> cells;
std::unordered_map<const void*, Object> objects;
long long counts[5], races;
std::string first;

void join(Clock& into, const Clock& from) {
  if (into.empty()) into.assign(PARTS * threads, 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}
void report(const char* what, size_t word, const Mark& other) {
  static const char* names[] = {"thread", "matrix instruction of thread", "copy of thread", "bulk copy of thread"};
  if (races++ == 0) {
    char text[200];
    snprintf(text, sizeof(text), "thread %d %s at byte %zu, unordered with %s %u", *current, what, 4 * word, names[other.actor / threads], other.actor % threads);
    first = text;
    if (getenv("Q27_RACES_END")) fprintf(stderr, "%s\n", text), _exit(86);
  }
}
void access(size_t word, RaceAccess kind) {
  static const char* names[] = {"reads", "writes", "lets a matrix instruction read", "lets a copy write", "lets a bulk copy write"};
  const uint32_t t = *current;
  Clock& clock = clocks[t];
  Cell& cell = cells[word];
  const auto before = [&](const Mark& mark) { return mark.time <= clock[mark.actor]; };
  if (cell.write.time && !before(cell.write)) report(names[kind], word, cell.write);
  if (kind == MATRIX_READ && cell.write.time && cell.write.actor < (uint32_t)threads && clock[PUBLIC * threads + cell.write.actor] < cell.write.time)
    report("lets a matrix instruction read what is not published", word, cell.write);
  if (kind == THREAD_READ || kind == MATRIX_READ) {
    const Mark mark = kind == THREAD_READ ? Mark{t, clock[t]} : Mark{MATRIX * threads + t, matrix_group[t]};
    for (Mark& read : cell.reads)
      if (read.actor == mark.actor) { read.time = mark.time; return; }
    cell.reads.push_back(mark);
    return;
  }
  for (const Mark& read : cell.reads)
    if (!before(read)) report(names[kind], word, read);
  cell.reads.clear();
  cell.write = kind == THREAD_WRITE ? Mark{t, clock[t]} : kind == COPY_WRITE ? Mark{COPY * threads + t, copy_group[t]} : Mark{BULK * threads + t, bulk_count[t]};
}
}  // namespace

extern "C" {
void race_begin(int count, const int* thread, const void* at, size_t bytes) {
  threads = count, current = thread, shared = static_cast<const unsigned char*>(at), size = bytes;
  clocks.assign(count, Clock(PARTS * count, 0));
  for (int i = 0; i < count; ++i) clocks[i][i] = 1;
  matrix_group.assign(count, 1), copy_group.assign(count, 1), bulk_count.assign(count, 1);
  cells.assign((bytes + 3) / 4, Cell{});
  objects.clear();
}
void race_access(const void* at, size_t bytes, RaceAccess kind) {
  const size_t offset = static_cast<const unsigned char*>(at) - shared;
  if (offset >= size || bytes == 0) return;
  ++counts[kind];
  for (size_t word = offset / 4; word <= std::min(offset + bytes, size) / 4 - ((offset + bytes) % 4 == 0); ++word) access(word, kind);
}
void race_event(RaceEvent event, const void* object, int pending) {
  const int t = *current;
  Clock& clock = clocks[t];
  if (event == LEFT) join(objects[object].left, clock), ++clock[t];
  else if (event == MET) objects[object].met = objects[object].left, objects[object].left.clear();
  else if (event == SEEN) join(clock, objects[object].met);
  else if (event == PUBLISHED) clock[PUBLIC * threads + t] = clock[t]++;
  else if (event == MATRIX_COMMITTED) ++matrix_group[t];
  else if (event == MATRIX_DONE) clock[MATRIX * threads + t] = std::max<int64_t>(clock[MATRIX * threads + t], (int64_t)matrix_group[t] - 1 - pending);
  else if (event == COPY_COMMITTED) ++copy_group[t];
  else if (event == COPY_DONE) clock[COPY * threads + t] = std::max<int64_t>(clock[COPY * threads + t], (int64_t)copy_group[t] - 1 - pending);
  else if (event == BULK_DONE) {
    Clock& left = objects[object].left;
    if (left.empty()) left.assign(PARTS * threads, 0);
    left[BULK * threads + t] = bulk_count[t]++;
  }
}
// counts: accesses by kind, then races; returns the first race in words.
const char* race_result(long long* out) {
  memcpy(out, counts, sizeof(counts)), out[5] = races;
  return first.c_str();
}
// The compiler's own calls for each access of the kernels.
#define READS(n) void __tsan_read##n(void* at) { race_access(at, n, THREAD_READ); } void __tsan_unaligned_read##n(void* at) { race_access(at, n, THREAD_READ); }
#define WRITES(n) void __tsan_write##n(void* at) { race_access(at, n, THREAD_WRITE); } void __tsan_unaligned_write##n(void* at) { race_access(at, n, THREAD_WRITE); }
READS(1) READS(2) READS(4) READS(8) READS(16) WRITES(1) WRITES(2) WRITES(4) WRITES(8) WRITES(16)
void __tsan_read_range(void* at, unsigned long bytes) { race_access(at, bytes, THREAD_READ); }
void __tsan_write_range(void* at, unsigned long bytes) { race_access(at, bytes, THREAD_WRITE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
