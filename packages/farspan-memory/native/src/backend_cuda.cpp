// Virtual memory management of the CUDA driver, found at run time: no header, no link.
#include <dlfcn.h>

#include <stdexcept>

#include "backend.h"

namespace farspan {
namespace {

// As in cuda.h, which keeps them: a CUdeviceptr and an allocation handle have 64 bits.
using Status = int;
enum : Status { SUCCESS = 0, CAPTURE_IMPLICIT = 906 };
enum { ATTRIBUTE_VMM = 102, ATTRIBUTE_RDMA = 110, CAPTURING = 1 };
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, MINIMUM = 0, NO_TIMING = 2, RELAXED = 2 };

struct Location {
    int type = ON_DEVICE;
    int id = 0;
};
struct Properties {
    int type = PINNED;
    int requested_handles = 0;
    Location location;
    void* win32 = nullptr;
    unsigned char compression = 0;
    unsigned char rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
};
struct Access {
    Location location;
    int flags = READ_WRITE;
};
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "the driver's layout");

struct Driver {
    Status (*cuInit)(unsigned);
    Status (*cuGetErrorName)(Status, const char**);
    Status (*cuDeviceGet)(int*, int);
    Status (*cuDeviceGetAttribute)(int*, int, int);
    Status (*cuDevicePrimaryCtxRetain)(void**, int);
    Status (*cuDevicePrimaryCtxRelease_v2)(int);
    Status (*cuCtxGetCurrent)(void**);
    Status (*cuCtxPushCurrent_v2)(void*);
    Status (*cuCtxPopCurrent_v2)(void**);
    Status (*cuThreadExchangeStreamCaptureMode)(int*);
    Status (*cuMemGetInfo_v2)(size_t*, size_t*);
    Status (*cuMemGetAllocationGranularity)(size_t*, const Properties*, int);
    Status (*cuMemAddressReserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
    Status (*cuMemAddressFree)(uint64_t, size_t);
    Status (*cuMemCreate)(uint64_t*, size_t, const Properties*, unsigned long long);
    Status (*cuMemRelease)(uint64_t);
    Status (*cuMemMap)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    Status (*cuMemUnmap)(uint64_t, size_t);
    Status (*cuMemSetAccess)(uint64_t, size_t, const Access*, size_t);
    Status (*cuEventCreate)(void**, unsigned);
    Status (*cuEventDestroy_v2)(void*);
    Status (*cuEventRecord)(void*, void*);
    Status (*cuEventQuery)(void*);
    Status (*cuEventSynchronize)(void*);
    Status (*cuStreamWaitEvent)(void*, void*, unsigned);
    Status (*cuStreamGetCaptureInfo_v2)(void*, int*, uint64_t*, void**, const void**, size_t*);
    Status (*cuCtxSynchronize)();
};

// Never unloaded: the driver outlives us.
Driver load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    Driver d;
    const auto find = [library, path](auto& function, const char* name) {
        void* found = dlsym(library, name);
        if (!found) {
            throw std::runtime_error(std::string(path) + " has no " + name + ": too old a driver");
        }
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
#define FIND(name) find(d.name, #name)
    FIND(cuInit), FIND(cuGetErrorName), FIND(cuDeviceGet), FIND(cuDeviceGetAttribute);
    FIND(cuDevicePrimaryCtxRetain), FIND(cuDevicePrimaryCtxRelease_v2), FIND(cuCtxGetCurrent);
    FIND(cuCtxPushCurrent_v2), FIND(cuCtxPopCurrent_v2), FIND(cuThreadExchangeStreamCaptureMode);
    FIND(cuMemGetInfo_v2), FIND(cuMemGetAllocationGranularity), FIND(cuMemAddressReserve);
    FIND(cuMemAddressFree), FIND(cuMemCreate), FIND(cuMemRelease), FIND(cuMemMap);
    FIND(cuMemUnmap), FIND(cuMemSetAccess), FIND(cuEventCreate), FIND(cuEventDestroy_v2);
    FIND(cuEventRecord), FIND(cuEventQuery), FIND(cuEventSynchronize), FIND(cuStreamWaitEvent);
    FIND(cuStreamGetCaptureInfo_v2), FIND(cuCtxSynchronize);
#undef FIND
    return d;
}

// Our device's context is the thread's, and calls that a capture on another stream would forbid are
// allowed, as torch does it around cudaMalloc.
class Here {
   public:
    Here(const Driver& driver, void* context) : driver_(driver) {
        void* current = nullptr;
        driver_.cuCtxGetCurrent(&current);
        pushed_ = current != context && driver_.cuCtxPushCurrent_v2(context) == SUCCESS;
        driver_.cuThreadExchangeStreamCaptureMode(&mode_);
    }
    ~Here() {
        void* popped = nullptr;
        driver_.cuThreadExchangeStreamCaptureMode(&mode_);
        if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
    }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    const Driver& driver_;
    bool pushed_ = false;
    int mode_ = RELAXED;
};

void refuse_chunks(const farspan_options& options, size_t granularity) {
    if (options.chunk % granularity || options.tail % granularity) {
        throw std::runtime_error("chunk and tail: the device needs multiples of " +
                                 std::to_string(granularity) + " bytes");
    }
}

void* pointer(uint64_t number) { return reinterpret_cast<void*>(number); }

class CudaBackend : public Backend {
   public:
    explicit CudaBackend(const farspan_options& options)
        : Backend(options), d_(load(options.library ? options.library : "libcuda.so.1")) {
        need(d_.cuInit(0), "cuInit");
        need(d_.cuDeviceGet(&device_, options.device), "cuDeviceGet");
        int supported = 0, rdma = 0;
        need(d_.cuDeviceGetAttribute(&supported, ATTRIBUTE_VMM, device_), "cuDeviceGetAttribute");
        if (!supported) throw std::runtime_error("the device has no virtual memory management");
        d_.cuDeviceGetAttribute(&rdma, ATTRIBUTE_RDMA, device_);
        properties_.location.id = device_;
        properties_.rdma = rdma != 0;
        size_t granularity = 0;
        need(d_.cuMemGetAllocationGranularity(&granularity, &properties_, MINIMUM),
             "cuMemGetAllocationGranularity");
        refuse_chunks(options, granularity);
        accesses_.resize(1);
        accesses_.front().location.id = device_;
        for (int peer = 0; peer < 64; ++peer) {
            if (peer != device_ && (options.peers >> peer & 1)) {
                accesses_.emplace_back();
                accesses_.back().location.id = peer;
            }
        }
        need(d_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }

    ~CudaBackend() override {
        {
            const Here here(d_, context_);
            for (void* event : events_) d_.cuEventDestroy_v2(event);
        }
        d_.cuDevicePrimaryCtxRelease_v2(device_);
    }

    uint64_t total() override {
        const Here here(d_, context_);
        size_t free = 0, all = 0;
        d_.cuMemGetInfo_v2(&free, &all);
        return all;
    }

    void drop(Event event) override { events_.push_back(pointer(event)); }

    // The legacy stream answers with an error when another stream captures.
    uint64_t capture(Stream stream) override {
        int capturing = 0;
        uint64_t number = 0;
        const Status status = d_.cuStreamGetCaptureInfo_v2(pointer(stream), &capturing, &number,
                                                           nullptr, nullptr, nullptr);
        if (status == SUCCESS && capturing == 0) return 0;
        return status == SUCCESS && capturing == CAPTURING ? number + 1
               : status == SUCCESS || status == CAPTURE_IMPLICIT ? UINT64_MAX : 0;
    }

   protected:
    bool do_reserve(size_t bytes, uint64_t* address) override {
        const Here here(d_, context_);
        return fine(d_.cuMemAddressReserve(address, bytes, unit_, 0, 0), "cuMemAddressReserve");
    }
    void do_free_range(uint64_t address, size_t bytes) override {
        const Here here(d_, context_);
        fine(d_.cuMemAddressFree(address, bytes), "cuMemAddressFree");
    }
    bool do_create(Chunk* chunk) override {
        const Here here(d_, context_);
        const size_t bytes = chunk->width * unit_;
        return fine(d_.cuMemCreate(&chunk->handle, bytes, &properties_, 0), "cuMemCreate");
    }
    void do_destroy(Chunk chunk) override {
        const Here here(d_, context_);
        fine(d_.cuMemRelease(chunk.handle), "cuMemRelease");
    }
    bool do_map(uint64_t address, const Chunk* chunks, size_t) override {
        const Here here(d_, context_);
        const size_t bytes = chunks->width * unit_;
        return fine(d_.cuMemMap(address, bytes, 0, chunks->handle, 0), "cuMemMap");
    }
    bool do_access(uint64_t address, size_t bytes) override {
        const Here here(d_, context_);
        return fine(d_.cuMemSetAccess(address, bytes, accesses_.data(), accesses_.size()),
                    "cuMemSetAccess");
    }
    // Whole mappings only, and each chunk was one.
    void do_unmap(uint64_t address, const Chunk* chunks, size_t count) override {
        const Here here(d_, context_);
        for (size_t i = 0; i < count; ++i) {
            const size_t bytes = chunks[i].width * unit_;
            fine(d_.cuMemUnmap(address, bytes), "cuMemUnmap");
            address += bytes;
        }
    }

    bool do_record(Stream stream, Event* event) override {
        const Here here(d_, context_);
        void* made = nullptr;
        if (!events_.empty()) {
            made = events_.back();
            events_.pop_back();
        } else if (!fine(d_.cuEventCreate(&made, NO_TIMING), "cuEventCreate")) {
            return false;
        }
        *event = reinterpret_cast<Event>(made);
        if (fine(d_.cuEventRecord(made, pointer(stream)), "cuEventRecord")) return true;
        events_.push_back(made);
        return false;
    }
    bool do_done(Event event) override {
        const Here here(d_, context_);
        return d_.cuEventQuery(pointer(event)) == SUCCESS;
    }
    bool do_wait(Stream stream, Event event) override {
        const Here here(d_, context_);
        return fine(d_.cuStreamWaitEvent(pointer(stream), pointer(event), 0), "cuStreamWaitEvent");
    }
    bool do_synchronize(Event event) override {
        const Here here(d_, context_);
        return fine(d_.cuEventSynchronize(pointer(event)), "cuEventSynchronize");
    }
    bool do_finish() override {
        const Here here(d_, context_);
        return fine(d_.cuCtxSynchronize(), "cuCtxSynchronize");
    }

   private:
    std::string named(Status status, const char* call) {
        const char* name = nullptr;
        if (d_.cuGetErrorName(status, &name) != SUCCESS || !name) name = "unknown error";
        return std::string(call) + ": " + name;
    }
    void need(Status status, const char* call) {
        if (status != SUCCESS) throw std::runtime_error(named(status, call));
    }
    bool fine(Status status, const char* call) {
        if (status != SUCCESS) trouble = named(status, call);
        return status == SUCCESS;
    }

    const Driver d_;
    int device_ = 0;
    void* context_ = nullptr;
    Properties properties_;
    std::vector<Access> accesses_;
    std::vector<void*> events_;  // made, for the next record
};

}  // namespace

void cuda_chunks(const farspan_options& options) {
    const char* const path = options.library ? options.library : "libcuda.so.1";
    Driver driver;
    try {
        driver = load(path);
    } catch (const std::runtime_error&) {
        return;
    }
    int device = 0;
    if (driver.cuInit(0) != SUCCESS) return;
    for (int i = 0; i < 64 && driver.cuDeviceGet(&device, i) == SUCCESS; ++i) {
        int rdma = 0;
        driver.cuDeviceGetAttribute(&rdma, ATTRIBUTE_RDMA, device);
        Properties properties;
        properties.location.id = device;
        properties.rdma = rdma != 0;
        size_t granularity = 0;
        const Status status =
            driver.cuMemGetAllocationGranularity(&granularity, &properties, MINIMUM);
        if (status == SUCCESS) refuse_chunks(options, granularity);
    }
}

std::unique_ptr<Backend> cuda_backend(const farspan_options& options) {
    return std::make_unique<CudaBackend>(options);
}

}  // namespace farspan
