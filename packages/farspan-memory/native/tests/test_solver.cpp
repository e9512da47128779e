// The solver against first fit in every order, on small problems drawn at random: some order
// reaches the optimum, so what fits and what does not is known.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "expect.h"
#include "farspan_solver.h"

namespace {

struct Problem {
    std::vector<int64_t> size, born, dies;
    int64_t count() const { return static_cast<int64_t>(size.size()); }
};

Problem draw(std::mt19937 &random, int count) {
    Problem p;
    for (int i = 0; i < count; ++i) {
        const int64_t born = static_cast<int64_t>(random() % 8);
        p.size.push_back(static_cast<int64_t>(random() % 5));
        p.born.push_back(born);
        p.dies.push_back(born + 1 + static_cast<int64_t>(random() % 5));
    }
    return p;
}

int64_t reach(const Problem &p, const std::vector<int64_t> &address) {
    int64_t top = 0;
    for (int64_t i = 0; i < p.count(); ++i) top = std::max(top, address[i] + p.size[i]);
    return top;
}

bool overlaps(const Problem &p, const std::vector<int64_t> &address) {
    for (int64_t i = 0; i < p.count(); ++i)
        for (int64_t j = 0; j < i; ++j) {
            const bool time = std::max(p.born[i], p.born[j]) < std::min(p.dies[i], p.dies[j]);
            const bool space = std::max(address[i], address[j]) <
                               std::min(address[i] + p.size[i], address[j] + p.size[j]);
            if (time && space) return true;
        }
    return false;
}

int64_t least_height(const Problem &p) {
    std::vector<int64_t> order(p.size.size()), address(p.size.size());
    std::iota(order.begin(), order.end(), 0);
    int64_t least = INT64_MAX;
    do {
        EXPECT(farspan_greedy(p.count(), p.size.data(), p.born.data(), p.dies.data(), order.data(),
                              0, address.data(), 60.0, INT64_MAX) == FARSPAN_PLACE_FITS);
        EXPECT(!overlaps(p, address));
        least = std::min(least, reach(p, address));
    } while (std::next_permutation(order.begin(), order.end()));
    return least;
}

int32_t fit(const Problem &p, int64_t height, std::vector<int64_t> &address) {
    int64_t nodes = 0;
    address.assign(p.size.size(), -1);
    return farspan_fit(p.count(), p.size.data(), p.born.data(), p.dies.data(), height, 240.0,
                       address.data(), &nodes);
}

void answers_are_right() {
    std::mt19937 random(1);
    std::vector<int64_t> address;
    for (int trial = 0; trial < 600; ++trial) {
        const Problem p = draw(random, 1 + trial % 6);
        const int64_t least = least_height(p);
        EXPECT(fit(p, least, address) == FARSPAN_PLACE_FITS);
        EXPECT(!overlaps(p, address));
        EXPECT(reach(p, address) <= least);
        if (least > 0) EXPECT(fit(p, least - 1, address) == FARSPAN_PLACE_NO_FIT);
    }
}

// A square of time and memory, cut again and again, mostly into pinwheels, which no straight cut
// undoes: its pieces fit into its height and nothing less, and a greedy order seldom finds how.
Problem cut_square(std::mt19937 &random, size_t count, int64_t side) {
    struct Piece {
        int64_t born, dies, low, high;
    };
    std::vector<Piece> pieces = {{0, side, 0, side}};
    for (int tries = 0; tries < 1000 && pieces.size() < count; ++tries) {
        const size_t at = random() % pieces.size();
        const Piece p = pieces[at];
        if (p.dies - p.born < 4 || p.high - p.low < 4) continue;
        const int64_t third = (p.dies - p.born) / 3, quarter = (p.high - p.low) / 3;
        const int64_t b = p.born + 1 + static_cast<int64_t>(random()) % third;
        const int64_t d = p.dies - 1 - static_cast<int64_t>(random()) % third;
        const int64_t l = p.low + 1 + static_cast<int64_t>(random()) % quarter;
        const int64_t h = p.high - 1 - static_cast<int64_t>(random()) % quarter;
        pieces[at] = {p.born, d, p.low, l};
        pieces.push_back({d, p.dies, p.low, h});
        pieces.push_back({b, p.dies, h, p.high});
        pieces.push_back({p.born, b, l, p.high});
        pieces.push_back({b, d, l, h});
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    Problem problem;
    for (const Piece &p : pieces) {
        problem.size.push_back(p.high - p.low);
        problem.born.push_back(p.born);
        problem.dies.push_back(p.dies);
    }
    return problem;
}

void a_cut_square_is_put_together() {
    std::mt19937 random(2);
    std::vector<int64_t> address;
    // Small squares give pieces of equal size, large ones pieces that are all different.
    for (const int64_t side : {12, 24, 1000})
        for (int trial = 0; trial < 300; ++trial) {
            const Problem p = cut_square(random, 5 + trial % 40, side);
            EXPECT(fit(p, side, address) == FARSPAN_PLACE_FITS);
            EXPECT(!overlaps(p, address));
            EXPECT(reach(p, address) == side);
            EXPECT(fit(p, side - 1, address) == FARSPAN_PLACE_NO_FIT);
        }
}

// 20,000 buffers, a chain of two alive at a time over a stack: no deep recursion, little memory.
void a_long_step_is_placed() {
    Problem p;
    for (int64_t i = 0; i < 10000; ++i) {
        p.size.push_back(1 + i % 7);
        p.born.push_back(i);
        p.dies.push_back(20000 - i);
        p.size.push_back(8);
        p.born.push_back(20000 + i);
        p.dies.push_back(20002 + i);
    }
    int64_t height = 0;
    for (int64_t i = 0; i < 10000; ++i) height += 1 + i % 7;
    std::vector<int64_t> address;
    EXPECT(fit(p, height, address) == FARSPAN_PLACE_FITS);
    EXPECT(reach(p, address) == height);
}

void wrong_input_is_refused() {
    std::vector<int64_t> address;
    EXPECT(fit({{-1}, {0}, {1}}, 9, address) == FARSPAN_PLACE_BAD_INPUT);
    EXPECT(fit({{1}, {2}, {1}}, 9, address) == FARSPAN_PLACE_BAD_INPUT);
    EXPECT(fit({{}, {}, {}}, 0, address) == FARSPAN_PLACE_FITS);
}

}  // namespace

int main() {
    RUN(answers_are_right);
    RUN(a_cut_square_is_put_together);
    RUN(a_long_step_is_placed);
    RUN(wrong_input_is_refused);
}
