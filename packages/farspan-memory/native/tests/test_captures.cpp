// Captured graphs: memory is mapped for them, serves them again, and is theirs.
#include "machine.h"

namespace {

struct Graph {
    Graph(Machine& machine, uint64_t of, uint64_t on) : m(machine), id{0, of}, stream(on) {
        EXPECT(farspan_begin_pool(m.a, id) == FARSPAN_OK);
        EXPECT(farspan_set_capturing(m.a, stream, 1) == FARSPAN_OK);
    }
    void end() {
        EXPECT(farspan_set_capturing(m.a, stream, 0) == FARSPAN_OK);
        EXPECT(farspan_end_pool(m.a, id) == FARSPAN_OK);
        m.check();
    }
    void release() {
        EXPECT(farspan_release_pool(m.a, id) == FARSPAN_OK);
        m.check();
    }
    Machine& m;
    farspan_pool id;
    uint64_t stream;
};

// torch.cuda.graph empties the cache before it captures.
void a_capture_maps_memory_and_uses_it_again() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    m.put(m.get(3, 1));
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK && m.now().reserved == 0);
    Graph g(m, 1, 1);
    for (int i = 0; i < 10; ++i) m.put(m.get(2, 1));
    EXPECT(m.now().reserved == 2 * CHUNK && m.now().pinned == 2 * CHUNK);
    // Of other sizes too, split and stitched.
    char* p = m.get(1, 1);
    char* q = m.get(2, 1);
    m.put(p);
    EXPECT(m.get(1, 1) == p);
    m.put(q);
    char* small[3];
    for (char*& s : small) m.take(700, 1, &s);
    EXPECT(m.now().reserved == 4 * CHUNK);
    g.end();
}

void what_is_idle_on_the_stream_serves_a_capture() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    m.put(m.get(2, 1));
    m.put(m.get(2, 2));
    Graph g(m, 1, 1);
    m.get(2, 1);
    char* none = nullptr;
    EXPECT(m.take(3 * CHUNK, 1, &none) == FARSPAN_OUT_OF_MEMORY);
    EXPECT(std::strstr(farspan_error(), "A graph is captured on the stream"));
    m.get(2, 1);  // of stream 2, given back and made anew
    EXPECT(m.now().event_waits == 0 && m.now().destroys == 2);
    g.end();
}

void memory_of_a_graph_is_nobody_elses() {
    Machine m(FARSPAN_NULL, 6, FARSPAN_DEFAULT_POLICY);
    farspan_options tight = options(FARSPAN_NULL, 6, PAPER);
    tight.virtual_limit = 6 * CHUNK;
    Machine n(tight);
    for (Machine* each : {&m, &n}) {
        Graph g(*each, 1, 1);
        char* p[4];
        for (char*& q : p) q = each->get(1, 1);
        for (char* q : p) each->put(q);
        char* s = each->get(4, 1);
        each->put(s);
        char* out = each->get(1, 1);
        g.end();
        each->put(out);
        char* none = nullptr;
        EXPECT(each->take(3 * CHUNK, 1, &none) == FARSPAN_OUT_OF_MEMORY);
        EXPECT(std::strstr(farspan_error(), "256.00 KiB are free and stay with captured graphs"));
        EXPECT(each->take(3 * CHUNK, 2, &none) == FARSPAN_OUT_OF_MEMORY);
        each->put(each->get(2, 2));
        farspan_release(each->a, 0);
        EXPECT(each->now().reserved == 4 * CHUNK && each->now().pinned == 4 * CHUNK);
        // A second graph of the pool has it, and an address of the first's is still mapped there.
        Graph h(*each, 1, 1);
        EXPECT(each->get(4, 1) == s);
        h.end();
        Graph other(*each, 2, 1);
        EXPECT(each->take(3 * CHUNK, 1, &none) == FARSPAN_OUT_OF_MEMORY);
        other.end();
    }
}

// StitchFree takes what is idle longest, but a graph may be launched with it.
void addresses_of_a_graph_stay_mapped() {
    farspan_options tight = options(FARSPAN_NULL, 10, PAPER);
    tight.virtual_limit = 6 * CHUNK;
    Machine m(tight);
    Graph g(m, 1, 1);
    char* p[4];
    for (char*& q : p) q = m.get(1, 1);
    for (char* q : p) m.put(q);
    char* s = m.get(4, 1);
    m.put(s);
    g.end();
    for (int i = 0; i < 3; ++i) p[i] = m.get(1, 2);
    for (int i = 0; i < 3; ++i) m.put(p[i]);
    m.get(3, 2);
    EXPECT(m.now().stitch_frees == 0);
    Graph h(m, 1, 1);
    EXPECT(m.get(4, 1) == s);
    h.end();
}

