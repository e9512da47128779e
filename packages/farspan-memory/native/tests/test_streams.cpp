// record_stream, stealing with order, captures and quarantine.
#include <map>

#include "allocator.h"
#include "machine.h"

namespace {

using farspan::Event;
using farspan::Stream;

void recorded_memory_waits_for_its_event() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    farspan_hold_events(m.a, 1);
    char* p = m.get(4);
    EXPECT(farspan_record_stream(m.a, p, 7) == FARSPAN_OK);
    m.put(p);
    EXPECT(m.now().held == 4 * CHUNK && m.now().event_records == 1);
    farspan_hold_events(m.a, 0);
    EXPECT(m.get(4) == p);
    EXPECT(m.now().held == 0 && m.now().event_syncs == 0);
}

void held_memory_is_waited_for_before_giving_up() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    farspan_hold_events(m.a, 1);
    char* p = m.get(4);
    farspan_record_stream(m.a, p, 7);
    farspan_record_stream(m.a, p, 7);
    farspan_record_stream(m.a, p, 8);
    farspan_record_stream(m.a, nullptr, 8);
    m.put(p);
    EXPECT(m.get(4) == p);
    EXPECT(m.now().event_records == 2 && m.now().event_syncs == 2 && m.now().retries == 1);
}

void a_piece_waits_too() {
    Machine m(FARSPAN_NULL, 1, FARSPAN_DEFAULT_POLICY);
    farspan_hold_events(m.a, 1);
    char *p, *q;
    m.take(512, 0, &p);
    farspan_record_stream(m.a, p, 7);
    m.put(p);
    m.take(512, 0, &q);
    EXPECT(q == p + 512);
    farspan_hold_events(m.a, 0);
    m.take(512, 0, &q);
    EXPECT(q == p);
}

void stealing_orders_the_streams() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    m.put(m.get(2, 1));
    m.put(m.get(2, 2));
    m.get(4, 3);
    EXPECT(m.now().steals == 2 && m.now().event_waits == 2 && m.now().event_syncs == 0);
    EXPECT(m.now().reserved == 4 * CHUNK && m.now().destroys == 0);
}

void without_stealing_idle_chunks_go_back_instead() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_LAZY);
    m.put(m.get(4, 1));
    m.get(4, 2);
    EXPECT(m.now().steals == 0 && m.now().destroys == 4 && m.now().event_syncs > 0);
}

// A graph that is captured elsewhere must not see an event.
void no_event_is_recorded_on_a_capturing_stream() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    char* p = m.get(2, 1);
    farspan_record_stream(m.a, p, 2);
    farspan_set_capturing(m.a, 2, 1);
    m.put(p);
    EXPECT(m.now().event_records == 0 && m.now().held == 2 * CHUNK);
    char* q = nullptr;
    EXPECT(m.take(4 * CHUNK, 1, &q) == FARSPAN_OUT_OF_MEMORY);
    EXPECT(m.now().event_records == 0);
    farspan_set_capturing(m.a, 2, 0);
    m.get(4, 1);
    EXPECT(m.now().held == 0 && m.now().event_records == 1);
}

void quarantine_keeps_one_free_back() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY | FARSPAN_QUARANTINE);
    char* p = m.get(1);
    char* q = m.get(1);
    m.put(p);
    EXPECT(m.get(1) != p);
    m.put(q);
    EXPECT(m.get(1) == p);
    m.get(1);
    m.get(1);
}

// Vector clocks: what each stream knows to be done of each other stream's work.
class Clocks : public farspan::HostBackend {
   public:
    using HostBackend::HostBackend;
    using Clock = std::map<Stream, uint64_t>;

    uint64_t total() override { return UINT64_C(1) << 40; }
    // Work on the bytes, at its time.
    uint64_t work(Stream stream, uint64_t address, uint64_t size) {
        const uint64_t now = ++known_[stream][stream];
        for (uint64_t at = address / CHUNK; at <= (address + size - 1) / CHUNK; ++at) {
            through_[at][stream] = now;
        }
        return now;
    }
    bool knows(Stream stream, Stream other, uint64_t time) {
        return stream == other || std::max(known_[stream][other], host_[other]) >= time;
    }

   protected:
    bool do_reserve(size_t bytes, uint64_t* address) override {
        *address = next_ += bytes;
        next_ += bytes;
        return true;
    }
    void do_free_range(uint64_t, size_t) override {}
    bool do_create(farspan::Chunk* chunk) override {
        chunk->handle = made_++;
        return true;
    }
    void do_destroy(farspan::Chunk) override {}
    bool do_map(uint64_t, const farspan::Chunk*, size_t) override { return true; }
    bool do_access(uint64_t, size_t) override { return true; }
    // The host knows that the work through these addresses is done.
    void do_unmap(uint64_t address, const farspan::Chunk* chunks, size_t n) override {
        const size_t count = farspan::width(chunks, n);
        for (uint64_t at = address / CHUNK; at < address / CHUNK + count; ++at) {
            for (const auto& [stream, time] : through_[at]) EXPECT(host_[stream] >= time);
            through_.erase(at);
        }
    }
    bool do_record(Stream stream, Event* event) override {
        HostBackend::do_record(stream, event);
        at_[*event] = known_[stream];
        return true;
    }
    bool do_done(Event event) override {
        const bool done = HostBackend::do_done(event);
        if (done) learn(host_, at_[event]);
        return done;
    }
    bool do_wait(Stream stream, Event event) override {
        learn(known_[stream], at_[event]);
        return true;
    }
    bool do_synchronize(Event event) override {
        learn(host_, at_[event]);
        return HostBackend::do_synchronize(event);
    }
    bool do_finish() override {
        for (const auto& [stream, clock] : known_) learn(host_, clock);
        return HostBackend::do_finish();
    }

