// What an emulated block tells of its shared memory, so that accesses which nothing orders are found (races.cpp); nothing where the sources are built
// without Q27_RACES. The names say who acts: a thread, its copies on their way, its matrix instructions on their way.
#pragma once
#include <cstddef>

enum RaceAccess { THREAD_READ, THREAD_WRITE, MATRIX_READ, COPY_WRITE, BULK_WRITE };
enum RaceEvent { LEFT, MET, SEEN, PUBLISHED, MATRIX_COMMITTED, MATRIX_DONE, COPY_COMMITTED, COPY_DONE, BULK_DONE };
#ifdef Q27_RACES
constexpr bool FINDS_RACES = true;
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))   // by the compiler's own calls: it is told of by hand, or none of the kernel's
extern "C" {
void race_begin(int threads, const int* current, const void* shared, size_t bytes);
void race_access(const void* at, size_t bytes, RaceAccess access);
// LEFT: what the thread did so far is left at an object for its next turn; MET: that turn is there; SEEN: the thread takes up what the last
// turn's threads left. PUBLISHED: its own writes are for matrix instructions too. ..._DONE: all but `pending` of its committed groups.
void race_event(RaceEvent event, const void* object, int pending);
}
#else
constexpr bool FINDS_RACES = false;
#define UNSEEN
inline void race_begin(int, const int*, const void*, size_t) {}
inline void race_access(const void*, size_t, RaceAccess) {}
inline void race_event(RaceEvent, const void*, int) {}
#endif
