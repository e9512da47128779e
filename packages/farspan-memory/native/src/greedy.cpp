// First fit and best fit.
//
// First fit takes n log n time where a step's buffers stand close together. Moments of births are
// the leaves of a tree. A buffer's lifetime is a few whole subtrees, and each node has two sets of
// addresses, in which ranges that touch are one:
//
//        [ . . . . . . . . ]   `inside`: what anything within the node's moments takes
//        [ . . . ] [ . . . ]   `across`: what buffers take that live through all of them
//        [ . ] [ . ] [ . ] [ . ]
//            <--------->       a lifetime: no address is free that is taken inside of these nodes
//              ^^^  ^^         or across one above
//
// The lowest gap climbs past each set in turn until all have it free. 200,000 buffers, a quarter of
// which live to the end, take 1 to 5 s an order, where a scan of all that stand took 15 to 60 s.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <vector>

#include "farspan_solver.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kClock = 256;  // buffers placed between two looks at the clock

bool is_permutation(int64_t n, const int64_t *order) {
    std::vector<bool> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
        if (order[i] < 0 || order[i] >= n || seen[order[i]]) return false;
        seen[order[i]] = true;
    }
    return true;
}

struct Range {
    int64_t low, high;
};

// Addresses that are taken: ranges in order that do not touch.
class Taken {
  public:
    void add(int64_t low, int64_t high) {
        const auto below = [](const Range &range, int64_t at) { return range.high < at; };
        const auto first = std::lower_bound(ranges_.begin(), ranges_.end(), low, below);
        auto last = first;
        for (; last != ranges_.end() && last->low <= high; ++last) {
            low = std::min(low, last->low);
            high = std::max(high, last->high);
        }
        if (first == last) {
            ranges_.insert(first, {low, high});
            return;
        }
        *first = {low, high};
        ranges_.erase(first + 1, last);
    }

    const Range *begin() const { return ranges_.data(); }
    const Range *end() const { return ranges_.data() + ranges_.size(); }

  private:
    std::vector<Range> ranges_;
};

// A way up through a set, past one range after another.
class Climb {
  public:
    explicit Climb(const Taken &taken) : next_(taken.begin()), end_(taken.end()) { look(); }

    int64_t low;  // of the next range; the largest number when there is none

    // Raises `address` to where this set has `size` free bytes. False if it had them there.
    bool over(int64_t &address, int64_t size) {
        const int64_t before = address;
        if (next_->high < address) skip(address);
        for (; next_ != end_ && next_->low < address + size; ++next_)
            address = std::max(address, next_->high);
        look();
        return address > before;
    }

    // Where the last range ends.
    int64_t top() const { return next_ == end_ ? 0 : end_[-1].high; }

  private:
    void look() { low = next_ == end_ ? std::numeric_limits<int64_t>::max() : next_->low; }

    // To the first range that does not end below the address, in steps that double.
    void skip(int64_t address) {
        std::ptrdiff_t step = 1;
        while (step < end_ - next_ && next_[step].high < address) {
            next_ += step;
            step *= 2;
        }
        const auto below = [](const Range &range, int64_t at) { return range.high < at; };
        next_ = std::lower_bound(next_, next_ + std::min(step + 1, end_ - next_), address, below);
    }

    const Range *next_, *end_;
};

// First fit over moments 0 to n - 1.
class FirstFit {
  public:
    explicit FirstFit(int64_t moments) {
        while (leaves_ < moments) leaves_ *= 2;
        inside_.resize(static_cast<size_t>(2 * leaves_));
        across_.resize(static_cast<size_t>(2 * leaves_));
    }

    // The lowest gap for a buffer that lives at moments [first, last), which takes it; if `late`,
    // above all that live with it.
    int64_t place(int64_t size, int64_t first, int64_t last, bool late) {
        find(first, last);
        int64_t address = 0;
        if (late)
            for (const Climb &climb : climbs_) address = std::max(address, climb.top());
        for (size_t agree = 0, at = 0; agree < climbs_.size(); ++agree) {
            if (climbs_[at].low < address + size && climbs_[at].over(address, size)) agree = 0;
            if (++at == climbs_.size()) at = 0;
        }
        for (const int64_t node : whole_) across_[node].add(address, address + size);
        for (const int64_t node : whole_) inside_[node].add(address, address + size);
        for (const int64_t node : above_) inside_[node].add(address, address + size);
        return address;
    }

