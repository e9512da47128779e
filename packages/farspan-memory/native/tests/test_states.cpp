// Each state of BestFit, and each function of the allocator, in the paper's terms.
#include "machine.h"

namespace {

void s1_exact_match_of_a_pblock() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    char* p = m.get(4);
    EXPECT(m.now().s4 == 1 && m.now().allocs == 1);
    m.put(p);
    EXPECT(m.get(4) == p);
    EXPECT(m.now().s1_primitive == 1 && m.now().maps == 4);
}

void s2_splits_without_a_call_of_the_driver() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    char* p = m.get(4);
    m.put(p);
    const uint64_t maps = m.now().maps;
    EXPECT(m.get(3) == p);
    EXPECT(m.get(1) == p + 3 * CHUNK);
    EXPECT(m.now().s2 == 1 && m.now().splits == 1 && m.now().s1_primitive == 1);
    EXPECT(m.now().maps == maps);
}

void s2_stitches_the_halves_as_the_paper_does() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_HALF_STITCH);
    m.put(m.get(4));
    char* p = m.get(3);
    EXPECT(m.now().stitches == 1 && m.now().sblocks == 1);
    m.put(p);
    EXPECT(m.get(4) != p);
    EXPECT(m.now().s1_stitched == 1 && m.now().stitches == 1);
}

// Every second of 8 single chunks is free; 4 are needed.
char* stitched(Machine& m, std::vector<char*>& kept) {
    std::vector<char*> all;
    for (int i = 0; i < 8; ++i) all.push_back(m.get(1));
    for (size_t i = 0; i < 8; ++i) {
        if (i % 2) {
            kept.push_back(all[i]);
        } else {
            m.put(all[i]);
        }
    }
    return m.get(4);
}

void s3_stitches_several() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    std::vector<char*> kept;
    char* s = stitched(m, kept);
    EXPECT(m.now().s3 == 1 && m.now().stitches == 1 && m.now().reserved == 8 * CHUNK);
    m.put(s);
    EXPECT(m.get(4) == s);
    EXPECT(m.now().s1_stitched == 1 && m.now().stitches == 1);
}

void an_sblock_with_an_active_part_is_not_given() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    std::vector<char*> kept;
    char* s = stitched(m, kept);
    m.put(s);
    char* part = m.get(1);
    char* p = nullptr;
    EXPECT(m.take(4 * CHUNK, 0, &p) == FARSPAN_OUT_OF_MEMORY);
    m.put(part);
    EXPECT(m.get(4) == s);
}

void s4_allocs_only_what_is_missing() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    m.put(m.get(3));
    m.get(5);
    EXPECT(m.now().s4 == 2 && m.now().stitches == 1 && m.now().reserved == 5 * CHUNK);
}

void s5_is_out_of_memory_with_words() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    char* p = m.get(6);
    char* q = nullptr;
    EXPECT(m.take(3 * CHUNK, 0, &q) == FARSPAN_OUT_OF_MEMORY && !q);
    EXPECT(std::strstr(farspan_error(), "Tried to allocate 192.00 KiB"));
    EXPECT(m.now().s5 == 1 && m.now().reserved == 6 * CHUNK);
    m.put(p);
    m.get(8);
}

void lazy_stitches_only_when_the_capacity_is_out() {
    Machine m(FARSPAN_NULL, 12, FARSPAN_LAZY);
    std::vector<char*> kept;
    stitched(m, kept);
    EXPECT(m.now().stitches == 0 && m.now().reserved == 12 * CHUNK);
    m.get(4);
    EXPECT(m.now().stitches == 1 && m.now().reserved == 12 * CHUNK);
}

void merge_undoes_a_split() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_MERGE);
    m.put(m.get(8));
    char* p = m.get(3);
    char* q = m.get(5);
    m.put(p);
    m.put(q);
    EXPECT(m.now().merges == 1 && m.now().pblocks == 1);
    EXPECT(m.get(8) == p);
    EXPECT(m.now().maps == 8);
}

// Parts that different sBlocks have stay apart, else an sBlock would have chunks it does not map.
void merge_keeps_what_sblocks_need() {
    Machine m(FARSPAN_NULL, 6, FARSPAN_MERGE);
    m.put(m.get(4));
    char* a = m.get(2);
    char* b = m.get(2);
    char* c = m.get(2);
    m.put(b);
    m.put(c);
    char* s = m.get(4);
    EXPECT(m.now().stitches == 1);
    m.put(s);
    m.put(a);
    EXPECT(m.now().pblocks == 3);
    EXPECT(m.get(4) == s);
}

void stitch_free_drops_the_least_recently_used() {
    farspan_options o = options(FARSPAN_NULL, 8, PAPER);
    o.virtual_limit = 8 * CHUNK;
    Machine m(o);
    std::vector<char*> kept;
    char* four = stitched(m, kept);
    m.put(four);
    m.put(m.get(3));
    m.put(m.get(4));  // now the one of three is the oldest
    EXPECT(m.now().sblocks == 2 && m.now().stitches == 2);
    m.put(m.get(2));
    EXPECT(m.now().stitch_frees == 1 && m.now().virtual_bytes == 6 * CHUNK);
    EXPECT(m.get(4) == four && m.now().stitches == 3);
}

