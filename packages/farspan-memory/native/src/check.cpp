// The dumb checker. It walks the lists of all blocks and asks the backend what is mapped where; it
// uses none of the look-ups by which the allocator finds blocks, but to compare them.
#include <algorithm>
#include <tuple>

#include "allocator.h"

namespace farspan {

std::string Checker::run() {
    chunks();
    sblocks();
    parts();
    pools();
    holders();
    segments();
    tensors();
    totals();
    return broken_;
}

void Checker::expect(bool holds, const char* words) {
    if (!holds && broken_.empty()) broken_ = words;
}

// What belongs at unit i of a pBlock.
static Backend::Page page(const PBlock* p, size_t i) {
    return {p->range->chunks.at(p->first + i / p->width).handle, i % p->width};
}

// Each chunk is in one pBlock, and mapped where the pBlock says.
void Checker::chunks() {
    const Stitcher& s = a_.stitcher_;
    std::set<uint64_t> seen;
    size_t units = 0;
    for (const PBlock* p : s.all_) {
        expect(p->count > 0, "a pBlock is empty");
        const size_t before = width(p->range->chunks.data(), p->first);
        expect(p->address == p->range->address + before * s.unit_, "a pBlock is elsewhere");
        expect(p->count % p->width == 0, "a pBlock has a part of a chunk");
        for (size_t i = 0; i < p->slots(); ++i) {
            const auto [handle, wide] = p->range->chunks.at(p->first + i);
            expect(wide == p->width, "a pBlock has a chunk of another width");
            expect(handle != Chunk::NONE, "a pBlock has a slot without a chunk");
            expect(seen.insert(handle).second, "a chunk is in two pBlocks");
        }
        for (size_t i = 0; i < p->count; ++i) {
            expect(a_.backend_->mapped_at(p->address + i * s.unit_) == page(p, i),
                   "a pBlock's chunk is not mapped at its address");
        }
        units += p->count;
        neighbours(p);
        pages_ += p->count;
    }
    expect(units == s.reserved_, "reserved is not what the chunks have");
}

void Checker::neighbours(const PBlock* p) {
    if (const PBlock* b = p->after) {
        expect(b->before == p && b->range == p->range && b->first == p->first + p->slots(),
               "a pBlock's neighbour is not adjacent");
    }
    if (const PBlock* b = p->before) expect(b->after == p, "a pBlock's neighbour has another");
}

// An sBlock has the chunks of its parts, in order.
void Checker::sblocks() {
    const Stitcher& stitcher = a_.stitcher_;
    size_t count = 0, space = 0;
    for (const SBlock* s = stitcher.spool_.oldest(); s; s = s->newer) {
        ++count;
        space += s->own ? s->count : 0;
        uint64_t address = s->address;
        bool idle = true;
        for (const PBlock* p : s->parts) {
            expect(std::count(p->users.begin(), p->users.end(), s) == 1,
                   "a part does not know its sBlock");
            idle = idle && p->use == Use::idle;
            for (size_t i = 0; i < p->count; ++i, address += stitcher.unit_) {
                expect(a_.backend_->mapped_at(address) == page(p, i),
                       "an sBlock's address has another chunk than its part");
            }
        }
        expect(address == s->address + s->count * stitcher.unit_, "parts do not fill an sBlock");
        if (s->use != Use::idle) continue;
        const auto* watched = s->watched;
        const bool waits =
            watched && std::count(watched->watchers.begin(), watched->watchers.end(), s) == 1 &&
            std::count(s->parts.begin(), s->parts.end(), watched) == 1 &&
            (watched->use != Use::idle || watched->stream != s->stream);
        expect(waits != stitcher.spool_.shelved(s), "an idle sBlock can never be found again");
    }
    expect(count == stitcher.sblocks_, "the number of sBlocks is wrong");
    expect(space == stitcher.virtual_, "the address space of sBlocks is wrong");
    pages_ += space;
    expect(pages_ == a_.backend_->mapped_pages(), "something is mapped that no block has");
}

// A part is given out by one sBlock, and an assigned sBlock gives out all of its parts.
void Checker::parts() {
    std::set<const PBlock*> given;
    for (const SBlock* s = a_.stitcher_.spool_.oldest(); s; s = s->newer) {
        if (s->use == Use::idle) continue;
        for (const PBlock* p : s->parts) {
            expect(p->use == Use::part, "an assigned sBlock has an idle part");
            expect(given.insert(p).second, "a pBlock is a part of two assigned sBlocks");
        }
    }
    for (const PBlock* p : a_.stitcher_.all_) {
        expect((p->use == Use::part) == (given.count(p) == 1), "a part has no assigned sBlock");
    }
}

void Checker::pools() {
    size_t idle = 0, shelved = 0;
    for (const PBlock* p : a_.stitcher_.all_) idle += p->use == Use::idle;
    for (const auto& [key, shelf] : a_.stitcher_.ppool_.shelves()) {
        size_t total = 0;
        const PBlock* before = nullptr;
        for (const PBlock* p : shelf.blocks) {
            expect(p->use == Use::idle && p->stream == key.stream && p->width == key.width,
                   "the pPool has a block in use");
            expect(!before || BySize()(before, p), "the pPool is not sorted");
            before = p;
            total += p->count;
        }
        shelved += shelf.blocks.size();
        expect(total == shelf.total, "the total of the pPool is wrong");
    }
    expect(idle == shelved, "an idle pBlock is not in the pPool");
}

void Checker::hold(const Block* block, Use use) {
    expect(block->use == use, "a block is not used as its holder says");
    expect(held_.insert(block).second, "a block has two holders");
}

std::vector<const Live*> Checker::all_live() const {
    std::vector<const Live*> all;
    for (const auto& [address, live] : a_.live_) all.push_back(&live);
    for (const Live& live : a_.quarantine_) all.push_back(&live);
    for (const auto& [id, pool] : a_.captures_.pools()) {
        for (const Live& live : pool.pinned) all.push_back(&live);
    }
    for (const auto& entry : a_.waiting_.entries_) all.push_back(&entry.live);
    return all;
}

// Each block that is neither idle nor a part has one holder.
void Checker::holders() {
    for (const auto& [address, live] : a_.live_) {
        expect(address == live.address, "a tensor is filed under another address");
        if (live.block) hold(live.block, Use::live);
    }
    for (const auto& [id, pool] : a_.captures_.pools()) {
        for (const Live& live : pool.pinned) {
            if (live.block) hold(live.block, Use::pinned);
        }
        for (const auto& [stream, own] : pool.streams) {
            expect(a_.stitcher_.is_aside(own), "a pool's stream is not aside");
        }
    }
    for (const Live& live : a_.quarantine_) {
        if (live.block) hold(live.block, Use::held);
    }
    for (const auto& entry : a_.waiting_.entries_) {
        if (entry.live.block) hold(entry.live.block, Use::held);
    }
    for (const Segment* segment : a_.small_.segments_) hold(segment->block, Use::small);
    if (a_.arena_) hold(a_.arena_, Use::arena);
    size_t used = 0;
    for (const PBlock* p : a_.stitcher_.all_) used += p->use != Use::idle && p->use != Use::part;
    for (const SBlock* s = a_.stitcher_.spool_.oldest(); s; s = s->newer) {
        used += s->use != Use::idle;
    }
    expect(used == held_.size(), "a block is in use and nobody holds it");
}

void Checker::segments() {
    size_t free = 0, shelved = 0;
    for (const Segment* segment : a_.small_.segments_) {
        uint64_t address = segment->block->address;
        size_t used = 0;
        for (const Piece* piece = segment->first; piece; piece = piece->after) {
            expect(piece->address == address && piece->size > 0, "a piece is elsewhere");
            expect(!piece->after || piece->after->before == piece, "pieces are not linked");
            expect(!(piece->free && piece->after && piece->after->free), "free pieces not joined");
            address += piece->size;
            (piece->free ? free : used) += 1;
        }
        expect(address == segment->block->address + a_.options_.chunk, "pieces leave a gap");
        expect(used == segment->used, "the number of used pieces is wrong");
        const auto& shelves = a_.small_.shelves_;
        const auto shelf = shelves.find(segment->block->stream);
        expect(shelf != shelves.end() && (used == 0) == (shelf->second.spare == segment),
               "the spare segment is not the empty one");
    }
    for (const auto& [stream, shelf] : a_.small_.shelves_) {
        for (const Piece* piece : shelf.pieces) {
            expect(piece->free && piece->segment->block->stream == stream, "a free set is wrong");
        }
        shelved += shelf.pieces.size();
    }
    expect(free == shelved, "a free piece is in no set");
}

// No two tensors share a physical byte.
void Checker::tensors() {
    struct Bytes {
        uint64_t handle, part, begin, end;
    };
    std::vector<Bytes> all;
    const uint64_t unit = a_.options_.tail;
    for (const Live* live : all_live()) {
        for (uint64_t at = live->address; at < live->address + live->size;) {
            const uint64_t begin = at % unit;
            const uint64_t end = std::min(unit, begin + live->address + live->size - at);
            const auto [handle, part] = a_.backend_->mapped_at(at);
            expect(handle != Chunk::NONE, "a tensor has an address that is not mapped");
            all.push_back({handle, part, begin, end});
            at += end - begin;
        }
        if (live->kind != Live::Kind::planned) continue;
        const uint64_t offset = live->address - a_.arena_->address;
        const auto found = a_.replay_.live_.find(offset);
        expect(found != a_.replay_.live_.end() && found->second == offset + live->size,
               "a planned tensor is not among the planned bytes in use");
    }
    std::sort(all.begin(), all.end(), [](const Bytes& a, const Bytes& b) {
        return std::tie(a.handle, a.part, a.begin) < std::tie(b.handle, b.part, b.begin);
    });
    for (size_t i = 1; i < all.size(); ++i) {
        const bool same = all[i - 1].handle == all[i].handle && all[i - 1].part == all[i].part;
        expect(!same || all[i - 1].end <= all[i].begin,
               "two tensors share memory");
    }
}

void Checker::totals() {
    uint64_t requested = 0, allocated = 0, held = 0, pinned = 0;
    for (const auto& [address, live] : a_.live_) requested += live.bytes, allocated += live.size;
    for (const auto& [id, pool] : a_.captures_.pools()) {
        for (const Live& live : pool.pinned) pinned += live.size;
    }
    for (const Live& live : a_.quarantine_) held += live.size;
    for (const auto& entry : a_.waiting_.entries_) held += entry.live.size;
    const farspan_statistics& s = a_.statistics_;
    expect(s.requested == requested && s.allocated == allocated, "allocated bytes are wrong");
    expect(s.held == held && s.pinned == pinned, "held bytes are wrong");
    expect(a_.stitcher_.mappings_ <= a_.stitcher_.limits_.mappings, "too many mappings");
    size_t mappings = 0, holes = 0;
    std::set<const Range*> ranges;
    for (const PBlock* p : a_.stitcher_.all_) ranges.insert(p->range);
    for (const Range* range : ranges) {
        mappings += a_.stitcher_.mappings_of(*range);
        holes += range->count - range->mapped;
    }
    expect(holes == a_.stitcher_.holes_, "the address space without memory is wrong");
    expect(a_.stitcher_.virtual_ <= a_.stitcher_.limits_.virtual_units, "too many sBlocks");
    for (const SBlock* b = a_.stitcher_.spool_.oldest(); b; b = b->newer) mappings += b->mappings;
    expect(mappings == a_.stitcher_.mappings_, "the number of mappings is wrong");
}

}  // namespace farspan
