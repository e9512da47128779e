// What an exact search knows while it places buffers from the bottom up.
//
//   height +            +- - - - - +     A section is a stretch of time in which the same buffers
//          |  +---+     |  rest    |     are alive; those whose buffers all live in a neighbour as
//          |  | a +-----+- - - - - +     well are left out. The skyline is the top of what stands
//          |  |   |  b  | <- floor of    in each section; what is not placed yet must fit above
//          +--+---+-----+   what comes   it: low + rest <= height for at least one buffer there,
//             s0    s1    s2             the one that will stand lowest.
//
// Invariant: floor[b] is the skyline under b; low[b] >= floor[b] bounds its address from below in
// every placement still open; watch[s] is a buffer not yet placed, alive in s, that could stand
// lowest in it (low + rest[s] <= height), for each section with rest[s] > 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace farspan {

using Bytes = int64_t;

struct Buffer {
    Bytes size;
    Bytes time;           // dies - born
    int32_t first, last;  // alive in the sections [first, last)
    int32_t twin;         // equal for buffers of one size and the same sections
};

// Buffers [begin, end) of Skyline::items: those of a stretch of sections that nothing unplaced
// crosses the borders of, so that it can be solved by itself.
struct Part {
    int32_t begin, end;
    int32_t size() const { return end - begin; }
};

class Skyline {
  public:
    Skyline(std::vector<Buffer> buffers, int32_t sections, Bytes height);

    // Can it fit, as far as one section tells? Sets the watches; call once.
    bool start();
    // Put b, which is in the part, on the skyline. False: no placement follows from it. The caller
    // undoes to its mark then.
    bool place(int32_t b, Part part);
    // b is not put on the skyline as it is now: something comes between. False as above.
    bool defer(int32_t b, Part part);
    void set_rank(int32_t b, int32_t rank);

    std::size_t mark() const { return trail_.size(); }
    void undo(std::size_t mark);
    void forget() { trail_.clear(); }  // what is done stays done
    std::size_t trail_bytes() const { return trail_.size() * sizeof(Entry); }

    const Buffer &buffer(int32_t b) const { return buffers_[b]; }
    int32_t buffers() const { return static_cast<int32_t>(buffers_.size()); }

    std::vector<Bytes> address, floor, low;
    std::vector<int32_t> rank;   // which of several comes first; different within a part
    std::vector<int32_t> items;  // all buffers; a part is a range of it
    std::vector<Bytes> rest;     // bytes not yet placed, a section
    std::vector<int32_t> cross;  // buffers not yet placed that live in s and in s + 1

  private:
    enum class Kind : int32_t { kPlaced, kRaised, kWatch, kRank };
    struct Entry {
        Kind kind;
        int32_t index;
        Bytes old, old_low;
    };

    bool raise(int32_t b, Bytes new_floor, Bytes new_low);
    bool raise_deferred(Bytes lowest, Bytes second, int32_t lowest_buffer);
    bool check_watches(int32_t b, bool all);
    bool find_watch(int32_t section);
    void move_watch(int32_t section, int32_t to);
    void take(int32_t b, int32_t sign);
    bool settle();

    std::vector<Buffer> buffers_;
    int32_t sections_;
    Bytes height_;
    std::vector<char> placed_;
    std::vector<std::size_t> alive_begin_;  // the buffers of section s: alive_[alive_begin_[s] ...)
    std::vector<int32_t> alive_;
    std::vector<int32_t> cursor_;                   // where the last search in a section ended
    std::vector<int32_t> watch_, next_, previous_;  // a section; lists of sections of one watch
    std::vector<int32_t> head_;                     // a buffer: the first section it watches
    std::vector<Entry> trail_;
    std::vector<int32_t> changed_, deferred_;
};

}  // namespace farspan
