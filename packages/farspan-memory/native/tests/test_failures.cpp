// Every call of every backend fails once, at every position of a program, and for good from there.
#include "machine.h"

namespace {

constexpr int CALLS = FARSPAN_CALL_EVENT + 1;

// Allocs, splits, stitches, steals, waits, StitchFree and release; tensors keep their bytes.
// Returns how many calls of the backend were counted, of the kind that fails.
void program(const farspan_options& o, int call, uint64_t nth, uint64_t times) {
    Machine m(o);
    EXPECT(farspan_fail_at(m.a, call, nth, times) == FARSPAN_OK);
    const bool real = o.backend != FARSPAN_NULL;
    struct Tensor {
        char* p;
        uint64_t size;
        int byte;
    };
    std::vector<Tensor> live;
    int byte = 0;
    const auto get = [&](uint64_t size, uint64_t stream) {
        char* p = nullptr;
        const int status = m.take(size, stream, &p);
        EXPECT((status == FARSPAN_OK) == (p != nullptr));
        EXPECT(status == FARSPAN_OK || status == FARSPAN_OUT_OF_MEMORY);
        if (!p) return;
        ++byte;
        if (real) std::memset(p, byte, size);
        live.push_back({p, size, byte});
    };
    const auto put = [&](size_t at) {
        if (live.empty()) return;
        const Tensor t = live[at % live.size()];
        for (uint64_t i = 0; real && i < t.size; i += 97) EXPECT(t.p[i] == t.byte);
        live.erase(live.begin() + static_cast<ptrdiff_t>(at % live.size()));
        m.put(t.p);
    };
    for (int round = 0; round < 2; ++round) {
        for (uint64_t i = 0; i < 4; ++i) get(CHUNK, i % 2);
        get(2 * CHUNK, 0);
        get(700, 1);
        put(1), put(2);
        get(2 * CHUNK, 0);
        if (!live.empty()) farspan_record_stream(m.a, live.back().p, 2);
        put(live.empty() ? 0 : live.size() - 1);
        get(3 * CHUNK, 1);
        get(5 * CHUNK, 0);
        put(0), put(0);
        farspan_release(m.a, 3 * CHUNK);
        m.check();
        get(4 * CHUNK, 1);
        get(1, 0);
        while (live.size() > 2) put(live.size() / 2);
    }
    const farspan_row row{2 * CHUNK, 0, 0};
    if (farspan_set_plan(m.a, &row, 1, 2 * CHUNK) == FARSPAN_OK) farspan_begin_iteration(m.a);
    get(2 * CHUNK, 0);
    while (!live.empty()) put(0);
    // What the failure left is whole: all the memory can be had.
    farspan_fail_at(m.a, call, 0, 0);
    if (farspan_set_plan(m.a, nullptr, 0, 0) == FARSPAN_OK) get(o.capacity, 0);
    EXPECT(live.size() == 1);
    put(0);
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    EXPECT(m.now().reserved == 0 && m.now().pblocks == 0 && m.now().sblocks == 0);
    EXPECT(m.now().creates - m.now().destroys <= times && m.now().mappings == 0);
}

void fail(int backend, uint64_t width) {
    for (uint64_t policy : {uint64_t{FARSPAN_DEFAULT_POLICY}, PAPER,
                            uint64_t{FARSPAN_SHUFFLE | FARSPAN_STEAL | FARSPAN_QUARANTINE}}) {
        farspan_options o = options(backend, 9, policy, width);
        o.virtual_limit = 8 * CHUNK;
        for (int call = 0; call < CALLS; ++call) {
            for (uint64_t nth = 1; nth <= 45; ++nth) {
                program(o, call, nth, 1);
                if (nth % 3 == 0) program(o, call, nth, 1000000);
            }
        }
    }
}

void null_fails_anywhere() { fail(FARSPAN_NULL, 1); }
void posix_fails_anywhere() { fail(FARSPAN_POSIX, 1); }
void posix_fails_anywhere_with_tails() { fail(FARSPAN_POSIX, 3); }

void cuda_fails_anywhere_and_gives_all_back() {
    fail(FARSPAN_CUDA, 1);
    fail(FARSPAN_CUDA, 3);
    const fake_cuda_state left = look();
    EXPECT(left.violations == 0);
    EXPECT(left.reserved + left.handles + left.mapped + left.events + left.contexts == 0);
}

}  // namespace

int main() {
    RUN(null_fails_anywhere);
    RUN(posix_fails_anywhere);
    RUN(posix_fails_anywhere_with_tails);
    RUN(cuda_fails_anywhere_and_gives_all_back);
}
