// One device: stitching for whole chunks, the splitting pool below, a plan before both.
#pragma once

#include <mutex>
#include <unordered_map>

#include "captures.h"
#include "replay.h"
#include "stitch.h"

namespace farspan {

// What a caller is told: a farspan_status and its words.
struct Refusal {
    int status;
    std::string words;
};

// As PyTorch writes sizes.
std::string readable(uint64_t bytes);

// Throws Refusal. Every public function holds the mutex.
// Invariant: each pointer given out and not freed has an entry in live_; what was freed and may
// not be reused is in waiting_, in quarantine_, or in a pool of captures_.
class Allocator {
   public:
    Allocator(std::unique_ptr<Backend> backend, const farspan_options& options);
    ~Allocator();

    uint64_t malloc(uint64_t bytes, Stream stream);
    void free(uint64_t address);
    void record_stream(uint64_t address, Stream stream);
    // Chunks beyond `keep` bytes, when they are idle.
    void release(uint64_t keep);
    void set_capacity(uint64_t bytes);
    // Of the device, and never beyond the capacity that was asked for.
    void set_share(double fraction);
    farspan_statistics statistics();
    void reset_peaks();
    // Throws FARSPAN_BROKEN.
    void check();

    void record(bool on);
    void mark(uint64_t number);
    uint64_t read_events(uint64_t from, farspan_event* to, uint64_t n);
    void set_plan(const farspan_row* rows, uint64_t n, uint64_t arena);
    void begin_iteration();

    // As torch tells of captures: one begins for a graph of the pool, ends, and its graph is gone.
    void begin_pool(PoolId id, Captures::Filter filter);
    void end_pool(PoolId id);
    void release_pool(PoolId id);

    void fail_at(int call, uint64_t nth, uint64_t times);
    void hold_events(bool on);
    void set_capturing(Stream stream, bool on);
    bool owns(uint64_t address);

   private:
    friend class Checker;
    using Lock = std::lock_guard<std::mutex>;

    size_t units(uint64_t bytes) const;
    Live place(uint64_t bytes, Stream stream);
    bool plan(Live& live);
    Stream captured(Live& live, uint64_t capture);
    Block* large(size_t count, Stream stream, Use use);
    [[noreturn]] void out_of_memory(uint64_t bytes, bool captured);
    void retire(Live& live);
    void retire(std::vector<Live> done);
    void settle();
    void return_pools();
    void hold(const Live& live);
    void drop_plan();
    void event(int64_t kind, uint64_t id, uint64_t size, Stream stream);

    std::mutex mutex_;
    const farspan_options options_;
    std::unique_ptr<Backend> backend_;
    Stitcher stitcher_;
    SmallPool small_;
    Waiting waiting_;
    Captures captures_;
    Replay replay_;
    Block* arena_ = nullptr;
    std::unordered_map<uint64_t, Live> live_;
    std::vector<Live> quarantine_;  // one at most
    uint64_t next_id_ = 0;
    bool recording_ = false;
    std::vector<farspan_event> events_;
    farspan_statistics statistics_{};
};

// Every invariant by brute force, from the lists of all blocks and what the machine has mapped.
class Checker {
   public:
    explicit Checker(Allocator& allocator) : a_(allocator) {}
    // Empty, or what does not hold.
    std::string run();

   private:
    void chunks();
    void neighbours(const PBlock* p);
    void sblocks();
    void parts();
    void pools();
    void holders();
    void hold(const Block* block, Use use);
    void tensors();
    void segments();
    void totals();
    void expect(bool holds, const char* words);
    std::vector<const Live*> all_live() const;

    Allocator& a_;
    std::string broken_;
    size_t pages_ = 0;
    std::set<const Block*> held_;
};

}  // namespace farspan
