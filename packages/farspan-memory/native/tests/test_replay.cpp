// Replay: in step, out of step in each way, and never on top of something live.
#include "machine.h"

namespace {

// Requests of 512, 1024, ... bytes, one after the other in the arena, twice as many rows as sizes.
std::vector<farspan_row> plan(uint64_t n) {
    std::vector<farspan_row> rows;
    uint64_t end = 0;
    for (uint64_t i = 0; i < n; ++i) {
        rows.push_back({512 * (1 + i), 0, end});
        end += rows.back().size;
    }
    return rows;
}

struct Planned : Machine {
    explicit Planned(const std::vector<farspan_row>& given, uint64_t misses = 64)
        : Machine(made(misses)), rows(given) {
        uint64_t arena = 0;
        for (const farspan_row& row : rows) arena = std::max(arena, row.address + row.size);
        EXPECT(farspan_set_plan(a, rows.data(), rows.size(), arena) == FARSPAN_OK);
        begin();
    }
    static farspan_options made(uint64_t misses) {
        farspan_options o = options(FARSPAN_POSIX, 64, FARSPAN_DEFAULT_POLICY);
        o.replay_misses = misses;
        return o;
    }
    void begin() { farspan_begin_iteration(a); }
    // Asks for these sizes, by row, and frees them all; 99: one that is in no row.
    void ask(const std::vector<size_t>& order, uint64_t stream = 0) {
        std::vector<char*> all;
        for (size_t row : order) {
            char* p = nullptr;
            const uint64_t size = row == 99 ? 512 * 90 : rows[row].size;
            EXPECT(take(size, stream, &p) == FARSPAN_OK);
            std::memset(p, static_cast<int>(row), size);
            all.push_back(p);
        }
        for (char* p : all) put(p);
    }
    std::vector<farspan_row> rows;
};

void in_step() {
    Planned m(plan(8));
    for (int i = 0; i < 3; ++i) {
        m.begin();
        m.ask({0, 1, 2, 3, 4, 5, 6, 7});
    }
    EXPECT(m.now().replay_hits == 24 && m.now().replay_misses == 0 && m.now().iterations == 4);
    EXPECT(m.now().stitches == 0 && m.now().allocs == 1);
}

void one_request_more() {
    Planned m(plan(8));
    m.ask({0, 1, 99, 2, 3, 4, 5, 6, 7});
    EXPECT(m.now().replay_hits == 8 && m.now().replay_misses == 1);
}

void another_request_instead() {
    Planned m(plan(8));
    m.ask({0, 1, 99, 3, 4, 5, 6, 7});
    EXPECT(m.now().replay_hits == 7 && m.now().replay_misses == 1 && m.now().replay_resyncs == 1);
}

void requests_left_out() {
    Planned m(plan(8));
    m.ask({0, 1, 4, 5, 6, 7});
    EXPECT(m.now().replay_hits == 5 && m.now().replay_misses == 1 && m.now().replay_resyncs == 1);
}

void more_requests_than_rows() {
    Planned m(plan(2));
    m.ask({0, 1, 0, 1});
    EXPECT(m.now().replay_hits == 2 && m.now().replay_misses == 2);
}

void another_stream_is_another_request() {
    Planned m(plan(2));
    m.ask({0, 1}, 3);
    EXPECT(m.now().replay_hits == 0);
}

void gives_up_until_the_next_iteration() {
    Planned m(plan(8), 3);
    m.ask({99, 99, 99, 0, 1, 2});
    EXPECT(m.now().replay_give_ups == 1 && m.now().replay_hits == 0);
    m.begin();
    m.ask({0, 1, 2});
    EXPECT(m.now().replay_hits == 3);
}

// A tensor that lives longer than in the recording keeps its bytes.
void what_is_live_is_never_given_again() {
    Planned m({{1024, 0, 0}, {1024, 0, 512}});
    char *a, *b;
    m.take(1024, 0, &a);
    m.take(1024, 0, &b);
    EXPECT(b >= a + 1024 || b + 1024 <= a);
    EXPECT(m.now().replay_overlaps == 1 && m.now().replay_hits == 1);
    m.begin();
    char* c;
    m.take(1000, 0, &c);
    EXPECT(m.now().replay_overlaps == 2);
}

void before_an_iteration_nothing_is_planned() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    const farspan_row row{512, 0, 0};
    EXPECT(farspan_set_plan(m.a, &row, 1, 512) == FARSPAN_OK);
    char* p;
    m.take(512, 0, &p);
    EXPECT(m.now().replay_hits == 0 && m.now().replay_misses == 0);
}

