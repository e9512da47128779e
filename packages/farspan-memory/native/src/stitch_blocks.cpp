// Where blocks end: merging, stealing, StitchFree and release.
#include <algorithm>
#include <tuple>

#include "stitch.h"

namespace farspan {

PBlock* Stitcher::add(Range* range, size_t first, size_t count, uint64_t address, Stream stream) {
    auto* p = new PBlock;
    p->address = address;
    p->count = count;
    p->width = range->chunks[first].width;
    p->stream = stream;
    p->range = range;
    p->first = first;
    p->place = all_.size();
    all_.push_back(p);
    return p;
}

void Stitcher::remove(PBlock* p) {
    all_[p->place] = all_.back();
    all_[p->place]->place = p->place;
    all_.pop_back();
    delete p;
}

// Both are parts of the same sBlocks, one right after the other in each.
bool Stitcher::can_merge(const PBlock* a, const PBlock* b) const {
    if (!a || !b || a->use != Use::idle || b->use != Use::idle) return false;
    if (a->stream != b->stream || a->width != b->width) return false;
    if (a->users != b->users) return false;
    return std::all_of(a->users.begin(), a->users.end(), [a, b](const SBlock* s) {
        const auto part = std::find(s->parts.begin(), s->parts.end(), a);
        return part + 1 != s->parts.end() && *(part + 1) == b;
    });
}

// a and the pBlock after it become one.
void Stitcher::merge(PBlock* a) {
    ++counts_.merges;
    PBlock* b = a->after;
    ppool_.erase(a);
    ppool_.erase(b);
    spool_.wake(b);
    for (SBlock* s : b->users) s->parts.erase(std::find(s->parts.begin(), s->parts.end(), b));
    a->count += b->count;
    a->after = b->after;
    if (a->after) a->after->before = a;
    remove(b);
    ppool_.insert(a);
}

PBlock* Stitcher::merge_around(PBlock* p) {
    if (!(limits_.policy & FARSPAN_MERGE) || (limits_.policy & FARSPAN_SHUFFLE)) return p;
    while (can_merge(p, p->after)) merge(p);
    while (can_merge(p->before, p)) {
        p = p->before;
        merge(p);
    }
    return p;
}

void Stitcher::move(PBlock* p, Stream stream) {
    ++counts_.steals;
    ppool_.erase(p);
    p->stream = stream;
    ppool_.insert(p);
    spool_.wake(p);
}

Stream Stitcher::worked(Stream stream) const {
    const auto found = aside_.find(stream);
    return found == aside_.end() ? stream : found->second;
}

bool Stitcher::order(Stream from, Stream to) {
    from = worked(from), to = worked(to);
    if (from == to) return true;
    Event event = 0;
    if (backend_.capturing(from) || backend_.capturing(to)) return false;
    if (!backend_.record(from, &event)) return false;
    const bool ordered = backend_.wait(to, event);
    backend_.drop(event);
    return ordered;
}

bool Stitcher::quiesce(const std::set<Stream>& streams) {
    bool quiet = true;
    for (Stream stream : streams) {
        Event event = 0;
        if (!quiet || backend_.capturing(stream) || !backend_.record(stream, &event)) return false;
        quiet = backend_.synchronize(event);
        backend_.drop(event);
    }
    return quiet;
}

std::set<Stream> Stitcher::streams() const {
    std::set<Stream> found;
    for (const auto& [key, shelf] : ppool_.shelves()) found.insert(worked(key.stream));
    return found;
}

bool Stitcher::capturing() const {
    const std::set<Stream> all = streams();
    return std::any_of(all.begin(), all.end(), [this](Stream s) { return backend_.capturing(s); });
}

void Stitcher::rename(Stream from, Stream to) {
    aside_.erase(from);
    for (PBlock* p : all_) {
        if (p->stream != from) continue;
        if (p->use == Use::idle) ppool_.erase(p);
        p->stream = to;
        if (p->use == Use::idle) ppool_.insert(p);
        spool_.wake(p);
    }
    for (SBlock* s = spool_.oldest(); s; s = s->newer) {
        if (s->stream != from) continue;
        if (s->use == Use::idle) spool_.erase(s);
        s->stream = to;
        if (s->use == Use::idle) spool_.insert(s);
    }
}

bool Stitcher::steal(size_t count, Stream stream) {
    const size_t idle_here = idle(stream);
    if (idle_here >= count) return false;
    const size_t own = idle_here + room();
    size_t others = 0;
    std::vector<PBlock*> blocks;
    const bool captured = backend_.capturing(worked(stream));
    for (const auto& [key, shelf] : ppool_.shelves()) {
        if (key.stream == stream || is_aside(key.stream) || shelf.total == 0) continue;
        // What no event can order.
        const bool same = key.stream == worked(stream);
        if (!same && (captured || backend_.capturing(key.stream))) continue;
        others += shelf.total;
        blocks.insert(blocks.end(), shelf.blocks.rbegin(), shelf.blocks.rend());
    }
    if (own + others < count) return false;
    // With room enough the machine itself had no chunk left.
    size_t missing = count - (own < count ? own : idle_here);
    // One block that is large enough needs no stitching.
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const PBlock* a, const PBlock* b) { return a->count < b->count; });
    const auto fits = std::find_if(blocks.begin(), blocks.end(),
                                   [count](const PBlock* p) { return p->count >= count; });
    if (fits != blocks.end()) {
        blocks = {*fits};
        missing = count;
    }
    std::set<Stream> ordered;
    bool moved = false;
    while (missing > 0 && !blocks.empty()) {
        PBlock* p = blocks.back();
        blocks.pop_back();
        const Stream from = p->stream;
        if (!ordered.count(from) && !order(from, stream)) continue;
        ordered.insert(from);
        cut(p, missing);
        missing -= std::min(missing, p->count);
        move(p, stream);
        moved = true;
    }
    return moved;
}

