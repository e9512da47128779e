// The CUDA runtime as PyTorch asks for it, without a GPU: device memory is main memory that no
// other process sees, streams are in order and done at once, kernels are named and do nothing.
// What kernels would compute is computed by operators.cpp.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

// The headers map these names to their newest versions; libraries ask for the plain ones.
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

#define API extern "C" __attribute__((visibility("default")))
#define DONE(signature) \
    API cudaError_t signature { return cudaSuccess; }

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t PAGE = 4096, UNIT = size_t(1) << 21;
constexpr size_t CONTEXT = 600'000'000;  // bytes a process takes before its first tensor

enum class Kind { Device, Locked, Registered };

struct Range {
    size_t bytes;
    Kind kind;
};

struct Stream {
    int priority;
};

struct Event {
    Clock::time_point at;
    bool timed, recorded;
};

std::recursive_mutex mutex;
std::map<uintptr_t, Range> ranges;
std::unordered_map<const void*, std::string> kernels;
std::set<std::string> launched;
size_t taken = CONTEXT;
thread_local cudaError_t last = cudaSuccess;

size_t device_bytes() {
    const char* given = std::getenv("STANDIN_BYTES");
    return given ? std::strtoull(given, nullptr, 0) : 150'110'011'392;
}

// STANDIN_LOCKS=none: no main memory can be locked; =own: only what the runtime itself allocates.
bool locks(bool is_own) {
    const char* given = std::getenv("STANDIN_LOCKS");
    return !given || (is_own && std::strcmp(given, "own") == 0);
}

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

cudaError_t fail(cudaError_t error, const char* what) {
    std::fprintf(stderr, "standin: %s failed with %d\n", what, static_cast<int>(error));
    return last = error;
}

void* map_pages(size_t bytes) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return made == MAP_FAILED ? nullptr : made;
}

const Range* find(const void* pointer) {
    auto after = ranges.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (after == ranges.begin()) return nullptr;
    auto& [begin, range] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(pointer) < begin + range.bytes ? &range : nullptr;
}

cudaError_t take(void** pointer, size_t bytes, Kind kind) {
    *pointer = map_pages(bytes);
    if (!*pointer) return fail(cudaErrorMemoryAllocation, "mmap");
    ranges[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, kind};
    return cudaSuccess;
}

cudaError_t give_back(void* pointer, Kind kind, const char* what) {
    std::lock_guard guard(mutex);
    if (!pointer) return cudaSuccess;
    auto found = ranges.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == ranges.end() || found->second.kind != kind)
        return fail(cudaErrorInvalidValue, what);
    if (kind == Kind::Device) taken -= found->second.bytes;
    if (kind != Kind::Registered) munmap(pointer, found->second.bytes);
    ranges.erase(found);
    return cudaSuccess;
}

cudaError_t launch(const void* kernel) {
    std::lock_guard guard(mutex);
    auto found = kernels.find(kernel);
    std::string name = found == kernels.end() ? "?" : found->second;
    if (launched.insert(name).second)
        std::fprintf(stderr, "standin: a kernel was not run: %.200s\n", name.c_str());
    return cudaSuccess;
}

cudaError_t copy(void* target, const void* source, size_t bytes) {
    std::memmove(target, source, bytes);
    return cudaSuccess;
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

}  // namespace

// -- what the driver takes beside it -------------------------------------------------------------

API void standin_take(long bytes) {
    std::lock_guard guard(mutex);
    taken += bytes;
}

// -- devices -------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice, "cudaSetDevice");
}
API cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t error) { return error ? "standin" : "cudaSuccess"; }
API const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "failed" : "no error";
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known = {
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrCanMapHostMemory, 1},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrHostRegisterSupported, 1},
        {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    };
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* made, int) {
    *made = {};
    std::strcpy(made->name, "NVIDIA H200 (stand-in)");
    made->totalGlobalMem = device_bytes();
    made->major = 9;
    made->multiProcessorCount = 132;
    made->warpSize = 32;
    made->sharedMemPerBlock = 49152;
    made->sharedMemPerBlockOptin = 232448;
    made->sharedMemPerMultiprocessor = 233472;
    made->regsPerBlock = made->regsPerMultiprocessor = 65536;
    made->maxThreadsPerBlock = made->maxThreadsDim[0] = made->maxThreadsDim[1] = 1024;
    made->maxThreadsDim[2] = 64;
    made->maxThreadsPerMultiProcessor = 2048;
    made->maxBlocksPerMultiProcessor = 32;
    made->maxGridSize[0] = 2147483647;
    made->maxGridSize[1] = made->maxGridSize[2] = 65535;
    made->l2CacheSize = 62914560;
    made->canMapHostMemory = made->unifiedAddressing = made->concurrentKernels = 1;
    made->asyncEngineCount = 3;
    made->memoryBusWidth = 6144;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* made, int size, int) {
    std::snprintf(made, size, "0000:01:00.0");
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
DONE(cudaDeviceEnablePeerAccess(int, unsigned))
DONE(cudaDeviceSynchronize())
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    *entry = nullptr;
    for (const char* suffix : {"_v3", "_v2", ""})
        if (driver && !*entry) *entry = dlsym(driver, (std::string(name) + suffix).c_str());
    if (result)
        *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (*entry) return cudaSuccess;
    std::fprintf(stderr, "standin: driver.cpp lacks %s\n", name);
    return cudaErrorSymbolNotFound;
}

