// Entry points of torch.cuda.memory.CUDAPluggableAllocator: a table of allocators by device.
//
// torch does not look at a null pointer: out of memory must be an exception.
#include <array>
#include <atomic>
#include <functional>
#include <stdexcept>

#include "made.h"

namespace farspan {
namespace {

constexpr int DEVICES = 64;

struct Plan {
    std::vector<farspan_row> rows;
    uint64_t arena = 0;
};

// Invariant: an entry of `allocators` is set once, under the mutex, and never destroyed: the driver
// may be gone before this process ends.
struct Table {
    std::mutex mutex;
    bool configured = false, used = false;
    farspan_options options{};
    std::string library;  // that options.library points to
    int mode = FARSPAN_MODE_STITCH;
    std::array<Plan, DEVICES> plans;
    std::array<std::atomic<Allocator*>, DEVICES> allocators{};
    std::atomic<void (*)(const char*)> oom{nullptr};
};

Table& table() {
    static Table* const made = new Table;
    return *made;
}

// The device's allocator, made now if need be. Throws Refusal.
Allocator& at(int device) {
    if (device < 0 || device >= DEVICES) throw Refusal{FARSPAN_INVALID, "device: 0 to 63"};
    Table& t = table();
    if (Allocator* found = t.allocators[device].load(std::memory_order_acquire)) return *found;
    const std::lock_guard<std::mutex> lock(t.mutex);
    if (Allocator* found = t.allocators[device].load()) return *found;
    if (!t.configured) {
        throw Refusal{FARSPAN_INVALID, "farspan_torch_configure was not called"};
    }
    farspan_options options = t.options;
    options.device = device;
    std::unique_ptr<Allocator> made = make(options);
    if (t.mode == FARSPAN_MODE_RECORD) made->record(true);
    const Plan& plan = t.plans[device];
    if (t.mode == FARSPAN_MODE_REPLAY && !plan.rows.empty()) {
        made->set_plan(plan.rows.data(), plan.rows.size(), plan.arena);
    }
    t.used = true;
    t.allocators[device].store(made.get(), std::memory_order_release);
    return *made.release();
}

[[noreturn]] void raise(const std::string& words) {
    if (auto oom = table().oom.load()) oom(words.c_str());
    throw std::runtime_error(words);
}

template <typename Work>
int guarded(Work work) {
    try {
        work();
        return FARSPAN_OK;
    } catch (...) {
        return caught();
    }
}

}  // namespace
}  // namespace farspan

using farspan::Refusal;
using farspan::table;

int farspan_torch_configure(const farspan_options* options, int mode) {
    return farspan::guarded([&] {
        const std::lock_guard<std::mutex> lock(table().mutex);
        if (table().used) throw Refusal{FARSPAN_INVALID, "an allocator is in use already"};
        if (mode < FARSPAN_MODE_RECORD || mode > FARSPAN_MODE_REPLAY) {
            throw Refusal{FARSPAN_INVALID, "mode: expected record, stitch or replay"};
        }
        farspan::verify(*options);
        // The caller's words may be gone at the first use of a device.
        table().library = options->library ? options->library : "";
        table().options = *options;
        table().options.library = options->library ? table().library.c_str() : nullptr;
        table().mode = mode;
        table().configured = true;
    });
}

int farspan_torch_set_plan(int device, const farspan_row* rows, uint64_t n, uint64_t arena) {
    return farspan::guarded([&] {
        if (device < 0 || device >= farspan::DEVICES) {
            throw Refusal{FARSPAN_INVALID, "device: 0 to 63"};
        }
        const std::lock_guard<std::mutex> lock(table().mutex);
        if (farspan::Allocator* found = table().allocators[device].load()) {
            found->set_plan(rows, n, arena);
        }
        table().plans[device] = {{rows, rows + n}, arena};
    });
}

void farspan_torch_set_oom(void (*oom)(const char*)) { table().oom.store(oom); }

int farspan_torch_allocator(int device, farspan_allocator** made) {
    *made = nullptr;
    return farspan::guarded(
        [&] { *made = reinterpret_cast<farspan_allocator*>(&farspan::at(device)); });
}

void* farspan_torch_alloc(size_t size, int device, void* stream) {
    std::string words;
    try {
        const auto number = reinterpret_cast<farspan::Stream>(stream);
        return reinterpret_cast<void*>(farspan::at(device).malloc(size, number));
    } catch (const Refusal& refusal) {
        if (refusal.status == FARSPAN_OUT_OF_MEMORY) {
            farspan::raise("CUDA " + refusal.words);
        }
        words = "farspan: " + refusal.words;
    }
    throw std::runtime_error(words);
}

// torch calls it in destructors: nothing may be thrown, and there is nobody to tell.
void farspan_torch_free(void* pointer, size_t, int device, void*) {
    farspan::guarded([&] { farspan::at(device).free(reinterpret_cast<uint64_t>(pointer)); });
}

// torch does not say whose pointer it is; the addresses of all devices are different.
void farspan_torch_record_stream(void* pointer, void* stream) {
    for (auto& entry : table().allocators) {
        farspan::Allocator* found = entry.load(std::memory_order_acquire);
        if (!found) continue;
        farspan::guarded([&] {
            found->record_stream(reinterpret_cast<uint64_t>(pointer),
                                 reinterpret_cast<farspan::Stream>(stream));
        });
    }
}

void farspan_torch_reset(void) {
    for (auto& entry : table().allocators) {
        farspan::Allocator* found = entry.load(std::memory_order_acquire);
        if (found) farspan::guarded([&] { found->release(0); });
    }
}

void farspan_torch_memory_fraction(double fraction, int device) {
    farspan::guarded([&] {
        farspan::at(device).set_share(fraction);
    });
}

// torch passes a std::function<bool(cudaStream_t)> by value, which for a C++ compiler is a pointer.
void farspan_torch_begin_pool(int device, farspan_pool pool, const void* filter) {
    farspan::guarded([&] {
        const auto* asked = static_cast<const std::function<bool(void*)>*>(filter);
        farspan::Captures::Filter filters;
        if (asked && *asked) {
            filters = [owns = *asked](farspan::Stream stream) {
                return owns(reinterpret_cast<void*>(stream));
            };
        }
        farspan::at(device).begin_pool({pool.owner, pool.number}, std::move(filters));
    });
}

void farspan_torch_end_pool(int device, farspan_pool pool) {
    farspan::guarded([&] { farspan::at(device).end_pool({pool.owner, pool.number}); });
}

void farspan_torch_release_pool(int device, farspan_pool pool) {
    farspan::guarded([&] { farspan::at(device).release_pool({pool.owner, pool.number}); });
}
