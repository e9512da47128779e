// First fit and best fit. What is placed stands in the order of its address, so a search for the
// lowest gap stops at it: 20,000 requests of a whole training step take 0.1 to 0.3 s an order.
#include <algorithm>
#include <vector>

#include "farspan_solver.h"

namespace {

struct Placed {
    int64_t low, high, born, dies;
};

bool is_permutation(int64_t n, const int64_t *order) {
    std::vector<bool> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        if (order[i] < 0 || order[i] >= n || seen[order[i]]) return false;
        seen[order[i]] = true;
    }
    return true;
}

int64_t lowest_gap(const std::vector<Placed> &placed, int64_t size, int64_t born, int64_t dies) {
    int64_t address = 0;
    for (const Placed &other : placed) {
        if (other.born >= dies || born >= other.dies) continue;
        if (other.low - address >= size) break;
        address = std::max(address, other.high);
    }
    return address;
}

// The smallest gap that is large enough, the lowest of those; else above all.
int64_t tightest_gap(const std::vector<Placed> &placed, int64_t size, int64_t born, int64_t dies) {
    int64_t top = 0, found = -1, smallest = INT64_MAX;
    for (const Placed &other : placed) {
        if (other.born >= dies || born >= other.dies) continue;
        const int64_t gap = other.low - top;
        if (gap >= size && gap < smallest) {
            smallest = gap;
            found = top;
        }
        top = std::max(top, other.high);
    }
    return found < 0 ? top : found;
}

}  // namespace

int32_t farspan_greedy(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies,
                       const int64_t *order, int32_t best, int64_t *address) {
    if (n < 0 || !is_permutation(n, order)) return FARSPAN_PLACE_BAD_INPUT;
    std::vector<Placed> placed;
    placed.reserve(static_cast<size_t>(n));
    for (int64_t k = 0; k < n; ++k) {
        const int64_t i = order[k];
        if (size[i] < 0 || dies[i] < born[i]) return FARSPAN_PLACE_BAD_INPUT;
        const int64_t low = best ? tightest_gap(placed, size[i], born[i], dies[i])
                                 : lowest_gap(placed, size[i], born[i], dies[i]);
        address[i] = low;
        const Placed entry{low, low + size[i], born[i], dies[i]};
        const auto above = [](const Placed &a, const Placed &b) { return a.low < b.low; };
        placed.insert(std::upper_bound(placed.begin(), placed.end(), entry, above), entry);
    }
    return FARSPAN_PLACE_FITS;
}
