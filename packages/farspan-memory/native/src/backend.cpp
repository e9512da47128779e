#include "backend.h"

namespace farspan {

size_t width(const Chunk* chunks, size_t count) {
    size_t sum = 0;
    for (size_t i = 0; i < count; ++i) sum += chunks[i].width;
    return sum;
}

bool Backend::refused(int call) {
    Failure& failure = failures_[call];
    if (failure.nth > 1) {
        --failure.nth;
        return false;
    }
    if (failure.times == 0) return false;
    if (--failure.times == 0) failure.nth = 0;
    trouble = "a failure that a test asked for";
    return true;
}

void Backend::fail_at(int call, uint64_t nth, uint64_t times) { failures_[call] = {nth, times}; }

bool Backend::reserve(size_t count, uint64_t* address) {
    ++counts_.reserves;
    return !refused(FARSPAN_CALL_RESERVE) && do_reserve(count * unit_, address);
}

void Backend::free_range(uint64_t address, size_t count) {
    ++counts_.range_frees;
    do_free_range(address, count * unit_);
}

bool Backend::create(std::vector<Chunk>& chunks) {
    for (size_t i = 0; i < chunks.size(); ++i) {
        ++counts_.creates;
        counts_.tail_creates += tail(chunks[i]);
        if (!refused(FARSPAN_CALL_CREATE) && do_create(&chunks[i])) continue;
        while (i > 0) destroy(chunks[--i]);
        return false;
    }
    return true;
}

void Backend::destroy(Chunk chunk) {
    ++counts_.destroys;
    counts_.tail_destroys += tail(chunk);
    do_destroy(chunk);
}

size_t Backend::run(const Chunk* chunks, size_t count) const {
    size_t length = 1;
    while (length < count && joined(chunks[length - 1], chunks[length])) ++length;
    return length;
}

size_t Backend::mappings(const Chunk* chunks, size_t count) const {
    size_t found = 0;
    for (size_t i = 0; i < count; ++found) i += run(chunks + i, count - i);
    return found;
}

// All or nothing: what is mapped before a failure is unmapped again.
bool Backend::map(uint64_t address, const std::vector<Chunk>& chunks) {
    std::vector<Page> pages;
    for (const Chunk chunk : chunks) {
        for (size_t part = 0; part < chunk.width; ++part) pages.push_back({chunk.handle, part});
    }
    size_t done = 0, at = 0;
    bool mapped = true;
    while (mapped && done < chunks.size()) {
        const Chunk* next = &chunks[done];
        const size_t length = run(next, chunks.size() - done);
        ++counts_.maps;
        counts_.tail_maps += tail(*next);
        mapped = !refused(FARSPAN_CALL_MAP) && do_map(address + at * unit_, next, length);
        if (!mapped) break;
        done += length;
        at += width(next, length);
    }
    if (mapped) {
        ++counts_.accesses;
        mapped = !refused(FARSPAN_CALL_ACCESS) && do_access(address, at * unit_);
    }
    if (mapped) {
        pages_[address] = {std::move(pages), at};
    } else if (done > 0) {
        ++counts_.unmaps;
        do_unmap(address, chunks.data(), done);
    }
    return mapped;
}

void Backend::unmap(uint64_t address, size_t count) {
    auto found = std::prev(pages_.upper_bound(address));
    std::vector<Page>& pages = found->second.pages;
    const size_t first = (address - found->first) / unit_;
    std::vector<Chunk> chunks;
    for (size_t i = first; i < first + count; ++i) {
        if (pages.at(i).part == 0) chunks.push_back({pages[i].handle, 0});
        ++chunks.back().width;
        pages[i] = Page{};
    }
    ++counts_.unmaps;
    do_unmap(address, chunks.data(), chunks.size());
    found->second.left -= count;
    if (found->second.left == 0) pages_.erase(found);
}

Backend::Page Backend::mapped_at(uint64_t address) const {
    auto found = pages_.upper_bound(address);
    if (found == pages_.begin()) return {};
    --found;
    const size_t slot = (address - found->first) / unit_;
    const std::vector<Page>& pages = found->second.pages;
    return slot < pages.size() ? pages[slot] : Page{};
}

size_t Backend::mapped_pages() const {
    size_t found = 0;
    for (const auto& [address, mapped] : pages_) {
        for (const Page& page : mapped.pages) found += page.handle != Chunk::NONE;
    }
    return found;
}

bool Backend::record(Stream stream, Event* event) {
    ++counts_.records;
    return !refused(FARSPAN_CALL_EVENT) && do_record(stream, event);
}

bool Backend::done(Event event) {
    ++counts_.queries;
    return do_done(event);
}

bool Backend::wait(Stream stream, Event event) {
    ++counts_.waits;
    return !refused(FARSPAN_CALL_EVENT) && do_wait(stream, event);
}

bool Backend::synchronize(Event event) {
    ++counts_.syncs;
    return !refused(FARSPAN_CALL_EVENT) && do_synchronize(event);
}

bool Backend::finish() {
    ++counts_.syncs;
    return !refused(FARSPAN_CALL_EVENT) && do_finish();
}

bool HostBackend::hold(bool on) {
    held_ = on;
    if (!on) {
        for (auto& [event, pending] : pending_) pending = false;
    }
    return true;
}

bool HostBackend::set_capturing(Stream stream, bool on) {
    if (on) {
        capturing_[stream] = ++captures_;
    } else {
        capturing_.erase(stream);
    }
    return true;
}

bool HostBackend::do_record(Stream, Event* event) {
    *event = ++last_;
    pending_[last_] = held_;
    return true;
}

bool HostBackend::do_synchronize(Event event) {
    pending_.at(event) = false;
    return true;
}

bool HostBackend::do_finish() {
    for (auto& [event, pending] : pending_) pending = false;
    return true;
}

}  // namespace farspan
