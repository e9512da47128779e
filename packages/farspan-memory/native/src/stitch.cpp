#include "stitch.h"

#include <algorithm>

namespace farspan {

Stitcher::Stitcher(Backend& backend, size_t unit, size_t chunk, const Limits& limits)
    : backend_(backend), unit_(unit), width_(chunk / unit), limits_(limits),
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
    for (const auto& [key, shelf] : ppool_.shelves()) {
        if (!is_aside(key.stream)) found += shelf.total;
    }
    return found;
}

size_t Stitcher::idle_aside() const {
    size_t found = 0;
    for (const auto& [key, shelf] : ppool_.shelves()) {
        if (is_aside(key.stream)) found += shelf.total;
    }
    return found;
}

size_t Stitcher::idle(Stream stream) {
    const size_t whole = ppool_.shelf(bodies(stream)).total;
    return width_ == 1 ? whole : whole + ppool_.shelf(tails(stream)).total;
}

// S1. An sBlock is a candidate for an exact match only.
Block* Stitcher::exact(size_t count, Stream stream) {
    const PPool::Key key = count % width_ ? tails(stream) : bodies(stream);
    PBlock* larger = ppool_.at_least(count, key);
    if (larger && larger->count == count) return larger;
    return spool_.find(count, stream);
}

// The smallest that leaves no piece below the fragmentation limit, else the smallest. The paper
// neither splits nor stitches below the limit, which grows the pool: 3 to 16 % of memory on traces
// of 7B models. Here it only chooses.
PBlock* Stitcher::single(size_t count, PPool::Key key) const {
    PBlock* best = ppool_.at_least(count, key);
    if (!best || best->count == count || limits_.fragment == 0) return best;
    PBlock* cheap = ppool_.at_least(count + limits_.fragment, key);
    return cheap ? cheap : best;
}

// p, with what it has beyond count split off; whole chunks stay whole.
PBlock* Stitcher::cut(PBlock* p, size_t count) {
    count = up(count, p->width);
    if (p->count > count) split(p, count);
    return p;
}

// Largest first; the last is the one that fits best and is cut to fit.
void Stitcher::gather(size_t count, PPool::Key key, Parts* to) {
    const auto& blocks = ppool_.shelf(key).blocks;
    Parts found;
    if (limits_.policy & FARSPAN_SHUFFLE) {
        found.assign(blocks.begin(), blocks.end());
        std::shuffle(found.begin(), found.end(), random_);
        size_t used = 0;
        for (; count > 0; ++used) count -= std::min(count, cut(found[used], count)->count);
        found.resize(used);
    }
    for (auto next = blocks.rbegin(); count > 0; ++next) {
        PBlock* p = *next;
        if (p->count >= count) {
            p = single(count, key);
            // The piece chosen for its large remainder may be one that is taken already.
            if (!found.empty() && !BySize()(p, found.back())) p = ppool_.at_least(count, key);
            found.push_back(cut(p, count));
            break;
        }
        found.push_back(p);
        count -= p->count;
    }
    to->insert(to->end(), found.begin(), found.end());
}

// False when idle units and room are not enough. Tail chunks stand in for whole ones that are
// neither idle nor can be created.
bool Stitcher::mix(size_t count, Stream stream, bool fresh, Mix* m) {
    const size_t body = count / width_ * width_, most = fresh ? 0 : SIZE_MAX;
    *m = {};
    m->body = std::min({body, ppool_.shelf(bodies(stream)).total, most});
    m->new_body = std::min(body - m->body, room() / width_ * width_);
    const size_t rest = count - m->body - m->new_body;
    if (width_ > 1) m->tail = std::min({rest, ppool_.shelf(tails(stream)).total, most});
    m->new_tail = rest - m->tail;
    return m->new_tail <= room() - m->new_body;
}

Block* Stitcher::malloc(size_t count, Stream stream, Use use) {
    if (Block* found = exact(count, stream)) {
        ++(found->stitched ? counts_.s1_stitched : counts_.s1_primitive);
        return assign(found, use);
    }
    const size_t whole = up(count, width_);
    if (count == whole || count < width_) {
        if (PBlock* p = single(count, count == whole ? bodies(stream) : tails(stream))) {
            ++counts_.s2;
            split(p, count);
            if (limits_.policy & FARSPAN_HALF_STITCH) {
                stitch({p, p->after}, p->count + p->after->count, stream);
            }
            return assign(p, use);
        }
    }
    if (Block* made = mixed(count, stream, use)) return made;
    // A whole chunk for the tail, where no tail chunk can be had.
    return count == whole ? nullptr : malloc(whole, stream, use);
}

