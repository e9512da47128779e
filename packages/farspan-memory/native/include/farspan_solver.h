// Static placement (MEMO 4.2), as plain C: an address in one arena for each request with a known
// lifetime. Sizes and addresses are bytes, a request is alive in [born, dies). Sums of sizes stay
// below 2^62.
#pragma once

#include "farspan_memory.h"

#ifdef __cplusplus
extern "C" {
#endif

// What became of a question.
enum {
    FARSPAN_PLACE_FITS = 0,      // addresses are written
    FARSPAN_PLACE_NO_FIT = 1,    // proved: no placement has this height
    FARSPAN_PLACE_UNKNOWN = 2,   // the limit was reached first
    FARSPAN_PLACE_BAD_INPUT = 3  // negative sizes, a lifetime that runs backwards, a wrong order
};

// First fit (best = 0) or best fit (best = 1) in the order given, a permutation of 0 to n - 1: each
// request goes to the lowest gap, or to the smallest one, that is free for its whole lifetime. What
// takes no room goes to 0. After `seconds`, first fit puts requests above all that live with them.
// FARSPAN_PLACE_UNKNOWN once one would reach `height`: the order is not lower.
FARSPAN_API int32_t farspan_greedy(int64_t n, const int64_t *size, const int64_t *born,
                                   const int64_t *dies, const int64_t *order, int32_t best,
                                   int64_t *address, double seconds, int64_t height);

// Is there a placement of at most `height` bytes? Searched until it is found, proved away, or
// `seconds` have passed. Deterministic but for the clock. `nodes` is the work done.
FARSPAN_API int32_t farspan_fit(int64_t n, const int64_t *size, const int64_t *born,
                                const int64_t *dies, int64_t height, double seconds,
                                int64_t *address, int64_t *nodes);

#ifdef __cplusplus
}
#endif
