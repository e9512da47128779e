// The stitching allocator of GMLake, section 3.3 and 4, over chunks of one device.
#pragma once

#include <random>
#include <string>

#include "backend.h"
#include "pools.h"

namespace farspan {

// In units; policy holds farspan_policy flags.
struct Limits {
    size_t capacity, fragment, virtual_units, mappings;
    uint64_t policy, seed;
};

// What a block is made of, in units: idle and new whole chunks, idle and new tail chunks.
struct Mix {
    size_t body = 0, new_body = 0, tail = 0, new_tail = 0;
    bool idle() const { return new_body + new_tail == 0; }
};

// Blocks of whole chunks, and of tail chunks where they end. Whatever is idle serves: but for calls
// that fail, malloc finds memory if and only if the stream's idle units and those below the
// capacity are enough. The states of BestFit, Algorithm 1, are branches of malloc; S5 is its
// caller's.
//
// Not thread-safe; nothing here throws or waits, but release, StitchFree (they wait for the work
// through the addresses that they unmap) and what runs out of host memory.
//
// Invariant: virtual_ and mappings_ are within their limits.
// Invariant: a chunk belongs to one pBlock and is in at most one assigned block.
// Invariant: a call that fails leaves pools, capacity and addresses as they were, but for splits
// and for idle pBlocks that are new.
class Stitcher {
   public:
    struct Counts {
        uint64_t s1_primitive = 0, s1_stitched = 0, s2 = 0, s3 = 0, s4 = 0;
        uint64_t allocs = 0, splits = 0, stitches = 0, stitch_frees = 0, merges = 0, steals = 0;
    };

    // Sizes in bytes: of a tail chunk, the unit, and of a whole one.
    Stitcher(Backend& backend, size_t unit, size_t chunk, const Limits& limits);
    ~Stitcher();

    // S1 to S4, or null.
    Block* malloc(size_t count, Stream stream, Use use);
    // New chunks in one piece, whatever is idle, or null.
    Block* fresh(size_t count, Stream stream, Use use);
    // Update: the chunks are idle again, the block stays for an exact match.
    void update(Block* block);

    // Moves idle chunks of other streams to this one, so that malloc has enough of them; its work
    // waits for theirs on the device. False when nothing was moved.
    bool steal(size_t count, Stream stream);
    // Gives `count` idle units back, up to whole chunks: whole ranges first, then the largest
    // blocks. Less where it cannot wait for their streams, or where the mappings beside what goes
    // are beyond their limit; unless it is needed, also where the addresses that stay without
    // memory are beyond theirs. False when nothing went for want of waiting.
    bool release(size_t count, bool needed);

    // Blocks on `own` are kept for requests on it: they are not stolen, unmapped or released. Work
    // on it is queued on `stream`, whose idle blocks may be stolen.
    void set_aside(Stream own, Stream stream) { aside_[own] = stream; }
    bool is_aside(Stream stream) const { return aside_.count(stream) > 0; }
    // All blocks on one are on the other, and no longer aside. The work through them is done.
    void rename(Stream from, Stream to);
    // A stream with blocks captures a graph.
    bool capturing() const;
    // Work queued later on `to` runs after what is queued on `from` now. False when it cannot.
    bool order(Stream from, Stream to);
    // All work queued now on these streams is done. False when it cannot wait.
    bool quiesce(const std::set<Stream>& streams);
    // Those on which work was queued for blocks.
    std::set<Stream> streams() const;

    size_t room() const;  // units below the capacity
    size_t reserved() const { return reserved_; }
    size_t peak() const { return peak_; }  // most reserved since reset_peak()
    void reset_peak() { peak_ = reserved_; }
    size_t idle() const;
    size_t idle_aside() const;
    void set_capacity(size_t units) { limits_.capacity = units; }
    const Counts& counts() const { return counts_; }
    size_t virtual_units() const { return virtual_ + holes_; }
    size_t mappings() const { return mappings_; }
    size_t pblocks() const { return all_.size(); }
    size_t sblocks() const { return sblocks_; }

   private:
    friend class Checker;

    using Parts = std::vector<PBlock*>;

    Block* exact(size_t count, Stream stream);
    Block* mixed(size_t count, Stream stream, Use use);
    bool mix(size_t count, Stream stream, bool fresh, Mix* m);
    Block* build(Parts parts, Stream stream);
    void gather(size_t count, PPool::Key key, Parts* to);
    PBlock* single(size_t count, PPool::Key key) const;
    PBlock* cut(PBlock* p, size_t count);
    Parts alloc(size_t body, size_t tail, Stream stream);
    bool scatter(size_t count, size_t width, Stream stream);
    size_t up(size_t count, size_t width) const { return (count + width - 1) / width * width; }
    PPool::Key bodies(Stream stream) const { return {stream, width_}; }
    PPool::Key tails(Stream stream) const { return {stream, 1}; }
    size_t idle(Stream stream);
    void split(PBlock* p, size_t count);
    SBlock* stitch(Parts parts, size_t count, Stream stream);
    SBlock* join(PBlock* body, PBlock* tail);
    void enlist(SBlock* s);
    bool stitch_free(size_t virtual_units, size_t mappings);
    Block* assign(Block* block, Use use);

    bool can_merge(const PBlock* a, const PBlock* b) const;
    void merge(PBlock* a);
    PBlock* merge_around(PBlock* p);

    PBlock* add(Range* range, size_t first, size_t count, uint64_t address, Stream stream);
    void remove(PBlock* p);
    void move(PBlock* p, Stream stream);
    void drop(SBlock* s);
    void drop(PBlock* p);
    size_t mappings_of(const Range& range) const;
    ptrdiff_t mappings_after(const PBlock* p) const;
    bool may_drop(const PBlock* p, bool needed) const;
    Parts releasable() const;
    Stream worked(Stream stream) const;
    bool over(size_t virtual_units, size_t mappings, size_t slack) const;
    std::string limit_words(size_t virtual_units, size_t mappings) const;

    Backend& backend_;
    const size_t unit_;   // bytes
    const size_t width_;  // of a whole chunk
    Limits limits_;
    PPool ppool_;
    SPool spool_;
    std::vector<PBlock*> all_;
    size_t sblocks_ = 0;
    size_t reserved_ = 0;  // units created
    size_t peak_ = 0;
    size_t virtual_ = 0;   // units of address space of all sBlocks
    size_t holes_ = 0;     // units of pBlocks' ranges without memory
    size_t mappings_ = 0;
    std::map<Stream, Stream> aside_;
    Counts counts_;
    std::minstd_rand random_;
#ifdef FARSPAN_DOUBLE_ASSIGN
    Chunk earlier_;
#endif
};

}  // namespace farspan
