// The tensor cores of sm_80 and later, as a warp uses them on split tiles (split.cuh): mma.sync, ldmatrix, cp.async.
//
// In an accumulator of 16 x 8 a thread holds rows g and g + 8 and columns 2t, 2t + 1 of each: c[0], c[1] and c[2],
// c[3], with g = lane / 4, t = lane % 4: the four threads of a quad share a row. As a left operand, two such blocks
// side by side are one fragment: x[0] and x[1] are rows g and g + 8 of the first, x[2] and x[3] of the second.
#pragma once
#include "split.cuh"

// A warp's 16 x 16 block of a left operand, or two 8 x 16 blocks of a right one.
struct Fragment {
    unsigned x[4];
};

// Four 8 x 8 blocks of fp16; lane 8i + r names row r of block i.
__device__ __forceinline__ Fragment ldmatrix(const unsigned char *row) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
    return f;
}

// Four 8 x 8 blocks of fp16, each transposed; lane 8i + r names row r of block i.
__device__ __forceinline__ Fragment ldmatrix_transposed(const unsigned char *row) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
    return f;
}

// c += a b for the 16 x 8 accumulator c; b is half a fragment.
__device__ __forceinline__ void mma(float (&c)[4], const Fragment &a, const unsigned *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b[0]), "r"(b[1]));
}

// Adds in fp16, with two numbers a register: c[0] has those of row g, c[1] those of row g + 8.
__device__ __forceinline__ void mma(unsigned (&c)[2], const Fragment &a, const unsigned *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b[0]), "r"(b[1]));
}

// Rows `row` to `row` + 15 and columns `column` to `column` + 15 of a split tile of R rows, both multiples of 16, as
// the right operands of two mma that sum over columns: x[0..1] for the first eight rows, x[2..3] for the others. Only
// row % 8 enters the swizzle, and it is the lane's.
template <int R>
__device__ __forceinline__ Fragment right_operand(const unsigned char *tile, int row, int column) {
    const int lane = threadIdx.x % 32, lane_row = lane % 8 + lane / 16 * 8, lane_chunk = lane / 8 % 2;
    const int at = lane_row * 128 + (lane_chunk ^ lane % 8) * 16;
    return ldmatrix(tile + (at ^ column % 64 / 8 * 16) + row * 128 + column / 64 * (R * 128));
}

// A 16 x 16 block of a tile as the right operands of two mma that sum over rows: x[0..1] for the first eight columns.
template <int R>
__device__ __forceinline__ Fragment right_operand_transposed(const unsigned char *tile, int row, int column) {
    const int lane = threadIdx.x % 32, lane_row = lane % 16, lane_chunk = lane / 16;
    const int at = lane_row * 128 + (lane_chunk ^ lane % 8) * 16;
    return ldmatrix_transposed(tile + (at ^ column % 64 / 8 * 16) + row * 128 + column / 64 * (R * 128));
}

// A 16 x 16 block of a tile, transposed, as a left operand: its columns become rows, and its rows are summed over.
template <int R>
__device__ __forceinline__ Fragment left_operand_transposed(const unsigned char *tile, int row, int column) {
    const int lane = threadIdx.x % 32, lane_row = lane % 8 + lane / 16 * 8, lane_chunk = lane / 8 % 2;
    const int at = lane_row * 128 + (lane_chunk ^ lane % 8) * 16;
    return ldmatrix_transposed(tile + (at ^ column % 64 / 8 * 16) + row * 128 + column / 64 * (R * 128));
}

__device__ __forceinline__ void copy16(unsigned char *to, const unsigned char *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
