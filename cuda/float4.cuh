// Four numbers at a time, from global memory to registers, or to tiles in shared memory: on any GPU.
#pragma once
#include "common.cuh"
#include "numbers.cuh"

__device__ __forceinline__ float part(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Four numbers of row `row` from column `column`, a multiple of 4; zeros beyond the matrix.
template <class Number>
__device__ __forceinline__ float4 load4(const Number *matrix, long long stride, int row, int column, int rows) {
    const Number *x = matrix + row * stride + column;
    if (row >= rows || column >= HEAD_DIM) return make_float4(0, 0, 0, 0);
    if (ALIGNED) return four_from(x);
    const int left = HEAD_DIM - column;
    return make_float4(x[0], left > 1 ? float(x[1]) : 0, left > 2 ? float(x[2]) : 0, left > 3 ? float(x[3]) : 0);
}

// Two neighbouring numbers to a row, those that are within it.
template <class Number>
__device__ __forceinline__ void store2(Number *row, int column, float x, float y) {
    if (ALIGNED) {
        if (column < HEAD_DIM) put(row + column, make_float2(x, y));
        return;
    }
    if (column < HEAD_DIM) row[column] = x;
    if (column + 1 < HEAD_DIM) row[column + 1] = y;
}

// *to = four numbers of row `row`, from column `column`; zeros beyond the matrix. Asynchronous where the GPU can.
__device__ __forceinline__ void copy4(float4 *to, const float *matrix, long long stride, int row, int column,
                                      int rows) {
    const int left = row < rows ? HEAD_DIM - column : 0;
    const float *from = left > 0 ? matrix + row * stride + column : matrix;
    if (!ALIGNED) {
        *to =
            make_float4(left > 0 ? from[0] : 0, left > 1 ? from[1] : 0, left > 2 ? from[2] : 0, left > 3 ? from[3] : 0);
        return;
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"  // what is not copied is filled with zeros
                 ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(left > 0 ? 16 : 0)
                 : "memory");
#else
    *to = left > 0 ? *reinterpret_cast<const float4 *>(from) : make_float4(0, 0, 0, 0);
#endif
}

// Halves go by registers, where they become floats.
template <int TYPE>
__device__ __forceinline__ void copy4(float4 *to, const Half<TYPE> *matrix, long long stride, int row, int column,
                                      int rows) {
    *to = load4(matrix, stride, row, column, rows);
}

// Every thread's share of the tiles has arrived, and nobody reads those of before any more.
__device__ __forceinline__ void await_tiles() {
#if __CUDA_ARCH__ >= 800
    await_copies();
#endif
    __syncthreads();
}
