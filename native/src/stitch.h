// The stitching allocator of GMLake, section 3.3 and 4, over chunks of one device.
#pragma once

#include <random>
#include <string>

#include "backend.h"
#include "pools.h"

namespace farspan {

// States of BestFit, Algorithm 1; S5, out of memory, is its caller's.
enum class State { s1_exact, s2_single, s3_multiple, s4_insufficient };

// exact is set in S1; blocks are the candidates otherwise.
struct Fit {
    State state;
    Block* exact = nullptr;
    std::vector<PBlock*> blocks;
};

// In chunks; policy holds farspan_policy flags.
struct Limits {
    size_t capacity, fragment, virtual_chunks, mappings;
    uint64_t policy, seed;
};

// Blocks of whole chunks. Not thread-safe; nothing here throws or waits, but release, StitchFree
// (they wait for the work through the addresses that they unmap) and what runs out of host memory.
//
// Invariant: a chunk belongs to one pBlock and is in at most one assigned block.
// Invariant: a call that fails leaves pools, capacity and addresses as they were, but for splits
// and for idle pBlocks that are new.
class Stitcher {
   public:
    struct Counts {
        uint64_t s1_primitive = 0, s1_stitched = 0, s2 = 0, s3 = 0, s4 = 0;
        uint64_t allocs = 0, splits = 0, stitches = 0, stitch_frees = 0, merges = 0, steals = 0;
    };

    Stitcher(Backend& backend, size_t chunk, const Limits& limits);
    ~Stitcher();

    // S1 to S4, or null. may_map false: S1 and S2 alone, which need no call of the backend.
    Block* malloc(size_t count, Stream stream, Use use, bool may_map);
    // New chunks in one piece, whatever is idle, or null.
    Block* fresh(size_t count, Stream stream, Use use);
    // Update: the chunks are idle again, the block stays for an exact match.
    void update(Block* block);

    // Moves idle chunks of other streams to this one, so that malloc has enough of them; its work
    // waits for theirs on the device. False when nothing was moved.
    bool steal(size_t count, Stream stream);
    // Gives `count` idle chunks back, the largest blocks first. False when it cannot wait for
    // their streams; then nothing has changed.
    bool release(size_t count);
    // Work queued later on `to` runs after what is queued on `from` now. False when it cannot.
    bool order(Stream from, Stream to);
    // All work queued now on these streams is done. False when it cannot wait.
    bool quiesce(const std::set<Stream>& streams);
    // All that blocks were ever made for, or moved to.
    std::set<Stream> streams() const;

    size_t room() const;  // chunks below the capacity
    size_t reserved() const { return reserved_; }
    size_t peak() const { return peak_; }  // most reserved since reset_peak()
    void reset_peak() { peak_ = reserved_; }
    size_t idle() const;
    void set_capacity(size_t chunks) { limits_.capacity = chunks; }
    const Counts& counts() const { return counts_; }
    size_t virtual_chunks() const { return virtual_; }
    size_t mappings() const { return mappings_; }
    size_t pblocks() const { return all_.size(); }
    size_t sblocks() const { return sblocks_; }

   private:
    friend class Checker;

    Fit best_fit(size_t count, Stream stream);
    std::vector<PBlock*> gather(size_t count, Stream stream);
    PBlock* single(size_t count, Stream stream) const;
    PBlock* alloc(size_t count, Stream stream);
    bool scatter(size_t count, Stream stream);
    void split(PBlock* p, size_t count);
    SBlock* stitch(std::vector<PBlock*> parts, size_t count, Stream stream);
    bool stitch_free(size_t virtual_chunks, size_t mappings);
    Block* assign(Block* block, Use use);

    bool can_merge(const PBlock* a, const PBlock* b) const;
    void merge(PBlock* a);
    PBlock* merge_around(PBlock* p);

    PBlock* add(Range* range, size_t first, size_t count, Stream stream);
    void remove(PBlock* p);
    void move(PBlock* p, Stream stream);
    void drop(SBlock* s);
    void drop(PBlock* p);
    size_t mappings_of(const Range& range) const;
    bool over(size_t virtual_chunks, size_t mappings, size_t slack) const;

    Backend& backend_;
    const size_t chunk_;
    Limits limits_;
    PPool ppool_;
    SPool spool_;
    std::vector<PBlock*> all_;
    size_t sblocks_ = 0;
    size_t reserved_ = 0;  // chunks created
    size_t peak_ = 0;
    size_t virtual_ = 0;   // chunks of address space of all sBlocks
    size_t mappings_ = 0;
    Counts counts_;
    std::minstd_rand random_;
#ifdef FARSPAN_DOUBLE_ASSIGN
    Chunk earlier_;
#endif
};

}  // namespace farspan
