// Chunk, PBlock and SBlock: the nouns of GMLake, section 3.
//
//   Range    |  c0  c1  c2  c3  c4 |t0 t1|   one reservation, a chunk a slot, tail chunks last
//   pBlocks  |  p0 (2)  |  p1 (3)  |  p2 |   cut at chunks: Split and merge need no driver call
//   sBlock   |  p1  |  p7  |  p3    |        own addresses over the chunks of its parts
//
// Sizes are in units. A whole chunk is one or more units wide; where it is more, the end of a block
// that fills no whole chunk is of tail chunks, one unit wide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace farspan {

using Stream = uint64_t;

// One physical piece: what is mapped, whole.
struct Chunk {
    uint64_t handle = NONE;
    size_t width = 1;
    static constexpr uint64_t NONE = UINT64_MAX;
};

// Who holds a block.
enum class Use : uint8_t {
    idle,    // in its pool
    part,    // a pBlock whose chunks an assigned sBlock gave out
    live,    // a tensor
    held,    // freed; an event is pending, or it is in quarantine
    pinned,  // freed, but a captured graph may still use its addresses
    small,   // a segment of the splitting pool
    arena    // of a plan
};

// One reservation of addresses with the chunks mapped there; a slot without one is NONE.
struct Range {
    uint64_t address = 0;
    size_t count = 0;
    std::vector<Chunk> chunks;
    size_t mapped = 0;  // units with a chunk
};

// `stream` is the one whose work is ordered before a next use; `count` is in units.
struct Block {
    uint64_t address = 0;
    size_t count = 0;
    Stream stream = 0;
    Use use = Use::idle;
    const bool stitched;

   protected:
    explicit Block(bool s) : stitched(s) {}
};

struct SBlock;

// Invariant: slots [first, first + slots()) of its range have chunks of its width, and no other
// pBlock has them.
// Invariant: `before` and `after` are the pBlocks of adjacent slots, null where there is none.
struct PBlock : Block {
    PBlock() : Block(false) {}
    Range* range = nullptr;
    size_t first = 0;
    size_t width = 1;  // of each chunk
    size_t slots() const { return count / width; }
    PBlock* before = nullptr;
    PBlock* after = nullptr;
    std::vector<SBlock*> users;     // sBlocks with this part, oldest first
    std::vector<SBlock*> watchers;  // idle sBlocks that cannot be used before this part is
    size_t place = 0;               // in the list of all pBlocks
};

// Invariant: an assigned sBlock's parts are all `part`. An idle one is in the sPool, where a
// look-up may find it blocked, or among the watchers of one part that blocks it.
struct SBlock : Block {
    SBlock() : Block(true) {}
    std::vector<PBlock*> parts;
    PBlock* watched = nullptr;
    bool own = true;   // addresses of its own; else those of its parts, which are adjacent
    size_t place = 0;  // in its bucket of the sPool
    SBlock* older = nullptr;
    SBlock* newer = nullptr;
    size_t mappings = 0;
};

struct BySize {
    using is_transparent = void;
    bool operator()(const PBlock* a, const PBlock* b) const {
        return a->count != b->count ? a->count < b->count : a->address < b->address;
    }
    bool operator()(const PBlock* a, size_t count) const { return a->count < count; }
    bool operator()(size_t count, const PBlock* a) const { return count < a->count; }
};

}  // namespace farspan
