// Recording of requests, the plan made from a recording, and the counters.
#include "allocator.h"

namespace farspan {

void Allocator::event(int64_t kind, uint64_t id, uint64_t size, Stream stream) {
    if (recording_) events_.push_back({kind, id, size, stream});
}

void Allocator::record(bool on) {
    const Lock lock(mutex_);
    if (on) events_.clear();
    recording_ = on;
}

void Allocator::mark(uint64_t number) {
    const Lock lock(mutex_);
    event(FARSPAN_MARK, 0, number, 0);
}

uint64_t Allocator::read_events(uint64_t from, farspan_event* to, uint64_t n) {
    const Lock lock(mutex_);
    uint64_t copied = 0;
    while (copied < n && from + copied < events_.size()) {
        to[copied] = events_[from + copied];
        ++copied;
    }
    return copied;
}

void Allocator::begin_iteration() {
    const Lock lock(mutex_);
    replay_.begin();
    event(FARSPAN_MARK, 0, 0, 0);
}

void Allocator::drop_plan() {
    if (replay_.live() > 0) settle();
    if (replay_.live() > 0) {
        throw Refusal{FARSPAN_INVALID, std::to_string(replay_.live()) +
                                           " tensors of the present plan are still live"};
    }
    if (arena_) {
        // The arena's chunks go back to the stream they came for.
        std::set<Stream> streams;
        bool ordered = true;
        for (const farspan_row& row : replay_.rows()) streams.insert(row.stream);
        for (Stream stream : streams) {
            ordered = ordered && stitcher_.order(stream, arena_->stream);
        }
        if (!ordered && !stitcher_.quiesce(streams)) {
            throw Refusal{FARSPAN_BACKEND, "the plan's streams cannot be waited for now"};
        }
        stitcher_.update(arena_);
    }
    arena_ = nullptr;
    replay_.set({}, 0, 0);
}

void Allocator::set_plan(const farspan_row* rows, uint64_t n, uint64_t arena) {
    const Lock lock(mutex_);
    if (arena > uint64_t{1} << 50) {
        throw Refusal{FARSPAN_INVALID, "an arena of " + std::to_string(arena) + " bytes"};
    }
    std::vector<farspan_row> taken(rows, rows + n);
    for (farspan_row& row : taken) {
        const uint64_t at = static_cast<uint64_t>(&row - taken.data());
        const bool huge = row.size > uint64_t{1} << 50;
        row.size = SmallPool::rounded(row.size);
        const bool placed = row.address != FARSPAN_UNPLANNED;
        const bool outside = row.size > arena || row.address > arena - row.size;
        if (row.size == 0 || huge || (placed && (outside || row.address % SmallPool::ROUND))) {
            throw Refusal{FARSPAN_INVALID, "row " + std::to_string(at) +
                                               " of the plan is empty, outside the arena of " +
                                               std::to_string(arena) +
                                               " bytes, or not at a multiple of 512"};
        }
    }
    drop_plan();
    if (n == 0) return;
    const Stream stream = taken.front().stream;
    const size_t count = units(arena);
    if (count > 0) arena_ = large(count, stream, Use::arena);
    replay_.set(std::move(taken), count * options_.tail, stream);
}

void Allocator::reset_peaks() {
    const Lock lock(mutex_);
    statistics_.requested_peak = statistics_.requested;
    statistics_.allocated_peak = statistics_.allocated;
    stitcher_.reset_peak();
}

farspan_statistics Allocator::statistics() {
    const Lock lock(mutex_);
    farspan_statistics s = statistics_;
    s.pinned += stitcher_.idle_aside() * options_.tail;
    s.reserved = stitcher_.reserved() * options_.tail;
    s.reserved_peak = stitcher_.peak() * options_.tail;
    const Stitcher::Counts& c = stitcher_.counts();
    s.s1_primitive = c.s1_primitive, s.s1_stitched = c.s1_stitched;
    s.s2 = c.s2, s.s3 = c.s3, s.s4 = c.s4, s.s5 = s.out_of_memory;
    s.allocs = c.allocs, s.splits = c.splits, s.stitches = c.stitches;
    s.stitch_frees = c.stitch_frees, s.merges = c.merges, s.steals = c.steals;
    s.pblocks = stitcher_.pblocks(), s.sblocks = stitcher_.sblocks();
    s.virtual_bytes = stitcher_.virtual_units() * options_.tail;
    s.mappings = stitcher_.mappings();
    const Backend::Counts& b = backend_->counts();
    s.reserves = b.reserves, s.range_frees = b.range_frees, s.creates = b.creates;
    s.destroys = b.destroys, s.maps = b.maps, s.unmaps = b.unmaps, s.accesses = b.accesses;
    s.tail_creates = b.tail_creates, s.tail_destroys = b.tail_destroys, s.tail_maps = b.tail_maps;
    s.event_records = b.records, s.event_queries = b.queries;
    s.event_waits = b.waits, s.event_syncs = b.syncs;
    const Replay::Counts& r = replay_.counts();
    s.iterations = r.iterations, s.replay_hits = r.hits, s.replay_misses = r.misses;
    s.replay_overlaps = r.overlaps, s.replay_resyncs = r.resyncs, s.replay_give_ups = r.give_ups;
    return s;
}

void Allocator::fail_at(int call, uint64_t nth, uint64_t times) {
    const Lock lock(mutex_);
    if (call < 0 || call > FARSPAN_CALL_EVENT) throw Refusal{FARSPAN_INVALID, "no such call"};
    backend_->fail_at(call, nth, times);
}

void Allocator::hold_events(bool on) {
    const Lock lock(mutex_);
    if (!backend_->hold(on)) throw Refusal{FARSPAN_INVALID, "the device's own events"};
}

void Allocator::set_capturing(Stream stream, bool on) {
    const Lock lock(mutex_);
    if (!backend_->set_capturing(stream, on)) {
        throw Refusal{FARSPAN_INVALID, "the device's own captures"};
    }
}

void Allocator::check() {
    const Lock lock(mutex_);
    const std::string broken = Checker(*this).run();
    if (!broken.empty()) throw Refusal{FARSPAN_BROKEN, broken};
}

}  // namespace farspan
