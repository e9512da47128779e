// The native allocator of farspan, as plain C: no C++ type and no CUDA header crosses this line.
//
// One farspan_allocator is one device. All calls on it may come from any thread; a mutex a device
// orders them. Sizes are bytes. A stream is the number of a cudaStream_t, 0 for the default one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FARSPAN_API __attribute__((visibility("default")))

enum { FARSPAN_ABI = 4 };

typedef struct farspan_allocator farspan_allocator;

// What a call returns; farspan_error() has the words.
enum farspan_status {
    FARSPAN_OK = 0,
    FARSPAN_OUT_OF_MEMORY = 1,
    FARSPAN_UNKNOWN = 3,  // a pointer that is not live here: never given out, or freed before
    FARSPAN_INVALID = 4,  // an argument out of range
    FARSPAN_BACKEND = 5,  // the backend failed, or is not there
    FARSPAN_BROKEN = 6    // farspan_check found an invariant that does not hold
};

enum farspan_backend { FARSPAN_NULL = 0, FARSPAN_POSIX = 1, FARSPAN_CUDA = 2 };

enum farspan_policy {
    FARSPAN_LAZY = 1,          // fresh chunks while under capacity; stitch when they are all out
    FARSPAN_HALF_STITCH = 2,   // S2 also stitches the two halves, as the paper does
    FARSPAN_STEAL = 4,         // idle chunks of other streams, ordered by an event
    FARSPAN_MERGE = 8,         // adjacent idle pBlocks with the same sBlocks become one again
    FARSPAN_SHUFFLE = 16,      // pBlocks of one chunk, drawn at random: for tests
    FARSPAN_QUARANTINE = 32,   // a freed block is reused only after the next free
    FARSPAN_DEFAULT_POLICY = FARSPAN_LAZY | FARSPAN_STEAL | FARSPAN_MERGE
};

typedef struct farspan_options {
    int32_t backend;
    int32_t device;
    uint64_t capacity;        // physical bytes at most; 0: all the device has
    uint64_t chunk;           // size of a physical chunk, a multiple of tail; 0: 2 MiB
    uint64_t tail;            // of a chunk at a block's end: a power of two; 0: 2 MiB, or chunk
    uint64_t small;           // smaller requests go to the splitting pool; at most, and 0: a chunk
    uint64_t fragment_limit;  // splits leave no piece below it where they can choose; 0: any
    uint64_t virtual_limit;   // address space of sBlocks and of holes in ranges; 0: 32 TiB
    uint64_t mapping_limit;   // mappings of the backend; 0: 30,000 for POSIX, else unlimited
    uint64_t policy;          // farspan_policy flags
    uint64_t peers;           // CUDA: bit d set: device d may access the memory too
    uint64_t replay_window;   // rows a replay looks ahead for its place; 0: 16
    uint64_t replay_misses;   // misses after which a replay gives up the iteration; 0: 64
    uint64_t seed;            // of FARSPAN_SHUFFLE
    const char* library;      // CUDA: the driver's library; NULL: libcuda.so.1
} farspan_options;

// Bytes are now, peaks since farspan_reset_peaks, everything else counts since the beginning.
typedef struct farspan_statistics {
    uint64_t requested, allocated, reserved;  // as asked; as given, rounded up; physical chunks
    uint64_t requested_peak, allocated_peak, reserved_peak;
    uint64_t held, pinned;  // freed, but an event is pending; free, but graphs may use it
    uint64_t mallocs, frees, small_mallocs;
    uint64_t s1_primitive, s1_stitched, s2, s3, s4, s5;  // states of BestFit; S5: out of memory
    uint64_t allocs, splits, stitches, stitch_frees, merges, steals, retries, out_of_memory;
    uint64_t pblocks, sblocks, virtual_bytes, mappings;  // now
    uint64_t reserves, range_frees, creates, destroys, maps, unmaps, accesses;  // backend calls
    uint64_t tail_creates, tail_destroys, tail_maps;  // those of them for tail chunks
    uint64_t event_records, event_queries, event_waits, event_syncs;
    uint64_t iterations, replay_hits, replay_misses, replay_overlaps, replay_resyncs,
        replay_give_ups;
} farspan_statistics;

enum farspan_event_kind { FARSPAN_MALLOC = 1, FARSPAN_FREE = 2, FARSPAN_MARK = 3 };

// A malloc, the free of the same id, or a mark (its number in size; an iteration begins: 0).
typedef struct farspan_event {
    int64_t kind;
    uint64_t id;
    uint64_t size;
    uint64_t stream;
} farspan_event;

// One malloc of a plan: the request as recorded and its place in the arena.
// address FARSPAN_UNPLANNED: the request is expected and goes to the stitching allocator.
#define FARSPAN_UNPLANNED UINT64_MAX
typedef struct farspan_row {
    uint64_t size;
    uint64_t stream;
    uint64_t address;
} farspan_row;

enum farspan_call {
    FARSPAN_CALL_RESERVE = 0,
    FARSPAN_CALL_CREATE = 1,
    FARSPAN_CALL_MAP = 2,
    FARSPAN_CALL_ACCESS = 3,
    FARSPAN_CALL_EVENT = 4
};

