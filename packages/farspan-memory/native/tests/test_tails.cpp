// Whole chunks of four units, and tail chunks of one for what fills no whole one.
#include "machine.h"

namespace {

constexpr uint64_t WIDTH = 4;

farspan_options wide(int backend, uint64_t units, uint64_t policy) {
    return options(backend, units, policy, WIDTH);
}

void a_tail_takes_what_it_needs() {
    Machine m(wide(FARSPAN_NULL, 40, FARSPAN_DEFAULT_POLICY));
    char* p = m.get(9);
    EXPECT(m.now().reserved == 9 * CHUNK && m.now().allocated == 9 * CHUNK);
    EXPECT(m.now().creates == 3 && m.now().tail_creates == 1);
    // One reservation, mapped once, and found again whole.
    EXPECT(m.now().reserves == 1 && m.now().maps == 3 && m.now().tail_maps == 1);
    m.put(p);
    EXPECT(m.get(9) == p);
    EXPECT(m.now().s1_stitched == 1 && m.now().maps == 3 && m.now().virtual_bytes == 0);
}

void nearly_a_whole_chunk_is_one() {
    farspan_options o = wide(FARSPAN_NULL, 400, FARSPAN_DEFAULT_POLICY);
    Machine m(o);
    m.get(63);  // of 64: a 64th is lost
    EXPECT(m.now().reserved == 64 * CHUNK && m.now().tail_creates == 0);
    m.get(61);
    EXPECT(m.now().reserved == (64 + 61) * CHUNK && m.now().tail_creates == 1);
}

void an_idle_body_gets_the_tail_it_lacks() {
    Machine m(wide(FARSPAN_NULL, 40, FARSPAN_DEFAULT_POLICY));
    m.put(m.get(8));
    m.get(5);
    EXPECT(m.now().reserved == 9 * CHUNK && m.now().tail_creates == 1 && m.now().stitches == 1);
}

void tails_of_many_serve_a_body() {
    Machine m(wide(FARSPAN_NULL, 20, FARSPAN_DEFAULT_POLICY));
    std::vector<char*> all;
    for (int i = 0; i < 4; ++i) all.push_back(m.get(5));
    for (char* p : all) m.put(p);
    m.get(16);
    m.get(4);
    EXPECT(m.now().reserved == 20 * CHUNK && m.now().creates == 8 && m.now().destroys == 0);
}

void a_whole_chunk_stands_in_for_a_tail_when_memory_is_out() {
    Machine m(wide(FARSPAN_NULL, 12, FARSPAN_DEFAULT_POLICY));
    m.put(m.get(12));
    char* p = m.get(5);
    EXPECT(m.now().allocated == 8 * CHUNK && m.now().destroys == 0);
    m.get(4);
    m.put(p);
    m.get(6);
    EXPECT(m.now().out_of_memory == 0 && m.now().reserved == 12 * CHUNK);
}

// A block at its range's own addresses goes when a part of it does.
void given_back_in_parts() {
    Machine m(wide(FARSPAN_CUDA, 40, FARSPAN_DEFAULT_POLICY));
    m.put(m.get(9));
    char* p = m.get(8);
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    m.check();
    EXPECT(m.now().reserved == 8 * CHUNK && m.now().sblocks == 0);
    std::memset(p, 1, 8 * CHUNK);
    m.get(9);
    m.put(p);
    EXPECT(look().violations == 0);
}

// Whatever the idle units and their widths: they are enough if and only if there are enough.
void all_that_is_idle_can_be_had() {
    for (unsigned seed = 0; seed < 60; ++seed) {
        const uint64_t policy = seed % 2 ? uint64_t{FARSPAN_DEFAULT_POLICY} : PAPER;
        Machine m(wide(FARSPAN_NULL, 37 + seed % 4, policy));
        const uint64_t capacity = 37 + seed % 4;
        std::mt19937 random(seed);
        std::vector<std::pair<char*, uint64_t>> live;
        for (int i = 0; i < 150; ++i) {
            const uint64_t idle = capacity - m.now().allocated / CHUNK;
            const uint64_t size = WIDTH + random() % 12;
            char* p = nullptr;
            const int status = m.take(size * CHUNK, 0, &p);
            EXPECT((status == FARSPAN_OK) == (size <= idle));
            if (p) live.push_back({p, size});
            while (!live.empty() && random() % 3 == 0) {
                std::swap(live[random() % live.size()], live.back());
                m.put(live.back().first);
                live.pop_back();
            }
        }
        EXPECT(m.now().destroys == 0);
    }
}

void a_tail_divides_its_chunk() {
    farspan_options o = wide(FARSPAN_NULL, 40, FARSPAN_DEFAULT_POLICY);
    o.tail = 3 * CHUNK;
    farspan_allocator* a = nullptr;
    EXPECT(farspan_create(&o, &a) == FARSPAN_INVALID && std::strstr(farspan_error(), "tail"));
}

}  // namespace

int main() {
    RUN(a_tail_takes_what_it_needs);
    RUN(nearly_a_whole_chunk_is_one);
    RUN(an_idle_body_gets_the_tail_it_lacks);
    RUN(tails_of_many_serve_a_body);
    RUN(a_whole_chunk_stands_in_for_a_tail_when_memory_is_out);
    RUN(given_back_in_parts);
    RUN(all_that_is_idle_can_be_had);
    RUN(a_tail_divides_its_chunk);
}
