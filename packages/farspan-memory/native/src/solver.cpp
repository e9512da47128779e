// Exact placement: does it fit under a height? Depth first, over the placements in which every
// buffer stands on another one or on the ground, in the order of their addresses.
//
// A node takes the unplaced buffer that would stand lowest and either places it there or defers it:
// something else comes under it first. Three things keep the search small. (1) A deferred buffer
// must stand on what is still to come, and where another buffer fits wholly below it the placement
// is the image of a lower one; both cut. (2) Each section asks whether what is left of it fits.
// (3) Where no unplaced buffer crosses a moment, the two sides are solved one after the other, and
// when one side fails the other is not tried again: the search returns to what divided them.
//
// The order of equals decides between a millisecond and for ever, so several take turns, each
// allowed a number of nodes that grows from round to round. As much work again goes into short
// runs with widths shaken by up to a fifth: MiniMalloc's E takes 1,000 to 13,000 nodes in one such
// run of eight, and more than 5,000,000 in every order that is not shaken.
#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <tuple>
#include <vector>

#include "farspan_solver.h"
#include "problem.h"
#include "skyline.h"

namespace farspan {
namespace {

using Clock = std::chrono::steady_clock;

// More would need more than this for what is undone; whole steps of 20,000 buffers stay far below.
constexpr size_t kTrailBytes = size_t{400} << 20;
constexpr size_t kAlive = size_t{100} << 20;  // buffers alive, summed over sections: 400 MiB
constexpr int32_t kAgain = 1000;  // buffers of the largest part that is ranked anew every time
constexpr int64_t kFirstNodes = 2000;
constexpr int64_t kGrowth = 3;
constexpr int64_t kShakenNodes = 20000;
constexpr double kShake = 0.2;

// A buffer's rank: by bytes of its busiest section, by area, by width, by size; largest first.
enum class Key { kBusy, kArea, kWidth, kSize };

struct Order {
    std::array<Key, 3> keys;
    bool time;   // width in time, or in sections
    bool again;  // ranks are given anew for each part, or for those half as large as before
    uint64_t seed = 0;  // of the shaking; 0: none
};

constexpr std::array<Key, 3> kBusyWidth = {Key::kBusy, Key::kWidth, Key::kArea};
constexpr std::array<Key, 3> kBusyArea = {Key::kBusy, Key::kArea, Key::kWidth};
constexpr std::array<Key, 3> kWidthArea = {Key::kWidth, Key::kArea, Key::kBusy};
constexpr std::array<Key, 3> kAreaWidth = {Key::kArea, Key::kWidth, Key::kSize};
constexpr std::array<Key, 3> kSizeWidth = {Key::kSize, Key::kWidth, Key::kArea};

constexpr Order kOrders[] = {
    {kBusyWidth, true, false},  {kBusyWidth, true, true},  {kBusyWidth, false, false},
    {kBusyWidth, false, true},  {kBusyArea, false, false}, {kBusyArea, true, true},
    {kWidthArea, false, false}, {kWidthArea, true, true},  {kAreaWidth, false, false},
    {kAreaWidth, true, true},   {kSizeWidth, false, false},
};

// A number in [0, 1) for each pair: splitmix64.
double fraction(uint64_t seed, uint64_t index) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + index * 0xD1B54A32D192ED03u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((x ^ (x >> 31)) >> 11) / static_cast<double>(uint64_t{1} << 53);
}

struct Limits {
    Clock::time_point end;
    int64_t nodes;
    bool dive;  // never go back further than one placement
};

enum class Answer { kYes, kNo, kUnknown };

class Search {
  public:
    Search(const Problem &problem, Bytes height, Order order)
        : skyline_(problem.buffers, problem.sections, height), order_(order) {}

    Answer run(const Limits &limits);
    int64_t nodes() const { return nodes_; }
    Bytes address(int32_t b) const { return skyline_.address[b]; }

  private:
    struct Waiting {  // a part to solve later; `next` comes after it, -1 is the end
        Part part;
        int32_t ranked;  // how many buffers there were when ranks were given
        int32_t owner;   // the frame that divided it off, where to go back to; -1: nowhere
        int32_t next;
    };
    struct Frame {
        Waiting task;
        size_t waiting;  // how much stood in waiting_ before
        size_t mark;     // before the last placement
        int32_t chosen;  // the buffer placed
    };

    bool over(const Limits &limits) const;
    void push(int32_t task);
    int32_t choose(Part part) const;
    bool advance();
    bool retreat();
    int32_t divide(const Frame &frame);
    void find_cuts(const Buffer &buffer);
    void sort_by_cuts(Part part);
    void rank(Part part);
    Bytes shaken(Bytes width, int32_t b) const;
    Bytes key(int32_t b, Key key) const;

