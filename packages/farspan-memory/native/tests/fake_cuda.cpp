// A libcuda.so.1 over a memfd: what the driver refuses, it refuses, and counts as a violation.
// Memory is touchable only after cuMemSetAccess. The structures are the driver's, declared anew.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "fake_cuda.h"

namespace {

constexpr size_t GRANULARITY = 64 << 10;
constexpr int OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_CONTEXT = 201, NOT_READY = 600;

struct Prop {
    int type, handles, location_type, location_id;
    void* win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Desc {
    int location_type, location_id, flags;
};
struct Mapping {
    uint64_t size, handle;
    bool access;
};

struct Machine {
    std::mutex mutex;
    int file = memfd_create("fake_cuda", 0);
    uint64_t capacity = UINT64_C(1) << 40, created = 0, next = 1, end = 0;
    std::map<uint64_t, uint64_t> reserved;                       // address, size
    std::map<uint64_t, std::pair<uint64_t, uint64_t>> handles;   // handle, (file offset, size)
    std::map<uint64_t, Mapping> mapped;
    std::map<void*, bool> events;  // recorded and pending
    std::map<void*, uint64_t> capturing;  // with the number of the capture
    bool held = false;
    int contexts = 0;
    uint64_t violations = 0, waits = 0;
};

Machine& machine() {
    static Machine* const made = new Machine;
    return *made;
}

int context_object;
thread_local void* current = nullptr;
thread_local int mode = 0;

int violation(const char* words) {
    std::fprintf(stderr, "fake_cuda: %s\n", words);
    ++machine().violations;
    return INVALID;
}

int guarded() {
    if (current != &context_object) return NO_CONTEXT;
    if (!machine().capturing.empty() && mode != 2) return violation("forbidden during a capture");
    return OK;
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

#define REQUIRE(holds, words) \
    if (!(holds)) return violation(words)
#define GUARD                            \
    const Lock lock(machine().mutex);    \
    if (const int bad = guarded()) return bad

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT int cuInit(unsigned flags) { return flags ? INVALID : OK; }
EXPORT int cuGetErrorName(int status, const char** name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return OK;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? OK : 101;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    REQUIRE(attribute == 102 || attribute == 110, "an attribute nobody needs");
    *value = 1;
    return OK;
}
EXPORT int cuDevicePrimaryCtxRetain(void** made, int) {
    ++machine().contexts;
    *made = &context_object;
    return OK;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
    --machine().contexts;
    return OK;
}
EXPORT int cuCtxGetCurrent(void** context) {
    *context = current;
    return OK;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
    REQUIRE(current == nullptr, "pushed twice");
    current = context;
    return OK;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
    *context = current;
    current = nullptr;
    return OK;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* value) {
    std::swap(*value, mode);
    return OK;
}
EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
    GUARD;
    *free = machine().capacity - machine().created;
    *total = machine().capacity;
    return OK;
}

static int valid(const Prop* p) {
    static_assert(sizeof(Prop) == 32, "CUmemAllocationProp");
    const unsigned char none[4] = {};
    REQUIRE(p->type == 1 && p->handles == 0, "not pinned memory without handle");
    REQUIRE(p->location_type == 1 && p->location_id == 0, "not on the device");
    REQUIRE(!p->win32 && !p->compression && !p->usage, "a field that should be zero");
    REQUIRE(std::memcmp(p->reserved, none, 4) == 0 && p->rdma == 1, "not for RDMA, or reserved");
    return OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t* size, const Prop* p, int option) {
    REQUIRE(option == 0, "not the minimum");
    *size = GRANULARITY;
    return valid(p);
}

EXPORT int cuMemAddressReserve(uint64_t* address, size_t size, size_t alignment, uint64_t hint,
                               unsigned long long flags) {
    GUARD;
    REQUIRE(size && size % GRANULARITY == 0 && hint == 0 && flags == 0, "reserve");
    REQUIRE(alignment && (alignment & (alignment - 1)) == 0, "alignment");
    void* made = mmap(nullptr, size + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return OUT_OF_MEMORY;
    const auto begin = reinterpret_cast<uint64_t>(made);
    *address = (begin + alignment - 1) / alignment * alignment;
    machine().reserved[*address] = size;
    return OK;
}

EXPORT int cuMemAddressFree(uint64_t address, size_t size) {
    GUARD;
    const auto found = machine().reserved.find(address);
    REQUIRE(found != machine().reserved.end() && found->second == size, "not a reservation");
    const auto inside = machine().mapped.lower_bound(address);
    REQUIRE(inside == machine().mapped.end() || inside->first >= address + size, "still mapped");
    machine().reserved.erase(found);
    munmap(reinterpret_cast<void*>(address), size);
    return OK;
}

EXPORT int cuMemCreate(uint64_t* handle, size_t size, const Prop* p, unsigned long long flags) {
    GUARD;
    if (const int bad = valid(p)) return bad;
    REQUIRE(size && size % GRANULARITY == 0 && flags == 0, "create");
    Machine& m = machine();
    if (m.created + size > m.capacity) return OUT_OF_MEMORY;
    if (ftruncate(m.file, static_cast<off_t>(m.end + size)) != 0) return OUT_OF_MEMORY;
    *handle = m.next++;
    m.handles[*handle] = {m.end, size};
    m.end += size;
    m.created += size;
    return OK;
}

EXPORT int cuMemRelease(uint64_t handle) {
    GUARD;
    const auto found = machine().handles.find(handle);
    REQUIRE(found != machine().handles.end(), "released twice");
    for (const auto& [address, mapping] : machine().mapped) {
        REQUIRE(mapping.handle != handle, "released while mapped: its memory stays");
    }
    machine().created -= found->second.second;
    machine().handles.erase(found);
    return OK;
}

EXPORT int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
                    unsigned long long flags) {
    GUARD;
    Machine& m = machine();
    const auto found = m.handles.find(handle);
    REQUIRE(found != m.handles.end() && found->second.second == size, "map of another size");
    REQUIRE(offset == 0 && flags == 0, "map with offset or flags");
    auto range = m.reserved.upper_bound(address);
    REQUIRE(range != m.reserved.begin(), "map outside");
    --range;
    REQUIRE(address + size <= range->first + range->second, "map outside a reservation");
    auto next = m.mapped.lower_bound(address);
    REQUIRE(next == m.mapped.end() || next->first >= address + size, "mapped already");
    if (next != m.mapped.begin()) {
        --next;
        REQUIRE(next->first + next->second.size <= address, "mapped already");
    }
    mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, m.file,
         static_cast<off_t>(found->second.first));
    m.mapped[address] = {size, handle, false};
    return OK;
}

EXPORT int cuMemUnmap(uint64_t address, size_t size) {
    GUARD;
    const auto found = machine().mapped.find(address);
    REQUIRE(found != machine().mapped.end() && found->second.size == size, "not a whole mapping");
    mmap(reinterpret_cast<void*>(address), size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    machine().mapped.erase(found);
    return OK;
}

EXPORT int cuMemSetAccess(uint64_t address, size_t size, const Desc* desc, size_t count) {
    GUARD;
    static_assert(sizeof(Desc) == 12, "CUmemAccessDesc");
    REQUIRE(count >= 1 && desc->location_type == 1 && desc->flags == 3, "access");
    for (uint64_t at = address; at < address + size;) {
        const auto found = machine().mapped.find(at);
        REQUIRE(found != machine().mapped.end(), "access to a range with holes");
        found->second.access = true;
        at += found->second.size;
    }
    mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
    return OK;
}

EXPORT int cuEventCreate(void** event, unsigned flags) {
    GUARD;
    REQUIRE(flags == 2, "an event with timing");
    *event = reinterpret_cast<void*>(machine().next++);
    machine().events[*event] = false;
    return OK;
}
EXPORT int cuEventDestroy_v2(void* event) {
    GUARD;
    return machine().events.erase(event) ? OK : violation("no such event");
}
EXPORT int cuEventRecord(void* event, void* stream) {
    GUARD;
    REQUIRE(!machine().capturing.count(stream), "an event in a capture");
    machine().events.at(event) = machine().held;
    return OK;
}
EXPORT int cuEventQuery(void* event) {
    GUARD;
    return machine().events.at(event) ? NOT_READY : OK;
}
EXPORT int cuEventSynchronize(void* event) {
    GUARD;
    machine().events.at(event) = false;
    return OK;
}
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    GUARD;
    REQUIRE(!machine().capturing.count(stream), "a wait in a capture");
    REQUIRE(machine().events.count(event) && flags == 0, "no such event");
    ++machine().waits;
    return OK;
}
EXPORT int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph,
                                     const void** after, size_t* count) {
    const Lock lock(machine().mutex);
    REQUIRE(!graph && !after && !count, "more than the number of a capture");
    const auto found = machine().capturing.find(stream);
    *status = found != machine().capturing.end();
    if (*status) *id = found->second;
    return OK;
}
EXPORT int cuCtxSynchronize() {
    GUARD;
    REQUIRE(machine().capturing.empty(), "a wait for the device during a capture");
    for (auto& [event, pending] : machine().events) pending = false;
    return OK;
}

EXPORT void fake_cuda_capture(void* stream, int on) {
    if (on) {
        machine().capturing[stream] = machine().next++;
    } else {
        machine().capturing.erase(stream);
    }
}
EXPORT void fake_cuda_hold(int on) {
    machine().held = on != 0;
    if (!on) {
        for (auto& [event, pending] : machine().events) pending = false;
    }
}
EXPORT void fake_cuda_capacity(uint64_t bytes) { machine().capacity = bytes; }
EXPORT void fake_cuda_look(fake_cuda_state* state) {
    const Machine& m = machine();
    *state = {m.violations, m.waits, m.reserved.size(), m.handles.size(), m.mapped.size(),
              m.events.size(), static_cast<uint64_t>(m.contexts)};
}

}  // extern "C"