  private:
    // The largest nodes within the lifetime, those above them, and the sets that a gap must miss.
    void find(int64_t first, int64_t last) {
        whole_.clear();
        above_.clear();
        climbs_.clear();
        int64_t low = first + leaves_, high = last + leaves_;
        int64_t left = low, right = high - 1;  // the outermost nodes that the lifetime meets
        const auto is_above = [&low, &high](int64_t node) { return node < low || node >= high; };
        while (left > 1) {
            if (low < high && low % 2) whole_.push_back(low++);
            if (low < high && high % 2) whole_.push_back(--high);
            low /= 2, high /= 2, left /= 2, right /= 2;
            if (is_above(left)) above_.push_back(left);
            if (right != left && is_above(right)) above_.push_back(right);
        }
        if (low < high) whole_.push_back(low);  // the root
        for (const int64_t node : whole_) climbs_.emplace_back(inside_[node]);
        for (const int64_t node : above_) climbs_.emplace_back(across_[node]);
    }

    int64_t leaves_ = 1;
    std::vector<Taken> inside_, across_;
    std::vector<int64_t> whole_, above_;
    std::vector<Climb> climbs_;
};

struct Placed {
    int64_t low, high, born, dies;
};

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

struct Requests {
    int64_t n;
    const int64_t *size, *born, *dies, *order;
    bool takes_room(int64_t i) const { return size[i] > 0 && born[i] < dies[i]; }
};

// Those that are left when time is up stand above what lives with them. False once one reaches
// `height`.
bool first_fit(const Requests &given, Clock::time_point end, int64_t height, int64_t *address) {
    std::vector<int64_t> births;
    for (int64_t i = 0; i < given.n; ++i)
        if (given.takes_room(i)) births.push_back(given.born[i]);
    std::sort(births.begin(), births.end());
    births.erase(std::unique(births.begin(), births.end()), births.end());
    const auto moment = [&births](int64_t time) {
        return std::lower_bound(births.begin(), births.end(), time) - births.begin();
    };
    FirstFit placer(static_cast<int64_t>(births.size()));
    int64_t top = 0;
    bool late = false;
    for (int64_t k = 0; k < given.n; ++k) {
        const int64_t i = given.order[k];
        address[i] = 0;
        if (!given.takes_room(i)) continue;
        if (k > 0 && k % kClock == 0) late = late || Clock::now() > end;
        const int64_t first = moment(given.born[i]), last = moment(given.dies[i]);
        address[i] = placer.place(given.size[i], first, last, late);
        top = std::max(top, address[i] + given.size[i]);
        if (top >= height) return false;
    }
    return true;
}

// Looks at every buffer placed: n * n time.
bool best_fit(const Requests &given, int64_t height, int64_t *address) {
    std::vector<Placed> placed;
    for (int64_t k = 0; k < given.n; ++k) {
        const int64_t i = given.order[k];
        address[i] = 0;
        if (!given.takes_room(i)) continue;
        const int64_t low = tightest_gap(placed, given.size[i], given.born[i], given.dies[i]);
        address[i] = low;
        if (low + given.size[i] >= height) return false;
        const Placed entry{low, low + given.size[i], given.born[i], given.dies[i]};
        const auto above = [](const Placed &a, const Placed &b) { return a.low < b.low; };
        placed.insert(std::upper_bound(placed.begin(), placed.end(), entry, above), entry);
    }
    return true;
}

// The moment after so many seconds; none later than the clock can tell.
Clock::time_point after(double seconds) {
    constexpr double kLongest = 1e9;
    const std::chrono::duration<double> left(std::min(std::max(seconds, 0.0), kLongest));
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(left);
}

}  // namespace

int32_t farspan_greedy(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies,
                       const int64_t *order, int32_t best, int64_t *address, double seconds,
                       int64_t height) {
    if (n < 0 || !is_permutation(n, order)) return FARSPAN_PLACE_BAD_INPUT;
    for (int64_t i = 0; i < n; ++i)
        if (size[i] < 0 || dies[i] < born[i]) return FARSPAN_PLACE_BAD_INPUT;
    const Requests given{n, size, born, dies, order};
    const bool below = best ? best_fit(given, height, address)
                            : first_fit(given, after(seconds), height, address);
    return below ? FARSPAN_PLACE_FITS : FARSPAN_PLACE_UNKNOWN;
}
