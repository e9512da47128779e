// Nanoseconds of processor time for a malloc and its free that hit, on the null backend.
#include <time.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "farspan_memory.h"

static double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

static farspan_allocator* made(uint64_t capacity, uint64_t policy) {
    farspan_options options;
    farspan_default_options(&options);
    options.capacity = capacity;
    options.policy = policy;
    farspan_allocator* a = nullptr;
    farspan_create(&options, &a);
    return a;
}

// Each pair frees one tensor of `width` chunks among `live` and asks for its size again.
static double pair(uint64_t live, uint64_t bytes, uint64_t policy) {
    farspan_allocator* a = made(UINT64_C(1) << 44, policy);
    std::vector<void*> all(live);
    for (uint64_t i = 0; i < live; ++i) farspan_malloc(a, bytes + (i % 17) * bytes, 0, &all[i]);
    const uint64_t pairs = 400000;
    double best = 1e9;
    for (int round = 0; round < 3; ++round) {
        const double start = seconds();
        for (uint64_t i = 0; i < pairs; ++i) {
            const uint64_t at = i * 7919 % live;
            farspan_free(a, all[at]);
            farspan_malloc(a, bytes + (at % 17) * bytes, 0, &all[at]);
        }
        const double taken = (seconds() - start) / static_cast<double>(pairs);
        best = taken < best ? taken : best;
    }
    farspan_destroy(a);
    return best * 1e9;
}

// The same for an sBlock of `parts` pBlocks: blocks of one chunk, every second one free.
static double stitched(uint64_t parts) {
    const uint64_t chunk = 2 << 20;
    farspan_allocator* a = made(2 * parts * chunk, FARSPAN_DEFAULT_POLICY);
    std::vector<void*> all(2 * parts);
    for (void*& p : all) farspan_malloc(a, chunk, 0, &p);
    for (uint64_t i = 0; i < 2 * parts; i += 2) farspan_free(a, all[i]);
    void* p = nullptr;
    farspan_malloc(a, parts * chunk, 0, &p);
    const uint64_t pairs = 4000000 / (parts + 10);
    const double start = seconds();
    for (uint64_t i = 0; i < pairs; ++i) {
        farspan_free(a, p);
        farspan_malloc(a, parts * chunk, 0, &p);
    }
    const double taken = (seconds() - start) / static_cast<double>(pairs);
    farspan_statistics s;
    farspan_get_statistics(a, &s);
    farspan_destroy(a);
    return s.s1_stitched == pairs ? taken * 1e9 : -1;
}

int main() {
    for (uint64_t live : {1, 100, 1000, 5000}) {
        std::printf("exact pBlock, %4llu live: %6.0f ns a malloc and free\n",
                    static_cast<unsigned long long>(live),
                    pair(live, 4 << 20, FARSPAN_DEFAULT_POLICY));
    }
    std::printf("small piece,  1000 live: %6.0f ns a malloc and free\n",
                pair(1000, 512, FARSPAN_DEFAULT_POLICY));
    for (uint64_t parts : {2, 16, 256}) {
        std::printf("sBlock of %3llu parts:    %6.0f ns a malloc and free\n",
                    static_cast<unsigned long long>(parts), stitched(parts));
    }
    return 0;
}
