// An allocator of small chunks on one of the backends, and what tests do with it.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <random>
#include <vector>

#include "expect.h"
#include "fake_cuda.h"
#include "farspan_memory.h"

constexpr uint64_t CHUNK = 64 << 10;
constexpr uint64_t PAPER = 0;

// `chunks` tail chunks of memory; a whole chunk is `width` of them.
inline farspan_options options(int backend, uint64_t chunks, uint64_t policy, uint64_t width = 1) {
    farspan_options o;
    farspan_default_options(&o);
    o.backend = backend;
    o.capacity = chunks * CHUNK;
    o.tail = CHUNK;
    o.chunk = o.small = width * CHUNK;
    o.policy = policy;
    o.library = FAKE_CUDA;
    return o;
}

// Sizes in chunks. Everything is checked after every call.
struct Machine {
    explicit Machine(const farspan_options& o) {
        const int status = farspan_create(&o, &a);
        EXPECT(status == FARSPAN_OK);
    }
    Machine(int backend, uint64_t chunks, uint64_t policy)
        : Machine(options(backend, chunks, policy)) {}
    ~Machine() { farspan_destroy(a); }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    int take(uint64_t bytes, uint64_t stream, char** p) {
        void* made = nullptr;
        const int status = farspan_malloc(a, bytes, stream, &made);
        *p = static_cast<char*>(made);
        check();
        return status;
    }
    char* get(uint64_t chunks, uint64_t stream = 0) {
        char* p = nullptr;
        const int status = take(chunks * CHUNK, stream, &p);
        EXPECT(status == FARSPAN_OK && p);
        return p;
    }
    void put(void* p) {
        EXPECT(farspan_free(a, p) == FARSPAN_OK);
        check();
    }
    void check() const { EXPECT(farspan_check(a) == FARSPAN_OK); }
    farspan_statistics now() const {
        farspan_statistics s;
        farspan_get_statistics(a, &s);
        return s;
    }

    farspan_allocator* a = nullptr;
};

template <typename Function>
Function* fake(const char* name) {
    void* library = dlopen(FAKE_CUDA, RTLD_NOW);
    EXPECT(library);
    return reinterpret_cast<Function*>(dlsym(library, name));
}

inline fake_cuda_state look() {
    fake_cuda_state state;
    fake<decltype(fake_cuda_look)>("fake_cuda_look")(&state);
    return state;
}