    Skyline skyline_;
    Order order_;
    std::vector<Frame> frames_;
    std::vector<Waiting> waiting_;
    std::vector<int32_t> cuts_, sorted_, starts_;
    int32_t next_ = -1;  // what to solve next, in waiting_
    int64_t nodes_ = 0;
    bool dive_ = false;
};

Answer Search::run(const Limits &limits) {
    dive_ = limits.dive;
    if (!skyline_.start()) return Answer::kNo;
    const Part all{0, skyline_.buffers()};
    rank(all);
    waiting_.push_back({all, all.size(), -1, -1});
    for (next_ = 0; next_ >= 0;) {
        push(next_);
        while (!advance()) {
            if (over(limits) || dive_) return Answer::kUnknown;
            if (!retreat()) return Answer::kNo;
        }
        if (over(limits)) return Answer::kUnknown;
    }
    return Answer::kYes;
}

bool Search::over(const Limits &limits) const {
    if (nodes_ >= limits.nodes || skyline_.trail_bytes() > kTrailBytes) return true;
    return nodes_ % 64 == 0 && Clock::now() > limits.end;
}

void Search::push(int32_t task) {
    if (dive_) frames_.clear();
    frames_.push_back({waiting_[task], waiting_.size(), skyline_.mark(), -1});
}

// Places one buffer of the last frame's part; false when none leads on.
bool Search::advance() {
    Frame &frame = frames_.back();
    while (true) {
        ++nodes_;
        const int32_t b = choose(frame.task.part);
        if (b < 0) return false;
        frame.mark = skyline_.mark();
        frame.chosen = b;
        if (skyline_.place(b, frame.task.part)) {
            next_ = divide(frame);
            if (dive_) skyline_.forget();
            return true;
        }
        skyline_.undo(frame.mark);
        if (!skyline_.defer(b, frame.task.part)) return false;
    }
}

// Back to the frame that the failed part came from, to go on from there without its last choice.
bool Search::retreat() {
    while (true) {
        const int32_t owner = frames_.back().task.owner;
        if (owner < 0) return false;
        frames_.resize(static_cast<size_t>(owner) + 1);
        const Frame &frame = frames_.back();
        waiting_.resize(frame.waiting);
        skyline_.undo(frame.mark);
        if (skyline_.defer(frame.chosen, frame.task.part)) return true;
    }
}

// The buffer that would stand lowest, by rank among equals; -1 when a placement from here on would
// leave a gap under it that another buffer fits into.
int32_t Search::choose(Part part) const {
    int32_t found = -1, rank = 0;
    Bytes bottom = std::numeric_limits<Bytes>::max(), reach = bottom;
    for (int32_t i = part.begin; i < part.end; ++i) {
        const int32_t c = skyline_.items[i];
        const Bytes floor = skyline_.floor[c];
        reach = std::min(reach, floor + skyline_.buffer(c).size);
        if (floor < skyline_.low[c] || floor > bottom) continue;
        if (floor < bottom || skyline_.rank[c] < rank) {
            found = c;
            bottom = floor;
            rank = skyline_.rank[c];
        }
    }
    return bottom < reach ? found : -1;
}

// Takes the chosen buffer out of the frame's part. What is left, in parts with nothing between
// them, waits before what was waiting; the smallest part comes first. Returns the first.
int32_t Search::divide(const Frame &frame) {
    const Waiting task = frame.task;
    const int32_t owner = static_cast<int32_t>(frames_.size()) - 1;
    std::vector<int32_t> &items = skyline_.items;
    const auto begin = items.begin() + task.part.begin;
    std::swap(*std::find(begin, items.begin() + task.part.end, frame.chosen), *begin);
    const Part left{task.part.begin + 1, task.part.end};
    if (left.size() == 0) return task.next;
    find_cuts(skyline_.buffer(frame.chosen));
    if (cuts_.empty()) {
        waiting_.push_back({left, task.ranked, owner, task.next});
        return static_cast<int32_t>(waiting_.size()) - 1;
    }
    sort_by_cuts(left);
    std::vector<Part> parts;
    for (size_t k = 0; k + 1 < starts_.size(); ++k)
        if (starts_[k] < starts_[k + 1]) parts.push_back({starts_[k], starts_[k + 1]});
    std::stable_sort(parts.begin(), parts.end(),
                     [](Part a, Part b) { return a.size() > b.size(); });
    int32_t next = task.next;
    for (const Part part : parts) {
        const bool smaller = part.size() <= (order_.again ? kAgain : task.ranked / 2);
        if (smaller) rank(part);
        waiting_.push_back({part, smaller ? part.size() : task.ranked, owner, next});
        next = static_cast<int32_t>(waiting_.size()) - 1;
    }
    return next;
}

// Sections s within the buffer's life after which a part begins: nothing unplaced crosses from s.
void Search::find_cuts(const Buffer &buffer) {
    cuts_.clear();
    for (int32_t s = buffer.first; s + 1 < buffer.last; ++s)
        if (skyline_.cross[s] == 0) cuts_.push_back(s);
}

// Items of the part by the stretch between cuts that they live in; `starts_` is where each begins.
void Search::sort_by_cuts(Part part) {
    const auto stretch = [this](int32_t b) {
        const int32_t first = skyline_.buffer(b).first;
        return std::lower_bound(cuts_.begin(), cuts_.end(), first) - cuts_.begin();
    };
    starts_.assign(cuts_.size() + 2, 0);
    for (int32_t i = part.begin; i < part.end; ++i) ++starts_[stretch(skyline_.items[i]) + 1];
    starts_[0] = part.begin;
    for (size_t k = 1; k < starts_.size(); ++k) starts_[k] += starts_[k - 1];
    std::vector<int32_t> fill(starts_.begin(), starts_.end() - 1);
    sorted_.assign(skyline_.items.begin() + part.begin, skyline_.items.begin() + part.end);
    for (const int32_t b : sorted_) skyline_.items[fill[stretch(b)]++] = b;
}

// The width, on a scale fine enough to shake the smallest.
Bytes Search::shaken(Bytes width, int32_t b) const {
    double scaled = static_cast<double>(width) * 1024;
    if (order_.seed != 0) scaled *= 1 + kShake * fraction(order_.seed, static_cast<uint64_t>(b));
    return static_cast<Bytes>(std::min(scaled, 9e18));
}

Bytes Search::key(int32_t b, Key key) const {
    const Buffer &buffer = skyline_.buffer(b);
    const Bytes width = shaken(order_.time ? buffer.time : buffer.last - buffer.first, b);
    switch (key) {
        case Key::kBusy: {
            const auto rest = skyline_.rest.begin();
            return *std::max_element(rest + buffer.first, rest + buffer.last);
        }
        case Key::kArea:
            // Saturated: areas need not be exact, only not wrong in sign.
            return static_cast<Bytes>(
                std::min(static_cast<double>(width) * static_cast<double>(buffer.size), 9e18));
        case Key::kWidth:
            return width;
        case Key::kSize:
            return buffer.size;
    }
    return 0;
}

void Search::rank(Part part) {
    using Ranked = std::tuple<Bytes, Bytes, Bytes, int32_t>;
    std::vector<Ranked> ranked;
    ranked.reserve(static_cast<size_t>(part.size()));
    for (int32_t i = part.begin; i < part.end; ++i) {
        const int32_t b = skyline_.items[i];
        ranked.emplace_back(-key(b, order_.keys[0]), -key(b, order_.keys[1]),
                            -key(b, order_.keys[2]), b);
    }
    std::sort(ranked.begin(), ranked.end());
    int32_t rank = 0;
    for (const Ranked &entry : ranked) skyline_.set_rank(std::get<3>(entry), rank++);
}

// One question, asked in several orders.
struct Inquiry {
    const Problem &problem;
    Bytes height;
    Clock::time_point end;
    int64_t *address;
    int64_t nodes = 0;

