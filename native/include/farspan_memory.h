// The native allocator of farspan, as plain C: no C++ type and no CUDA header crosses this line.
//
// One farspan_allocator is one device. All calls on it may come from any thread; a mutex a device
// orders them. Sizes are bytes. A stream is the number of a cudaStream_t, 0 for the default one.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FARSPAN_API __attribute__((visibility("default")))

FARSPAN_API uint32_t farspan_abi(void);

#ifdef __cplusplus
}
#endif