void a_pool_ends_with_its_last_graph() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    farspan_hold_events(m.a, 1);
    Graph g(m, 1, 1);
    char* out = m.get(1, 1);
    char *small, *kept;
    m.take(512, 1, &small);
    m.take(512, 1, &kept);
    m.put(small);
    char* used = m.get(1, 1);
    farspan_record_stream(m.a, used, 2);
    m.put(used);
    g.end();
    Graph h(m, 1, 1);
    m.put(m.get(1, 1));
    h.end();
    EXPECT(m.now().pinned == 2 * CHUNK);
    g.release();
    char* none = nullptr;
    EXPECT(m.take(CHUNK, 2, &none) == FARSPAN_OUT_OF_MEMORY);
    h.release();
    h.release();
    // It may still run: the device is waited for, but not while another graph is captured.
    Graph i(m, 2, 3);
    const uint64_t syncs = m.now().event_syncs;
    EXPECT(m.take(CHUNK, 2, &none) == FARSPAN_OUT_OF_MEMORY && m.now().event_syncs == syncs);
    i.end();
    m.get(2, 2);
    EXPECT(m.now().pinned == 0 && m.now().event_syncs > syncs);
    m.put(kept);
    m.put(out);
    m.get(2, 1);
}

// Without hooks: one capture cannot know what graphs another one made.
void a_capture_that_nobody_announced_keeps_its_memory() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    for (uint64_t k = 1; k <= 3; ++k) {
        farspan_set_capturing(m.a, 1, 1);
        char* p = m.get(2, 1);
        m.put(p);
        EXPECT(m.get(2, 1) == p);
        m.put(p);
        farspan_set_capturing(m.a, 1, 0);
        EXPECT(m.now().pinned == k * 2 * CHUNK && m.now().reserved == k * 2 * CHUNK);
    }
}

void a_plan_does_not_serve_a_capture() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    const farspan_row row{2 * CHUNK, 1, 0};
    EXPECT(farspan_set_plan(m.a, &row, 1, 2 * CHUNK) == FARSPAN_OK);
    farspan_begin_iteration(m.a);
    Graph g(m, 1, 1);
    m.put(m.get(2, 1));
    g.end();
    EXPECT(m.now().replay_hits == 0 && m.now().pinned == 2 * CHUNK);
    m.put(m.get(2, 1));
    EXPECT(m.now().replay_hits == 1);
}

// Pieces of four pools over two streams, against programs that capture, free and end at random.
void random_captures(unsigned seed, uint64_t policy, int backend) {
    farspan_options o = options(backend, 12, policy, 1 + 2 * (seed % 2));
    o.virtual_limit = (14 + seed % 20) * CHUNK;
    Machine m(o);
    std::mt19937 random(seed);
    struct Tensor {
        char* p;
        uint64_t size;
        int byte;
    };
    std::vector<Tensor> live;
    std::vector<Graph> graphs;
    std::vector<Graph> open;
    for (int i = 0; i < 400; ++i) {
        if (open.empty() && random() % 10 == 0) {
            open.emplace_back(m, random() % 4, random() % 2);
        } else if (!open.empty() && random() % 10 == 0) {
            open.back().end();
            graphs.push_back(open.back());
            open.pop_back();
        } else if (!graphs.empty() && random() % 15 == 0) {
            std::swap(graphs[random() % graphs.size()].id, graphs.back().id);
            graphs.back().release();
            graphs.pop_back();
        } else if (random() % 30 == 0) {
            farspan_release(m.a, random() % o.capacity);
            m.check();
        } else if (random() % 5 < 3 || live.empty()) {
            const uint64_t size = random() % 3 ? 1 + random() % (5 * CHUNK) : 1 + random() % CHUNK;
            char* p = nullptr;
            if (m.take(size, random() % 3, &p) != FARSPAN_OK) continue;
            if (backend != FARSPAN_NULL) std::memset(p, i % 127, size);
            live.push_back({p, size, i % 127});
        } else {
            std::swap(live[random() % live.size()], live.back());
            const Tensor t = live.back();
            for (uint64_t at = 0; backend != FARSPAN_NULL && at < t.size; at += 97) {
                EXPECT(t.p[at] == t.byte);
            }
            if (random() % 4 == 0) farspan_record_stream(m.a, t.p, random() % 3);
            live.pop_back();
            m.put(t.p);
        }
    }
    for (const Tensor& t : live) m.put(t.p);
    for (Graph& g : open) g.end();
    for (Graph& g : open) g.release();
    for (Graph& g : graphs) g.release();
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    EXPECT(m.now().reserved == 0 && m.now().pinned == 0 && m.now().mappings == 0);
}

void captures_at_random_leave_nothing() {
    for (unsigned seed = 0; seed < 12; ++seed) {
        for (uint64_t policy : {PAPER, uint64_t{FARSPAN_DEFAULT_POLICY}}) {
            random_captures(seed, policy, FARSPAN_NULL);
            random_captures(seed, policy, FARSPAN_POSIX);
        }
    }
}

}  // namespace

int main() {
    RUN(a_capture_maps_memory_and_uses_it_again);
    RUN(what_is_idle_on_the_stream_serves_a_capture);
    RUN(memory_of_a_graph_is_nobody_elses);
    RUN(addresses_of_a_graph_stay_mapped);
    RUN(a_pool_ends_with_its_last_graph);
    RUN(a_capture_that_nobody_announced_keeps_its_memory);
    RUN(a_plan_does_not_serve_a_capture);
    RUN(captures_at_random_leave_nothing);
}
