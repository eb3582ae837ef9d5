// The homework as many hand it in: a thread a row, tiles of K and V in static shared memory, one launch for all batches.
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define BR 64
#define BC 32
#define MAX_D 64

__global__ void attention(const float *qkv, float *o, int N, int d, float scale) {
    __shared__ float k_tile[BC][MAX_D];
    __shared__ float v_tile[BC][MAX_D];
    const float *q = qkv + (size_t)blockIdx.y * 3 * N * d, *k = q + N * d, *v = k + N * d;
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    float m = -FLT_MAX, l = 0, sum[MAX_D] = {0};
    for (int j0 = 0; j0 < N; j0 += BC) {
        for (int i = threadIdx.x; i < BC * d && j0 * d + i < N * d; i += blockDim.x) {
            k_tile[i / d][i % d] = k[j0 * d + i];
            v_tile[i / d][i % d] = v[j0 * d + i];
        }
        __syncthreads();
        if (row < N) {
            for (int j = 0; j < min(BC, N - j0); ++j) {
                float s = 0;
                for (int x = 0; x < d; ++x) s += q[row * d + x] * k_tile[j][x];
                s *= scale;
                float m_new = fmaxf(m, s), old = __expf(m - m_new), p = __expf(s - m_new);
                for (int x = 0; x < d; ++x) sum[x] = sum[x] * old + p * v_tile[j][x];
                l = l * old + p;
                m = m_new;
            }
        }
        __syncthreads();
    }
    if (row < N)
        for (int x = 0; x < d; ++x) o[((size_t)blockIdx.y * N + row) * d + x] = sum[x] / l;
}

int main(int argc, char *argv[]) {
    FILE *file = fopen(argv[1], "rb");
    int B, N, d;
    fread(&B, sizeof(int), 1, file);
    fread(&N, sizeof(int), 1, file);
    fread(&d, sizeof(int), 1, file);
    size_t count = (size_t)B * N * d;
    float *qkv = (float *)malloc(3 * count * sizeof(float)), *o = (float *)malloc(count * sizeof(float));
    fread(qkv, sizeof(float), 3 * count, file);
    fclose(file);

    float *qkv_d, *o_d;
    cudaMalloc((void **)&qkv_d, 3 * count * sizeof(float));
    cudaMalloc((void **)&o_d, count * sizeof(float));
    cudaMemcpy(qkv_d, qkv, 3 * count * sizeof(float), cudaMemcpyHostToDevice);
    dim3 grid((N + BR - 1) / BR, B);
    attention<<<grid, BR>>>(qkv_d, o_d, N, d, 1.0 / sqrt(d));
    cudaDeviceSynchronize();
    cudaMemcpy(o, o_d, count * sizeof(float), cudaMemcpyDeviceToHost);
    cudaFree(qkv_d);
    cudaFree(o_d);

    file = fopen(argv[2], "wb");
    fwrite(o, sizeof(float), count, file);
    fclose(file);
}
