// Where blocks end: merging, stealing, StitchFree and release.
#include <algorithm>

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

bool Stitcher::order(Stream from, Stream to) {
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
    for (const auto& [key, shelf] : ppool_.shelves()) found.insert(key.stream);
    return found;
}

bool Stitcher::steal(size_t count, Stream stream) {
    const size_t idle_here = idle(stream);
    if (idle_here >= count) return false;
    const size_t own = idle_here + room();
    size_t others = 0;
    std::vector<PBlock*> blocks;
    for (const auto& [key, shelf] : ppool_.shelves()) {
        if (key.stream == stream) continue;
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
        if (s->use != Use::idle || !s->own) continue;
        victims.push_back(s);
        streams.insert(s->stream);
        virtual_ -= s->count;
        mappings_ -= s->mappings;
        enough = !over(virtual_units, mappings, 0);
        if (!over(virtual_units, mappings, 16)) break;
    }
    virtual_ = space;
    mappings_ = maps;
    if (!enough || !quiesce(streams)) return false;
    for (SBlock* s : victims) drop(s);
    counts_.stitch_frees += victims.size();
    return true;
}

bool Stitcher::release(size_t count) {
    std::vector<PBlock*> blocks;
    for (const auto& [key, shelf] : ppool_.shelves()) {
        blocks.insert(blocks.end(), shelf.blocks.begin(), shelf.blocks.end());
    }
    if (count > 0 && !quiesce(streams())) return false;
    std::sort(blocks.begin(), blocks.end(), BySize());
    for (; count > 0 && !blocks.empty(); blocks.pop_back()) {
        PBlock* p = blocks.back();
        cut(p, count);
        count -= std::min(count, p->count);
        while (!p->users.empty()) drop(p->users.back());
        drop(p);
    }
    return true;
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
    mappings_ -= mappings_of(*range);
    backend_.unmap(p->address, p->count);
    for (size_t i = p->first; i < p->first + p->slots(); ++i) {
        backend_.destroy(range->chunks[i]);
        range->chunks[i].handle = Chunk::NONE;
    }
    reserved_ -= p->count;
    range->mapped -= p->count;
    if (p->before) p->before->after = nullptr;
    if (p->after) p->after->before = nullptr;
    remove(p);
    if (range->mapped > 0) {
        mappings_ += mappings_of(*range);
    } else {
        backend_.free_range(range->address, range->count);
        delete range;
    }
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
