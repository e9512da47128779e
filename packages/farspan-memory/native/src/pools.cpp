#include "pools.h"

#include <algorithm>

namespace farspan {

void PPool::insert(PBlock* p) {
    Shelf& shelf = shelves_[{p->stream, p->width}];
    shelf.blocks.insert(p);
    shelf.total += p->count;
}

void PPool::erase(PBlock* p) {
    Shelf& shelf = shelves_[{p->stream, p->width}];
    shelf.blocks.erase(p);
    shelf.total -= p->count;
}

PBlock* PPool::at_least(size_t count, Key key) const {
    const auto shelf = shelves_.find(key);
    if (shelf == shelves_.end()) return nullptr;
    const auto found = shelf->second.blocks.lower_bound(count);
    return found == shelf->second.blocks.end() ? nullptr : *found;
}

void SPool::insert(SBlock* s) {
    std::vector<SBlock*>& bucket = buckets_[{s->count, s->stream}];
    s->place = bucket.size();
    bucket.push_back(s);
}

void SPool::erase(SBlock* s) {
    if (s->watched) {
        std::vector<SBlock*>& watchers = s->watched->watchers;
        watchers.erase(std::find(watchers.begin(), watchers.end(), s));
        s->watched = nullptr;
        return;
    }
    std::vector<SBlock*>& bucket = buckets_[{s->count, s->stream}];
    bucket[s->place] = bucket.back();
    bucket[s->place]->place = s->place;
    bucket.pop_back();
}

SBlock* SPool::find(size_t count, Stream stream) {
    const auto found = buckets_.find({count, stream});
    if (found == buckets_.end()) return nullptr;
    std::vector<SBlock*>& bucket = found->second;
    while (!bucket.empty()) {
        SBlock* s = bucket.back();
        const auto blocking = [stream](const PBlock* p) {
            return p->use != Use::idle || p->stream != stream;
        };
        const auto part = std::find_if(s->parts.begin(), s->parts.end(), blocking);
        if (part == s->parts.end()) return s;
        bucket.pop_back();
        s->watched = *part;
        (*part)->watchers.push_back(s);
    }
    return nullptr;
}

void SPool::wake(PBlock* p) {
    for (SBlock* s : p->watchers) {
        s->watched = nullptr;
        insert(s);
    }
    p->watchers.clear();
}

void SPool::append(SBlock* s) {
    s->older = newest_;
    s->newer = nullptr;
    (newest_ ? newest_->newer : oldest_) = s;
    newest_ = s;
}

void SPool::unlink(SBlock* s) {
    (s->older ? s->older->newer : oldest_) = s->newer;
    (s->newer ? s->newer->older : newest_) = s->older;
}

bool SPool::shelved(const SBlock* s) const {
    const auto found = buckets_.find({s->count, s->stream});
    if (found == buckets_.end()) return false;
    return std::count(found->second.begin(), found->second.end(), s) == 1;
}

}  // namespace farspan
