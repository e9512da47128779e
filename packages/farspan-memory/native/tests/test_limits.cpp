// Limits on mappings and addresses are kept, also by what gives memory back.
#include "machine.h"

namespace {

farspan_options limited(int backend, uint64_t mappings, uint64_t space) {
    farspan_options o = options(backend, 64, FARSPAN_DEFAULT_POLICY);
    o.mapping_limit = mappings;
    o.virtual_limit = space;
    return o;
}

// One range, of which every second chunk is free. The checker compares what is counted with what is
// mapped, and both with the limits.
void holes(Machine& m, std::vector<char*>* left) {
    m.put(m.get(64));
    for (int i = 0; i < 64; ++i) left->push_back(m.get(1));
    for (size_t i = 0; i < 32; ++i) {
        m.put((*left)[i]);
        left->erase(left->begin() + static_cast<ptrdiff_t>(i));
    }
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    m.check();
}

// Each hole in a run that is mapped at once takes two mappings more.
void release_keeps_the_limit_on_mappings() {
    for (uint64_t most : {20, 40, 1000}) {
        std::vector<char*> left;
        Machine m(limited(FARSPAN_POSIX, most, 0));
        holes(m, &left);
        EXPECT(m.now().mappings <= most);
        EXPECT(m.now().reserved == (most == 1000 ? 32 : 63 - (most - 3) / 2) * CHUNK);
        for (char* p : left) m.put(p);
        EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
        EXPECT(m.now().reserved == 0 && m.now().mappings == 0);
        m.get(64);
    }
}

void a_limit_is_named_when_memory_is_out() {
    std::vector<char*> left;
    Machine m(limited(FARSPAN_POSIX, 40, 0));
    holes(m, &left);
    char* none = nullptr;
    EXPECT(m.take(30 * CHUNK, 0, &none) == FARSPAN_OUT_OF_MEMORY);
    EXPECT(std::strstr(farspan_error(), "of 40 mappings (mapping_limit) are in use"));
    EXPECT(std::strstr(farspan_error(), "Tried to allocate 1.88 MiB"));
}

void addresses_without_memory_are_counted() {
    std::vector<char*> left;
    Machine m(limited(FARSPAN_NULL, 0, 0));
    holes(m, &left);
    EXPECT(m.now().virtual_bytes == 32 * CHUNK && m.now().reserved == 32 * CHUNK);
    std::vector<char*> others;
    Machine n(limited(FARSPAN_NULL, 0, 20 * CHUNK));
    holes(n, &others);
    EXPECT(n.now().virtual_bytes == 20 * CHUNK && n.now().reserved == 44 * CHUNK);
    n.put(n.get(32));  // a request goes before the limit
    for (char* p : others) n.put(p);
    EXPECT(farspan_release(n.a, 0) == FARSPAN_OK && n.now().virtual_bytes == 0);
}

// What is idle as a whole goes first, since its addresses go too.
void whole_ranges_go_first() {
    Machine m(limited(FARSPAN_NULL, 0, 0));
    char* a = m.get(8);
    char* b = m.get(4);
    m.put(a);
    char* c = m.get(2);
    EXPECT(c == a);
    m.put(b);
    EXPECT(farspan_release(m.a, m.now().reserved - 4 * CHUNK) == FARSPAN_OK);
    EXPECT(m.now().virtual_bytes == 0 && m.now().range_frees == 1);
}

// Streams without anything to give back are not waited for.
void release_waits_for_the_streams_of_what_goes() {
    Machine m(limited(FARSPAN_NULL, 0, 0));
    std::vector<char*> live;
    for (uint64_t stream = 1; stream <= 8; ++stream) live.push_back(m.get(1, stream));
    m.put(live[2]);
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK && m.now().event_syncs == 1);
}

void absurd_arenas_are_refused() {
    Machine m(limited(FARSPAN_NULL, 0, 0));
    const farspan_row row{512, 0, 0};
    for (uint64_t arena : {UINT64_MAX, UINT64_MAX - CHUNK, (UINT64_C(1) << 50) + 1}) {
        EXPECT(farspan_set_plan(m.a, &row, 1, arena) == FARSPAN_INVALID);
        EXPECT(std::strstr(farspan_error(), "an arena of "));
    }
    farspan_begin_iteration(m.a);
    char* p = nullptr;
    EXPECT(m.take(512, 0, &p) == FARSPAN_OK && m.now().replay_hits == 0);
}

}  // namespace

int main() {
    RUN(release_keeps_the_limit_on_mappings);
    RUN(a_limit_is_named_when_memory_is_out);
    RUN(addresses_without_memory_are_counted);
    RUN(whole_ranges_go_first);
    RUN(release_waits_for_the_streams_of_what_goes);
    RUN(absurd_arenas_are_refused);
}