// S2 for a block with a tail, S3 and S4.
Block* Stitcher::mixed(size_t count, Stream stream, Use use) {
    const size_t body = count / width_ * width_;
    const bool shuffle = limits_.policy & FARSPAN_SHUFFLE;
    // One idle block lacks the tail alone: that is cheaper than new chunks for all.
    const bool one = body > 0 && body < count && ppool_.at_least(body, bodies(stream));
    const bool lazy = (limits_.policy & FARSPAN_LAZY) && room() >= count && !one;
    Mix m;
    if (lazy && !shuffle) {
        if (Block* made = fresh(count, stream, use)) return made;
    }
    if (!mix(count, stream, lazy && shuffle, &m)) return nullptr;
    if (shuffle) {
        if (!scatter(m.new_body, width_, stream) || !scatter(m.new_tail, 1, stream)) return nullptr;
    } else if (m.body + m.tail == 0) {
        return fresh(count, stream, use);
    } else if (!m.idle() && alloc(m.new_body, m.new_tail, stream).empty()) {
        return nullptr;
    }
    // New chunks are made when all idle ones are taken: what is gathered are both.
    Parts parts;
    gather(m.body + m.new_body, bodies(stream), &parts);
    if (width_ > 1) gather(m.tail + m.new_tail, tails(stream), &parts);
    Block* made = parts.size() == 1 ? static_cast<Block*>(parts.front())
                                    : stitch(std::move(parts), count, stream);
    if (made) ++(!m.idle() ? counts_.s4 : one ? counts_.s2 : counts_.s3);
    return assign(made, use);
}

Block* Stitcher::fresh(size_t count, Stream stream, Use use) {
    const Parts made = alloc(count / width_ * width_, count % width_, stream);
    if (made.empty()) return nullptr;
    ++counts_.s4;
    if (made.size() == 1) return assign(made.front(), use);
    return assign(join(made.front(), made.back()), use);
}

// The only function that creates chunks: an idle pBlock of whole ones, and one of tail chunks after
// it. None when it fails.
Stitcher::Parts Stitcher::alloc(size_t body, size_t tail, Stream stream) {
    const size_t count = body + tail;
    if (room() < count) return {};
    auto range = std::make_unique<Range>();
    range->count = count;
    range->chunks.assign(body / width_, {Chunk::NONE, width_});
    range->chunks.resize(body / width_ + tail);
    if (!backend_.create(range->chunks)) return {};
    const size_t mappings = mappings_of(*range);
    bool made = stitch_free(0, mappings) && backend_.reserve(count, &range->address);
    if (made && !backend_.map(range->address, range->chunks)) {
        backend_.free_range(range->address, count);
        made = false;
    }
    if (!made) {
        for (Chunk chunk : range->chunks) backend_.destroy(chunk);
        return {};
    }
    ++counts_.allocs;
    range->mapped = count;
    reserved_ += count;
    peak_ = std::max(peak_, reserved_);
    mappings_ += mappings;
    Range* const r = range.release();
    Parts parts;
    if (body > 0) parts.push_back(add(r, 0, body, r->address, stream));
    if (tail > 0) parts.push_back(add(r, body / width_, tail, r->address + body * unit_, stream));
    if (parts.size() == 2) {
        parts.front()->after = parts.back();
        parts.back()->before = parts.front();
    }
    for (PBlock* p : parts) ppool_.insert(p);
    return parts;
}

bool Stitcher::scatter(size_t count, size_t width, Stream stream) {
    for (; count > 0; count -= width) {
        if (alloc(width / width_ * width_, width % width_, stream).empty()) return false;
    }
    return true;
}

// The first `count` units stay p; the rest is a new pBlock after it. Addresses stay, so that no
// mapping changes, and sBlocks have both parts in the place of one.
void Stitcher::split(PBlock* p, size_t count) {
    ++counts_.splits;
    ppool_.erase(p);
    spool_.wake(p);
    PBlock* rest = add(p->range, p->first + count / p->width, p->count - count,
                       p->address + count * unit_, p->stream);
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

// Idle, over idle parts that have `count` units.
SBlock* Stitcher::stitch(Parts parts, size_t count, Stream stream) {
    std::vector<Chunk> chunks;
    for (const PBlock* p : parts) {
        const auto first = p->range->chunks.begin() + static_cast<ptrdiff_t>(p->first);
        chunks.insert(chunks.end(), first, first + static_cast<ptrdiff_t>(p->slots()));
    }
#ifdef FARSPAN_DOUBLE_ASSIGN
    if (earlier_.handle != Chunk::NONE && earlier_.width == chunks.back().width) {
        chunks.back() = earlier_;
    }
    earlier_ = chunks.front();
#endif
    const size_t mappings = 1 + backend_.mappings(chunks.data(), chunks.size());
    uint64_t address = 0;
    if (!stitch_free(count, mappings) || !backend_.reserve(count, &address)) return nullptr;
    if (!backend_.map(address, chunks)) {
        backend_.free_range(address, count);
        return nullptr;
    }
    ++counts_.stitches;
    virtual_ += count;
    mappings_ += mappings;
    auto* s = new SBlock;
    s->address = address;
    s->count = count;
    s->stream = stream;
    s->mappings = mappings;
    s->parts = std::move(parts);
    enlist(s);
    return s;
}

// Both parts at the addresses that they have: no call of the backend.
SBlock* Stitcher::join(PBlock* body, PBlock* tail) {
    auto* s = new SBlock;
    s->own = false;
    s->address = body->address;
    s->count = body->count + tail->count;
    s->stream = body->stream;
    s->parts = {body, tail};
    enlist(s);
    return s;
}

void Stitcher::enlist(SBlock* s) {
    ++sblocks_;
    for (PBlock* p : s->parts) p->users.push_back(s);
    spool_.insert(s);
    spool_.append(s);
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