   private:
    static void learn(Clock& clock, const Clock& other) {
        for (const auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
    }
    uint64_t next_ = CHUNK << 20, made_ = 0;
    std::map<Stream, Clock> known_;
    std::map<Event, Clock> at_;
    std::map<uint64_t, Clock> through_;  // work by address in chunks
    Clock host_;
};

struct Tensor {
    uint64_t address, size;
    Stream stream;
};

// Who worked on which physical bytes, in pieces of 512, and when.
struct History {
    Clocks& clocks;
    std::map<uint64_t, std::map<Stream, uint64_t>> last;

    std::map<Stream, uint64_t>& at(uint64_t address) {
        const auto [handle, part] = clocks.mapped_at(address);
        return last[(handle * 16 + part) * CHUNK + address % CHUNK];
    }
    // Whoever gets bytes knows that all earlier work on them is done.
    void given(const Tensor& t) {
        const uint64_t now = clocks.work(t.stream, t.address, t.size);
        for (uint64_t byte = t.address; byte < t.address + t.size; byte += 512) {
            for (const auto& [stream, time] : at(byte)) {
                EXPECT(clocks.knows(t.stream, stream, time));
            }
            at(byte) = {{t.stream, now}};
        }
    }
    void used(const Tensor& t, Stream stream) {
        const uint64_t now = clocks.work(stream, t.address, t.size);
        for (uint64_t byte = t.address; byte < t.address + t.size; byte += 512) {
            at(byte)[stream] = now;
        }
    }
};

// Random programs on four streams.
void every_reuse_is_ordered(uint64_t policy, unsigned seed, bool planned, uint64_t width) {
    farspan_options o = options(FARSPAN_NULL, 12, policy, width);
    o.replay_window = 16;
    o.replay_misses = 64;
    o.virtual_limit = (13 + seed % 3 * 15) * CHUNK;
    auto owned = std::make_unique<Clocks>(o);
    History history{*owned, {}};
    farspan::Allocator a(std::move(owned), o);
    std::mt19937 random(seed);
    std::vector<farspan_row> rows;
    for (int i = 0; i < 200; ++i) {
        rows.push_back({512 * (1 + random() % 300), random() % 4, 512 * (random() % 100)});
    }
    if (planned) a.set_plan(rows.data(), rows.size(), 400 * 512);
    std::vector<Tensor> live;
    const auto free_last = [&] {
        history.used(live.back(), live.back().stream);
        a.free(live.back().address);
        live.pop_back();
    };
    for (size_t i = 0; i < 600; ++i) {
        if (i == 450) {
            while (!live.empty()) free_last();
            a.set_plan(nullptr, 0, 0);
        }
        if (i % 200 == 0) a.begin_iteration();
        a.hold_events(random() % 4 > 0);
        Tensor made{0, rows[i % 200].size, rows[i % 200].stream};
        try {
            made.address = a.malloc(made.size, made.stream);
            history.given(made);
            live.push_back(made);
        } catch (const farspan::Refusal&) {
        }
        while (!live.empty() && random() % 7 < 3) {
            std::swap(live[random() % live.size()], live.back());
            if (random() % 3 == 0) {
                const Stream user = random() % 4;
                a.record_stream(live.back().address, user);
                history.used(live.back(), user);
            }
            free_last();
        }
        if (random() % 50 == 0) a.release(0);
        a.check();
    }
    while (!live.empty()) free_last();
}

void reuse_is_ordered_in_random_programs() {
    for (unsigned seed = 0; seed < 12; ++seed) {
        for (uint64_t policy : {PAPER, uint64_t{FARSPAN_DEFAULT_POLICY},
                                uint64_t{FARSPAN_STEAL | FARSPAN_SHUFFLE}}) {
            every_reuse_is_ordered(policy, seed, seed % 2, 1);
            every_reuse_is_ordered(policy, seed, seed % 2, 4);
        }
    }
}

}  // namespace

int main() {
    RUN(recorded_memory_waits_for_its_event);
    RUN(held_memory_is_waited_for_before_giving_up);
    RUN(a_piece_waits_too);
    RUN(stealing_orders_the_streams);
    RUN(without_stealing_idle_chunks_go_back_instead);
    RUN(no_event_is_recorded_on_a_capturing_stream);
    RUN(quarantine_keeps_one_free_back);
    RUN(reuse_is_ordered_in_random_programs);
}
