// The seam to the machine: addresses, chunks, mappings, events.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "blocks.h"
#include "farspan_memory.h"

namespace farspan {

using Event = uint64_t;

// Units of chunks in a row.
size_t width(const Chunk* chunks, size_t count);

// Sizes and widths are in units, the width of a tail chunk.
//
// Counts calls, lets tests fail them, and keeps what is mapped where for the checker; a subclass
// does the work. A false is a failure that left nothing behind; `trouble` has its words.
// Invariant: pages_ has, for each mapped address, the piece of a chunk that the machine has there.
class Backend {
   public:
    struct Counts {
        uint64_t reserves = 0, range_frees = 0, creates = 0, destroys = 0, maps = 0, unmaps = 0;
        uint64_t tail_creates = 0, tail_destroys = 0, tail_maps = 0;  // of them
        uint64_t accesses = 0, records = 0, queries = 0, waits = 0, syncs = 0;
    };

    explicit Backend(const farspan_options& o) : unit_(o.tail), whole_(o.chunk / o.tail) {}
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    bool reserve(size_t count, uint64_t* address);
    void free_range(uint64_t address, size_t count);
    // Fills all of chunks, each of its width, or none.
    bool create(std::vector<Chunk>& chunks);
    void destroy(Chunk chunk);
    bool map(uint64_t address, const std::vector<Chunk>& chunks);
    void unmap(uint64_t address, size_t count);
    // Mappings that this many chunks take.
    size_t mappings(const Chunk* chunks, size_t count) const;

    bool record(Stream stream, Event* event);
    bool done(Event event);
    bool wait(Stream stream, Event event);
    bool synchronize(Event event);
    virtual void drop(Event event) = 0;
    // A number of the capture that the stream is in; 0: none.
    virtual uint64_t capture(Stream stream) = 0;
    bool capturing(Stream stream) { return capture(stream) != 0; }
    // All work of the device is done.
    bool finish();

    virtual uint64_t total() = 0;  // bytes of the device
    virtual size_t default_mappings() const { return SIZE_MAX; }
    virtual bool hold(bool) { return false; }
    virtual bool set_capturing(Stream, bool) { return false; }

    void fail_at(int call, uint64_t nth, uint64_t times);
    const Counts& counts() const { return counts_; }
    // What the machine has at an address of a unit; Chunk::NONE where nothing is mapped.
    struct Page {
        uint64_t handle = Chunk::NONE;
        size_t part = 0;  // of a whole chunk
        bool operator==(const Page& o) const { return handle == o.handle && part == o.part; }
    };
    Page mapped_at(uint64_t address) const;
    size_t mapped_pages() const;

    std::string trouble;

   protected:
    virtual bool do_reserve(size_t bytes, uint64_t* address) = 0;
    virtual void do_free_range(uint64_t address, size_t bytes) = 0;
    virtual bool do_create(Chunk* chunk) = 0;
    virtual void do_destroy(Chunk chunk) = 0;
    // One mapping of `count` chunks that mappable() joined.
    virtual bool do_map(uint64_t address, const Chunk* chunks, size_t count) = 0;
    virtual bool do_access(uint64_t address, size_t bytes) = 0;
    virtual void do_unmap(uint64_t address, const Chunk* chunks, size_t count) = 0;
    virtual bool do_record(Stream stream, Event* event) = 0;
    virtual bool do_done(Event event) = 0;
    virtual bool do_wait(Stream stream, Event event) = 0;
    virtual bool do_synchronize(Event event) = 0;
    virtual bool do_finish() = 0;
    // Whether b is mapped with a in one call when it follows it.
    virtual bool joined(Chunk, Chunk) const { return false; }

    const size_t unit_;   // bytes
    const size_t whole_;  // width of a whole chunk

   private:
    bool refused(int call);
    size_t run(const Chunk* chunks, size_t count) const;
    bool tail(Chunk chunk) const { return chunk.width < whole_; }

    struct Failure {
        uint64_t nth = 0, times = 0;
    };
    Counts counts_;
    Failure failures_[5];
    struct Mapped {
        std::vector<Page> pages;
        size_t left;  // of them mapped
    };
    std::map<uint64_t, Mapped> pages_;
};

// Streams of a machine without them: work is done when it is queued, and an event at once, unless
// a test holds events or lets a stream capture.
class HostBackend : public Backend {
   public:
    using Backend::Backend;
    void drop(Event event) override { pending_.erase(event); }
    uint64_t capture(Stream stream) override {
        const auto found = capturing_.find(stream);
        return found == capturing_.end() ? 0 : found->second;
    }
    bool hold(bool on) override;
    bool set_capturing(Stream stream, bool on) override;
    size_t events() const { return pending_.size(); }

   protected:
    bool do_record(Stream stream, Event* event) override;
    bool do_done(Event event) override { return !held_ || !pending_.at(event); }
    bool do_wait(Stream, Event event) override { return pending_.count(event) > 0; }
    bool do_synchronize(Event event) override;
    bool do_finish() override;

   private:
    bool held_ = false;
    Event last_ = 0;
    std::map<Event, bool> pending_;
    std::map<Stream, uint64_t> capturing_;
    uint64_t captures_ = 0;
};

// Throws std::runtime_error where the machine is not there.
std::unique_ptr<Backend> null_backend(const farspan_options& options);
std::unique_ptr<Backend> posix_backend(const farspan_options& options);
std::unique_ptr<Backend> cuda_backend(const farspan_options& options);
// Throws std::runtime_error for chunks that a device cannot have; without a driver, for none.
void cuda_chunks(const farspan_options& options);

}  // namespace farspan
