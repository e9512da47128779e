// Requests as buffers over sections; see skyline.h for what a section is.
#pragma once

#include <cstdint>
#include <vector>

#include "skyline.h"

namespace farspan {

struct Problem {
    std::vector<Buffer> buffers;  // those that take room for some time
    std::vector<int64_t> origin;  // which request a buffer is
    int32_t sections = 0;
};

// Are sizes and lifetimes such that read_problem takes them?
bool readable(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies);

Problem read_problem(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies);

}  // namespace farspan
