// Threads on one allocator and on the entry points of torch; for the thread sanitizer above all.
#include <atomic>
#include <thread>

#include "machine.h"

namespace {

void churn(farspan_allocator* a, unsigned seed, std::atomic<uint64_t>* made) {
    std::mt19937 random(seed);
    std::vector<std::pair<char*, uint64_t>> live;
    for (int i = 0; i < 6000; ++i) {
        if (random() % 2 && live.size() < 8) {
            const uint64_t size = 1 + random() % (random() % 2 ? 4 * CHUNK : 2000);
            void* p = nullptr;
            if (farspan_malloc(a, size, seed % 2, &p) != FARSPAN_OK) continue;
            ++*made;
            std::memset(p, static_cast<int>(seed), size < 600 ? size : 600);
            live.push_back({static_cast<char*>(p), size < 600 ? size : 600});
        } else if (!live.empty()) {
            const auto [p, size] = live.back();
            live.pop_back();
            for (uint64_t j = 0; j < size; ++j) EXPECT(p[j] == static_cast<char>(seed));
            if (i % 10 == 0) farspan_record_stream(a, p, 5);
            EXPECT(farspan_free(a, p) == FARSPAN_OK);
        }
        farspan_statistics s;
        if (i % 100 == 0) farspan_get_statistics(a, &s);
        if (i % 500 == 0) farspan_release(a, 8 * CHUNK);
    }
    for (const auto& [p, size] : live) EXPECT(farspan_free(a, p) == FARSPAN_OK);
}

void threads_share_an_allocator() {
    Machine m(FARSPAN_POSIX, 64, FARSPAN_DEFAULT_POLICY);
    farspan_record(m.a, 1);
    std::atomic<uint64_t> made{0};
    std::vector<std::thread> all;
    for (unsigned seed = 1; seed <= 4; ++seed) all.emplace_back(churn, m.a, seed, &made);
    for (int i = 0; i < 20; ++i) m.check();
    for (std::thread& t : all) t.join();
    m.check();
    EXPECT(m.now().requested == 0 && m.now().mallocs == made && m.now().frees == made);
    std::vector<farspan_event> events(2 * made + 1);
    EXPECT(farspan_read_events(m.a, 0, events.data(), events.size()) == 2 * made);
}

// All at once at the first use of each device.
void threads_make_the_devices() {
    farspan_options o = options(FARSPAN_POSIX, 64, FARSPAN_DEFAULT_POLICY);
    EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_STITCH) == FARSPAN_OK);
    std::vector<std::thread> all;
    for (int i = 0; i < 8; ++i) {
        all.emplace_back([i] {
            for (int j = 0; j < 50; ++j) {
                auto* p = static_cast<char*>(farspan_torch_alloc(CHUNK, i % 3, nullptr));
                p[0] = p[CHUNK - 1] = static_cast<char>(i);
                farspan_torch_record_stream(p, p);
                EXPECT(p[0] == i);
                farspan_torch_free(p, CHUNK, i % 3, nullptr);
            }
        });
    }
    for (std::thread& t : all) t.join();
    farspan_torch_reset();
    for (int device = 0; device < 3; ++device) {
        farspan_allocator* a = nullptr;
        EXPECT(farspan_torch_allocator(device, &a) == FARSPAN_OK);
        farspan_statistics s;
        farspan_get_statistics(a, &s);
        EXPECT(s.requested == 0 && s.reserved == 0 && s.mallocs == (device < 2 ? 150 : 100));
        EXPECT(farspan_check(a) == FARSPAN_OK);
    }
}

}  // namespace

int main() {
    RUN(threads_share_an_allocator);
    RUN(threads_make_the_devices);
}
