// The CUDA backend's calls, against a driver that refuses what the real one refuses.
#include "machine.h"

namespace {

void memory_can_be_touched_through_every_alias() {
    {
        Machine m(FARSPAN_CUDA, 8, PAPER);
        std::vector<char*> all(8);
        for (char*& p : all) p = m.get(1);
        for (int i = 0; i < 8; i += 2) {
            all[i][0] = static_cast<char>(i + 1);
            m.put(all[i]);
        }
        char* s = m.get(4);
        for (int i = 0; i < 4; ++i) s[i * CHUNK + 1] = 'x';
        int seen = 0;
        for (int i = 0; i < 4; ++i) seen += s[i * CHUNK];
        EXPECT(seen == 1 + 3 + 5 + 7);
        // One access for each chunk's own address and one for the whole stitched range.
        EXPECT(m.now().accesses == 9 && m.now().maps == 12);
    }
    EXPECT(look().violations == 0 && look().handles + look().mapped + look().reserved == 0);
}

void a_full_device_is_out_of_memory() {
    fake<decltype(fake_cuda_capacity)>("fake_cuda_capacity")(6 * CHUNK);
    {
        Machine m(FARSPAN_CUDA, 8, FARSPAN_DEFAULT_POLICY);
        m.put(m.get(4, 1));
        char* p = nullptr;
        EXPECT(m.take(7 * CHUNK, 2, &p) == FARSPAN_OUT_OF_MEMORY);
        EXPECT(std::strstr(farspan_error(), "CUDA_ERROR_OUT_OF_MEMORY"));
        m.get(6, 2);
    }
    {
        farspan_options o = options(FARSPAN_CUDA, 0, FARSPAN_DEFAULT_POLICY);
        Machine m(o);
        m.get(6);
        char* p = nullptr;
        EXPECT(m.take(CHUNK, 0, &p) == FARSPAN_OUT_OF_MEMORY);
    }
    fake<decltype(fake_cuda_capacity)>("fake_cuda_capacity")(UINT64_C(1) << 40);
    EXPECT(look().violations == 0 && look().handles == 0);
}

void events_of_the_device_are_waited_for() {
    auto* hold = fake<decltype(fake_cuda_hold)>("fake_cuda_hold");
    {
        Machine m(FARSPAN_CUDA, 2, FARSPAN_DEFAULT_POLICY);
        hold(1);
        char* p = m.get(2, 1);
        farspan_record_stream(m.a, p, 2);
        m.put(p);
        char* q = m.get(1, 1);  // waits
        EXPECT(q == p && m.now().event_syncs == 1 && m.now().event_queries == 1);
        hold(0);
        EXPECT(farspan_hold_events(m.a, 1) == FARSPAN_INVALID);
    }
    EXPECT(look().events == 0 && look().contexts == 0 && look().violations == 0);
}

void a_capture_sees_no_forbidden_call() {
    auto* capture = fake<decltype(fake_cuda_capture)>("fake_cuda_capture");
    void* stream = reinterpret_cast<void*>(1);
    {
        Machine m(FARSPAN_CUDA, 8, FARSPAN_DEFAULT_POLICY);
        m.put(m.get(2, 1));
        capture(stream, 1);
        m.get(2, 1);
        char* p = nullptr;
        // Another stream goes on, in relaxed mode, but cannot take from the capturing one.
        p = m.get(3, 2);
        farspan_record_stream(m.a, p, 1);
        m.put(p);
        m.get(1, 2);
        EXPECT(m.take(2 * CHUNK, 1, &p) == FARSPAN_OK);
        m.put(p);
        EXPECT(m.take(5 * CHUNK, 1, &p) == FARSPAN_OUT_OF_MEMORY);
        capture(stream, 0);
        m.get(1, 2);
    }
    EXPECT(look().violations == 0 && look().handles == 0);
}

void a_chunk_below_the_granularity_is_refused() {
    farspan_options o = options(FARSPAN_CUDA, 8, PAPER);
    o.chunk = o.small = o.tail = 4096;
    farspan_allocator* a = nullptr;
    EXPECT(farspan_create(&o, &a) == FARSPAN_BACKEND && std::strstr(farspan_error(), "65536"));
    o = options(FARSPAN_CUDA, 8, PAPER);
    o.device = 1;
    EXPECT(farspan_create(&o, &a) == FARSPAN_BACKEND);
    EXPECT(std::strstr(farspan_error(), "cuDeviceGet"));
}

// The driver aligns addresses at powers of two.
void chunks_that_cannot_be_aligned_are_refused() {
    farspan_options o = options(FARSPAN_CUDA, 8, PAPER);
    o.chunk = o.small = o.tail = 3 * CHUNK;
    farspan_allocator* a = nullptr;
    EXPECT(farspan_create(&o, &a) == FARSPAN_INVALID);
    EXPECT(std::strstr(farspan_error(), "chunk: a power of two"));
    o.chunk = o.small = 6 * CHUNK;
    EXPECT(farspan_create(&o, &a) == FARSPAN_INVALID && std::strstr(farspan_error(), "tail: "));
    o = options(FARSPAN_CUDA, 12, PAPER, 3);
    {
        Machine m(o);
        m.get(4);
        m.get(8);
    }
    EXPECT(look().violations == 0 && look().handles == 0);
}

}  // namespace

int main() {
    RUN(memory_can_be_touched_through_every_alias);
    RUN(a_full_device_is_out_of_memory);
    RUN(events_of_the_device_are_waited_for);
    RUN(a_capture_sees_no_forbidden_call);
    RUN(a_chunk_below_the_granularity_is_refused);
    RUN(chunks_that_cannot_be_aligned_are_refused);
}
