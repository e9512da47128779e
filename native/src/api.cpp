#include "farspan_memory.h"

uint32_t farspan_abi(void) { return 1; }
