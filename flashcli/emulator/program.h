// CUDA's runtime for a program on a CPU: memory, copies, launches, events; streams do one thing after another.
// A program has this in the place of cuda_runtime.h. What it does wrong is found in program.cpp.
#pragma once
#include <tuple>
#include <utility>

#define OF_A_BLOCK  // blocks run one after another, on one thread
#define DYNAMIC_SHARED static
#define EMULATED_ATOMIC(address) look_at_atomic(address, sizeof *address, __builtin_return_address(0))
namespace emulator {
void look_at_atomic(const void *address, unsigned size, void *from);
}
#include "cuda.h"
#define __CUDACC__ 1
#define __NVCC__ 1
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)

enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotReady = 600,
    cudaErrorInvalidDevice = 101,
};
typedef cudaError cudaError_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaFuncCache {
    cudaFuncCachePreferNone,
    cudaFuncCachePreferShared,
    cudaFuncCachePreferL1,
    cudaFuncCachePreferEqual
};
enum { cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped, cudaHostAllocWriteCombined = 4 };
enum { cudaHostRegisterDefault, cudaHostRegisterPortable, cudaHostRegisterMapped };
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum { cudaEventDefault, cudaEventBlockingSync, cudaEventDisableTiming, cudaStreamDefault = 0, cudaStreamNonBlocking };
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, totalConstMem;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor, clockRate, memoryClockRate, memoryBusWidth;
    int l2CacheSize, concurrentKernels, asyncEngineCount, unifiedAddressing, managedMemory;
};
typedef struct EmulatedStream *cudaStream_t;
typedef struct EmulatedEvent *cudaEvent_t;

cudaError_t cudaMalloc(void **address, size_t bytes, EMULATED_PLACE);
cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags = 1, EMULATED_PLACE);
cudaError_t cudaMallocPitch(void **address, size_t *pitch, size_t width, size_t height, EMULATED_PLACE);
cudaError_t cudaFree(void *address, EMULATED_PLACE);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, EMULATED_PLACE);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind, EMULATED_PLACE);
cudaError_t cudaMemset(void *to, int value, size_t bytes, EMULATED_PLACE);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t allow_dynamic_shared(size_t bytes);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t event);

template <class T>
inline cudaError_t cudaMalloc(T **address, size_t bytes, EMULATED_PLACE) {
    return cudaMalloc((void **)address, bytes, place);
}
template <class T>
inline cudaError_t cudaMallocManaged(T **address, size_t bytes, unsigned flags = 1, EMULATED_PLACE) {
    return cudaMallocManaged((void **)address, bytes, flags, place);
}
template <class T>
inline cudaError_t cudaMallocPitch(T **address, size_t *pitch, size_t width, size_t height, EMULATED_PLACE) {
    return cudaMallocPitch((void **)address, pitch, width, height, place);
}
// Pinned memory of the host is the GPU's, too.
template <class T>
inline cudaError_t cudaMallocHost(T **address, size_t bytes, unsigned = 0, EMULATED_PLACE) {
    return cudaMallocManaged((void **)address, bytes, 1, place);
}
template <class T>
inline cudaError_t cudaHostAlloc(T **address, size_t bytes, unsigned, EMULATED_PLACE) {
    return cudaMallocManaged((void **)address, bytes, 1, place);
}
template <class T>
inline cudaError_t cudaHostGetDevicePointer(T **device, void *host, unsigned) {
    return *device = (T *)host, cudaSuccess;
}
inline cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
inline cudaError_t cudaFreeHost(void *address, EMULATED_PLACE) { return cudaFree(address, place); }
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t = nullptr, EMULATED_PLACE) {
    return cudaMemcpy(to, from, bytes, kind, place);
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t = nullptr, EMULATED_PLACE) {
    return cudaMemset(to, value, bytes, place);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t bytes, size_t offset = 0,
                                      cudaMemcpyKind = cudaMemcpyHostToDevice) {
    if (offset + bytes > sizeof symbol) return cudaErrorInvalidValue;
    return memcpy((char *)&symbol + offset, from, bytes), cudaSuccess;
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void *to, const T &symbol, size_t bytes, size_t offset = 0,
                                        cudaMemcpyKind = cudaMemcpyDeviceToHost) {
    if (offset + bytes > sizeof symbol) return cudaErrorInvalidValue;
    return memcpy(to, (const char *)&symbol + offset, bytes), cudaSuccess;
}
// What waits returns errors of kernels at work, which end the program here, but none of a launch that has failed.
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaThreadSynchronize() { return cudaSuccess; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel *, cudaFuncAttribute attribute, int value) {
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? allow_dynamic_shared(value) : cudaSuccess;
}
template <class Kernel>
inline cudaError_t cudaFuncSetCacheConfig(Kernel *, cudaFuncCache) {
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

namespace emulator {

// What kernel<<<grid, block, shared, stream>>>(given...) has become.
struct Launch {
    const char *kernel;
    uint3 grid, block;
    size_t shared;
    Place place;
    Launch(const char *kernel, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr, EMULATED_PLACE)
        : kernel(kernel), grid(grid), block(block), shared(shared), place(place) {}
    template <class Kernel, class... Given>
    void operator()(Kernel kernel, Given... given) const {
        struct Call {
            Kernel kernel;
            std::tuple<Given...> given;
        };
        const Call call{kernel, {given...}};
        const auto run_one = [](const void *call) {
            std::apply(((const Call *)call)->kernel, ((const Call *)call)->given);
        };
        run(run_one, &call, sizeof call);
    }
    void run(void (*one)(const void *), const void *given, size_t bytes) const;
};

}  // namespace emulator
