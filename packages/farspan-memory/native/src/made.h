// What the C face and the entry points of torch share.
#pragma once

#include "allocator.h"

namespace farspan {

// Throws Refusal for options that no allocator can be made with: all devices are asked, where the
// driver is there.
void verify(const farspan_options& given);
// Throws Refusal.
std::unique_ptr<Allocator> make(const farspan_options& given);
// Keeps the words of a failure for farspan_error.
int told(int status, std::string text);
// Status of the exception being handled.
int caught();

}  // namespace farspan
