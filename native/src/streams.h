// Memory that is free once work on other streams is done (record_stream).
#pragma once

#include <list>

#include "backend.h"
#include "small.h"

namespace farspan {

// A tensor: what was asked for, and what it has.
struct Live {
    enum class Kind : uint8_t { large, small, planned };
    uint64_t address = 0;
    uint64_t id = 0;
    uint64_t bytes = 0;  // as asked
    uint64_t size = 0;   // as given
    Stream stream = 0;
    Kind kind = Kind::large;
    bool captured = false;
    Block* block = nullptr;
    Piece* piece = nullptr;
    std::vector<Stream> users;  // other streams that were recorded
};

// Freed tensors with an event pending on each recorded stream. An event that could not be recorded,
// during a capture or after a failure, is recorded at a later poll.
// Invariant: an entry has an event or an unrecorded stream, and no memory of it is in a pool.
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
        std::vector<std::pair<Stream, Event>> events;
    };
    bool record(Entry& entry);
    Backend& backend_;
    std::list<Entry> entries_;
};

}  // namespace farspan
