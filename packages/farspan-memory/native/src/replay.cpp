#include "replay.h"

namespace farspan {

void Replay::set(std::vector<farspan_row> rows, uint64_t arena, Stream stream) {
    rows_ = std::move(rows);
    users_.clear();
    if (arena > 0) users_[0] = {arena, stream};
    active_ = false;
}

void Replay::begin() {
    ++counts_.iterations;
    active_ = !rows_.empty();
    cursor_ = missed_ = trail_ = 0;
}

bool Replay::same(size_t row, uint64_t size, Stream stream) const {
    return row < rows_.size() && rows_[row].size == size && rows_[row].stream == stream;
}

// Moves the cursor to the request's row, which it has when the row at the cursor is the same; when
// as many rows are left out as requests came instead; or when the request before is there too.
bool Replay::find(uint64_t size, Stream stream) {
    if (same(cursor_, size, stream)) return true;
    size_t row = cursor_ + trail_;
    bool found = trail_ > 0 && trail_ < window_ && same(row, size, stream);
    for (size_t i = 1; !found && trail_ > 0 && i < window_; ++i) {
        row = cursor_ + i;
        found = same(row, size, stream) && same(row - 1, last_.size, last_.stream);
    }
    if (!found) return false;
    ++counts_.resyncs;
    cursor_ = row;
    return true;
}

void Replay::miss(uint64_t size, Stream stream) {
    ++counts_.misses;
    last_ = {size, stream, 0};
    if (++missed_ < most_misses_) return;
    ++counts_.give_ups;
    active_ = false;
}

bool Replay::overlaps(uint64_t begin, uint64_t end) const {
    auto next = live_.lower_bound(begin);
    if (next != live_.end() && next->first < end) return true;
    return next != live_.begin() && std::prev(next)->second > begin;
}

// The bytes become the stream's; its work waits for that of the streams that had them.
bool Replay::take(uint64_t begin, uint64_t end, Stream stream, Order order, void* context) {
    auto first = std::prev(users_.upper_bound(begin));
    std::set<Stream> others;
    for (auto user = first; user != users_.end() && user->first < end; ++user) {
        if (user->second.stream != stream) others.insert(user->second.stream);
    }
    if (others.empty()) return true;
    for (Stream other : others) {
        if (!order(context, other, stream)) return false;
    }
    for (auto user = first; user != users_.end() && user->first < end;) {
        const auto [from, had] = *user;
        user = users_.erase(user);
        if (from < begin) users_[from] = {begin, had.stream};
        if (had.end > end) users_[end] = {had.end, had.stream};
    }
    users_[begin] = {end, stream};
    return true;
}

uint64_t Replay::malloc(uint64_t size, Stream stream, Order order, void* context) {
    if (!find(size, stream)) {
        ++trail_;
        miss(size, stream);
        return FARSPAN_UNPLANNED;
    }
    trail_ = 0;
    const uint64_t begin = rows_[cursor_++].address, end = begin + size;
    if (begin == FARSPAN_UNPLANNED) return begin;
    const bool busy = overlaps(begin, end);
    counts_.overlaps += busy;
    if (busy || !take(begin, end, stream, order, context)) {
        miss(size, stream);
        return FARSPAN_UNPLANNED;
    }
    ++counts_.hits;
    live_[begin] = end;
    return begin;
}

}  // namespace farspan
