// Memory that is free once work on other streams is done (record_stream).
#pragma once

#include <deque>
#include <list>
#include <unordered_map>

#include "backend.h"
#include "small.h"

namespace farspan {

using PoolId = std::pair<uint64_t, uint64_t>;

// A tensor: what was asked for, and what it has.
struct Live {
    enum class Kind : uint8_t { large, small, planned };
    uint64_t address = 0;
    uint64_t id = 0;
    uint64_t bytes = 0;  // as asked
    uint64_t size = 0;   // as given
    Stream stream = 0;
    Kind kind = Kind::large;
    bool captured = false;  // by a graph of the pool
    PoolId pool{};
    Block* block = nullptr;
    Piece* piece = nullptr;
    std::vector<Stream> users;  // other streams that were recorded
};

// Freed tensors with an event pending on each recorded stream. An event that could not be recorded,
// during a capture or after a failure, is recorded at a later poll.
// Invariant: an entry has an event or an unrecorded stream, and no memory of it is in a pool.
// Invariant: a queue has a stream's events in the order of the stream, and is not empty.
class Waiting {
   public:
    explicit Waiting(Backend& backend) : backend_(backend) {}
    ~Waiting();

    void add(Live&& live);
    // Those that are done now.
    std::vector<Live> poll();
    // Waits; what could not be waited for stays.
    std::vector<Live> settle();
    bool empty() const { return entries_.empty(); }

   private:
    friend class Checker;
    struct Entry {
        Live live;
        size_t pending;  // events in queues
    };
    using Entries = std::list<Entry>;
    struct Mark {
        Event event;
        Entries::iterator entry;
    };
    bool record(Entries::iterator entry);
    void retry();
    void pop(std::deque<Mark>* queue, std::vector<Live>* done);
    Backend& backend_;
    Entries entries_;
    std::vector<Entries::iterator> unrecorded_;
    std::unordered_map<Stream, std::deque<Mark>> queues_;
};

}  // namespace farspan
