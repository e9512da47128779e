// pPool and sPool of GMLake, section 3.2.
#pragma once

#include <unordered_map>

#include "blocks.h"

namespace farspan {

// Idle pBlocks, a sorted set a stream and width.
// Invariant: holds the idle pBlocks and no others; total is the sum of their units.
class PPool {
   public:
    struct Shelf {
        std::set<PBlock*, BySize> blocks;
        size_t total = 0;
    };

    void insert(PBlock* p);
    void erase(PBlock* p);
    // Of what a shelf has.
    struct Key {
        Stream stream;
        size_t width;
        bool operator==(const Key& o) const { return stream == o.stream && width == o.width; }
    };
    struct Hash {
        size_t operator()(const Key& k) const {
            return (k.stream * 0x9E3779B97F4A7C15u) ^ (k.width * 0xC2B2AE3D27D4EB4Fu);
        }
    };
    using Shelves = std::unordered_map<Key, Shelf, Hash>;

    // The smallest with at least this many units, or null. O(log n).
    PBlock* at_least(size_t count, Key key) const;
    const Shelf& shelf(Key key) { return shelves_[key]; }
    const Shelves& shelves() const { return shelves_; }

   private:
    Shelves shelves_;
};

// sBlocks by exact size and stream, and all of them by last use.
//
// An sBlock with an active part is active in the paper, and every assignment of a pBlock would
// have to label all its sBlocks. Here a look-up that meets a blocked sBlock leaves it with the part
// that blocks it, and that part's return wakes it: an assignment costs nothing for its aliases.
class SPool {
   public:
    void insert(SBlock* s);  // idle again, or new
    void erase(SBlock* s);   // assigned, or dropped
    // One whose parts are all idle and on the stream, or null.
    SBlock* find(size_t count, Stream stream);
    // The part became idle or changed its stream: those that wait for it may be usable.
    void wake(PBlock* p);

    void append(SBlock* s);  // as newest
    void unlink(SBlock* s);
    SBlock* oldest() const { return oldest_; }

    // Whether s is in its bucket; for the checker.
    bool shelved(const SBlock* s) const;

   private:
    struct Key {
        size_t count;
        Stream stream;
        bool operator==(const Key& o) const { return count == o.count && stream == o.stream; }
    };
    struct Hash {
        size_t operator()(const Key& k) const {
            return (k.count * 0x9E3779B97F4A7C15u) ^ (k.stream * 0xC2B2AE3D27D4EB4Fu);
        }
    };
    std::unordered_map<Key, std::vector<SBlock*>, Hash> buckets_;
    SBlock* oldest_ = nullptr;
    SBlock* newest_ = nullptr;
};

}  // namespace farspan