void an_assigned_sblock_is_never_dropped() {
    farspan_options o = options(FARSPAN_NULL, 8, PAPER);
    o.virtual_limit = 5 * CHUNK;
    Machine m(o);
    std::vector<char*> kept;
    stitched(m, kept);
    m.put(kept[0]);
    m.put(kept[2]);
    // No address space for a second sBlock: idle chunks go back, and new ones come in one piece.
    m.get(2);
    EXPECT(m.now().sblocks == 1 && m.now().stitch_frees == 0 && m.now().destroys == 2);
}

// The paper's limit grows the pool: it neither splits nor stitches below. Ours only chooses.
void the_fragment_limit_chooses_and_never_grows() {
    farspan_options o = options(FARSPAN_NULL, 16, PAPER);
    o.fragment_limit = 3 * CHUNK;
    Machine m(o);
    char* five = m.get(5);
    char* seven = m.get(7);
    m.put(five);
    m.put(seven);
    EXPECT(m.get(4) == seven);
    m.get(4);
    m.get(4);
    EXPECT(m.now().reserved == 12 * CHUNK && m.now().allocs == 2);
}

void small_requests_share_a_chunk() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    char *a, *b, *c;
    m.take(1000, 0, &a);
    m.take(CHUNK / 2, 0, &b);
    m.take(1, 0, &c);
    EXPECT(b == a + 1024 && c == b + CHUNK / 2);
    EXPECT(m.now().reserved == CHUNK && m.now().allocated == 1024 + CHUNK / 2 + 512);
    m.put(b);
    m.put(a);
    char* d;
    m.take(1024 + CHUNK / 2, 0, &d);
    EXPECT(d == a && m.now().reserved == CHUNK);
}

void empty_segments_serve_large_requests() {
    Machine m(FARSPAN_NULL, 4, FARSPAN_DEFAULT_POLICY);
    std::vector<char*> all(4);
    for (char*& p : all) m.take(CHUNK - 512, 0, &p);
    for (char* p : all) m.put(p);
    m.get(4);
}

void release_gives_idle_chunks_back() {
    Machine m(FARSPAN_NULL, 8, FARSPAN_DEFAULT_POLICY);
    char* p = m.get(3);
    m.put(m.get(5));
    EXPECT(farspan_release(m.a, 6 * CHUNK) == FARSPAN_OK);
    EXPECT(m.now().reserved == 6 * CHUNK && m.now().destroys == 2);
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    EXPECT(m.now().reserved == 3 * CHUNK);
    m.check();
    m.put(p);
    EXPECT(farspan_release(m.a, 0) == FARSPAN_OK);
    EXPECT(m.now().reserved == 0 && m.now().mappings == 0 && m.now().pblocks == 0);
}

void mappings_stay_within_their_limit() {
    farspan_options o = options(FARSPAN_POSIX, 64, FARSPAN_SHUFFLE);
    o.mapping_limit = 400;
    Machine m(o);
    for (uint64_t i = 1; i < 100; ++i) m.put(m.get(1 + i * 7 % 60));
    EXPECT(m.now().stitch_frees > 0 && m.now().mappings <= 400);
}

void bad_arguments_are_named() {
    Machine m(FARSPAN_NULL, 8, PAPER);
    char* p = nullptr;
    EXPECT(m.take(UINT64_MAX, 0, &p) == FARSPAN_OUT_OF_MEMORY);
    EXPECT(m.take(0, 0, &p) == FARSPAN_OK && !p);
    EXPECT(farspan_free(m.a, nullptr) == FARSPAN_OK);
    p = m.get(1);
    m.put(p);
    EXPECT(farspan_free(m.a, p) == FARSPAN_UNKNOWN && std::strstr(farspan_error(), "not live"));
    farspan_options o = options(FARSPAN_NULL, 8, PAPER);
    farspan_allocator* a = nullptr;
    o.chunk = 1000;
    EXPECT(farspan_create(&o, &a) == FARSPAN_INVALID && std::strstr(farspan_error(), "chunk"));
    o = options(FARSPAN_CUDA, 8, PAPER);
    o.library = "/nowhere/libcuda.so.1";
    EXPECT(farspan_create(&o, &a) == FARSPAN_BACKEND && std::strstr(farspan_error(), "/nowhere"));
}

}  // namespace

int main() {
    RUN(s1_exact_match_of_a_pblock);
    RUN(s2_splits_without_a_call_of_the_driver);
    RUN(s2_stitches_the_halves_as_the_paper_does);
    RUN(s3_stitches_several);
    RUN(an_sblock_with_an_active_part_is_not_given);
    RUN(s4_allocs_only_what_is_missing);
    RUN(s5_is_out_of_memory_with_words);
    RUN(lazy_stitches_only_when_the_capacity_is_out);
    RUN(merge_undoes_a_split);
    RUN(merge_keeps_what_sblocks_need);
    RUN(stitch_free_drops_the_least_recently_used);
    RUN(an_assigned_sblock_is_never_dropped);
    RUN(the_fragment_limit_chooses_and_never_grows);
    RUN(small_requests_share_a_chunk);
    RUN(empty_segments_serve_large_requests);
    RUN(release_gives_idle_chunks_back);
    RUN(mappings_stay_within_their_limit);
    RUN(bad_arguments_are_named);
}
