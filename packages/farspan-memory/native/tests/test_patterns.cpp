// Random programs over POSIX and the fake driver: every tensor keeps the bytes written to it.
#include "machine.h"

namespace {

struct Tensor {
    char* p;
    uint64_t size, seed;
};

// Different at each place and for each tensor: a chunk that two tensors have, or one has twice, or
// in another order, shows. Every 64th byte and the last.
char pattern(const Tensor& t, uint64_t at) { return static_cast<char>((at * 31 >> 6) + t.seed); }

void write(const Tensor& t) {
    for (uint64_t i = 0; i < t.size; i += 64) t.p[i] = pattern(t, i);
    t.p[t.size - 1] = pattern(t, t.size - 1);
}

void read(const Tensor& t) {
    for (uint64_t i = 0; i < t.size; i += 64) EXPECT(t.p[i] == pattern(t, i));
    EXPECT(t.p[t.size - 1] == pattern(t, t.size - 1));
}

void random_program(const farspan_options& o, unsigned seed, int steps) {
    Machine m(o);
    std::mt19937 random(seed);
    std::vector<Tensor> live;
    const auto size = [&]() -> uint64_t {
        if (random() % 3 == 0) return 1 + random() % 3000;
        if (random() % 2) return CHUNK * (1 + random() % 4);
        return 1 + random() % (9 * CHUNK);
    };
    for (int i = 0; i < steps; ++i) {
        const unsigned what = random() % 100;
        if (what < 50) {
            Tensor t{nullptr, size(), random()};
            m.take(t.size, random() % 3, &t.p);
            if (!t.p) continue;
            write(t);
            live.push_back(t);
        } else if (what < 90 && !live.empty()) {
            std::swap(live[random() % live.size()], live.back());
            read(live.back());
            if (random() % 5 == 0) farspan_record_stream(m.a, live.back().p, random() % 3);
            m.put(live.back().p);
            live.pop_back();
        } else if (what < 92) {
            farspan_release(m.a, random() % o.capacity);
            m.check();
        } else if (what < 96 && o.backend != FARSPAN_CUDA) {
            farspan_hold_events(m.a, random() % 2);
        }
    }
    for (const Tensor& t : live) read(t);
    for (const Tensor& t : live) m.put(t.p);
}

void every_policy(int backend, uint64_t width) {
    for (uint64_t policy = 0; policy < 64; ++policy) {
        farspan_options o = options(backend, 48, policy, width);
        o.seed = policy;
        o.virtual_limit = policy % 2 ? 0 : 64 * CHUNK;
        if (!o.virtual_limit) o.virtual_limit = UINT64_C(1) << 40;
        o.fragment_limit = policy % 3 * CHUNK;
        o.small = policy % 5 ? width * CHUNK : CHUNK / 4;
        random_program(o, static_cast<unsigned>(policy) + 100, 250);
    }
}

void posix_keeps_bytes() { every_policy(FARSPAN_POSIX, 1); }
void posix_keeps_bytes_with_tails() { every_policy(FARSPAN_POSIX, 4); }

void cuda_keeps_bytes() {
    every_policy(FARSPAN_CUDA, 1);
    every_policy(FARSPAN_CUDA, 4);
    EXPECT(look().violations == 0 && look().handles == 0 && look().reserved == 0);
}

}  // namespace

int main() {
    RUN(posix_keeps_bytes);
    RUN(posix_keeps_bytes_with_tails);
    RUN(cuda_keeps_bytes);
}
