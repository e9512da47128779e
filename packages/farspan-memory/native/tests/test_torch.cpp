// The entry points of torch, on POSIX memory.
#include <functional>
#include <stdexcept>
#include <string>

#include "machine.h"

namespace {

struct Thrown {};

std::string words_of(size_t size, int device) {
    try {
        farspan_torch_alloc(size, device, nullptr);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

void unconfigured_is_refused() {
    EXPECT(words_of(512, 0).find("farspan_torch_configure") != std::string::npos);
}

// Before CUDA starts, not at its first tensor.
void bad_options_are_refused_when_they_are_given() {
    farspan_options o = options(FARSPAN_CUDA, 8, FARSPAN_DEFAULT_POLICY);
    o.chunk = 1000;
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_STITCH) == FARSPAN_INVALID);
    EXPECT(std::strstr(farspan_error(), "chunk"));
    o.chunk = o.tail = o.small = 4096;
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_STITCH) == FARSPAN_INVALID);
    EXPECT(std::strstr(farspan_error(), "65536"));
    o.library = "no such driver";
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_STITCH) == FARSPAN_OK);
}

void absurd_requests_are_out_of_memory() {
    for (const size_t size : {(size_t{1} << 50) + 1, SIZE_MAX}) {
        EXPECT(words_of(size, 0).rfind("CUDA out of memory. Tried to allocate ", 0) == 0);
    }
}

// torch takes an address as a number, and calls what it expects there.
template <typename Function>
Function* hook(void* address) {
    return reinterpret_cast<Function*>(address);
}

// The hooks as torch's binding calls them: a std::pair and a std::function by value.
void a_captured_graph_gives_its_memory_back() {
    using Id = std::pair<unsigned long long, unsigned long long>;
    auto* begin = hook<void(int, Id, std::function<bool(void*)>)>(
        reinterpret_cast<void*>(farspan_torch_begin_pool));
    auto* end = hook<void(int, Id)>(reinterpret_cast<void*>(farspan_torch_end_pool));
    auto* release = hook<void(int, Id)>(reinterpret_cast<void*>(farspan_torch_release_pool));
    void* stream = reinterpret_cast<void*>(64);
    farspan_allocator* a = nullptr;
    EXPECT(farspan_torch_allocator(0, &a) == FARSPAN_OK);
    const auto pinned = [a] {
        farspan_statistics s;
        farspan_get_statistics(a, &s);
        return s.pinned;
    };
    const Id id{0, 7};
    void* asked = nullptr;
    begin(0, id, [stream, &asked](void* s) { return (asked = s) == stream; });
    farspan_set_capturing(a, 64, 1);
    farspan_torch_free(farspan_torch_alloc(8 * CHUNK, 0, stream), 8 * CHUNK, 0, stream);
    EXPECT(asked == stream && pinned() == 8 * CHUNK);
    farspan_set_capturing(a, 64, 0);
    end(0, id);
    EXPECT(words_of(CHUNK, 0).find("512.00 KiB are free and stay with captured graphs") !=
           std::string::npos);
    release(0, id);
    farspan_torch_free(farspan_torch_alloc(8 * CHUNK, 0, nullptr), 8 * CHUNK, 0, nullptr);
    EXPECT(pinned() == 0);
    farspan_torch_reset();
}

void a_plan_is_followed() {
    farspan_options o = options(FARSPAN_POSIX, 8, FARSPAN_DEFAULT_POLICY);
    const std::string library = FAKE_CUDA;
    o.library = library.c_str();
    const farspan_row row{2 * CHUNK, 0, 0};
    EXPECT(farspan_torch_configure(&o, 3) == FARSPAN_INVALID);
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_REPLAY) == FARSPAN_OK);
    EXPECT(farspan_torch_set_plan(64, &row, 1, 2 * CHUNK) == FARSPAN_INVALID);
    EXPECT(farspan_torch_set_plan(1, &row, 1, 2 * CHUNK) == FARSPAN_OK);
    farspan_allocator* a = nullptr;
    EXPECT(farspan_torch_allocator(1, &a) == FARSPAN_OK);
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_STITCH) == FARSPAN_INVALID);
    farspan_begin_iteration(a);
    void* p = farspan_torch_alloc(2 * CHUNK, 1, nullptr);
    farspan_statistics s;
    farspan_get_statistics(a, &s);
    EXPECT(s.replay_hits == 1);
    farspan_torch_free(p, 2 * CHUNK, 1, nullptr);
}

void out_of_memory_is_an_exception() {
    const std::string words = words_of(9 * CHUNK, 0);
    EXPECT(words.rfind("CUDA out of memory. Tried to allocate 576.00 KiB", 0) == 0);
    farspan_torch_set_oom([](const char*) { throw Thrown(); });
    bool thrown = false;
    try {
        farspan_torch_alloc(9 * CHUNK, 0, nullptr);
    } catch (const Thrown&) {
        thrown = true;
    }
    EXPECT(thrown);
    farspan_torch_set_oom(nullptr);
}

void nothing_for_no_bytes() {
    EXPECT(farspan_torch_alloc(0, 0, nullptr) == nullptr);
    farspan_torch_free(nullptr, 0, 0, nullptr);
    farspan_torch_free(reinterpret_cast<void*>(4096), 1, 0, nullptr);
    farspan_torch_record_stream(reinterpret_cast<void*>(4096), nullptr);
}

void the_fraction_bounds_the_device() {
    farspan_torch_memory_fraction(0.0, 0);
    EXPECT(words_of(CHUNK, 0).find("out of memory") != std::string::npos);
    farspan_torch_memory_fraction(1.0, 0);
    EXPECT(words_of(9 * CHUNK, 0).find("a capacity of 512.00 KiB") != std::string::npos);
    void* p = farspan_torch_alloc(8 * CHUNK, 0, nullptr);
    static_cast<char*>(p)[8 * CHUNK - 1] = 1;
    farspan_torch_free(p, 8 * CHUNK, 0, nullptr);
    farspan_torch_reset();
    farspan_allocator* a = nullptr;
    farspan_torch_allocator(0, &a);
    farspan_statistics s;
    farspan_get_statistics(a, &s);
    EXPECT(s.reserved == 0);
}

}  // namespace

int main() {
    RUN(unconfigured_is_refused);
    RUN(bad_options_are_refused_when_they_are_given);
    RUN(a_plan_is_followed);
    RUN(absurd_requests_are_out_of_memory);
    RUN(a_captured_graph_gives_its_memory_back);
    RUN(out_of_memory_is_an_exception);
    RUN(nothing_for_no_bytes);
    RUN(the_fraction_bounds_the_device);
}
