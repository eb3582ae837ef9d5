// The arguments of every function of every backward kernel, passed by value: one struct, packed in one place
// (flashcli/kernels/backward.py), whose size each build asserts and whose fields a test compares.
#pragma once
#include "numbers.cuh"

// Element (b, h, i, x) of a matrix is at data[b * batch + h * head + i * row + x]: batch, head, row, column; in numbers.
typedef struct {
    long long batch, head, row;
} Strides;

typedef struct {
    const Answer *dO;        // [B, H, M, d], as Q and O
    const Input *Q, *K, *V;  // K and V [B, Hkv, N, d]
    const Answer *O;
    const float *lse, *dlse;   // [B, H, M]: natural logarithms of sums of exponentials; its gradient, or null
    const float *bias;         // [B, H, M, N], added to scores: BIAS & 1
    Gradient *dQ, *dK, *dV;    // as Q, K and V
    float *dbias;              // or null
    unsigned char *workspace;  // scratch of the size the registry asks for
    int *notes;                // [B, Hkv], or [S, Hkv], or null: not 0 where a kernel that does not split is to compute
    Strides d_o, q, k, v, o, lse_at, dlse_at, dq, dk, dv;
    Strides bias_strides, dbias_at;  // in elements; 0 where a bias is broadcast, and dbias is summed up
    long long bias_column, dbias_column;
    int B, H, Hkv, M, N;        // Hkv divides H: H / Hkv heads of Q share one of K and V
    int q_start;                // the position of Q's first row in the sequence: where the causal mask lets it look
    float scale;                // factor on Q Kᵀ, usually 1/sqrt(d)
    const unsigned char *mask;  // [B, H, M, N], 0 where a key is taken away from a query: BIAS & 2
    Strides mask_strides;       // in bytes; 0 where it is broadcast
    long long mask_column;
    const float *slopes;  // of ALiBi, [B, H]: slope * |position + i - j| is taken from scores: BIAS & 4
    long long slopes_batch, slopes_head;
    const int *q_starts, *k_starts;  // where S packed sequences start in Q and K, S + 1 each: PACKED
    int first, position;             // query i sees keys from first + i on (WINDOW), and is at position + i
    int S, tokens, key_tokens;       // PACKED: the rows of Q and of K of all sequences; to a block, M and N are of one
    int sequence, first_row, first_key, tile;  // of a block: its sequence, where that begins, and its tile there
} Backward;
