// What tests ask of the fake driver.
#pragma once

#include <cstdint>

// The last five are what is not given back yet.
struct fake_cuda_state {
    uint64_t violations, waits, reserved, handles, mapped, events, contexts;
};

extern "C" {
void fake_cuda_capture(void* stream, int on);
void fake_cuda_hold(int on);
void fake_cuda_capacity(uint64_t bytes);
void fake_cuda_look(fake_cuda_state* state);
}
