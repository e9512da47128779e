// Memory of captured graphs, as in torch's private pools: what a capture frees serves that capture
// again, and nobody else for as long as a graph may be launched.
#pragma once

#include <functional>

#include "streams.h"

namespace farspan {

// A pool has streams of its own, one for each stream that it captures on. The blocks of a pool are
// on them: stitching, splitting and small pieces know no other way to keep memory apart.
//
// Invariant: a pool with an open capture, or of a capture that nobody announced, has not ended.
class Captures {
   public:
    using Filter = std::function<bool(Stream)>;
    struct Pool {
        size_t uses = 0;  // announced captures whose graphs are not released
        size_t open = 0;  // of them those that go on
        Filter filter;    // whether the stream is in the capture; none: every capturing stream is
        std::map<Stream, Stream> streams;  // own one by captured one
        std::vector<Live> pinned;          // freed, and used by streams outside
    };
    using Pools = std::map<PoolId, Pool>;

    void begin(PoolId id, Filter filter);
    void end(PoolId id);
    // A graph of the pool is gone.
    void release(PoolId id);

    // The pool of a capture on this stream: one that is open, else one for this capture alone,
    // which never ends.
    Pools::value_type& of(Stream stream, uint64_t capture);
    // The pool's own stream; `made` tells whether it is new.
    Stream own(Pool& pool, Stream stream, bool* made);
    Pool* find(PoolId id);

    bool open() const;
    bool any_ended() const;
    // Those without a graph, which are forgotten here.
    std::vector<Pool> take_ended();
    const Pools& pools() const { return pools_; }

   private:
    static bool ended(const PoolId& id, const Pool& pool);

    static constexpr uint64_t ALONE = UINT64_MAX;  // first number of an id that no caller gave
    Pools pools_;
    Stream next_ = Stream{1} << 63;  // no pointer to a stream has this bit
};

}  // namespace farspan
