#include "streams.h"

namespace farspan {

Waiting::~Waiting() {
    for (const auto& [stream, queue] : queues_) {
        for (const Mark& mark : queue) backend_.drop(mark.event);
    }
}

// Whether every recorded stream has its event.
bool Waiting::record(Entries::iterator entry) {
    std::vector<Stream>& left = entry->live.users;
    while (!left.empty()) {
        const Stream stream = left.back();
        Event event = 0;
        if (backend_.capturing(stream) || !backend_.record(stream, &event)) return false;
        queues_[stream].push_back({event, entry});
        ++entry->pending;
        left.pop_back();
    }
    return true;
}

void Waiting::add(Live&& live) {
    entries_.push_back({std::move(live), 0});
    const auto entry = std::prev(entries_.end());
    if (!record(entry)) unrecorded_.push_back(entry);
}

void Waiting::retry() {
    std::vector<Entries::iterator> left;
    for (const auto entry : unrecorded_) {
        if (!record(entry)) left.push_back(entry);
    }
    unrecorded_ = std::move(left);
}

// The stream's first event is done.
void Waiting::pop(std::deque<Mark>* queue, std::vector<Live>* done) {
    const auto [event, entry] = queue->front();
    queue->pop_front();
    backend_.drop(event);
    if (--entry->pending > 0 || !entry->live.users.empty()) return;
    done->push_back(std::move(entry->live));
    entries_.erase(entry);
}

// A stream's events complete in order: behind one that is not done no other is asked for.
std::vector<Live> Waiting::poll() {
    std::vector<Live> done;
    retry();
    for (auto queue = queues_.begin(); queue != queues_.end();) {
        std::deque<Mark>& marks = queue->second;
        if (!backend_.capturing(queue->first)) {
            while (!marks.empty() && backend_.done(marks.front().event)) pop(&marks, &done);
        }
        queue = marks.empty() ? queues_.erase(queue) : std::next(queue);
    }
    return done;
}

std::vector<Live> Waiting::settle() {
    std::vector<Live> done;
    retry();
    for (auto queue = queues_.begin(); queue != queues_.end();) {
        std::deque<Mark>& marks = queue->second;
        if (!backend_.capturing(queue->first) && backend_.synchronize(marks.back().event)) {
            while (!marks.empty()) pop(&marks, &done);
        }
        queue = marks.empty() ? queues_.erase(queue) : std::next(queue);
    }
    return done;
}

}  // namespace farspan
