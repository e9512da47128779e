// The entry points of torch, on POSIX memory.
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
    EXPECT(words.rfind("CUDA out of memory. Tried to allocate 0.56 MiB", 0) == 0);
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
    void* p = farspan_torch_alloc(9 * CHUNK, 0, nullptr);
    static_cast<char*>(p)[9 * CHUNK - 1] = 1;
    farspan_torch_free(p, 9 * CHUNK, 0, nullptr);
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
    RUN(a_plan_is_followed);
    RUN(out_of_memory_is_an_exception);
    RUN(nothing_for_no_bytes);
    RUN(the_fraction_bounds_the_device);
}
