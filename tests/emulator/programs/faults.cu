// A fault for each name that the program may be given; "none" has none. The line of each says so at its end.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

__device__ int number_of_zeros;

__global__ void no_barrier(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];  // no_barrier
}
__global__ void barrier_only_before(float *x) {
    extern __shared__ float s[];
    for (int i = 0; i < 2; ++i) {
        s[threadIdx.x] = x[threadIdx.x] + i;  // barrier_only_before
        __syncthreads();
        x[threadIdx.x] = s[(threadIdx.x + 33) % 64];
    }
}
__global__ void no_warp_barrier(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 16) s[threadIdx.x] += s[threadIdx.x + 16];
    if (threadIdx.x < 8) s[threadIdx.x] += s[threadIdx.x + 8];  // no_warp_barrier
    if (threadIdx.x == 0) x[0] = s[0];
}
__global__ void some_at_barrier(float *x) {
    if (threadIdx.x < 32) __syncthreads();
    else __shfl_xor_sync(~0u, x[threadIdx.x], 1);
    if (threadIdx.x >= 32) __syncthreads();  // some_at_barrier
}
__global__ void some_at_shuffle(float *x) {
    if (threadIdx.x != 5) x[threadIdx.x] = __shfl_down_sync(~0u, x[threadIdx.x], 1);  // some_at_shuffle
}
__global__ void beyond(float *x) {
    x[threadIdx.x + 1] = 0;  // beyond
}
__global__ void before(float *x) {
    x[int(threadIdx.x) - 1] = 0;  // before
}
__global__ void index(float *x) {
    __shared__ float s[2][32];
    s[1][threadIdx.x] = 0;  // index
}
__global__ void beyond_dynamic(float *x) {
    extern __shared__ float t[];
    t[threadIdx.x + 1] = x[threadIdx.x];  // beyond_dynamic
}
__global__ void not_aligned(float *x) {
    reinterpret_cast<float4 *>(x + 1)->x = 0;  // not_aligned
}
__global__ void of_host(float *x) {
    x[threadIdx.x] = 0;  // of_host
}
__global__ void between_blocks(float *x) {
    x[threadIdx.x] = blockIdx.x;  // between_blocks
}
__global__ void zero(float *x) {
    x[threadIdx.x] = 1 / number_of_zeros;  // zero
}
__global__ void none(float *x) {
    __shared__ bool any;
    __shared__ float s[64];
    const int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (i % 3) any = true;  // of many threads, which all write the same
    s[i] = i;
    __syncwarp();
    atomicAdd(x, s[i ^ 1]);
    if (i > 40) return;
    __syncthreads();
    if (i == 0 && any && atomicAdd(x, 0.0f) == 2016) printf("right\n");
}

int main(int argc, char **argv) {
    const size_t bytes = 64 * sizeof(float);
    float *x, *host = new float[64]();
    cudaMalloc(&x, bytes);
    cudaMemcpy(x, host, bytes, cudaMemcpyHostToDevice);
    const char *name = argv[1];
    const auto is = [name](const char *other) { return strcmp(name, other) == 0; };
    if (is("no_barrier")) no_barrier<<<1, 64>>>(x);
    if (is("barrier_only_before")) barrier_only_before<<<1, 64, bytes>>>(x);
    if (is("no_warp_barrier")) no_warp_barrier<<<1, 64>>>(x);
    if (is("some_at_barrier")) some_at_barrier<<<1, 64>>>(x);
    if (is("some_at_shuffle")) some_at_shuffle<<<1, 64>>>(x);
    if (is("beyond")) beyond<<<1, 64>>>(x);
    float *below;  // where the next of Linux' addresses is
    cudaMalloc(&below, bytes);
    if (is("before")) before<<<1, 64>>>(x);
    if (is("index")) index<<<1, 64>>>(x);
    if (is("beyond_dynamic")) beyond_dynamic<<<1, 64, bytes>>>(x);
    if (is("not_aligned")) not_aligned<<<1, 1>>>(x);
    if (is("of_host")) of_host<<<1, 64>>>(host);
    if (is("between_blocks")) between_blocks<<<2, 64>>>(x);
    if (is("zero")) zero<<<1, 1>>>(x);
    if (is("none")) none<<<dim3(1), dim3(8, 4, 2)>>>(x);
    if (is("on_the_cpu")) printf("%g\n", x[0]);                                  // on_the_cpu
    if (is("too_much")) cudaMemcpy(host, x, 2 * bytes, cudaMemcpyDeviceToHost);  // too_much
    if (is("exchanged")) cudaMemcpy(x, host, bytes, cudaMemcpyDeviceToHost);     // exchanged
    if (is("freed") || is("twice")) cudaFree(x);
    if (is("freed")) beyond<<<1, 64>>>(x);      // freed
    if (is("twice")) cudaFree(x);               // twice
    if (is("not_asked")) none<<<1, 2048>>>(x);  // not_asked
    if (is("asked")) none<<<1, 2048>>>(x), puts(cudaGetErrorString(cudaPeekAtLastError()));
    if (is("asked_of_device")) {
        int most = 0, major = 0;
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlock, 0);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
        if (cudaHostRegister(host, bytes, cudaHostRegisterDefault) == cudaHostUnregister(host))
            printf("%d %d\n", most, major);
    }
    if (is("returned")) puts(cudaGetErrorString(cudaSetDevice(3)));
    if (cudaDeviceSynchronize() != cudaSuccess) puts("it waits for what was launched, and nothing was");
}
