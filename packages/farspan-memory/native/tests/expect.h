// A test is a program of functions; the first thing that does not hold ends it.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(holds)                                                                \
    do {                                                                             \
        if (!(holds)) {                                                              \
            std::fprintf(stderr, "%s:%d: does not hold: %s (%s)\n", __FILE__, __LINE__, #holds, \
                         farspan_error());                                           \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

#define RUN(test)                     \
    do {                              \
        test();                       \
        std::printf("%s\n", #test);   \
    } while (0)