// -- memory --------------------------------------------------------------------------------------

API cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
    std::lock_guard guard(mutex);
    *all = device_bytes();
    *free = *all > taken ? *all - taken : 0;
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    std::lock_guard guard(mutex);
    size_t size = whole(bytes, UNIT);
    if (taken + size > device_bytes()) return last = cudaErrorMemoryAllocation;
    cudaError_t error = take(pointer, size, Kind::Device);
    if (!error) taken += size;
    return error;
}
API cudaError_t cudaFree(void* pointer) { return give_back(pointer, Kind::Device, "cudaFree"); }

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    std::lock_guard guard(mutex);
    if (!locks(/*is_own=*/true)) return last = cudaErrorMemoryAllocation;
    return take(pointer, whole(bytes, PAGE), Kind::Locked);
}
API cudaError_t cudaFreeHost(void* pointer) {
    return give_back(pointer, Kind::Locked, "cudaFreeHost");
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    std::lock_guard guard(mutex);
    if (!locks(/*is_own=*/false)) return last = cudaErrorNotSupported;
    auto begin = reinterpret_cast<uintptr_t>(pointer);
    for (auto& [other, range] : ranges)
        if (begin < other + range.bytes && other < begin + bytes)
            return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
    ranges[begin] = {bytes, Kind::Registered};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
    return give_back(pointer, Kind::Registered, "cudaHostUnregister");
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* made, const void* pointer) {
    std::lock_guard guard(mutex);
    *made = {};
    made->device = -2;
    const Range* found = find(pointer);
    if (!found) return cudaSuccess;
    bool on_device = found->kind == Kind::Device;
    made->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    made->device = 0;
    made->devicePointer = const_cast<void*>(pointer);
    made->hostPointer = on_device ? nullptr : const_cast<void*>(pointer);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    return copy(target, source, bytes);
}
API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                                cudaStream_t) {
    return copy(target, source, bytes);
}
API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes,
                                    cudaStream_t) {
    return copy(target, source, bytes);
}
API cudaError_t cudaMemset(void* target, int value, size_t bytes) {
    return std::memset(target, value, bytes), cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
    return std::memset(target, value, bytes), cudaSuccess;
}

// -- streams and events --------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int priority) {
    *made = reinterpret_cast<cudaStream_t>(new Stream{priority});
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    *priority = stream ? reinterpret_cast<Stream*>(stream)->priority : 0;
    return cudaSuccess;
}
DONE(cudaStreamQuery(cudaStream_t))
DONE(cudaStreamSynchronize(cudaStream_t))
DONE(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))
DONE(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*))
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* given) {
    return function(given), cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
    *made = reinterpret_cast<cudaEvent_t>(
        new Event{{}, !(flags & cudaEventDisableTiming), /*recorded=*/false});
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event_of(event), cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    event_of(event)->at = Clock::now();
    event_of(event)->recorded = true;
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
DONE(cudaEventQuery(cudaEvent_t))
DONE(cudaEventSynchronize(cudaEvent_t))
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    for (Event* each : {event_of(from), event_of(to)})
        if (!each->timed || !each->recorded)
            return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    std::chrono::duration<float, std::milli> between = event_of(to)->at - event_of(from)->at;
    return *milliseconds = between.count(), cudaSuccess;
}

// -- kernels -------------------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
    std::lock_guard guard(mutex);
    kernels[kernel] = name;
}
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = *block = dim3{1, 1, 1};
    *shared = 0;
    *static_cast<void**>(stream) = nullptr;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* made, const void* kernel) {
    *made = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
    return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch(kernel);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch(kernel);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
    return launch(kernel);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* made, const void*) {
    *made = {};
    made->binaryVersion = made->ptxVersion = 90;
    made->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
DONE(cudaFuncSetAttribute(const void*, cudaFuncAttribute, int))
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                       int, size_t, unsigned) {
    return *blocks = 8, cudaSuccess;
}
DONE(cudaProfilerStart())
DONE(cudaProfilerStop())
