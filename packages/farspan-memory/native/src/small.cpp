#include "small.h"

namespace farspan {

SmallPool::~SmallPool() {
    for (Segment* segment : segments_) {
        for (Piece* piece = segment->first; piece;) {
            Piece* after = piece->after;
            delete piece;
            piece = after;
        }
        delete segment;
    }
}

Piece* SmallPool::malloc(uint64_t size, Stream stream) {
    Shelf& here = shelves_[stream];
    const auto found = here.pieces.lower_bound(size);
    if (found == here.pieces.end()) return nullptr;
    Piece* piece = *found;
    here.pieces.erase(found);
    if (piece->size > size) {
        auto* rest = new Piece{piece->segment, piece->address + size, piece->size - size,
                               piece,          piece->after,          true};
        if (rest->after) rest->after->before = rest;
        piece->after = rest;
        piece->size = size;
        here.pieces.insert(rest);
    }
    piece->free = false;
    ++piece->segment->used;
    if (here.spare == piece->segment) here.spare = nullptr;
    return piece;
}

void SmallPool::add(Block* block, uint64_t bytes) {
    auto* segment = new Segment{block, nullptr};
    segment->first = new Piece{segment, block->address, bytes, nullptr, nullptr, true};
    segments_.insert(segment);
    shelves_[block->stream].pieces.insert(segment->first);
}

// a and the free piece after it become one.
Piece* SmallPool::join(Piece* a) {
    Piece* b = a->after;
    a->size += b->size;
    a->after = b->after;
    if (a->after) a->after->before = a;
    delete b;
    return a;
}

Block* SmallPool::free(Piece* piece) {
    Shelf& here = shelf(piece);
    Segment* segment = piece->segment;
    piece->free = true;
    --segment->used;
    if (piece->after && piece->after->free) {
        here.pieces.erase(piece->after);
        piece = join(piece);
    }
    if (piece->before && piece->before->free) {
        here.pieces.erase(piece->before);
        piece = join(piece->before);
    }
    here.pieces.insert(piece);
    if (segment->used > 0) return nullptr;
    if (!here.spare) {
        here.spare = segment;
        return nullptr;
    }
    return retire(segment);
}

Block* SmallPool::retire(Segment* segment) {
    Shelf& here = shelf(segment->first);
    here.pieces.erase(segment->first);
    if (here.spare == segment) here.spare = nullptr;
    Block* block = segment->block;
    segments_.erase(segment);
    delete segment->first;
    delete segment;
    return block;
}

void SmallPool::rename(Stream from, Stream to) {
    const auto node = shelves_.extract(from);
    if (node) shelves_[to].pieces.insert(node.mapped().pieces.begin(), node.mapped().pieces.end());
}

std::vector<Block*> SmallPool::drain() {
    std::vector<Segment*> empty;
    for (Segment* segment : segments_) {
        if (segment->used == 0) empty.push_back(segment);
    }
    std::vector<Block*> blocks;
    for (Segment* segment : empty) blocks.push_back(retire(segment));
    return blocks;
}

}  // namespace farspan
