#include "skyline.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace farspan {

namespace {
constexpr Bytes kNever = std::numeric_limits<Bytes>::max() / 4;
}

Skyline::Skyline(std::vector<Buffer> buffers, int32_t sections, Bytes height)
    : buffers_(std::move(buffers)), sections_(sections), height_(height) {
    const size_t n = buffers_.size(), m = static_cast<size_t>(sections);
    address.assign(n, 0);
    floor.assign(n, 0);
    low.assign(n, 0);
    rank.assign(n, 0);
    items.resize(n);
    placed_.assign(n, 0);
    head_.assign(n, -1);
    rest.assign(m, 0);
    cross.assign(m, 0);
    cursor_.assign(m, 0);
    watch_.assign(m, -1);
    next_.assign(m, -1);
    previous_.assign(m, -1);
    alive_begin_.assign(m + 1, 0);
    for (size_t i = 0; i < n; ++i) {
        items[i] = static_cast<int32_t>(i);
        for (int32_t s = buffers_[i].first; s < buffers_[i].last; ++s) ++alive_begin_[s + 1];
        take(static_cast<int32_t>(i), -1);
    }
    for (size_t s = 0; s < m; ++s) alive_begin_[s + 1] += alive_begin_[s];
    alive_.resize(alive_begin_[m]);
    std::vector<size_t> fill(alive_begin_.begin(), alive_begin_.end() - 1);
    for (size_t i = 0; i < n; ++i)
        for (int32_t s = buffers_[i].first; s < buffers_[i].last; ++s)
            alive_[fill[s]++] = static_cast<int32_t>(i);
}

// Counts b among what is placed (sign 1) or among what is not (sign -1).
void Skyline::take(int32_t b, int32_t sign) {
    const Buffer &buffer = buffers_[b];
    for (int32_t s = buffer.first; s < buffer.last; ++s) rest[s] -= sign * buffer.size;
    for (int32_t s = buffer.first; s + 1 < buffer.last; ++s) cross[s] -= sign;
}

bool Skyline::start() {
    for (int32_t s = 0; s < sections_; ++s) {
        if (rest[s] > height_) return false;
        move_watch(s, alive_[alive_begin_[s]]);
    }
    return true;
}

bool Skyline::place(int32_t b, Part part) {
    const Buffer &buffer = buffers_[b];
    const Bytes bottom = floor[b], top = bottom + buffer.size;
    trail_.push_back({Kind::kPlaced, b, 0, 0});
    address[b] = bottom;
    placed_[b] = 1;
    take(b, 1);
    changed_.clear();
    deferred_.clear();
    Bytes lowest = kNever, second = kNever;  // tops of what may come next
    int32_t lowest_buffer = -1;
    for (int32_t i = part.begin; i < part.end; ++i) {
        const int32_t c = items[i];
        if (c == b) continue;
        const Buffer &other = buffers_[c];
        const bool meets = other.first < buffer.last && buffer.first < other.last;
        if (meets && floor[c] < top && !raise(c, top, std::max(low[c], top))) return false;
        if (floor[c] < low[c]) deferred_.push_back(c);
        const Bytes reach = low[c] + other.size;
        if (reach < lowest) {
            second = lowest;
            lowest = reach;
            lowest_buffer = c;
        } else if (reach < second) {
            second = reach;
        }
    }
    if (!raise_deferred(lowest, second, lowest_buffer)) return false;
    return check_watches(b, true) && settle();
}

// What was deferred stands on something that is not placed yet.
bool Skyline::raise_deferred(Bytes lowest, Bytes second, int32_t lowest_buffer) {
    for (const int32_t c : deferred_) {
        const Bytes bound = c == lowest_buffer ? second : lowest;
        if (low[c] < bound && !raise(c, floor[c], bound)) return false;
    }
    return true;
}

bool Skyline::defer(int32_t b, Part part) {
    changed_.clear();
    for (int32_t i = part.begin; i < part.end; ++i) {
        const int32_t t = items[i];
        // A twin that takes its place is the same placement by another name.
        if (buffers_[t].twin != buffers_[b].twin || placed_[t] || floor[t] < low[t]) continue;
        Bytes bound = kNever;
        for (int32_t j = part.begin; j < part.end; ++j) {
            const int32_t c = items[j];
            const Buffer &other = buffers_[c];
            if (c == t || placed_[c] || other.first >= buffers_[t].last ||
                buffers_[t].first >= other.last)
                continue;
            bound = std::min(bound, std::max(low[c], low[b]) + other.size);
        }
        if (!raise(t, floor[t], bound)) return false;
    }
    return settle();
}

bool Skyline::raise(int32_t b, Bytes new_floor, Bytes new_low) {
    trail_.push_back({Kind::kRaised, b, floor[b], low[b]});
    floor[b] = new_floor;
    if (new_low > low[b]) {
        low[b] = new_low;
        changed_.push_back(b);
    }
    return new_low + buffers_[b].size <= height_;
}

bool Skyline::settle() {
    for (const int32_t c : changed_)
        if (!check_watches(c, false)) return false;
    return true;
}

// The sections that b watches find another where b stands too high, or has been placed (all).
bool Skyline::check_watches(int32_t b, bool all) {
    for (int32_t s = head_[b]; s >= 0;) {
        const int32_t following = next_[s];
        if (rest[s] > 0 && (all || low[b] + rest[s] > height_) && !find_watch(s)) return false;
        s = following;
    }
    return true;
}

bool Skyline::find_watch(int32_t section) {
    const size_t begin = alive_begin_[section];
    const int32_t count = static_cast<int32_t>(alive_begin_[section + 1] - begin);
    const Bytes limit = height_ - rest[section];
    int32_t at = cursor_[section];
    for (int32_t tried = 0; tried < count; ++tried) {
        const int32_t c = alive_[begin + at];
        if (!placed_[c] && low[c] <= limit) {
            cursor_[section] = at;
            trail_.push_back({Kind::kWatch, section, watch_[section], 0});
            move_watch(section, c);
            return true;
        }
        if (++at == count) at = 0;
    }
    return false;
}

void Skyline::move_watch(int32_t section, int32_t to) {
    const int32_t from = watch_[section];
    if (from >= 0) {
        if (previous_[section] >= 0)
            next_[previous_[section]] = next_[section];
        else
            head_[from] = next_[section];
        if (next_[section] >= 0) previous_[next_[section]] = previous_[section];
    }
    watch_[section] = to;
    previous_[section] = -1;
    next_[section] = head_[to];
    if (head_[to] >= 0) previous_[head_[to]] = section;
    head_[to] = section;
}

void Skyline::set_rank(int32_t b, int32_t new_rank) {
    trail_.push_back({Kind::kRank, b, rank[b], 0});
    rank[b] = new_rank;
}

void Skyline::undo(size_t mark) {
    while (trail_.size() > mark) {
        const Entry entry = trail_.back();
        trail_.pop_back();
        switch (entry.kind) {
            case Kind::kPlaced:
                placed_[entry.index] = 0;
                take(entry.index, -1);
                break;
            case Kind::kRaised:
                floor[entry.index] = entry.old;
                low[entry.index] = entry.old_low;
                break;
            case Kind::kWatch:
                move_watch(entry.index, static_cast<int32_t>(entry.old));
                break;
            case Kind::kRank:
                rank[entry.index] = static_cast<int32_t>(entry.old);
                break;
        }
    }
}

}  // namespace farspan
