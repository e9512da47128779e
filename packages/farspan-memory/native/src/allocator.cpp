#include "allocator.h"

#include <algorithm>
#include <cstdio>

namespace farspan {
namespace {

Limits limits_of(const farspan_options& o, const Backend& backend) {
    const auto units = [&o](uint64_t bytes) { return static_cast<size_t>(bytes / o.tail); };
    const size_t fragment = units((o.fragment_limit + o.chunk - 1) / o.chunk * o.chunk);
    const size_t mappings = o.mapping_limit ? o.mapping_limit : backend.default_mappings();
    return {units(o.capacity), fragment, units(o.virtual_limit), mappings, o.policy, o.seed};
}

bool order(void* stitcher, Stream from, Stream to) {
    return static_cast<Stitcher*>(stitcher)->order(from, to);
}

}  // namespace

std::string readable(uint64_t bytes) {
    if (bytes < 1024) return std::to_string(bytes) + " bytes";
    const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double size = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    for (; size >= 1024 && unit < 5; ++unit) size /= 1024;
    char text[40];
    std::snprintf(text, sizeof text, "%.2f %s", size, units[unit]);
    return text;
}

Allocator::Allocator(std::unique_ptr<Backend> backend, const farspan_options& options)
    : options_(options), backend_(std::move(backend)),
      stitcher_(*backend_, options.tail, options.chunk, limits_of(options, *backend_)),
      waiting_(*backend_), replay_(options.replay_window, options.replay_misses) {}

// Work may still be queued; what cannot be waited for is the caller's, as with cudaFree.
Allocator::~Allocator() {
    std::set<Stream> streams = stitcher_.streams();
    for (const farspan_row& row : replay_.rows()) streams.insert(row.stream);
    waiting_.settle();
    stitcher_.quiesce(streams);
}

uint64_t Allocator::malloc(uint64_t bytes, Stream stream) {
    const Lock lock(mutex_);
    if (bytes == 0) return 0;
    if (bytes > uint64_t{1} << 50) {
        out_of_memory(bytes, false);
    }
    Live live = place(bytes, stream);
    live.id = next_id_++;
    live.bytes = bytes;
    live.stream = stream;
    farspan_statistics& s = statistics_;
    ++s.mallocs;
    s.requested += bytes;
    s.allocated += live.size;
    s.requested_peak = std::max(s.requested_peak, s.requested);
    s.allocated_peak = std::max(s.allocated_peak, s.allocated);
    event(FARSPAN_MALLOC, live.id, bytes, stream);
    const uint64_t address = live.address;
    live_.emplace(address, std::move(live));
    return address;
}

// Up to whole chunks where that costs a 64th at most, else up to a unit.
size_t Allocator::units(uint64_t bytes) const {
    const uint64_t whole = (bytes + options_.chunk - 1) / options_.chunk * options_.chunk;
    const uint64_t size = whole - bytes <= whole / 64 ? whole : bytes;
    return static_cast<size_t>((size + options_.tail - 1) / options_.tail);
}

Live Allocator::place(uint64_t bytes, Stream stream) {
    Live live;
    const uint64_t capture = backend_->capture(stream);
    if (!capture && !waiting_.empty()) retire(waiting_.poll());
    live.size = SmallPool::rounded(bytes);
    live.stream = stream;
    if (!capture && replay_.active() && plan(live)) return live;
    if (capture) stream = captured(live, capture);
    if (bytes >= options_.small) {
        live.block = large(units(bytes), stream, Use::live);
        live.size = live.block->count * options_.tail;
        live.address = live.block->address;
        return live;
    }
    live.kind = Live::Kind::small;
    live.piece = small_.malloc(live.size, stream);
    if (!live.piece) {
        Block* segment = large(units(options_.chunk), stream, Use::small);
        // Pieces that were waited for may fit by now.
        live.piece = small_.malloc(live.size, stream);
        if (live.piece) {
            stitcher_.update(segment);
        } else {
            small_.add(segment, options_.chunk);
            live.piece = small_.malloc(live.size, stream);
        }
    }
    ++statistics_.small_mallocs;
    live.address = live.piece->address;
    return live;
}

// The stream on which the pool of this capture has its blocks.
Stream Allocator::captured(Live& live, uint64_t capture) {
    auto& [id, pool] = captures_.of(live.stream, capture);
    live.captured = true;
    live.pool = id;
    bool made = false;
    const Stream own = captures_.own(pool, live.stream, &made);
    if (made) stitcher_.set_aside(own, live.stream);
    return own;
}

bool Allocator::plan(Live& live) {
    const uint64_t offset = replay_.malloc(live.size, live.stream, order, &stitcher_);
    if (offset == FARSPAN_UNPLANNED) return false;
    live.kind = Live::Kind::planned;
    live.address = arena_->address + offset;
    return true;
}

// S1 to S4; then idle chunks of other streams; then, waiting, what events hold and empty segments;
// then chunks that cannot be used where they are go back for new ones; then S5.
//
// For a capture as well: the driver creates and maps in one, and waits for streams outside;
// stealing takes from the captured stream alone, which needs no event.
Block* Allocator::large(size_t count, Stream stream, Use use) {
    backend_->trouble.clear();
    Block* block = stitcher_.malloc(count, stream, use);
    if (block) return block;
    const bool captured = stitcher_.is_aside(stream);
    const bool steals = captured || (options_.policy & FARSPAN_STEAL);
    const auto again = [&]() { return stitcher_.malloc(count, stream, use); };
    if (steals && stitcher_.steal(count, stream) && (block = again())) return block;
    ++statistics_.retries;
    settle();
    if ((block = again())) return block;
    if (steals && stitcher_.steal(count, stream) && (block = again())) return block;
    const size_t room = stitcher_.room();
    const size_t idle = stitcher_.idle();
    // With room enough the machine itself had no chunk left.
    const size_t wanted = room < count ? count - room : std::min(idle, count);
    if (room + idle >= count && stitcher_.release(wanted, true)) {
        if ((block = stitcher_.fresh(count, stream, use))) return block;
    }
    out_of_memory(count * options_.tail, captured);
}

void Allocator::out_of_memory(uint64_t bytes, bool captured) {
    ++statistics_.out_of_memory;
    const uint64_t unit = options_.tail;
    const uint64_t capacity = (stitcher_.reserved() + stitcher_.room()) * unit;
    std::string words = "out of memory. Tried to allocate " + readable(bytes) + ". Device " +
                        std::to_string(options_.device) + " has a capacity of " +
                        readable(capacity) + " for this process, of which " +
                        readable(stitcher_.reserved() * unit) + " are reserved, " +
                        readable(statistics_.allocated) + " allocated and " +
                        readable(stitcher_.idle() * unit) + " idle.";
    const uint64_t pinned = statistics_.pinned + stitcher_.idle_aside() * unit;
    if (pinned > 0) {
        words += " " + readable(pinned) +
                 " are free and stay with captured graphs, until these are deleted.";
    }
    if (captured) {
        words += " A graph is captured on the stream: what is idle on others cannot be ordered "
                 "before it; synchronize and empty the cache before the capture.";
    }
    if (!backend_->trouble.empty()) words += " Last failure: " + backend_->trouble + ".";
    throw Refusal{FARSPAN_OUT_OF_MEMORY, words};
}

void Allocator::free(uint64_t address) {
    const Lock lock(mutex_);
    if (address == 0) return;
    const auto found = live_.find(address);
    if (found == live_.end()) {
        char text[80];
        std::snprintf(text, sizeof text, "free of 0x%llx, which is not live here",
                      static_cast<unsigned long long>(address));
        throw Refusal{FARSPAN_UNKNOWN, text};
    }
    Live live = std::move(found->second);
    live_.erase(found);
    ++statistics_.frees;
    statistics_.requested -= live.bytes;
    statistics_.allocated -= live.size;
    event(FARSPAN_FREE, live.id, live.bytes, live.stream);
    Captures::Pool* pool = live.captured ? captures_.find(live.pool) : nullptr;
    if (pool && !live.users.empty()) {
        if (live.block) live.block->use = Use::pinned;
        statistics_.pinned += live.size;
        pool->pinned.push_back(std::move(live));
    } else if (!live.users.empty()) {
        hold(live);
        waiting_.add(std::move(live));
    } else if (options_.policy & FARSPAN_QUARANTINE) {
        std::vector<Live> before = std::move(quarantine_);
        quarantine_.clear();
        hold(live);
        quarantine_.push_back(std::move(live));
        retire(std::move(before));
    } else {
        retire(live);
    }
}

void Allocator::hold(const Live& live) {
    if (live.block) live.block->use = Use::held;
    statistics_.held += live.size;
}

// The memory is idle again.
void Allocator::retire(Live& live) {
    if (live.kind == Live::Kind::large) {
        stitcher_.update(live.block);
    } else if (live.kind == Live::Kind::planned) {
        replay_.free(live.address - arena_->address);
    } else if (Block* block = small_.free(live.piece)) {
        stitcher_.update(block);
    }
}

// That was held.
void Allocator::retire(std::vector<Live> done) {
    for (Live& live : done) {
        statistics_.held -= live.size;
        retire(live);
    }
}

// Memory of graphs that are gone. They may still run, on any stream.
void Allocator::return_pools() {
    if (!captures_.any_ended() || captures_.open() || stitcher_.capturing()) return;
    if (!backend_->finish()) return;
    for (Captures::Pool& pool : captures_.take_ended()) {
        for (Live& live : pool.pinned) {
            statistics_.pinned -= live.size;
            retire(live);
        }
        for (Block* block : small_.drain()) stitcher_.update(block);
        for (const auto& [stream, own] : pool.streams) {
            small_.rename(own, stream);
            stitcher_.rename(own, stream);
        }
    }
}

void Allocator::begin_pool(PoolId id, Captures::Filter filter) {
    const Lock lock(mutex_);
    captures_.begin(id, std::move(filter));
}

void Allocator::end_pool(PoolId id) {
    const Lock lock(mutex_);
    captures_.end(id);
}

void Allocator::release_pool(PoolId id) {
    const Lock lock(mutex_);
    captures_.release(id);
}

void Allocator::settle() {
    return_pools();
    retire(waiting_.settle());
    retire(std::move(quarantine_));
    quarantine_.clear();
    for (Block* block : small_.drain()) stitcher_.update(block);
}

void Allocator::record_stream(uint64_t address, Stream stream) {
    const Lock lock(mutex_);
    const auto found = live_.find(address);
    if (found == live_.end() || found->second.stream == stream) return;
    std::vector<Stream>& users = found->second.users;
    if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

void Allocator::release(uint64_t keep) {
    const Lock lock(mutex_);
    settle();
    const size_t kept = (keep + options_.tail - 1) / options_.tail;
    if (stitcher_.reserved() <= kept) return;
    backend_->trouble.clear();
    const size_t wanted = std::min(stitcher_.idle(), stitcher_.reserved() - kept);
    if (wanted == 0) return;
    if (!stitcher_.release(wanted, false)) {
        const std::string& trouble = backend_->trouble;
        const std::string why = trouble.empty() ? "a graph is captured" : trouble;
        throw Refusal{FARSPAN_BACKEND, "idle memory stays: " + why};
    }
}

void Allocator::set_share(double fraction) {
    const double share = fraction > 0 ? std::min(fraction, 1.0) : 0;
    const auto bytes = static_cast<uint64_t>(share * static_cast<double>(backend_->total()));
    set_capacity(std::min(bytes, options_.capacity));
}

void Allocator::set_capacity(uint64_t bytes) {
    const Lock lock(mutex_);
    stitcher_.set_capacity(bytes / options_.tail);
}

bool Allocator::owns(uint64_t address) {
    const Lock lock(mutex_);
    return live_.count(address) > 0;
}

}  // namespace farspan
