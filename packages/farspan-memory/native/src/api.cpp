// The C face: arguments checked, exceptions turned into a status and words.
#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>

#include "allocator.h"
#include "made.h"

namespace farspan {
namespace {

thread_local std::string words;

constexpr uint64_t TAIL = 2 << 20;  // the granularity of devices, GMLake's chunk

farspan_options filled(const farspan_options& given) {
    farspan_options o = given;
    if (o.chunk == 0) o.chunk = TAIL;
    if (o.tail == 0) o.tail = o.chunk % TAIL ? o.chunk : TAIL;
    if (o.small == 0) o.small = o.chunk;
    if (o.virtual_limit == 0) o.virtual_limit = uint64_t{32} << 40;
    if (o.replay_window == 0) o.replay_window = 16;
    if (o.replay_misses == 0) o.replay_misses = 64;
    return o;
}

void validate(const farspan_options& o) {
    const auto refuse = [](const char* text) { throw Refusal{FARSPAN_INVALID, text}; };
    if (o.chunk % 4096 || o.chunk > uint64_t{1} << 40) refuse("chunk: a multiple of 4096 bytes");
    if (o.tail % 4096 || o.chunk % o.tail) {
        refuse("tail: a multiple of 4096 bytes that divides the chunk");
    }
    if (o.tail & (o.tail - 1)) {
        refuse(o.tail == o.chunk ? "chunk: a power of two, or a multiple of 2 MiB, whose blocks "
                                   "end in chunks of that"
                               : "tail: a power of two, at which addresses are aligned");
    }
    if (o.small > o.chunk) refuse("small: at most a chunk");
    if (o.policy > 63) refuse("policy: an unknown switch");
    if (o.device < 0 || o.device > 63) refuse("device: expected 0 to 63");
    if (o.backend < FARSPAN_NULL || o.backend > FARSPAN_CUDA) refuse("backend: unknown");
}

std::unique_ptr<Backend> backend_of(const farspan_options& o) {
    try {
        if (o.backend == FARSPAN_CUDA) return cuda_backend(o);
        return o.backend == FARSPAN_POSIX ? posix_backend(o) : null_backend(o);
    } catch (const std::runtime_error& error) {
        throw Refusal{FARSPAN_BACKEND, error.what()};
    }
}

}  // namespace

void verify(const farspan_options& given) {
    const farspan_options o = filled(given);
    validate(o);
    try {
        if (o.backend == FARSPAN_CUDA) cuda_chunks(o);
    } catch (const std::runtime_error& error) {
        throw Refusal{FARSPAN_INVALID, error.what()};
    }
}

std::unique_ptr<Allocator> make(const farspan_options& given) {
    farspan_options o = filled(given);
    validate(o);
    auto backend = backend_of(o);
    o.library = nullptr;  // the caller's, and loaded: an allocator keeps no pointer to it
    if (o.capacity == 0) o.capacity = backend->total();
    return std::make_unique<Allocator>(std::move(backend), o);
}

int told(int status, std::string text) {
    words = std::move(text);
    return status;
}

int caught() {
    try {
        throw;
    } catch (Refusal& refusal) {
        return told(refusal.status, std::move(refusal.words));
    } catch (const std::bad_alloc&) {
        return told(FARSPAN_BACKEND, "the process has no main memory left");
    } catch (const std::exception& error) {
        return told(FARSPAN_BACKEND, error.what());
    }
}

}  // namespace farspan

using farspan::Allocator;

// The C type has no members: a handle is the Allocator.
static Allocator& of(farspan_allocator* a) { return *reinterpret_cast<Allocator*>(a); }

template <typename Work>
static int guarded(Work work) {
    try {
        work();
        return FARSPAN_OK;
    } catch (...) {
        return farspan::caught();
    }
}

static uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint32_t farspan_abi(void) { return FARSPAN_ABI; }
const char* farspan_error(void) { return farspan::words.c_str(); }

void farspan_default_options(farspan_options* options) {
    *options = {};
    options->policy = FARSPAN_DEFAULT_POLICY;
    *options = farspan::filled(*options);
}

int farspan_create(const farspan_options* options, farspan_allocator** made) {
    *made = nullptr;
    return guarded([&] {
        *made = reinterpret_cast<farspan_allocator*>(farspan::make(*options).release());
    });
}

void farspan_destroy(farspan_allocator* a) { delete reinterpret_cast<Allocator*>(a); }

int farspan_malloc(farspan_allocator* a, uint64_t bytes, uint64_t stream, void** made) {
    *made = nullptr;
    return guarded([&] { *made = reinterpret_cast<void*>(of(a).malloc(bytes, stream)); });
}

int farspan_free(farspan_allocator* a, void* pointer) {
    return guarded([&] { of(a).free(number(pointer)); });
}

int farspan_record_stream(farspan_allocator* a, void* pointer, uint64_t stream) {
    return guarded([&] { of(a).record_stream(number(pointer), stream); });
}

int farspan_release(farspan_allocator* a, uint64_t keep) {
    return guarded([&] { of(a).release(keep); });
}

int farspan_set_capacity(farspan_allocator* a, uint64_t capacity) {
    return guarded([&] { of(a).set_capacity(capacity); });
}

void farspan_get_statistics(farspan_allocator* a, farspan_statistics* statistics) {
    *statistics = of(a).statistics();
}

void farspan_reset_peaks(farspan_allocator* a) { of(a).reset_peaks(); }

int farspan_check(farspan_allocator* a) {
    return guarded([&] { of(a).check(); });
}

void farspan_record(farspan_allocator* a, int on) { of(a).record(on != 0); }
void farspan_mark(farspan_allocator* a, uint64_t at) { of(a).mark(at); }

uint64_t farspan_read_events(farspan_allocator* a, uint64_t from, farspan_event* to, uint64_t n) {
    return of(a).read_events(from, to, n);
}

int farspan_set_plan(farspan_allocator* a, const farspan_row* rows, uint64_t n, uint64_t arena) {
    return guarded([&] { of(a).set_plan(rows, n, arena); });
}

void farspan_begin_iteration(farspan_allocator* a) { of(a).begin_iteration(); }

int farspan_begin_pool(farspan_allocator* a, farspan_pool pool) {
    return guarded([&] { of(a).begin_pool({pool.owner, pool.number}, {}); });
}

int farspan_end_pool(farspan_allocator* a, farspan_pool pool) {
    return guarded([&] { of(a).end_pool({pool.owner, pool.number}); });
}

int farspan_release_pool(farspan_allocator* a, farspan_pool pool) {
    return guarded([&] { of(a).release_pool({pool.owner, pool.number}); });
}

int farspan_fail_at(farspan_allocator* a, int call, uint64_t nth, uint64_t times) {
    return guarded([&] { of(a).fail_at(call, nth, times); });
}

int farspan_hold_events(farspan_allocator* a, int on) {
    return guarded([&] { of(a).hold_events(on != 0); });
}

int farspan_set_capturing(farspan_allocator* a, uint64_t stream, int on) {
    return guarded([&] { of(a).set_capturing(stream, on != 0); });
}
