// The entry points of torch in record mode, on the fake driver.
#include <string>

#include "machine.h"

namespace {

// The options may be gone at the first use of a device.
void requests_are_recorded_from_the_first_on() {
    {
        const std::string library = FAKE_CUDA;
        farspan_options o = options(FARSPAN_CUDA, 8, FARSPAN_DEFAULT_POLICY);
        o.library = library.c_str();
        EXPECT(farspan_torch_configure(&o, FARSPAN_MODE_RECORD) == FARSPAN_OK);
    }
    void* stream = reinterpret_cast<void*>(3);
    void* p = farspan_torch_alloc(1000, 0, stream);
    farspan_torch_free(p, 1000, 0, stream);
    farspan_allocator* a = nullptr;
    EXPECT(farspan_torch_allocator(0, &a) == FARSPAN_OK);
    farspan_event events[3];
    EXPECT(farspan_read_events(a, 0, events, 3) == 2);
    EXPECT(events[0].kind == FARSPAN_MALLOC && events[0].size == 1000 && events[0].stream == 3);
    EXPECT(events[1].kind == FARSPAN_FREE && events[1].id == events[0].id);
    EXPECT(look().violations == 0);
}

}  // namespace

int main() { RUN(requests_are_recorded_from_the_first_on); }
