// The splitting pool: requests below a chunk are cut from segments of one chunk.
#pragma once

#include <set>
#include <unordered_map>

#include "blocks.h"

namespace farspan {

struct Segment;

// A piece of a segment, free or given out. Sizes and offsets are multiples of 512 bytes.
struct Piece {
    Segment* segment;
    uint64_t address;
    uint64_t size;
    Piece* before;
    Piece* after;
    bool free;
};

struct Segment {
    Block* block;
    Piece* first;
    size_t used = 0;  // pieces given out
};

// Invariant: the pieces of a segment cover its block in order; no two neighbours are both free.
// Invariant: the free pieces of a stream's segments, and no others, are in its set.
class SmallPool {
   public:
    static constexpr uint64_t ROUND = 512;
    static uint64_t rounded(uint64_t bytes) { return (bytes + ROUND - 1) / ROUND * ROUND; }

    ~SmallPool();
    // The smallest free piece that fits, cut to size; null when none does.
    Piece* malloc(uint64_t size, Stream stream);
    // A chunk more for the block's stream.
    void add(Block* block, uint64_t bytes);
    // The block of a segment that is empty beyond the one each stream keeps, or null.
    Block* free(Piece* piece);
    // Blocks of all empty segments.
    std::vector<Block*> drain();
    // Segments of one stream are another's, as their blocks will be. None of them is empty.
    void rename(Stream from, Stream to);

   private:
    friend class Checker;
    struct ByPieceSize {
        using is_transparent = void;
        bool operator()(const Piece* a, const Piece* b) const {
            return a->size != b->size ? a->size < b->size : a->address < b->address;
        }
        bool operator()(const Piece* a, uint64_t size) const { return a->size < size; }
    };
    struct Shelf {
        std::set<Piece*, ByPieceSize> pieces;
        Segment* spare = nullptr;  // empty, kept
    };
    Shelf& shelf(const Piece* piece) { return shelves_[piece->segment->block->stream]; }
    Piece* join(Piece* a);
    Block* retire(Segment* segment);

    std::unordered_map<Stream, Shelf> shelves_;
    std::set<Segment*> segments_;
};

}  // namespace farspan
