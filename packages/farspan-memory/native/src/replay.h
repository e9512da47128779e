// Replay of a static plan: the recorded requests of an iteration have fixed places in an arena.
#pragma once

#include <map>

#include "streams.h"

namespace farspan {

// Follows the plan with a cursor. A request gets its planned address only when its size and stream
// are the row's and nothing live overlaps; so a program that deviates costs time, never memory
// safety. Offsets are from the arena's start.
//
//   rows     a b c d e f g     plan
//   program  a b X d e f g     X: elsewhere; d is where X would have been, plus one: in step again
//   program  a b X c d e f     X: elsewhere; c is the row at the cursor
//   program  a b d e f g       d: elsewhere; e follows d in the rows: in step again
//
// Invariant: live_ has the planned bytes in use, disjoint; users_ covers the arena, each interval
// with the stream that was given it last.
class Replay {
   public:
    struct Counts {
        uint64_t iterations = 0, hits = 0, misses = 0, overlaps = 0, resyncs = 0, give_ups = 0;
    };
    // Orders work between streams; false when it cannot.
    using Order = bool (*)(void* context, Stream from, Stream to);

    Replay(size_t window, size_t misses) : window_(window), most_misses_(misses) {}

    // Sizes rounded, addresses as offsets.
    void set(std::vector<farspan_row> rows, uint64_t arena, Stream stream);
    void begin();
    bool active() const { return active_; }
    size_t live() const { return live_.size(); }
    const std::vector<farspan_row>& rows() const { return rows_; }
    // The offset for the next request, or FARSPAN_UNPLANNED: it is served elsewhere.
    uint64_t malloc(uint64_t size, Stream stream, Order order, void* context);
    void free(uint64_t offset) { live_.erase(offset); }
    const Counts& counts() const { return counts_; }

   private:
    friend class Checker;
    bool find(uint64_t size, Stream stream);
    bool same(size_t row, uint64_t size, Stream stream) const;
    void miss(uint64_t size, Stream stream);
    bool overlaps(uint64_t begin, uint64_t end) const;
    bool take(uint64_t begin, uint64_t end, Stream stream, Order order, void* context);

    struct User {
        uint64_t end;
        Stream stream;
    };
    const size_t window_, most_misses_;
    std::vector<farspan_row> rows_;
    bool active_ = false;
    size_t cursor_ = 0;
    size_t missed_ = 0;   // in this iteration
    size_t trail_ = 0;    // requests in a row that were served elsewhere
    farspan_row last_{};  // the latest of them
    std::map<uint64_t, uint64_t> live_;
    std::map<uint64_t, User> users_;
    Counts counts_;
};

}  // namespace farspan
