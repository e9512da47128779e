#include "problem.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace farspan {

namespace {

void name_twins(std::vector<Buffer> &buffers) {
    const auto shape = [&buffers](int32_t b) {
        return std::make_tuple(buffers[b].first, buffers[b].last, buffers[b].size);
    };
    std::vector<int32_t> order(buffers.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return shape(a) < shape(b); });
    for (size_t k = 0; k < order.size(); ++k) {
        const bool same = k > 0 && shape(order[k]) == shape(order[k - 1]);
        buffers[order[k]].twin = same ? buffers[order[k - 1]].twin : order[k];
    }
}

}  // namespace

// What dies at t makes room for what is born at t. A section begins where something is born after
// something has died.
Problem read_problem(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies) {
    Problem problem;
    std::vector<std::tuple<int64_t, int32_t, int32_t>> events;  // time, is a birth, buffer
    for (int64_t i = 0; i < n; ++i) {
        if (size[i] == 0 || born[i] == dies[i]) continue;
        const int32_t b = static_cast<int32_t>(problem.buffers.size());
        events.emplace_back(born[i], 1, b);
        events.emplace_back(dies[i], 0, b);
        problem.buffers.push_back({size[i], dies[i] - born[i], 0, 0, 0});
        problem.origin.push_back(i);
    }
    std::sort(events.begin(), events.end());
    int32_t section = 0;
    bool died = false;
    for (const auto &[time, birth, b] : events) {
        if (birth && died) ++section;
        died = !birth;
        if (birth)
            problem.buffers[b].first = section;
        else
            problem.buffers[b].last = section + 1;
    }
    problem.sections = problem.buffers.empty() ? 0 : section + 1;
    name_twins(problem.buffers);
    return problem;
}

bool readable(int64_t n, const int64_t *size, const int64_t *born, const int64_t *dies) {
    if (n < 0 || n > std::numeric_limits<int32_t>::max()) return false;
    for (int64_t i = 0; i < n; ++i)
        if (size[i] < 0 || dies[i] < born[i]) return false;
    return true;
}

}  // namespace farspan
