#include "streams.h"

namespace farspan {

Waiting::~Waiting() {
    for (Entry& entry : entries_) {
        for (const auto& [stream, event] : entry.events) backend_.drop(event);
    }
}

// Whether every recorded stream has its event.
bool Waiting::record(Entry& entry) {
    std::vector<Stream>& left = entry.live.users;
    while (!left.empty()) {
        Event event = 0;
        if (backend_.capturing(left.back()) || !backend_.record(left.back(), &event)) return false;
        entry.events.push_back({left.back(), event});
        left.pop_back();
    }
    return true;
}

void Waiting::add(Live&& live) {
    entries_.push_back({std::move(live), {}});
    record(entries_.back());
}

// A stream's events complete in order: behind one that is not done no other is asked for.
std::vector<Live> Waiting::poll() {
    std::vector<Live> done;
    std::set<Stream> busy;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
        const bool recorded = record(*entry);
        auto& events = entry->events;
        for (size_t i = events.size(); i-- > 0;) {
            const auto [stream, event] = events[i];
            if (busy.count(stream)) continue;
            if (backend_.capturing(stream) || !backend_.done(event)) {
                busy.insert(stream);
                continue;
            }
            backend_.drop(event);
            events.erase(events.begin() + static_cast<ptrdiff_t>(i));
        }
        if (recorded && events.empty()) {
            done.push_back(std::move(entry->live));
            entry = entries_.erase(entry);
        } else {
            ++entry;
        }
    }
    return done;
}

std::vector<Live> Waiting::settle() {
    std::vector<Live> done;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
        bool waited = record(*entry);
        auto& events = entry->events;
        while (waited && !events.empty()) {
            const auto [stream, event] = events.back();
            waited = !backend_.capturing(stream) && backend_.synchronize(event);
            if (!waited) break;
            backend_.drop(event);
            events.pop_back();
        }
        if (waited) {
            done.push_back(std::move(entry->live));
            entry = entries_.erase(entry);
        } else {
            ++entry;
        }
    }
    return done;
}

}  // namespace farspan
