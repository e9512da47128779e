// NCCL of one rank, as PyTorch asks for it: what is sent is what arrives.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default"))) ncclResult_t
#define DONE(signature) \
    API signature { return ncclSuccess; }

namespace {

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclFloat64: case ncclInt64: case ncclUint64: return 8;
        case ncclFloat32: case ncclInt32: case ncclUint32: return 4;
        case ncclFloat16: case ncclBfloat16: return 2;
        default: return 1;
    }
}

ncclResult_t copy(const void* source, void* target, size_t count, ncclDataType_t type) {
    std::memmove(target, source, count * bytes_of(type));
    return ncclSuccess;
}

ncclResult_t make(ncclComm_t* made, int ranks) {
    if (ranks != 1) {
        std::fprintf(stderr, "standin: NCCL of %d ranks; there is one device\n", ranks);
        return ncclInvalidUsage;
    }
    *made = reinterpret_cast<ncclComm_t>(new int(0));
    return ncclSuccess;
}

const void* sent = nullptr;  // between a send and its receive

}  // namespace

API ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
extern "C" const char* ncclGetErrorString(ncclResult_t) { return "failed"; }
extern "C" const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclGetUniqueId(ncclUniqueId* id) { return std::memset(id, 1, sizeof *id), ncclSuccess; }

API ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId, int) { return make(made, ranks); }
API ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId, int, ncclConfig_t*) {
    return make(made, ranks);
}
API ncclCommInitRankScalable(ncclComm_t* made, int ranks, int, int, ncclUniqueId*, ncclConfig_t*) {
    return make(made, ranks);
}
API ncclCommSplit(ncclComm_t, int, int, ncclComm_t* made, ncclConfig_t*) { return make(made, 1); }
DONE(ncclCommDestroy(ncclComm_t))
DONE(ncclCommAbort(ncclComm_t))
DONE(ncclCommFinalize(ncclComm_t))
API ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    return *error = ncclSuccess, ncclSuccess;
}
API ncclCommCount(const ncclComm_t, int* ranks) { return *ranks = 1, ncclSuccess; }
API ncclCommUserRank(const ncclComm_t, int* rank) { return *rank = 0, ncclSuccess; }
DONE(ncclGroupStart())
DONE(ncclGroupEnd())

API ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type,
                  ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return copy(source, target, count, type);
}
API ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type,
                      ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return copy(source, target, count, type);
}
API ncclReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t,
               int, ncclComm_t, cudaStream_t) {
    return copy(source, target, count, type);
}
API ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t type, int,
                  ncclComm_t, cudaStream_t) {
    return copy(source, target, count, type);
}
API ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t,
                  cudaStream_t) {
    return copy(source, target, count, type);
}
API ncclAlltoAll(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t,
                 cudaStream_t) {
    return copy(source, target, count, type);
}
DONE(ncclBcast(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t))
API ncclSend(const void* source, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
    return sent = source, ncclSuccess;
}
API ncclRecv(void* target, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t) {
    return sent ? copy(sent, target, count, type) : ncclInvalidUsage;
}