void unplanned_rows_keep_step() {
    Planned m({{512, 0, 0}, {4 * CHUNK, 0, FARSPAN_UNPLANNED}, {1024, 0, 512}});
    m.ask({0, 1, 2});
    EXPECT(m.now().replay_hits == 2 && m.now().replay_misses == 0 && m.now().replay_resyncs == 0);
}

void streams_are_ordered_where_they_share_bytes() {
    Planned m({{1024, 1, 0}, {512, 2, 512}, {512, 1, 0}, {1024, 2, 1024}});
    for (const farspan_row& row : m.rows) {
        char* p;
        m.take(row.size, row.stream, &p);
        m.put(p);
    }
    // Of the second with the first, and of the fourth with the arena's own.
    EXPECT(m.now().replay_hits == 4 && m.now().event_waits == 2);
}

void bad_plans_are_refused() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    const auto refused = [&m](farspan_row row, uint64_t arena, int status) {
        EXPECT(farspan_set_plan(m.a, &row, 1, arena) == status);
        m.check();
    };
    refused({1024, 0, 512}, 1024, FARSPAN_INVALID);
    EXPECT(std::strstr(farspan_error(), "row 0"));
    refused({1024, 0, UINT64_MAX - 511}, 1024, FARSPAN_INVALID);
    refused({0, 0, 0}, 1024, FARSPAN_INVALID);
    refused({UINT64_MAX, 0, 0}, 1024, FARSPAN_INVALID);
    refused({1024, 0, 100}, 4096, FARSPAN_INVALID);
    refused({1024, 0, 0}, 9 * CHUNK, FARSPAN_OUT_OF_MEMORY);
    refused({1024, 0, 0}, CHUNK, FARSPAN_OK);
    farspan_begin_iteration(m.a);
    char* p;
    m.take(1024, 0, &p);
    EXPECT(farspan_set_plan(m.a, nullptr, 0, 0) == FARSPAN_INVALID);
    m.put(p);
    EXPECT(farspan_set_plan(m.a, nullptr, 0, 0) == FARSPAN_OK);
    m.get(8);
}

void random_deviations_keep_bytes() {
    for (unsigned seed = 0; seed < 40; ++seed) {
        std::mt19937 random(seed);
        std::vector<farspan_row> rows;
        for (int i = 0; i < 60; ++i) {
            rows.push_back({512 * (1 + random() % 6), random() % 2, 512 * (random() % 40)});
        }
        Planned m(rows, 20);
        struct Tensor {
            char* p;
            uint64_t size;
            char byte;
        };
        std::vector<Tensor> live;
        for (int step = 0; step < 240; ++step) {
            if (step % 60 == 0) m.begin();
            farspan_row row = rows[step % 60];
            if (random() % 10 == 0) row = rows[random() % 60];
            if (random() % 10 == 0) continue;
            Tensor t{nullptr, row.size, static_cast<char>(random())};
            EXPECT(m.take(t.size, row.stream, &t.p) == FARSPAN_OK);
            std::memset(t.p, t.byte, t.size);
            live.push_back(t);
            while (live.size() > 4 + random() % 8) {
                std::swap(live[random() % live.size()], live.back());
                t = live.back();
                live.pop_back();
                for (uint64_t i = 0; i < t.size; ++i) EXPECT(t.p[i] == t.byte);
                if (random() % 4 == 0) farspan_record_stream(m.a, t.p, 2);
                m.put(t.p);
            }
        }
        EXPECT(m.now().replay_hits > 0 && m.now().replay_overlaps > 0);
    }
}

}  // namespace

int main() {
    RUN(in_step);
    RUN(one_request_more);
    RUN(another_request_instead);
    RUN(requests_left_out);
    RUN(more_requests_than_rows);
    RUN(another_stream_is_another_request);
    RUN(gives_up_until_the_next_iteration);
    RUN(what_is_live_is_never_given_again);
    RUN(before_an_iteration_nothing_is_planned);
    RUN(unplanned_rows_keep_step);
    RUN(streams_are_ordered_where_they_share_bytes);
    RUN(bad_plans_are_refused);
    RUN(random_deviations_keep_bytes);
}
