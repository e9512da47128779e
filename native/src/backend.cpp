#include "backend.h"

namespace farspan {

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
    return !refused(FARSPAN_CALL_RESERVE) && do_reserve(count * chunk_, address);
}

void Backend::free_range(uint64_t address, size_t count) {
    ++counts_.range_frees;
    do_free_range(address, count * chunk_);
}

bool Backend::create(std::vector<Chunk>& chunks) {
    for (size_t i = 0; i < chunks.size(); ++i) {
        ++counts_.creates;
        if (!refused(FARSPAN_CALL_CREATE) && do_create(&chunks[i])) continue;
        while (i > 0) destroy(chunks[--i]);
        return false;
    }
    return true;
}

void Backend::destroy(Chunk chunk) {
    ++counts_.destroys;
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
    const size_t count = chunks.size();
    std::vector<uint64_t> handles(count);
    for (size_t i = 0; i < count; ++i) handles[i] = chunks[i].handle;
    size_t done = 0;
    bool mapped = true;
    while (mapped && done < count) {
        const size_t length = run(&chunks[done], count - done);
        ++counts_.maps;
        mapped = !refused(FARSPAN_CALL_MAP) &&
                 do_map(address + done * chunk_, &chunks[done], length);
        if (mapped) done += length;
    }
    if (mapped) {
        ++counts_.accesses;
        mapped = !refused(FARSPAN_CALL_ACCESS) && do_access(address, count * chunk_);
    }
    if (mapped) {
        pages_[address] = std::move(handles);
    } else if (done > 0) {
        ++counts_.unmaps;
        do_unmap(address, done);
    }
    return mapped;
}

void Backend::unmap(uint64_t address, size_t count) {
    ++counts_.unmaps;
    do_unmap(address, count);
    auto page = std::prev(pages_.upper_bound(address));
    const size_t first = (address - page->first) / chunk_;
    std::vector<uint64_t>& handles = page->second;
    for (size_t i = 0; i < count; ++i) handles.at(first + i) = Chunk::NONE;
    for (uint64_t handle : handles) {
        if (handle != Chunk::NONE) return;
    }
    pages_.erase(page);
}

uint64_t Backend::mapped_at(uint64_t address) const {
    auto page = pages_.upper_bound(address);
    if (page == pages_.begin()) return Chunk::NONE;
    --page;
    const size_t slot = (address - page->first) / chunk_;
    return slot < page->second.size() ? page->second[slot] : Chunk::NONE;
}

size_t Backend::mapped_pages() const {
    size_t found = 0;
    for (const auto& [address, handles] : pages_) {
        for (uint64_t handle : handles) found += handle != Chunk::NONE;
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

bool HostBackend::hold(bool on) {
    held_ = on;
    if (!on) {
        for (auto& [event, pending] : pending_) pending = false;
    }
    return true;
}

bool HostBackend::set_capturing(Stream stream, bool on) {
    if (on) {
        capturing_.insert(stream);
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

}  // namespace farspan
