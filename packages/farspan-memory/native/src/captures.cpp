#include "captures.h"

#include <algorithm>

namespace farspan {

void Captures::begin(PoolId id, Filter filter) {
    Pool& pool = pools_[id];
    ++pool.uses;
    ++pool.open;
    pool.filter = std::move(filter);
}

void Captures::end(PoolId id) {
    Pool* pool = find(id);
    if (pool && pool->open > 0) --pool->open;
}

void Captures::release(PoolId id) {
    Pool* pool = find(id);
    if (!pool || pool->uses == 0) return;
    --pool->uses;
    pool->open = std::min(pool->open, pool->uses);
}

Captures::Pools::value_type& Captures::of(Stream stream, uint64_t capture) {
    for (auto& entry : pools_) {
        const Pool& pool = entry.second;
        if (pool.open > 0 && (!pool.filter || pool.filter(stream))) return entry;
    }
    return *pools_.try_emplace({ALONE, capture}).first;
}

Stream Captures::own(Pool& pool, Stream stream, bool* made) {
    const auto [found, fresh] = pool.streams.try_emplace(stream, next_);
    next_ += fresh;
    *made = fresh;
    return found->second;
}

Captures::Pool* Captures::find(PoolId id) {
    const auto found = pools_.find(id);
    return found == pools_.end() ? nullptr : &found->second;
}

bool Captures::open() const {
    return std::any_of(pools_.begin(), pools_.end(),
                       [](const Pools::value_type& entry) { return entry.second.open > 0; });
}

bool Captures::ended(const PoolId& id, const Pool& pool) {
    return id.first != ALONE && pool.uses == 0;
}

bool Captures::any_ended() const {
    return std::any_of(pools_.begin(), pools_.end(), [](const Pools::value_type& entry) {
        return ended(entry.first, entry.second);
    });
}

std::vector<Captures::Pool> Captures::take_ended() {
    std::vector<Pool> taken;
    for (auto entry = pools_.begin(); entry != pools_.end();) {
        if (!ended(entry->first, entry->second)) {
            ++entry;
            continue;
        }
        taken.push_back(std::move(entry->second));
        entry = pools_.erase(entry);
    }
    return taken;
}

}  // namespace farspan
