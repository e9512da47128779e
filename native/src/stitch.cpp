#include "stitch.h"

#include <algorithm>

namespace farspan {

Stitcher::Stitcher(Backend& backend, size_t chunk, const Limits& limits)
    : backend_(backend), chunk_(chunk), limits_(limits),
      random_(static_cast<std::minstd_rand::result_type>(limits.seed + 1)) {}

// Callers have waited for all work.
Stitcher::~Stitcher() {
    while (spool_.oldest()) drop(spool_.oldest());
    while (!all_.empty()) drop(all_.back());
}

size_t Stitcher::room() const {
    return limits_.capacity > reserved_ ? limits_.capacity - reserved_ : 0;
}

size_t Stitcher::idle() const {
    size_t found = 0;
    for (const auto& [stream, shelf] : ppool_.shelves()) found += shelf.total;
    return found;
}

// Algorithm 1. An sBlock is a candidate for an exact match only.
Fit Stitcher::best_fit(size_t count, Stream stream) {
    PBlock* larger = ppool_.at_least(count, stream);
    if (larger && larger->count == count) return {State::s1_exact, larger, {}};
    if (SBlock* s = spool_.find(count, stream)) return {State::s1_exact, s, {}};
    if (larger) return {State::s2_single, nullptr, {single(count, stream)}};
    const PPool::Shelf& shelf = ppool_.shelf(stream);
    if (shelf.total >= count) return {State::s3_multiple, nullptr, gather(count, stream)};
    return {State::s4_insufficient, nullptr, {shelf.blocks.begin(), shelf.blocks.end()}};
}

// The smallest that leaves no piece below the fragmentation limit, else the smallest. The paper
// neither splits nor stitches below the limit, which grows the pool: 3 to 16 % of memory on traces
// of 7B models. Here it only chooses.
PBlock* Stitcher::single(size_t count, Stream stream) const {
    PBlock* best = ppool_.at_least(count, stream);
    if (best->count == count || limits_.fragment == 0) return best;
    PBlock* cheap = ppool_.at_least(count + limits_.fragment, stream);
    return cheap ? cheap : best;
}

// Largest first; the last is the one that fits best and is cut to fit. Each is smaller than count.
std::vector<PBlock*> Stitcher::gather(size_t count, Stream stream) {
    const auto& blocks = ppool_.shelf(stream).blocks;
    std::vector<PBlock*> found;
    if (limits_.policy & FARSPAN_SHUFFLE) {
        found.assign(blocks.begin(), blocks.end());
        std::shuffle(found.begin(), found.end(), random_);
        size_t used = 0;
        for (size_t sum = 0; sum < count; ++used) sum += found[used]->count;
        found.resize(used);
        return found;
    }
    for (auto next = blocks.rbegin(); count > 0; ++next) {
        PBlock* p = *next;
        if (p->count >= count) {
            found.push_back(single(count, stream));
            // The piece chosen for its large remainder may be one that is taken already.
            if (found.size() > 1 && !BySize()(found.back(), found[found.size() - 2])) {
                found.back() = ppool_.at_least(count, stream);
            }
            return found;
        }
        found.push_back(p);
        count -= p->count;
    }
    return found;
}

Block* Stitcher::malloc(size_t count, Stream stream, Use use, bool may_map) {
    Fit fit = best_fit(count, stream);
    if (fit.state == State::s1_exact) {
        ++(fit.exact->stitched ? counts_.s1_stitched : counts_.s1_primitive);
        return assign(fit.exact, use);
    }
    if (fit.state == State::s2_single) {
        ++counts_.s2;
        PBlock* p = fit.blocks.front();
        split(p, count);
        if (may_map && (limits_.policy & FARSPAN_HALF_STITCH)) {
            stitch({p, p->after}, p->count + p->after->count, stream);
        }
        return assign(p, use);
    }
    if (!may_map) return nullptr;
    const bool enough = fit.state == State::s3_multiple;
    const bool lazy = (limits_.policy & FARSPAN_LAZY) && room() >= count;
    size_t missing = enough ? 0 : count - ppool_.shelf(stream).total;
    if (limits_.policy & FARSPAN_SHUFFLE) {
        if (!scatter(lazy ? count : missing, stream)) return nullptr;
        fit = best_fit(count, stream);
        ++(enough && !lazy ? counts_.s3 : counts_.s4);
        return assign(fit.exact ? fit.exact : stitch(fit.blocks, count, stream), use);
    }
    if (lazy) {
        if (Block* made = fresh(count, stream, use)) return made;
    }
    if (missing > 0) {
        PBlock* p = alloc(missing, stream);
        if (!p) return nullptr;
        fit.blocks.push_back(p);
    }
    Block* made = missing == count ? static_cast<Block*>(fit.blocks.front())
                                   : stitch(std::move(fit.blocks), count, stream);
    if (made) ++(enough ? counts_.s3 : counts_.s4);
    return assign(made, use);
}

Block* Stitcher::fresh(size_t count, Stream stream, Use use) {
    PBlock* p = alloc(count, stream);
    if (p) ++counts_.s4;
    return assign(p, use);
}

// The only function that creates chunks: one new idle pBlock.
PBlock* Stitcher::alloc(size_t count, Stream stream) {
    if (room() < count) return nullptr;
    auto range = std::make_unique<Range>();
    range->chunks.resize(count);
    if (!backend_.create(range->chunks)) return nullptr;
    const size_t mappings = mappings_of(*range);
    bool made = stitch_free(0, mappings) && backend_.reserve(count, &range->address);
    if (made && !backend_.map(range->address, range->chunks)) {
        backend_.free_range(range->address, count);
        made = false;
    }
    if (!made) {
        for (Chunk chunk : range->chunks) backend_.destroy(chunk);
        return nullptr;
    }
    ++counts_.allocs;
    range->mapped = count;
    reserved_ += count;
    peak_ = std::max(peak_, reserved_);
    mappings_ += mappings;
    PBlock* p = add(range.release(), 0, count, stream);
    ppool_.insert(p);
    return p;
}

bool Stitcher::scatter(size_t count, Stream stream) {
    for (size_t i = 0; i < count; ++i) {
        if (!alloc(1, stream)) return false;
    }
    return true;
}

// The first `count` chunks stay p; the rest is a new pBlock after it. Addresses stay, so that no
// mapping changes, and sBlocks have both parts in the place of one.
void Stitcher::split(PBlock* p, size_t count) {
    ++counts_.splits;
    ppool_.erase(p);
    spool_.wake(p);
    PBlock* rest = add(p->range, p->first + count, p->count - count, p->stream);
    p->count = count;
    rest->before = p;
    rest->after = p->after;
    if (rest->after) rest->after->before = rest;
    p->after = rest;
    rest->users = p->users;
    for (SBlock* s : p->users) {
        const auto part = std::find(s->parts.begin(), s->parts.end(), p);
        s->parts.insert(part + 1, rest);
    }
    ppool_.insert(p);
    ppool_.insert(rest);
}

// The only function that makes an sBlock: idle, over idle parts, the last one cut to fit.
SBlock* Stitcher::stitch(std::vector<PBlock*> parts, size_t count, Stream stream) {
    size_t sum = 0;
    for (const PBlock* p : parts) sum += p->count;
    if (sum > count) split(parts.back(), parts.back()->count - (sum - count));
    std::vector<Chunk> chunks;
    chunks.reserve(count);
    for (const PBlock* p : parts) {
        const auto first = p->range->chunks.begin() + static_cast<ptrdiff_t>(p->first);
        chunks.insert(chunks.end(), first, first + static_cast<ptrdiff_t>(p->count));
    }
#ifdef FARSPAN_DOUBLE_ASSIGN
    if (earlier_.handle != Chunk::NONE) chunks.back() = earlier_;
    earlier_ = chunks.front();
#endif
    const size_t mappings = 1 + backend_.mappings(chunks.data(), count);
    uint64_t address = 0;
    if (!stitch_free(count, mappings) || !backend_.reserve(count, &address)) return nullptr;
    if (!backend_.map(address, chunks)) {
        backend_.free_range(address, count);
        return nullptr;
    }
    ++counts_.stitches;
    ++sblocks_;
    virtual_ += count;
    mappings_ += mappings;
    auto* s = new SBlock;
    s->address = address;
    s->count = count;
    s->stream = stream;
    s->mappings = mappings;
    s->parts = std::move(parts);
    for (PBlock* p : s->parts) p->users.push_back(s);
    spool_.insert(s);
    spool_.append(s);
    return s;
}

Block* Stitcher::assign(Block* block, Use use) {
    if (!block) return nullptr;
    block->use = use;
    if (!block->stitched) {
        ppool_.erase(static_cast<PBlock*>(block));
        return block;
    }
    auto* s = static_cast<SBlock*>(block);
    spool_.erase(s);
    for (PBlock* p : s->parts) {
        ppool_.erase(p);
        p->use = Use::part;
    }
    return block;
}

void Stitcher::update(Block* block) {
    block->use = Use::idle;
    if (!block->stitched) {
        auto* p = static_cast<PBlock*>(block);
        ppool_.insert(p);
        spool_.wake(p);
        merge_around(p);
        return;
    }
    auto* s = static_cast<SBlock*>(block);
    for (PBlock* p : s->parts) {
        p->use = Use::idle;
        ppool_.insert(p);
        spool_.wake(p);
    }
    spool_.insert(s);
    spool_.unlink(s);
    spool_.append(s);
    // A merge takes parts of s away, never those before i, but for the one that i becomes.
    for (size_t i = 0; i < s->parts.size(); ++i) merge_around(s->parts[i]);
}

}  // namespace farspan