bool Stitcher::over(size_t virtual_units, size_t mappings, size_t slack) const {
    const size_t space = limits_.virtual_units, maps = limits_.mappings;
    return virtual_ + virtual_units > space - (slack ? space / slack : 0) ||
           mappings_ + mappings > maps - (slack ? maps / slack : 0);
}

// StitchFree: the least recently used sBlocks go, until there is address space for virtual_units
// and room for the mappings. Those that are assigned stay; an idle one goes even when a part of it
// is in use through another block, whose addresses are its own; one without own addresses has none
// to give. One sixteenth more than needed goes, since each round waits for the streams. False when
// it cannot.
bool Stitcher::stitch_free(size_t virtual_units, size_t mappings) {
    if (!over(virtual_units, mappings, 0)) return true;
    std::vector<SBlock*> victims;
    std::set<Stream> streams;
    const size_t space = virtual_, maps = mappings_;
    bool enough = false;
    for (SBlock* s = spool_.oldest(); s; s = s->newer) {
        if (s->use != Use::idle || !s->own || is_aside(s->stream)) continue;
        victims.push_back(s);
        streams.insert(s->stream);
        virtual_ -= s->count;
        mappings_ -= s->mappings;
        enough = !over(virtual_units, mappings, 0);
        if (!over(virtual_units, mappings, 16)) break;
    }
    virtual_ = space;
    mappings_ = maps;
    if (!enough) backend_.trouble = limit_words(virtual_units, mappings);
    if (!enough || !quiesce(streams)) return false;
    for (SBlock* s : victims) drop(s);
    counts_.stitch_frees += victims.size();
    return true;
}

std::string Stitcher::limit_words(size_t virtual_units, size_t mappings) const {
    const auto words = [](const char* limit, size_t used, size_t more, size_t most) {
        return std::to_string(used) + " of " + std::to_string(most) + " " + limit +
               " are in use and " + std::to_string(more) + " more were needed";
    };
    if (mappings_ + mappings > limits_.mappings) {
        return words("mappings (mapping_limit)", mappings_, mappings, limits_.mappings);
    }
    return words("units of address space (virtual_limit)", virtual_, virtual_units,
                 limits_.virtual_units);
}

// Idle blocks, those to release first at the end: of ranges that are idle as a whole, whose
// addresses go too, the largest; then the largest.
Stitcher::Parts Stitcher::releasable() const {
    Parts blocks;
    std::unordered_map<const Range*, size_t> idle;
    for (const auto& [key, shelf] : ppool_.shelves()) {
        if (is_aside(key.stream)) continue;
        blocks.insert(blocks.end(), shelf.blocks.begin(), shelf.blocks.end());
        for (const PBlock* p : shelf.blocks) idle[p->range] += p->count;
    }
    const auto rank = [&idle](const PBlock* p) {
        const bool whole = idle.at(p->range) == p->range->mapped;
        return std::make_tuple(whole ? p->range->mapped : 0, whole ? p->range->address : 0,
                               p->count, p->address);
    };
    std::sort(blocks.begin(), blocks.end(),
              [&rank](const PBlock* a, const PBlock* b) { return rank(a) < rank(b); });
    return blocks;
}