    Answer ask(const Order &order, int64_t limit, bool dive) {
        Search search(problem, height, order);
        const Answer answer = search.run({end, limit, dive});
        nodes += search.nodes();
        for (size_t b = 0; answer == Answer::kYes && b < problem.origin.size(); ++b)
            address[problem.origin[b]] = search.address(static_cast<int32_t>(b));
        return answer;
    }
};

Answer solve(Inquiry &inquiry) {
    Answer answer = Answer::kUnknown;
    for (const Order &order : kOrders) {
        answer = inquiry.ask(order, std::numeric_limits<int64_t>::max(), true);
        if (answer != Answer::kUnknown) return answer;
    }
    uint64_t seed = 0;
    for (int64_t limit = kFirstNodes;; limit *= kGrowth) {
        for (const Order &order : kOrders) {
            if (Clock::now() > inquiry.end) return Answer::kUnknown;
            int64_t before = inquiry.nodes;
            answer = inquiry.ask(order, limit, false);
            const int64_t share = inquiry.nodes - before;
            before = inquiry.nodes;
            while (answer == Answer::kUnknown && inquiry.nodes - before < share &&
                   Clock::now() < inquiry.end) {
                ++seed;
                const Order shaken{kBusyWidth, seed % 4 == 3, seed % 2 == 0, seed};
                answer = inquiry.ask(shaken, std::min(limit, kShakenNodes), false);
            }
            if (answer != Answer::kUnknown) return answer;
        }
    }
}

}  // namespace
}  // namespace farspan

int32_t farspan_fit(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies,
                    int64_t height, double seconds, int64_t *address, int64_t *nodes) {
    using namespace farspan;
    *nodes = 0;
    if (!readable(n, size, born, dies)) return FARSPAN_PLACE_BAD_INPUT;
    std::fill(address, address + n, 0);
    for (int64_t i = 0; i < n; ++i)
        if (size[i] > height) return FARSPAN_PLACE_NO_FIT;
    const Problem problem = read_problem(n, size, born, dies);
    if (problem.buffers.empty()) return FARSPAN_PLACE_FITS;
    size_t alive = 0;
    for (const Buffer &buffer : problem.buffers) alive += buffer.last - buffer.first;
    if (alive > kAlive) return FARSPAN_PLACE_UNKNOWN;
    const auto allowed = std::chrono::duration<double>(std::min(seconds, 1e8));
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(allowed);
    Inquiry inquiry{problem, height, end, address};
    const Answer answer = solve(inquiry);
    *nodes = inquiry.nodes;
    if (answer == Answer::kYes) return FARSPAN_PLACE_FITS;
    return answer == Answer::kNo ? FARSPAN_PLACE_NO_FIT : FARSPAN_PLACE_UNKNOWN;
}