FARSPAN_API uint32_t farspan_abi(void);
// Words of the last failure on this thread.
FARSPAN_API const char* farspan_error(void);

FARSPAN_API void farspan_default_options(farspan_options* options);
FARSPAN_API int farspan_create(const farspan_options* options, farspan_allocator** made);
// Everything goes back to the backend, live pointers too.
FARSPAN_API void farspan_destroy(farspan_allocator* a);

// bytes 0 gives NULL, and NULL may be freed.
FARSPAN_API int farspan_malloc(farspan_allocator* a, uint64_t bytes, uint64_t stream, void** made);
FARSPAN_API int farspan_free(farspan_allocator* a, void* pointer);
// The memory is reused only when the work queued on the stream at its free is done.
// An unknown pointer is ignored.
FARSPAN_API int farspan_record_stream(farspan_allocator* a, void* pointer, uint64_t stream);
// Idle chunks go back to the backend (torch.cuda.empty_cache) until `keep` bytes are reserved.
FARSPAN_API int farspan_release(farspan_allocator* a, uint64_t keep);
FARSPAN_API int farspan_set_capacity(farspan_allocator* a, uint64_t capacity);

FARSPAN_API void farspan_get_statistics(farspan_allocator* a, farspan_statistics* statistics);
FARSPAN_API void farspan_reset_peaks(farspan_allocator* a);
// Every invariant, slowly, by a checker that uses none of the allocator's look-ups.
FARSPAN_API int farspan_check(farspan_allocator* a);

// Recording starts (1, forgetting the earlier events) or stops (0).
FARSPAN_API void farspan_record(farspan_allocator* a, int on);
FARSPAN_API void farspan_mark(farspan_allocator* a, uint64_t number);
// Copies up to n events from event `from` on; returns how many there were.
FARSPAN_API uint64_t farspan_read_events(farspan_allocator* a, uint64_t from, farspan_event* to,
                                         uint64_t n);

// Takes the arena from the capacity and follows the rows from the next iteration on; n 0: no plan.
FARSPAN_API int farspan_set_plan(farspan_allocator* a, const farspan_row* rows, uint64_t n,
                                 uint64_t arena);
FARSPAN_API void farspan_begin_iteration(farspan_allocator* a);

// Captured graphs. What a capture takes stays with the graphs of its pool, and serves later
// requests of their captures on the same stream. When as many graphs were released as captures
// began, it is anybody's. A capture that nobody announced keeps its memory for good.
typedef struct farspan_pool {
    uint64_t owner, number;  // owner UINT64_MAX: reserved
} farspan_pool;
FARSPAN_API int farspan_begin_pool(farspan_allocator* a, farspan_pool pool);
FARSPAN_API int farspan_end_pool(farspan_allocator* a, farspan_pool pool);
FARSPAN_API int farspan_release_pool(farspan_allocator* a, farspan_pool pool);

// For tests. The nth next call of a kind (1: the next) and `times - 1` more after it fail.
FARSPAN_API int farspan_fail_at(farspan_allocator* a, int call, uint64_t nth, uint64_t times);
// For tests, null and POSIX only: events stay pending while held; a stream captures or not.
FARSPAN_API int farspan_hold_events(farspan_allocator* a, int on);
FARSPAN_API int farspan_set_capturing(farspan_allocator* a, uint64_t stream, int on);

// Entry points of torch.cuda.memory.CUDAPluggableAllocator: one allocator a device, made at its
// first use. Out of memory calls the function of farspan_torch_set_oom, which must not return
// normally, or throws std::runtime_error("CUDA out of memory. ...").
enum farspan_mode { FARSPAN_MODE_RECORD = 0, FARSPAN_MODE_STITCH = 1, FARSPAN_MODE_REPLAY = 2 };
FARSPAN_API int farspan_torch_configure(const farspan_options* options, int mode);
// Before or after first use; every later allocator of that device follows the plan.
FARSPAN_API int farspan_torch_set_plan(int device, const farspan_row* rows, uint64_t n,
                                       uint64_t arena);
FARSPAN_API void farspan_torch_set_oom(void (*oom)(const char*));
FARSPAN_API int farspan_torch_allocator(int device, farspan_allocator** made);
FARSPAN_API void* farspan_torch_alloc(size_t size, int device, void* stream);
FARSPAN_API void farspan_torch_free(void* pointer, size_t size, int device, void* stream);
FARSPAN_API void farspan_torch_record_stream(void* pointer, void* stream);
FARSPAN_API void farspan_torch_reset(void);
// At most what farspan_torch_configure allows.
FARSPAN_API void farspan_torch_memory_fraction(double fraction, int device);
// set_begin_allocate_to_pool, set_end_allocate_to_pool_fn and set_release_pool. `filter` is the
// address of a std::function<bool(cudaStream_t)>, or NULL.
FARSPAN_API void farspan_torch_begin_pool(int device, farspan_pool pool, const void* filter);
FARSPAN_API void farspan_torch_end_pool(int device, farspan_pool pool);
FARSPAN_API void farspan_torch_release_pool(int device, farspan_pool pool);

#ifdef __cplusplus
}
#endif