bool Stitcher::release(size_t count, bool needed) {
    Parts blocks = releasable();
    std::map<Stream, bool> answers;
    const auto quiet = [this, &answers](const PBlock* p) {
        const auto [answer, first] = answers.try_emplace(p->stream, false);
        if (first) answer->second = quiesce({p->stream});
        return answer->second;
    };
    const size_t before = reserved_;
    const Range* range = nullptr;
    bool whole = false;  // all blocks of the range go: no limit is in the way
    for (; count > 0 && !blocks.empty(); blocks.pop_back()) {
        PBlock* p = blocks.back();
        if (p->range != range) {
            range = p->range;
            size_t units = 0;
            auto next = blocks.rbegin();
            for (; next != blocks.rend() && (*next)->range == range && quiet(*next); ++next) {
                units += (*next)->count;
            }
            whole = units == range->mapped && units <= count;
        }
        if (!quiet(p)) continue;
        cut(p, count);
        while (!p->users.empty()) drop(p->users.back());
        if (!whole && !may_drop(p, needed)) continue;
        count -= std::min(count, p->count);
        drop(p);
    }
    const bool asked = std::all_of(answers.begin(), answers.end(),
                                   [](const auto& answer) { return answer.second; });
    return asked || reserved_ < before;
}

void Stitcher::drop(SBlock* s) {
    if (s->own) {
        backend_.unmap(s->address, s->count);
        backend_.free_range(s->address, s->count);
        virtual_ -= s->count;
    }
    if (s->use == Use::idle) spool_.erase(s);
    spool_.unlink(s);
    for (PBlock* p : s->parts) p->users.erase(std::find(p->users.begin(), p->users.end(), s));
    mappings_ -= s->mappings;
    --sblocks_;
    delete s;
}

// Its chunks go back to the machine. It has no users, hence no watchers.
void Stitcher::drop(PBlock* p) {
    Range* range = p->range;
    if (p->use == Use::idle) ppool_.erase(p);
    mappings_ += static_cast<size_t>(mappings_after(p));
    backend_.unmap(p->address, p->count);
    for (size_t i = p->first; i < p->first + p->slots(); ++i) {
        backend_.destroy(range->chunks[i]);
        range->chunks[i].handle = Chunk::NONE;
    }
    reserved_ -= p->count;
    range->mapped -= p->count;
    if (p->before) p->before->after = nullptr;
    if (p->after) p->after->before = nullptr;
    holes_ += p->count;
    remove(p);
    if (range->mapped == 0) {
        holes_ -= range->count;
        backend_.free_range(range->address, range->count);
        delete range;
    }
}

// What dropping p adds to the mappings, or takes from them: of the three runs that its run is cut
// into its own goes, and the others are mapped apart. Looks at p's chunks and those beside them.
ptrdiff_t Stitcher::mappings_after(const PBlock* p) const {
    const std::vector<Chunk>& chunks = p->range->chunks;
    const size_t first = p->first, end = first + p->slots();
    const auto added = [this](const Chunk* pair) {
        return pair->handle == Chunk::NONE || pair[1].handle == Chunk::NONE
                   ? 0 : 3 - static_cast<ptrdiff_t>(backend_.mappings(pair, 2));
    };
    auto found = -1 - static_cast<ptrdiff_t>(backend_.mappings(&chunks[first], p->slots()));
    if (first > 0) found += added(&chunks[first - 1]);
    if (end < chunks.size()) found += added(&chunks[end - 1]);
    return p->range->mapped == p->count ? found - 1 : found;
}

// A request that would find no memory is worse than many addresses without.
bool Stitcher::may_drop(const PBlock* p, bool needed) const {
    const ptrdiff_t mappings = mappings_after(p);
    const size_t added = mappings > 0 ? static_cast<size_t>(mappings) : 0;
    const size_t holes = needed || p->range->mapped == p->count ? 0 : holes_ + p->count;
    if (!over(holes, added, 0)) return true;
    backend_.trouble = limit_words(holes, added);
    return false;
}

// One for the addresses without a chunk, and those of the runs with.
size_t Stitcher::mappings_of(const Range& range) const {
    const auto mapped = [](Chunk chunk) { return chunk.handle != Chunk::NONE; };
    size_t found = 1;
    auto first = std::find_if(range.chunks.begin(), range.chunks.end(), mapped);
    while (first != range.chunks.end()) {
        const auto last = std::find_if_not(first, range.chunks.end(), mapped);
        found += 1 + backend_.mappings(&*first, static_cast<size_t>(last - first));
        first = std::find_if(last, range.chunks.end(), mapped);
    }
    return found;
}

}  // namespace farspan
