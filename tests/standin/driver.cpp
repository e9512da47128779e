// libcuda.so.1 without a driver: what PyTorch's expandable segments and farspan's allocator ask it.
// Physical memory is one file in memory, of which virtual addresses map parts. The rest of its
// names are in refused.cpp.

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#define API extern "C" __attribute__((visibility("default"))) CUresult
#define DONE(signature) \
    API signature { return CUDA_SUCCESS; }

#undef cuCtxPopCurrent
#undef cuCtxPushCurrent
#undef cuDevicePrimaryCtxRelease
#undef cuEventDestroy
#undef cuMemGetInfo
#undef cuStreamGetCaptureInfo

// Of runtime.cpp, which is loaded before.
extern "C" int cudaMemGetInfo(size_t*, size_t*);
extern "C" int cudaEventCreateWithFlags(void**, unsigned);
extern "C" int cudaEventDestroy(void*);
extern "C" void standin_take(long bytes);

namespace {

constexpr size_t UNIT = size_t(1) << 21;

std::mutex mutex;
std::map<CUmemGenericAllocationHandle, size_t> chunks;  // bytes, by their place in the file
CUmemGenericAllocationHandle next = UNIT;

int file() {
    static int made = memfd_create("standin", 0);
    return made;
}

void* map_nothing(void* at, size_t bytes, int flags) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(at, bytes, PROT_NONE, flags, -1, 0);
}

template <class T>
CUresult tell(T* target, T value) {
    *target = value;
    return CUDA_SUCCESS;
}

CUcontext context() { return reinterpret_cast<CUcontext>(1); }

}  // namespace

DONE(cuInit(unsigned))
API cuDriverGetVersion(int* version) { return tell(version, 13000); }
API cuDeviceGetCount(int* count) { return tell(count, 1); }
API cuDeviceGet(CUdevice* device, int) { return tell(device, 0); }
API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return tell(value, 9);
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return tell(value, 0);
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return tell(value, 132);
        default: return tell(value, 1);
    }
}
API cuGetErrorName(CUresult, const char** name) { return tell(name, "standin"); }
API cuGetErrorString(CUresult, const char** words) { return tell(words, "failed"); }
API cuGetProcAddress_v2(const char*, void** found, int, cuuint64_t,
                        CUdriverProcAddressQueryResult*) {
    *found = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

// -- contexts ------------------------------------------------------------------------------------

API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    return tell(active, 1);
}
API cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice) { return tell(made, context()); }
DONE(cuDevicePrimaryCtxRelease_v2(CUdevice))
API cuCtxGetCurrent(CUcontext* made) { return tell(made, context()); }
API cuCtxGetDevice(CUdevice* device) { return tell(device, 0); }
DONE(cuCtxSetCurrent(CUcontext))
DONE(cuCtxPushCurrent_v2(CUcontext))
API cuCtxPopCurrent_v2(CUcontext* made) { return tell(made, context()); }
DONE(cuCtxSynchronize())
DONE(cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*))

// -- memory --------------------------------------------------------------------------------------

API cuMemGetInfo_v2(size_t* free, size_t* all) {
    return static_cast<CUresult>(cudaMemGetInfo(free, all));
}
API cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                  CUmemAllocationGranularity_flags) {
    return tell(bytes, UNIT);
}
API cuMemAddressReserve(CUdeviceptr* made, size_t bytes, size_t alignment, CUdeviceptr,
                        unsigned long long) {
    void* found = map_nothing(nullptr, bytes + alignment, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    auto begin = reinterpret_cast<CUdeviceptr>(found);
    return tell(made, alignment ? (begin + alignment - 1) / alignment * alignment : begin);
}
API cuMemAddressFree(CUdeviceptr begin, size_t bytes) {
    munmap(reinterpret_cast<void*>(begin), bytes);
    return CUDA_SUCCESS;
}
API cuMemCreate(CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
    std::lock_guard guard(mutex);
    size_t free, all;
    cudaMemGetInfo(&free, &all);
    if (bytes > free) return CUDA_ERROR_OUT_OF_MEMORY;
    chunks[next] = bytes;
    *made = next;
    next += bytes;
    standin_take(static_cast<long>(bytes));
    return ftruncate(file(), static_cast<off_t>(next)) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API cuMemRelease(CUmemGenericAllocationHandle chunk) {
    std::lock_guard guard(mutex);
    standin_take(-static_cast<long>(chunks.at(chunk)));
    chunks.erase(chunk);
    return CUDA_SUCCESS;
}
API cuMemMap(CUdeviceptr begin, size_t bytes, size_t, CUmemGenericAllocationHandle chunk,
             unsigned long long) {
    void* at = mmap(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, file(), static_cast<off_t>(chunk));
    return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API cuMemUnmap(CUdeviceptr begin, size_t bytes) {
    map_nothing(reinterpret_cast<void*>(begin), bytes, MAP_FIXED);
    return CUDA_SUCCESS;
}
DONE(cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))

// -- streams and events --------------------------------------------------------------------------

API cuEventCreate(CUevent* made, unsigned flags) {
    return static_cast<CUresult>(cudaEventCreateWithFlags(reinterpret_cast<void**>(made), flags));
}
API cuEventDestroy_v2(CUevent event) { return static_cast<CUresult>(cudaEventDestroy(event)); }
DONE(cuEventRecord(CUevent, CUstream))
DONE(cuEventQuery(CUevent))
DONE(cuEventSynchronize(CUevent))
DONE(cuStreamWaitEvent(CUstream, CUevent, unsigned))
API cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus* status, cuuint64_t*, CUgraph*,
                              const CUgraphNode**, size_t*) {
    return tell(status, CU_STREAM_CAPTURE_STATUS_NONE);
}
